"""What an operator gives the server besides the engine: `ServerConfig`.

Owns the fields with defaults, bounds and meanings; flags, environment (`SGL_<FIELD>`) and the TOML file are derived
from them, as they are from `EngineConfig`. Secrets show as `***` wherever the config is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError, InvalidParameter

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the user gave. Field names are those that SGLang and vLLM share.

    Example:
        >>> ServerConfig(api_key=("secret",))
        ServerConfig(host='127.0.0.1', port=30000, api_key=***)
    """

    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for all, which wants an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 30000
    uds: Annotated[str | None, Meta(description="Listen on this unix socket, in place of host and port.")] = None
    api_key: Annotated[
        tuple[str, ...],
        Meta(description="Key that requests must bear; several are several tenants, who share no cached prefix."),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        Meta(description="Key for routes that act on everybody; without it they are shut where keys are used."),
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="Name of the model in the API. [default: the model path]")
    ] = None
    tool_call_parser: Annotated[
        str | None, Meta(description="Format of the model's tool calls; its chat template tells by default.")
    ] = None
    reasoning_parser: Annotated[
        str | None, Meta(description="Format of the model's reasoning; its chat template tells by default.")
    ] = None
    lenient: Annotated[
        bool, Meta(description="Take requests with unknown fields, and warn in the response, where they are refused.")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Names that a Host header may have. [default: any; loopback ones without a key on loopback]"),
    ] = ()
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest body of a request.")] = 4 * 2**20
    max_header_bytes: Annotated[int, Meta(ge=1024, le=2**20, description="Largest head of a request.")] = 32 * 2**10
    header_timeout: Annotated[Seconds, Meta(description="Seconds in which the head of a request must come.")] = 10.0
    body_timeout: Annotated[Seconds, Meta(description="Seconds in which the body of a request must come.")] = 60.0
    write_timeout: Annotated[
        Seconds, Meta(description="Seconds in which a client must take 64 KiB of its answer, or what is left of it.")
    ] = 60.0
    max_unread_bytes: Annotated[
        int, Meta(ge=2**20, description="Bytes of answers that wait for clients to read, of all connections together.")
    ] = 2**28
    max_connections: Annotated[int, Meta(ge=1, description="Connections open at a time; more are answered 503.")] = 4096
    stream_backlog: Annotated[
        int, Meta(ge=16, description="Events that a stream's reader may lag behind before its request is aborted.")
    ] = 4096
    program_lease: Annotated[
        Seconds, Meta(description="Seconds without a fragment after which a waiting program over HTTP ends.")
    ] = 300.0
    response_store_bytes: Annotated[
        int,
        Meta(ge=0, description="Memory for answers of /v1/responses that are kept; 0 keeps none."),
    ] = 0
    response_lease: Annotated[Seconds, Meta(description="Seconds that an answer of /v1/responses is kept.")] = 3600.0
    drain: Annotated[float, Meta(ge=0, le=1e9, description="Seconds that running requests may take after SIGTERM.")] = (
        30.0
    )
    playground: Annotated[bool, Meta(description="Serve the playground, a page to try things with, at /.")] = True
    profiler_dir: Annotated[
        str | None,
        Meta(description="Folder of the traces of /start_profile. [default: a new one that only this user can open]"),
    ] = None
    log_requests: Annotated[bool, Meta(description="Log one line for each request.")] = True

    def __repr__(self) -> str:
        shown = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name in ("host", "port"):
                shown.append(f"{field.name}={'***' if field.name in SECRETS else repr(value)}")
        return f"ServerConfig({', '.join(shown)})"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that a Host header may have; `None` is any.

        Without a key on loopback, other names would let a web page reach this server through DNS rebinding.
        """
        if self.allowed_hosts:
            return frozenset(name.lower() for name in self.allowed_hosts)
        if self.on_loopback and not self.api_key:
            return frozenset({"localhost", "127.0.0.1", "::1", self.host.lower()})
        return None


SECRETS = ("api_key", "admin_api_key")
"""Fields that are never shown."""

_SEVERAL = ("api_key", "allowed_hosts")
"""Fields that may be given as one text, too."""


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """The config in a mapping, as flags, environment or a file give it.

    Raises:
        ConfigError: an unknown field, a wrong value, or fields that contradict each other.
    """
    known = {field.name for field in msgspec.structs.fields(ServerConfig)}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"unknown server option {unknown[0]!r}", hint=f"they are {', '.join(sorted(known))}")
    given = {name: (value,) if name in _SEVERAL and isinstance(value, str) else value for name, value in given.items()}
    try:
        config = msgspec.convert(given, ServerConfig)
    except msgspec.ValidationError as error:
        text, _, place = str(error).rstrip("`").partition(" - at `$.")
        raise ConfigError(f"server option {place or '?'}: {text}", hint="see sgl serve --help", param=place) from None
    if any(not key.strip() for key in (*config.api_key, *filter(None, [config.admin_api_key]))):
        raise ConfigError("an API key is empty", hint="give a key, or leave the option out", param="api_key")
    for name in SECRETS:
        given_keys = config.api_key if name == "api_key" else (config.admin_api_key or "",)
        if any(key != key.strip() or not key.isascii() or not key.isprintable() for key in given_keys):
            raise ConfigError(
                f"{name} has characters that a header cannot carry",
                hint="use printable ASCII characters, without white space around them",
                param=name,
            )
    if config.admin_api_key in config.api_key:
        raise ConfigError("admin_api_key is also an api_key", hint="choose another admin key", param="admin_api_key")
    _check_parsers(config)
    return config


def _check_parsers(config: ServerConfig) -> None:
    from sgl.grammars.formats import reasoning_format, tool_format

    for name, find in (("tool_call_parser", tool_format), ("reasoning_parser", reasoning_format)):
        if (given := getattr(config, name)) is not None:
            try:
                find(given)
            except InvalidParameter as error:
                raise ConfigError(error.message, hint=error.hint, param=name) from None


def effective(config: ServerConfig) -> dict[str, Any]:
    """All fields for people, secrets as `***`."""
    return {
        field.name: "***" if field.name in SECRETS and getattr(config, field.name) else getattr(config, field.name)
        for field in msgspec.structs.fields(config)
    }
