"""Prompts as Jinja templates, whose variables may be generations.

Owns `template` and `Template`. Templates run in Jinja's immutable sandbox and see only what they are given. A variable
that is an expression (`gen`, `select`, ...) is left where the template writes it, so the result is text, or text with
expressions between it. Fails with `InvalidParameter` for a template that cannot be read, or a variable that is missing.
"""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from typing import Any

from sgl.errors import InvalidParameter
from sgl.lang.expr import Expr, ExprList, items_of


def template(source: str | Path) -> Template:
    """A prompt template: Jinja text, or the path of a file that holds it.

    Example:
        >>> import sgl
        >>> few_shot = sgl.template("{% for q, a in shots %}Q: {{ q }} A: {{ a }}\\n{% endfor %}Q: {{ question }} A: ")
        >>> few_shot(shots=[("1 + 1", "2")], question="2 + 2")
        'Q: 1 + 1 A: 2\\nQ: 2 + 2 A: '
        >>> ask = sgl.template("Name: {{ name }}, age: {{ age }}.")
        >>> [type(item).__name__ for item in ask(name="Ada", age=sgl.gen("age", type=int)).items]
        ['str', 'GenExpr', 'str']
    """
    if isinstance(source, Path):
        try:
            source = source.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidParameter(
                f"template {str(source)!r} cannot be read: {error.strerror}", param="source"
            ) from None
    if not isinstance(source, str):
        raise InvalidParameter(f"template got {source!r}; expected text or a path", param="source")
    return Template(source)


class Template:
    """A prompt with variables. Made by `template`; call it with values.

    Attributes:
        source: its text.

    Example:
        >>> import sgl
        >>> greeting = sgl.template("Dear {{ name }},")
        >>> greeting(name="Ada"), greeting.source
        ('Dear Ada,', 'Dear {{ name }},')
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled = _compile(source)

    def __call__(self, **variables: Any) -> str | ExprList:
        """The prompt with its variables filled in: text, or an expression to append.

        Raises:
            InvalidParameter: a variable is missing, or the template fails on its values.
        """
        from jinja2 import TemplateError

        marked = _Marked()
        try:
            text = self._compiled.render({name: marked.replace(value) for name, value in variables.items()})
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidParameter(
                f"the template cannot be filled in: {error}", hint=f"given: {', '.join(variables) or 'nothing'}"
            ) from error
        return marked.split(str(text))


class _Marked:
    """Expressions on their way through a template: marks that stand for them, and the way back."""

    def __init__(self) -> None:
        self._border = f"\ue000{secrets.token_hex(8)}\ue000"
        self._expressions: list[Expr] = []

    def replace(self, value: Any) -> Any:
        """A value with marks for the expressions in it."""
        if isinstance(value, Expr):
            self._expressions.append(value)
            return f"{self._border}{len(self._expressions) - 1}{self._border}"
        if isinstance(value, (list, tuple)):
            return type(value)(self.replace(item) for item in value) if type(value) in (list, tuple) else value
        if type(value) is dict:
            return {key: self.replace(item) for key, item in value.items()}
        return value

    def split(self, text: str) -> str | ExprList:
        """The rendered text with the expressions back in their places."""
        pieces = text.split(self._border)
        if len(pieces) == 1:
            return text
        items: list[str | Expr] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                items.extend(items_of(self._expressions[int(piece)]))
            elif piece:
                items.append(piece)
        return ExprList(tuple(items))


@functools.lru_cache(maxsize=256)
def _compile(source: str) -> Any:
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidParameter(
            f"the template is wrong in line {error.lineno}: {error.message}", param="source"
        ) from None
