"""JSON pointers (RFC 6901): how a step is written in one, and read from it.

Owns the escapes. Called by everything that says where in a schema or a value something stands. Nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable


def escaped(step: str | int) -> str:
    """One step as it stands in a pointer.

    Example:
        >>> escaped("a/b~c"), escaped(3)
        ('a~1b~0c', '3')
    """
    return str(step).replace("~", "~0").replace("/", "~1")


def unescaped(step: str) -> str:
    """What a step of a pointer names.

    Example:
        >>> unescaped("a~1b~0c")
        'a/b~c'
    """
    return step.replace("~1", "/").replace("~0", "~")


def pointer_of(steps: Iterable[str | int]) -> str:
    """The pointer of some steps.

    Example:
        >>> pointer_of(["items", 0, "a/b"])
        '/items/0/a~1b'
    """
    return "".join(f"/{escaped(step)}" for step in steps)


def steps_of(pointer: str) -> list[str]:
    """The steps of a pointer.

    Example:
        >>> steps_of("/items/0/a~1b")
        ['items', '0', 'a/b']
    """
    return [unescaped(step) for step in pointer.split("/")[1:]]
