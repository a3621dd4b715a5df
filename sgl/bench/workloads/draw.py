"""Material for workloads: counts, lengths and texts from a seed, at a scale.

Owns the random source of one workload and the two rules of scaling. Counts of instances and lengths of texts both
shrink with the square root of the scale, so that the tokens of a workload shrink about as the scale does, and its tree
keeps its shape; widths of forks, numbers of turns and of steps do not shrink. Short literals that a program writes
itself (a label, a JSON key) are not scaled.
"""

from __future__ import annotations

import math
import random
from typing import Literal, TypeAlias

from sgl.errors import InvalidParameter

Unit: TypeAlias = Literal["words", "bytes"]
"""What is about one token for the model that runs: a common English word with its space, or one byte."""

_WORDS = """
able above action again ago all alone also among and answer appear arm art baby bad bank beat bed begin being
best big black blue boat book bottom boy bridge brother business call capital care case cause century chance
charge child circle claim clean close color common compare consider control cool corn cost course create crowd
cup cut dark day deal decide degree develop direct dog double draw dress drive dry each earth easy edge egg end
engine enter even event every example eye fact family far fast fear few fight fill find finger fire fish floor
flower follow foot forest forward free friend fruit game gas gave gentle give glass good grass great ground grow
guide half happen hard have hear heat help high history hole hope hot house human hunt imagine island join key
king lady land large late law learn left length letter lie lift line listen live look lot low main make map
market matter measure meet middle milk mind minute modern money moon morning motion mouth much name nature need
next nine north note notice object offer oil once order over page pair part pass path people person piece plain
plant point power press produce prove push quick race rain range read real record remember reply rest rich right
rise road roll root rose rule safe salt sand science season second see seem send serve seven shape sharp shop
should show sight silver sing sit size skin sleep small smile soft soldier son soon south speak speed spot
spring stand start stay step still stop story strange street strong study summer supply sure swim table teach
tell term thing third thousand through tiny tone total toward track train tree trouble try twenty type under
until valley view visit wait wall war wash water way weather weight wheel whole wife wind winter woman wood work
write yellow young
"""
WORDS = tuple(_WORDS.split())
"""Common words, most of them one token each (with a space before them) in vocabularies made for English."""


class Draw:
    """The random source of one workload.

    Args:
        name: of the workload; each draws from a source of its own.
        seed, scale: as given to `Workload.build`.
        unit: what about one token is.

    Raises:
        InvalidParameter: the scale is not a positive number.

    Example:
        >>> draw = Draw("x", seed=1, scale=0.25, unit="bytes")
        >>> draw.num(200), draw.num(3, least=2), draw.length(1600), len(draw.text(40))
        (100, 2, 800, 20)
        >>> Draw("x", seed=1, scale=0.25, unit="bytes").text(40) == Draw("x", 1, 0.25, "bytes").text(40)
        True
    """

    def __init__(self, name: str, seed: int, scale: float, unit: Unit) -> None:
        if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
            raise InvalidParameter(f"scale is {scale!r}; expected a number above 0", param="scale")
        self.random = random.Random(f"{name}:{seed}")
        self.unit = unit
        self._factor = math.sqrt(scale)

    def num(self, count: int, least: int = 2) -> int:
        """A count of instances or groups, scaled."""
        return max(least, round(count * self._factor))

    def length(self, low: int, high: int | None = None) -> int:
        """A length in tokens, scaled: `low`, or between both, drawn evenly."""
        return max(1, round((low if high is None else self.random.randint(low, high)) * self._factor))

    def text(self, low: int, high: int | None = None) -> str:
        """Random words of about that many tokens (scaled); in bytes exactly that many."""
        return self.exactly(self.length(low, high))

    def exactly(self, length: int) -> str:
        """Random words of about `length` tokens, not scaled. Begins with a space."""
        if self.unit == "words":
            return "".join(f" {word}" for word in self.random.choices(WORDS, k=length))
        text = ""
        while len(text) < length:
            text += f" {self.random.choice(WORDS)}"
        return text[:length]

    def texts(self, count: int, low: int, high: int | None = None) -> list[str]:
        """`count` texts, drawn independently."""
        return [self.text(low, high) for _ in range(count)]

    def seed(self) -> int:
        """A seed for one generation."""
        return self.random.randrange(2**31)
