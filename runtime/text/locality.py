"""Whether a chat template writes each turn without a look at the others.

Owns the rule, which holds of a template's syntax alone: one loop over `messages` at the top, in it nothing of other
turns but the first (`messages[0]`), of the loop nothing but whether this is its first or last turn, nothing that is
carried from one turn to the next, and nothing that changes by itself (the time). Whatever the rule does not know is
not local, so that a mistake costs time and nothing else.
"""

from __future__ import annotations

from jinja2 import nodes

_MESSAGES = "messages"
_LOOP = "loop"
_STATEFUL = {"namespace", "cycler", "joiner", "lipsum", "strftime_now"}
"""Globals with a memory, or another value each time."""
_KNOWN = (
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Const, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword, nodes.Compare, nodes.Operand,
    nodes.BinExpr, nodes.UnaryExpr, nodes.CondExpr, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair,
)  # fmt: skip


def is_local(template: nodes.Template) -> bool:
    """Whether what a template writes of a turn depends on that turn, the first one, and on whether it is the first or
    the last.

    Example:
        >>> from jinja2 import Environment
        >>> chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> is_local(Environment().parse(chatml)), is_local(Environment().parse(chatml + "{{ messages|length }}"))
        (True, False)
    """
    loops = [node for node in template.body if isinstance(node, nodes.For) and _is_named(_source(node), _MESSAGES)]
    if len(loops) != 1 or loops[0].test is not None or loops[0].else_ or loops[0].recursive:
        return False
    others = [node for node in template.body if node is not loops[0]]
    return (
        isinstance(loops[0].target, nodes.Name)
        and all(_is_known(node, in_turn=False, inner=False) for node in (*others, loops[0].target))
        and all(_is_known(node, in_turn=True, inner=False) for node in loops[0].body)
    )


def _source(loop: nodes.For) -> nodes.Node:
    """What a loop is over, without the meter that counts its steps."""
    found: nodes.Node = loop.iter
    while isinstance(found, nodes.Filter) and found.name == "metered" and found.node is not None:
        found = found.node
    return found


def _is_named(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_known(node: nodes.Node, *, in_turn: bool, inner: bool) -> bool:
    """Whether a part of the template is as it has to be.

    Args:
        in_turn: it is within the loop over the turns; `inner`: and within a loop of its own there, whose `loop` it is.
    """
    match node:
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=0)):
            return True
        case nodes.Compare(
            expr=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"),
            ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=0))],
        ) if in_turn:
            return True
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
            return inner or (in_turn and attr in ("first", "last"))
        case nodes.Name(name=name):
            is_own = inner and name == _LOOP and node.ctx == "load"
            return is_own or name not in (_MESSAGES, _LOOP, *_STATEFUL)
        case nodes.Filter(name="random"):
            return False
        case nodes.For(recursive=True):
            return False
        case nodes.For():
            parts = [*node.body, *node.else_, *([node.test] if node.test is not None else [])]
            outside = all(_is_known(part, in_turn=in_turn, inner=inner) for part in (_source(node), node.target))
            return outside and all(_is_known(part, in_turn=in_turn, inner=True) for part in parts)
    return isinstance(node, _KNOWN) and all(
        _is_known(child, in_turn=in_turn, inner=inner) for child in node.iter_child_nodes()
    )
