"""`sgl.LiteLLM`: programs on any endpoint that LiteLLM knows.

Owns the adapter: LiteLLM answers in OpenAI's form, so requests and answers are `sgl.lang.api.openai`'s. The package is
the extra `litellm`; what a provider can do is up to the caller to declare where it is more than chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sgl import environment
from sgl.errors import ConfigError
from sgl.lang.api.capabilities import Capabilities
from sgl.lang.api.openai import OpenAIClient
from sgl.lang.api.session import ApiBackend
from sgl.lang.chat_template import ChatTemplate, chosen_template

CAPABILITIES = Capabilities(tools=True, images=True, seed=True)


class LiteLLM(ApiBackend):
    """A backend over LiteLLM.

    Args:
        model_name: with its provider, as LiteLLM writes it: `anthropic/claude-haiku`.
        chat_template: taken for compatibility; LiteLLM's endpoints take turns.
        capabilities: what the provider's model can do besides (see `sgl.lang.api.capabilities.Capabilities`):
            `{"json_schema": True}`, `{"top_logprobs": 20}`.
        api_key, ..., kwargs: handed on with each request.

    Raises:
        ConfigError: the package is not installed.

    Example:
        >>> import sgl
        >>> try:
        ...     print(sgl.LiteLLM("openai/gpt-4o-mini").server_info()["backend"])
        ... except sgl.errors.ConfigError as error:  # the package is an extra
        ...     print("LiteLLM" if "litellm" in str(error) else error)
        LiteLLM
    """

    def __init__(
        self,
        model_name: str,
        chat_template: str | ChatTemplate | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float = 600,
        max_retries: int = 2,
        default_headers: Mapping[str, str] | None = None,
        *,
        capabilities: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        style = chosen_template(chat_template)
        try:
            import litellm
        except ImportError:
            raise ConfigError("sgl.LiteLLM needs the package litellm", hint="pip install 'sgl[litellm]'") from None
        given = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "num_retries": max_retries,
            "extra_headers": dict(default_headers) if default_headers else None,
        }
        fixed = {**kwargs, **{name: value for name, value in given.items() if value is not None}}

        def create(**fields: Any) -> Any:
            return litellm.completion(**fixed, **fields)

        # The part of an OpenAI client that the translation uses.
        client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), close=lambda: None)
        errors = SimpleNamespace(OpenAIError=Exception)  # LiteLLM's have no base of their own
        able = CAPABILITIES.changed(capabilities)
        super().__init__(OpenAIClient(errors, client, model_name, able), f"LiteLLM {model_name}", style)


class VertexAI(LiteLLM):
    """A backend over Google's Vertex AI, by LiteLLM.

    Args:
        model_name: as Vertex knows it. The project is the environment's `GCP_PROJECT_ID`, the place its `GCP_LOCATION`.
        safety_settings: handed on with each request.

    Raises:
        ConfigError: `GCP_PROJECT_ID` is not set, or the package is not installed.

    Example:
        >>> import sgl
        >>> sgl.VertexAI.__mro__[1].__name__
        'LiteLLM'
    """

    def __init__(self, model_name: str, safety_settings: Any = None, **kwargs: Any) -> None:
        project = environment.read("GCP_PROJECT_ID")
        if not project:
            raise ConfigError("sgl.VertexAI needs a project", hint="set GCP_PROJECT_ID")
        if safety_settings is not None:
            kwargs["safety_settings"] = safety_settings
        if location := environment.read("GCP_LOCATION"):
            kwargs["vertex_location"] = location
        super().__init__(f"vertex_ai/{model_name}", vertex_project=project, **kwargs)
