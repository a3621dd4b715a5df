"""The checkpoint's chat template, run as the untrusted program that it is.

Owns rendering of messages to text, byte for byte as transformers' `apply_chat_template` does. Used by `Transcript`;
`Tokenizer` finds the source. Templates come from model files, so each runs in Jinja's immutable sandbox (no attribute
that leads to the interpreter, no changes to the messages) and under a budget: loop steps and calls of one rendering,
and the size of what it writes or builds with `~`, `+` and `*`. Templates from requests are not accepted anywhere.

Fails with `UnsupportedModel` when the source is not a template or tries to leave the sandbox, and with
`InvalidProgram` when it refuses the messages or spends its budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sgl.errors import InvalidProgram, UnsupportedModel
from sgl.runtime.text.locality import is_local

MAX_STEPS = 1_000_000
"""Loop steps and calls of one rendering; a conversation of a thousand turns takes some ten thousand."""

MAX_OUTPUT_CHARS = 16 * 2**20
"""Largest text that a rendering may write or build; four times the longest prompt text."""

_MAX_WIDTH = 10_000


class _OverBudget(Exception):
    """The template does too much."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token` and the like, as the template's variables.

    Attributes:
        is_local: what it writes of a turn depends on that turn, whether it is the first or the last, and the first one
            (see `locality`).

    Raises:
        UnsupportedModel: the source does not compile.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
        ...                         {"eos_token": "</s>"})
        >>> template.render([{"role": "user", "content": "Hi"}])
        '[user] Hi</s>'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.is_local = False
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self.is_local = is_local(_ENVIRONMENT.parse(source))
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise UnsupportedModel(
                f"the chat template does not compile: {error}", hint="correct the checkpoint's chat template"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **kwargs: Any) -> str:
        """Text of a conversation.

        Args:
            messages: objects with at least `role` and `content`.
            add_generation_prompt: end with the beginning of an assistant turn.
            kwargs: further variables of the template (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidProgram: the template refuses these messages, or the rendering is over its budget.
            UnsupportedModel: the template tries to leave the sandbox.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        variables.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        token = _steps_left.set([MAX_STEPS])
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
        except SecurityError as error:
            raise UnsupportedModel(
                f"the chat template tries to leave its sandbox: {error}", hint="do not use this checkpoint's template"
            ) from None
        except (_OverBudget, OverflowError, MemoryError, RecursionError) as error:
            raise InvalidProgram(
                f"the chat template does too much: {error}", hint="check the checkpoint's chat template"
            ) from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything that Python can
            raise InvalidProgram(
                f"the chat template refuses these messages: {error}",
                hint="use the roles in the order that this model's template expects",
            ) from None
        finally:
            _steps_left.reset(token)
        return "".join(parts)


def template_clock(now: float | None) -> dict[str, Any]:
    """Variables of a chat template for which it is always `now`; none for the time of the clock.

    Example:
        >>> template_clock(None)
        {}
        >>> template_clock(0.0)["strftime_now"]("%Y") in ("1969", "1970")
        True
    """
    if now is None:
        return {}
    moment = datetime.fromtimestamp(now)
    return {"strftime_now": moment.strftime}


# --- the budget -----------------------------------------------------------------------------------------------------

_steps_left: ContextVar[list[int]] = ContextVar("chat_template_steps_left")


def _step() -> None:
    left = _steps_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise _OverBudget(f"more than {MAX_STEPS} loop steps and calls")


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise _OverBudget(f"a text of more than {MAX_OUTPUT_CHARS} characters")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _step()
        yield value


def _concat(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


class _Meter(NodeTransformer):
    """Sends loops and `~` through the budget; a sandbox has no hook for either."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "metered")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "concat")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return template

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:  # jinja itself would print ""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_size(max(_size(left), 1) * abs(right) if isinstance(right, int) and _size(left) else 0)
            _check_size(max(_size(right), 1) * abs(left) if isinstance(left, int) and _size(right) else 0)
        elif operator == "**" and (abs(right) > 64 or abs(left) > 2**32):
            raise _OverBudget("a power of large numbers")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the % operator on texts is not available in chat templates")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and any(isinstance(value, int) and value > _MAX_WIDTH for value in args):
            raise _OverBudget("a text padded to a large width")
        value = super().call(context, obj, *args, **kwargs)
        _check_size(_size(value))
        return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Environment:
    # Not optimized: folding constants would run parts of an untrusted template while compiling, outside the budget.
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters.update(tojson=_tojson, metered=_metered, concat=_concat)
    for name in ("center", "format"):  # pad to any width; no template needs them
        del environment.filters[name]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
