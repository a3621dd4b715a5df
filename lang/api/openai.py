"""`sgl.OpenAI`: programs on OpenAI's endpoints, and on any that speak like them.

Owns the translation to the official client (the extra `openai`), of requests and of errors. Chat endpoints take turns;
completion endpoints (`is_chat_model=False`) continue a text, and score the options of a select where the server echoes
log-probabilities. Retries and timeouts are the client's (`max_retries=`, `timeout=`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sgl import environment
from sgl.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RemoteError,
    SglError,
)
from sgl.grammars.spec import Ebnf, JsonSchema, Regex
from sgl.lang.api.capabilities import Capabilities
from sgl.lang.api.messages import Ask, Reply, TokenText, Turn
from sgl.lang.api.session import ApiBackend
from sgl.lang.chat_template import ChatTemplate, chosen_template
from sgl.lang.graph import Media, Sampling, Usage

_COMPLETION_MODELS = ("-instruct", "davinci-", "babbage-")
"""Parts of the names of OpenAI's models that continue a text."""

_CRUSOE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"

CHAT = Capabilities(top_logprobs=20, json_schema=True, tools=True, images=True, seed=True)
COMPLETION = Capabilities(is_chat=False, top_logprobs=5, echo_logprobs=True, seed=True)


class OpenAI(ApiBackend):
    """A backend over an endpoint that speaks as OpenAI's do.

    Args:
        model_name: as the endpoint knows it.
        is_chat_model: whether it takes turns; by default decided by the name.
        chat_template: of a completion model: how turns are written: `chatml`, `plain`, or another one
            that is registered (`sgl.lang.chat_template`).
        is_azure: use the client for Azure.
        capabilities: what the endpoint can do, where it differs from OpenAI's (see `Capabilities`): a vLLM or SGLang
            server also has `regex` and `ebnf`, and takes sampling fields such as `top_k`.
        args, kwargs: for the official client: `api_key`, `base_url`, `timeout`, `max_retries`, ...

    Raises:
        ConfigError: the client is not installed, or refuses its arguments.

    Example:
        >>> import sgl
        >>> try:
        ...     backend = sgl.OpenAI("gpt-4o-mini", api_key="none", max_retries=0)
        ... except sgl.errors.ConfigError as error:  # the client is an extra
        ...     print("json_schema" if "openai" in str(error) else error)
        ... else:
        ...     print(*[name for name in backend.server_info()["capabilities"] if name == "json_schema"])
        json_schema
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: str | ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        capabilities: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        if is_chat_model is None:
            is_chat_model = not any(part in model_name for part in _COMPLETION_MODELS)
        style = chosen_template(chat_template)
        module = _imported()
        try:
            made = (module.AzureOpenAI if is_azure else module.OpenAI)(*args, **kwargs)
        except (module.OpenAIError, TypeError, ValueError) as error:
            raise ConfigError(f"the openai client refuses its arguments: {error}", hint="see its own message") from None
        able = (CHAT if is_chat_model else COMPLETION).changed(capabilities)
        super().__init__(OpenAIClient(module, made, model_name, able), f"OpenAI {model_name}", style)


class Crusoe(OpenAI):
    """A backend over Crusoe's managed inference, which speaks as OpenAI's endpoint does.

    Args:
        api_key: Crusoe's; the environment's `CRUSOE_API_KEY` without it.

    Raises:
        ConfigError: no key, or no client.

    Example:
        >>> import sgl
        >>> try:
        ...     print(sgl.Crusoe("meta-llama/Llama-3.1-8B-Instruct", api_key="none").server_info()["backend"])
        ... except sgl.errors.ConfigError as error:  # the client is an extra
        ...     print("Crusoe" if "openai" in str(error) else error)
        Crusoe
    """

    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        chat_template: str | ChatTemplate | None = None,
        **kwargs: Any,
    ) -> None:
        key = api_key or environment.read("CRUSOE_API_KEY")
        if not key:
            raise ConfigError("sgl.Crusoe needs a key", hint="give api_key=, or set CRUSOE_API_KEY", param="api_key")
        super().__init__(
            model_name, chat_template=chat_template, api_key=key, base_url=base_url or _CRUSOE_URL, **kwargs
        )


def _imported() -> Any:
    try:
        import openai
    except ImportError:
        raise ConfigError("sgl.OpenAI needs the package openai", hint="pip install 'sgl[openai]'") from None
    return openai


class OpenAIClient:
    """Speaks with the endpoint (see `sgl.lang.api.messages.Client`)."""

    def __init__(self, module: Any, client: Any, model: str, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._module = module
        self._client = client
        self._model = model

    def ask(self, ask: Ask) -> Reply:
        """One request."""
        with self._errors():
            return self._complete(ask) if ask.prompt is not None else self._chat(ask)

    def score(self, prompts: list[str]) -> list[list[tuple[int, float]]]:
        """Texts with the log-probabilities of their tokens."""
        with self._errors():
            # Endpoints that refuse to generate nothing generate one token, which is left out below.
            reply = self._client.completions.create(
                model=self._model, prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=1
            )
        scored = []
        for prompt, choice in zip(prompts, sorted(reply.choices, key=lambda choice: choice.index), strict=True):
            told = choice.logprobs
            tokens = zip(told.tokens, told.text_offset, told.token_logprobs, strict=True)
            scored.append(
                [(start + len(text), logprob or 0.0) for text, start, logprob in tokens if start < len(prompt)]
            )
        return scored

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    # --- chat ---

    def _chat(self, ask: Ask) -> Reply:
        messages = chat_messages(ask.turns)
        if ask.prefix:
            messages.append({"role": "assistant", "content": ask.prefix})
        fields = self._fields(ask)
        fields["max_tokens"] = ask.max_tokens
        if ask.prefix:
            fields["extra_body"] = {
                **fields.get("extra_body", {}), "continue_final_message": True, "add_generation_prompt": False
            }  # fmt: skip
        if ask.template_kwargs:
            more = fields.get("extra_body", {})
            fields["extra_body"] = {**more, "chat_template_kwargs": dict(ask.template_kwargs)}
        if ask.top_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        if ask.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": json.loads(tool.parameters),
                    },
                }
                for tool in ask.tools
            ]
            fields["tool_choice"] = (
                ask.tool_choice
                if ask.tool_choice in ("auto", "none", "required")
                else {"type": "function", "function": {"name": ask.tool_choice}}
            )
            if not ask.parallel_tool_calls:
                fields["parallel_tool_calls"] = False
        if isinstance(ask.constraint, JsonSchema):
            schema = {"name": "value", "schema": json.loads(ask.constraint.schema), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        create = self._client.chat.completions.create
        if ask.on_text is not None and not ask.tools:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            return self._streamed(create(model=self._model, messages=messages, **options, **fields), ask, chat=True)
        reply = create(model=self._model, messages=messages, **fields)
        choice = reply.choices[0]
        told = choice.logprobs.content if choice.logprobs is not None else None
        return Reply(
            choice.message.content or "",
            _finish(choice.finish_reason),
            usage_of(reply.usage),
            tuple(_token(entry) for entry in told or ()),
            tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()),
        )

    def _streamed(self, stream: Any, ask: Ask, *, chat: bool) -> Reply:
        """A streamed answer; the connection is closed when nobody wants more."""
        texts: list[str] = []
        tokens: list[TokenText] = []
        finish, usage = "stop", Usage()
        try:
            for chunk in stream:
                if (told := getattr(chunk, "usage", None)) is not None:  # LiteLLM's have none before the last
                    usage = usage_of(told)
                for choice in chunk.choices:
                    text = (choice.delta.content if chat else choice.text) or ""
                    if chat and choice.logprobs is not None:
                        tokens += [_token(entry) for entry in choice.logprobs.content or ()]
                    finish = _finish(choice.finish_reason) if choice.finish_reason else finish
                    texts.append(text)
                    if text and ask.on_text is not None and not ask.on_text(text):
                        return Reply("".join(texts), finish, usage)
        finally:
            if (close := getattr(stream, "close", None)) is not None:
                close()
        return Reply("".join(texts), finish, usage, tuple(tokens))

    # --- completions ---

    def _complete(self, ask: Ask) -> Reply:
        fields = self._fields(ask)
        if ask.top_logprobs is not None:
            fields["logprobs"] = ask.top_logprobs
        given = {"model": self._model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, **fields}
        create = self._client.completions.create
        if ask.on_text is not None and ask.top_logprobs is None:
            return self._streamed(create(stream=True, stream_options={"include_usage": True}, **given), ask, chat=False)
        reply = create(**given)
        choice = reply.choices[0]
        told = choice.logprobs
        tokens: tuple[TokenText, ...] = ()
        if told is not None:
            tops = told.top_logprobs or [None] * len(told.tokens)
            rows = zip(told.tokens, told.token_logprobs, tops, strict=True)
            tokens = tuple(TokenText(text, logprob or 0.0, tuple((top or {}).items())) for text, logprob, top in rows)
        if ask.on_text is not None and choice.text:
            ask.on_text(choice.text)
        return Reply(choice.text, _finish(choice.finish_reason), usage_of(reply.usage), tokens)

    def _fields(self, ask: Ask) -> dict[str, Any]:
        """Sampling and stops, as both kinds of endpoint take them."""
        sampling = ask.sampling
        fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(sampling, name):
                fields[name] = getattr(sampling, name)
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        if ask.stops:
            fields["stop"] = list(ask.stops)
        more: dict[str, Any] = {
            name: getattr(sampling, name)
            for name in self.capabilities.sampling
            if name not in ("frequency_penalty", "presence_penalty")
            and getattr(sampling, name) != getattr(_PLAIN, name)
        }
        if isinstance(ask.constraint, Regex):
            more["regex"] = ask.constraint.pattern
        elif isinstance(ask.constraint, Ebnf):
            more["ebnf"] = ask.constraint.grammar
        if more:
            fields["extra_body"] = more
        return fields

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._module.OpenAIError as error:
            raise typed_error(error, self._model) from error


def typed_error(error: Exception, model: str) -> SglError:
    """A client's exception as one of sgl's. OpenAI's and Anthropic's clients name theirs alike."""
    status = getattr(error, "status_code", None)
    facts: dict[str, Any] = {"remote_status": status, "request_id": getattr(error, "request_id", None)}
    told = f"{model}: {getattr(error, 'message', None) or error}"
    if status == 404:
        return ModelNotFound(told, hint="check the model's name and base_url", **facts)
    if status in (400, 422):
        return InvalidRequest(told, hint="the endpoint refuses the request", **facts)
    if status in (429, 503, 529):
        return Overloaded(told, hint="try again later, or raise max_retries", retryable=True, **facts)
    if status in (401, 403):
        return RemoteError(told, hint="check api_key", retryable=False, **facts)
    if "Timeout" in type(error).__name__:
        return RemoteError(f"{model} did not answer in time", hint="raise timeout=", retryable=True, **facts)
    if "Connection" in type(error).__name__:
        return RemoteError(f"{model} cannot be reached: {error}", hint="check base_url", retryable=True, **facts)
    return RemoteError(told, retryable=status is None or status >= 500, **facts)


def chat_messages(turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    """Turns as OpenAI's messages; results of tools, which a program writes as turns, are told by the user."""
    messages = []
    for turn in turns:
        role = turn.role if turn.role in ("system", "user", "assistant", "developer") else "user"
        content: Any = turn.text
        if any(isinstance(part, Media) for part in turn.parts):
            content = [_part(part) for part in turn.parts]
        messages.append({"role": role, "content": content})
    return messages


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:{media_type(part)};base64,{base64.b64encode(part.data).decode()}"
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": url}}


def media_type(node: Media) -> str:
    """What a file is, by its first bytes.

    Example:
        >>> media_type(Media(id=0, kind="image", digest="", data=b"\\x89PNG...."))
        'image/png'
    """
    begins = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    found = next((name for start, name in begins.items() if node.data.startswith(start)), None)
    return found or ("video/mp4" if node.kind == "video" else "application/octet-stream")


def usage_of(usage: Any) -> Usage:
    """An endpoint's count of tokens."""
    if usage is None:
        return Usage()
    details = getattr(usage, "prompt_tokens_details", None)
    cached = min(getattr(details, "cached_tokens", None) or 0, usage.prompt_tokens)
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=cached,
        prefill_tokens=usage.prompt_tokens - cached,
        completion_tokens=usage.completion_tokens or 0,
        reasoning_tokens=getattr(getattr(usage, "completion_tokens_details", None), "reasoning_tokens", None) or 0,
    )


def _finish(reason: str | None) -> str:
    return "length" if reason == "length" else "stop"


def _token(entry: Any) -> TokenText:
    return TokenText(entry.token, entry.logprob, tuple((top.token, top.logprob) for top in entry.top_logprobs or ()))


_PLAIN = Sampling()
