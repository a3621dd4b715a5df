"""Names that programs written for SGLang's frontend use and that nothing else here needs.

Owns `global_config`, `Runtime` and `RuntimeEndpoint`. What a name cannot do here is said when it is used, with what to
use instead; see `tutorials/from_sglang.md`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sgl.errors import InvalidParameter, Unsupported
from sgl.lang import defaults
from sgl.lang.api.remote import RemoteEngine
from sgl.lang.backend import Backend


class GlobalConfig:
    """Settings of the process, as SGLang has them.

    Attributes:
        verbosity: 2 prints the text of each program that `run` has finished; 0 (default) nothing.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hello(s):
        ...     s += "Hello " + sgl.gen("who")
        >>> sgl.global_config.verbosity = 2
        >>> _ = hello.run(backend=sgl.MockBackend(["world"]))
        Hello world
        >>> sgl.global_config.verbosity = 0
    """

    def __init__(self) -> None:
        self.verbosity = 0

    @property
    def default_backend(self) -> Backend | None:
        """What `set_default_backend` was given."""
        return defaults.chosen_backend()

    @default_backend.setter
    def default_backend(self, backend: Backend) -> None:
        defaults.set_default_backend(backend)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ALWAYS:
            if value is not True:
                raise Unsupported(f"global_config.{name} = {value!r}", hint=_ALWAYS[name], param=name)
            return
        if name not in ("verbosity", "default_backend"):
            known = ", ".join(("verbosity", "default_backend", *_ALWAYS))
            raise InvalidParameter(f"global_config has no {name!r}", hint=f"it has {known}", param=name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _ALWAYS:
            return True
        raise AttributeError(f"global_config has no {name!r}")


_ALWAYS = {
    "skip_special_tokens_in_output": "give generations skip_special_tokens=False",
    "spaces_between_special_tokens_in_out": "no tokenizer here inserts spaces",
    "enable_precache_with_tracing": "equal beginnings of rows are found as tokens, and bodies are never run for it",
    "enable_parallel_encoding": "leave concate_and_append out where it is not wanted",
}
"""Settings that are always true here, and what to do where another value is wanted."""

global_config = GlobalConfig()
"""The settings of this process.

Example:
    >>> global_config.verbosity
    0
"""


class RuntimeEndpoint(RemoteEngine):
    """`sgl.RemoteEngine` under SGLang's name: programs on a server that `sgl serve` runs.

    A server of SGLang itself takes no programs; it is an endpoint that speaks as OpenAI's: `sgl.OpenAI(model,
    base_url=url + "/v1", capabilities={"regex": True, "ebnf": True, "prefill": True})`.

    Raises:
        ConfigError: the URL is none.
        Unsupported: `verify` or `chat_template_name`, which have no meaning here.

    Example:
        >>> import sgl
        >>> endpoint = sgl.RuntimeEndpoint("http://127.0.0.1:9")
        >>> endpoint.url
        'http://127.0.0.1:9'
        >>> endpoint.shutdown()
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        if verify is not None:
            raise Unsupported("verify is not supported", hint="set SSL_CERT_FILE for a certificate", param="verify")
        if chat_template_name is not None:
            raise Unsupported(
                "chat_template_name is not supported",
                hint="leave it out: the server's model has its own chat template",
                param="chat_template_name",
            )
        super().__init__(base_url, api_key=api_key)


class Runtime:
    """SGLang's server in a process of its own, which is not needed here: `sgl.Engine` runs the model.

    Example:
        >>> import sgl
        >>> sgl.Runtime(model_path="some/model")
        Traceback (most recent call last):
        sgl.errors.Unsupported: sgl.Runtime starts no server (use sgl.Engine(model_path='some/model') for programs, or \
sgl serve and sgl.RuntimeEndpoint(url))
    """

    def __init__(self, *args: Any, **server_args: Any) -> None:
        shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in server_args.items())])
        _no_server(shown)


def _no_server(arguments: str) -> NoReturn:
    raise Unsupported(
        "sgl.Runtime starts no server",
        hint=f"use sgl.Engine({arguments}) for programs, or sgl serve and sgl.RuntimeEndpoint(url)",
    )
