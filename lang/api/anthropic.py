"""`sgl.Anthropic`: programs on Anthropic's messages endpoint.

Owns the translation to the official client (the extra `anthropic`). System turns become the system prompt, an assistant
turn that has begun is continued (`prefill`), an option of a select is the argument of a tool call that has to be one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sgl.errors import ConfigError
from sgl.grammars.spec import JsonSchema
from sgl.lang.api.capabilities import Capabilities
from sgl.lang.api.messages import Ask, Reply, Turn
from sgl.lang.api.openai import media_type, typed_error
from sgl.lang.api.session import ApiBackend
from sgl.lang.graph import Media, Usage

CAPABILITIES = Capabilities(
    prefill=True, json_schema=True, tools=True, images=True, max_stops=64, max_temperature=1.0, sampling=("top_k",)
)

_ANSWER = "answer"
"""The tool whose input is a value of the schema that an answer is held to."""


class Anthropic(ApiBackend):
    """A backend over Anthropic's endpoint.

    Args:
        model_name: as the endpoint knows it.
        capabilities: what it can do, where that differs (see `sgl.lang.api.capabilities.Capabilities`): models that
            continue no assistant turn want `{"prefill": False}`.
        args, kwargs: for the official client: `api_key`, `base_url`, `timeout`, `max_retries`, ...

    Raises:
        ConfigError: the client is not installed, or refuses its arguments.

    Example:
        >>> import sgl
        >>> try:
        ...     backend = sgl.Anthropic("claude-haiku", api_key="none")
        ... except sgl.errors.ConfigError as error:  # the client is an extra
        ...     print("prefill" if "anthropic" in str(error) else error)
        ... else:
        ...     print(*[name for name in backend.server_info()["capabilities"] if name == "prefill"])
        prefill
    """

    def __init__(
        self, model_name: str, *args: Any, capabilities: Mapping[str, object] | None = None, **kwargs: Any
    ) -> None:
        try:
            import anthropic
        except ImportError:
            raise ConfigError(
                "sgl.Anthropic needs the package anthropic", hint="pip install 'sgl[anthropic]'"
            ) from None
        try:
            made = anthropic.Anthropic(*args, **kwargs)
        except (anthropic.AnthropicError, TypeError, ValueError) as error:
            raise ConfigError(f"the anthropic client refuses its arguments: {error}", hint="see its message") from None
        client = AnthropicClient(anthropic, made, model_name, CAPABILITIES.changed(capabilities))
        super().__init__(client, f"Anthropic {model_name}")


class AnthropicClient:
    """Speaks with the endpoint (see `sgl.lang.api.messages.Client`)."""

    def __init__(self, module: Any, client: Any, model: str, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._module = module
        self._client = client
        self._model = model

    def ask(self, ask: Ask) -> Reply:
        """One request."""
        sampling = ask.sampling
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "messages": _messages(ask),
        }
        # Not arguments of every version of the client, and some models refuse them: sent only where they say something.
        chosen = {
            name: value
            for name, value, plain in (
                ("temperature", sampling.temperature, 1.0),
                ("top_p", sampling.top_p, 1.0),
                ("top_k", sampling.top_k, -1),
            )
            if value != plain
        }
        if chosen:
            fields["extra_body"] = chosen
        system = "\n\n".join(turn.text for turn in ask.turns if turn.role == "system")
        if system:
            fields["system"] = system
        if ask.stops:
            fields["stop_sequences"] = list(ask.stops)
        if isinstance(ask.constraint, JsonSchema):
            schema = json.loads(ask.constraint.schema)
            fields["tools"] = [{"name": _ANSWER, "description": "Give the answer.", "input_schema": schema}]
            fields["tool_choice"] = {"type": "tool", "name": _ANSWER}
        elif ask.tools:
            fields["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": json.loads(tool.parameters)}
                for tool in ask.tools
            ]
            modes = {"auto": "auto", "none": "none", "required": "any"}
            mode = modes.get(ask.tool_choice)
            fields["tool_choice"] = {"type": mode} if mode else {"type": "tool", "name": ask.tool_choice}
            if not ask.parallel_tool_calls and mode != "none":
                fields["tool_choice"]["disable_parallel_tool_use"] = True
        with self._errors():
            if ask.on_text is not None and "tools" not in fields:
                return self._streamed(ask, fields)
            return _reply(self._client.messages.create(**fields), held=ask.constraint is not None)

    def _streamed(self, ask: Ask, fields: dict[str, Any]) -> Reply:
        with self._client.messages.stream(**fields) as stream:
            for text in stream.text_stream:
                if ask.on_text is not None and not ask.on_text(text):
                    break
            else:
                return _reply(stream.get_final_message(), held=False)
        return Reply("")  # nobody waits for it any more

    def score(self, prompts: list[str]) -> list[list[tuple[int, float]]]:
        """Never called: the endpoint scores nothing, and does not say that it did."""
        raise ConfigError("Anthropic's endpoint scores no texts", hint="leave echo_logprobs out of capabilities")

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._module.AnthropicError as error:
            raise typed_error(error, self._model) from error


def _messages(ask: Ask) -> list[dict[str, Any]]:
    messages = [
        {"role": "assistant" if turn.role == "assistant" else "user", "content": _content(turn)}
        for turn in ask.turns
        if turn.role != "system"
    ]
    if ask.prefix:
        messages.append({"role": "assistant", "content": ask.prefix})
    return messages


def _content(turn: Turn) -> Any:
    if not any(isinstance(part, Media) for part in turn.parts):
        return turn.text
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": part.kind,
            "source": {
                "type": "base64",
                "media_type": media_type(part),
                "data": base64.b64encode(part.data).decode(),
            },
        }
        for part in turn.parts
    ]


def _reply(message: Any, *, held: bool) -> Reply:
    """The answer; of one that was held to a schema, the tool's input as its text."""
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [(block.name, json.dumps(block.input)) for block in message.content if block.type == "tool_use"]
    if held and calls:
        text, calls = calls[0][1], []
    finish = "length" if message.stop_reason == "max_tokens" else "stop"
    return Reply(text, finish, _usage(message.usage), calls=tuple(calls))


def _usage(usage: Any) -> Usage:
    read = getattr(usage, "cache_read_input_tokens", None) or 0
    written = getattr(usage, "cache_creation_input_tokens", None) or 0
    return Usage(
        prompt_tokens=usage.input_tokens + read + written,
        cached_tokens=read,
        prefill_tokens=usage.input_tokens + written,
        completion_tokens=usage.output_tokens,
    )
