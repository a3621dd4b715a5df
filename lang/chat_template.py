"""How chat turns are written out as text, where the backend does not do it: a registry by name.

Owns `ChatTemplate` and its registry, for endpoints that continue a text and for backends of one's own (`BaseBackend`).
An engine renders turns with its model's own template and has no use for these. An unknown name is an error.

Example:
    >>> template = ChatTemplate("tags", None, {"user": ("<u>", "</u>"), "assistant": ("<a>", "</a>")})
    >>> register_chat_template(template)
    >>> get_chat_template("tags").begin("user")
    '<u>'
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sgl.errors import ConfigError


@dataclass(frozen=True)
class ChatTemplate:
    """What stands before and after the turns of each role.

    Attributes:
        name: under which it is registered.
        default_system_prompt: what a system turn says that the program did not write; `None` for no such turn.
        role_prefix_and_suffix: by role; `{role}` and `{ROLE}` in it stand for the role's name.
        stop_str: what ends a turn of the assistant; appended to every generation's stops.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: Sequence[str] = ()

    def begin(self, role: str) -> str:
        """What stands before a turn."""
        return self._around(role)[0]

    def end(self, role: str) -> str:
        """What stands after it."""
        return self._around(role)[1]

    def _around(self, role: str) -> tuple[str, str]:
        found = self.role_prefix_and_suffix.get(role) or self.role_prefix_and_suffix.get("*")
        if found is None:
            raise ConfigError(
                f"chat template {self.name!r} has no role {role!r}",
                hint=f"it has {', '.join(self.role_prefix_and_suffix)}",
            )
        before, after = (text.replace("{role}", role).replace("{ROLE}", role.upper()) for text in found)
        return before, after


_lock = threading.Lock()
_templates: dict[str, ChatTemplate] = {}
_matchers: list[Callable[[str], str | None]] = []


def register_chat_template(template: ChatTemplate) -> None:
    """Make a template known by its name; one of that name is replaced."""
    with _lock:
        _templates[template.name] = template


def register_chat_template_matching_function(function: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Have `function` say the name of the template for a model's path, or `None`. Can be used as a decorator."""
    with _lock:
        _matchers.append(function)
    return function


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name.

    Raises:
        ConfigError: none is registered.
    """
    with _lock:
        found, known = _templates.get(name), ", ".join(sorted(_templates))
    if found is None:
        raise ConfigError(
            f"chat_template is {name!r}; expected one of {known}",
            hint="register others with register_chat_template",
            param="chat_template",
        )
    return found


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template that a registered function finds for a model.

    Raises:
        ConfigError: none knows it.
    """
    with _lock:
        matchers = tuple(_matchers)
    for matcher in matchers:
        if (name := matcher(model_path)) is not None:
            return get_chat_template(name)
    raise ConfigError(
        f"no chat template is known for {model_path!r}",
        hint="name one, or register a function with register_chat_template_matching_function",
        param="chat_template",
    )


def chosen_template(given: str | ChatTemplate | None) -> ChatTemplate | None:
    """A template that was given by name or as itself.

    Raises:
        ConfigError: there is none of that name.
    """
    return get_chat_template(given) if isinstance(given, str) else given


register_chat_template(ChatTemplate("chatml", None, {"*": ("<|im_start|>{role}\n", "<|im_end|>\n")}, ("<|im_end|>",)))
register_chat_template(ChatTemplate("plain", None, {"*": ("{ROLE}: ", "\n")}))
register_chat_template(
    ChatTemplate("default", None, {role: (f"{role.upper()}:", "\n") for role in ("system", "user", "assistant")})
)
