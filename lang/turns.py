"""Media and chat turns: what a program appends besides text and generations.

Owns the functions that users call for them. Several images or videos are parts in the order in which they are appended.
"""

from __future__ import annotations

import base64
from pathlib import Path

from sgl.errors import InvalidParameter
from sgl.lang.expr import Appendable, Expr, ExprList, MediaExpr, RoleExpr, items_of
from sgl.lang.graph import MediaKind


def _media(kind: MediaKind, source: str | bytes | Path, num_frames: int | None = None) -> MediaExpr:
    if isinstance(source, bytes):
        return MediaExpr(kind, source, num_frames)
    text = str(source)
    if text.startswith("data:"):
        return MediaExpr(kind, base64.b64decode(text.partition(",")[2]), num_frames)
    try:
        return MediaExpr(kind, Path(text).read_bytes(), num_frames)
    except OSError as error:
        raise InvalidParameter(
            f"{kind} {text!r} cannot be read: {error.strerror}", hint="give a path to a file, or bytes", param="path"
        ) from None


def image(path: str | bytes | Path) -> MediaExpr:
    """An image: a path, a `data:` address or the bytes of a file.

    Example:
        >>> import sgl
        >>> sgl.image(b"\\x89PNG").kind
        'image'
    """
    return _media("image", path)


def video(path: str | bytes | Path, num_frames: int) -> MediaExpr:
    """A video of which `num_frames` frames are shown to the model.

    Example:
        >>> import sgl
        >>> sgl.video(b"....", 4).num_frames
        4
    """
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise InvalidParameter(f"num_frames is {num_frames!r}; expected an integer >= 1", param="num_frames")
    return _media("video", path, num_frames)


def _turn(role: str, expr: Appendable | None) -> ExprList:
    if expr is not None and not isinstance(expr, (str, Expr)):
        raise InvalidParameter(f"{role}() got {expr!r}; expected text or an expression", param="expr")
    inner = () if expr is None else items_of(expr)
    return ExprList((RoleExpr(role, True), *inner, RoleExpr(role, False)))


def system(expr: Appendable | None = None) -> ExprList:
    """A system turn.

    Example:
        >>> import sgl
        >>> sgl.system("Be brief.").items[1]
        'Be brief.'
    """
    return _turn("system", expr)


def user(expr: Appendable | None = None) -> ExprList:
    """A turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user("Hi").items[1]
        'Hi'
    """
    return _turn("user", expr)


def assistant(expr: Appendable | None = None) -> ExprList:
    """A turn of the assistant.

    Example:
        >>> import sgl
        >>> len(sgl.assistant(sgl.gen("answer")).items)
        3
    """
    return _turn("assistant", expr)


def system_begin() -> RoleExpr:
    """Begin a system turn.

    Example:
        >>> import sgl
        >>> sgl.system_begin() + "Be brief." + sgl.system_end() == sgl.system("Be brief.")
        True
    """
    return RoleExpr("system", True)


def system_end() -> RoleExpr:
    """End a system turn.

    Example:
        >>> import sgl
        >>> sgl.system_end().begin
        False
    """
    return RoleExpr("system", False)


def user_begin() -> RoleExpr:
    """Begin a turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user_begin().role
        'user'
    """
    return RoleExpr("user", True)


def user_end() -> RoleExpr:
    """End a turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user_end().begin
        False
    """
    return RoleExpr("user", False)


def assistant_begin() -> RoleExpr:
    """Begin a turn of the assistant.

    Example:
        >>> import sgl
        >>> sgl.assistant_begin().role
        'assistant'
    """
    return RoleExpr("assistant", True)


def assistant_end() -> RoleExpr:
    """End a turn of the assistant.

    Example:
        >>> import sgl
        >>> sgl.assistant_end().begin
        False
    """
    return RoleExpr("assistant", False)
