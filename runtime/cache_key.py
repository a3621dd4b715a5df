"""What besides token ids decides whether cached keys and values may be used.

Owns `CacheKey`, the part of the key that holds for a whole sequence, and `MediaIds`, which turns images and the like
into token ids. The radix tree keeps one root per `CacheKey`, so nothing is ever shared between two of them; below a
root it compares ids one by one. No hash stands for tokens, so there is no collision that could serve other text.

The seam for media: a model that takes them asks `MediaIds` for the ids of each medium's positions and puts these ids
into the sequence; its runner finds the embeddings of negative ids where the medium was registered. Models of text
never see one, and ids that users give are never negative.
"""

from __future__ import annotations

from typing import NamedTuple


class CacheKey(NamedTuple):
    """Sequences with different keys share no page.

    Args:
        salt: chosen by the caller, for example per tenant: who does not know it cannot find out, by its speed, what was
            computed under it.
        adapter: the adapter's id and version; its keys and values are its own.
        program: set when the cache is switched off: pages are shared within that program only.
    """

    salt: str = ""
    adapter: str = ""
    program: int | None = None


class MediaIds:
    """Token ids for media: equal media get equal ids, different ones never do.

    Digests are interned, not folded into ids: two digests have different ids whatever their bits, and every position of
    a medium has the same id, so that a match which ends inside a medium stays exact.

    Example:
        >>> media = MediaIds()
        >>> media.ids(b"digest of a cat", 3), media.ids(b"digest of a dog", 2), media.ids(b"digest of a cat", 3)
        ([-1, -1, -1], [-2, -2], [-1, -1, -1])
    """

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def ids(self, digest: bytes, num_positions: int) -> list[int]:
        """The ids of a medium.

        Args:
            digest: SHA-256 over everything that its embeddings depend on (the bytes, the processor's settings).
            num_positions: how many tokens it takes, which must follow from what the digest covers.
        """
        number = self._known.setdefault(digest, -1 - len(self._known))
        return [number] * num_positions
