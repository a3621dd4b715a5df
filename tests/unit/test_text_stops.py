"""Stop patterns: the end that a reader of the characters would find with `re`, whatever the tokens are."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.errors import ConstraintTooComplex, InvalidParameter, InvalidRegex, SglError
from sgl.lang.graph import sampling_from_mapping
from sgl.limits import Limits
from sgl.runtime.text.detokenize import StreamDecoder
from sgl.runtime.text.stops import StopSearch

PATTERNS = [
    "ab+c", "a|bc", "b{2,3}a", "[ab]c", "(?:ab|b)c?a", "c$", "^ab", "\\bc", "a\\b", "(?<=a)b", "a(?=b)", "c(?!a)",
    "a.b", "(a)c\\1", "(?i)AB", "b+?c", "x|ca",
]  # fmt: skip


class Letters:
    """Each token is a piece of the text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def read(text: str, patterns: list[str], strings: list[str]) -> tuple[str, str | None]:
    """The text before the stop, and the stop, found with `re` by adding one character at a time."""
    for end in range(1, len(text) + 1):
        found = [m.span() for p in patterns if (m := re.compile(p).search(text[:end]))]
        found += [(end - len(s), end) for s in strings if text[:end].endswith(s)]
        if found:
            begin, last = min(found, key=lambda span: (span[0], -span[1]))
            return text[:begin], text[begin:last]
    return text, None


def decode(pieces: list[str], patterns: list[str], strings: list[str] = (), **how: object) -> StreamDecoder:
    decoder = StreamDecoder(Letters(pieces), strings, patterns, **how)
    shown = "".join([*(decoder.push(i) for i in range(len(pieces))), decoder.finish()])
    assert shown == decoder.text, "what was streamed is the text"
    return decoder


@settings(max_examples=150, deadline=None)
@given(
    st.text("abcAB \n", max_size=14),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=1),
    st.data(),
)
def test_ends_where_a_reader_of_the_characters_would(
    text: str, patterns: list[str], strings: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    before, stop = read(text, patterns, strings)
    decoder = decode(pieces, patterns, strings)
    assert (decoder.text, decoder.finished_by) == (before, stop)
    kept = decode(pieces, patterns, strings, keep_stop=True)
    assert kept.text == before + (stop or "")
    num_tokens, rest = decoder.tokens_for_text(len(decoder.text))
    assert "".join(pieces[:num_tokens]) + rest == before, "tokens and text that stay are the value"


def test_only_what_may_be_a_stop_is_held_back() -> None:
    decoder = StreamDecoder(Letters(["I have 1", "2 app", "endages, 12 app", "les"]), (), [r"\d+ apples"])
    assert decoder.push(0) == "I have "
    assert decoder.push(1) == ""
    assert decoder.push(2) == "12 appendages, "
    assert decoder.push(3) == ""
    assert (decoder.text, decoder.finished_by) == ("I have 12 appendages, ", "12 apples")


def test_held_text_comes_at_the_end() -> None:
    assert decode(["so 12 app"], [r"\d+ apples"]).text == "so 12 app"


def test_a_stop_within_the_first_tokens_is_text() -> None:
    decoder = decode(["END", " and ", "END"], ["END"], min_tokens=2)
    assert (decoder.text, decoder.finished_by) == ("END and ", "END")


def test_exponential_patterns_fail_within_their_time() -> None:
    stops = StopSearch((), ["(a|aa)+c"], Limits(max_stop_regex_s=0.05))
    with pytest.raises(ConstraintTooComplex, match=r"more than 0\.05 s"):
        stops.look("a" * 200 + "b", 0, 150)


def test_a_long_output_costs_little() -> None:
    """Patterns that never begin are within their budget over 20,000 characters."""
    decoder = StreamDecoder(Letters(["some words and 12 more "]), (), [r"\n\n+", "[.!?] +[A-Z]"])
    for _ in range(900):
        decoder.push(0)
    assert len(decoder.text) > 20_000


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("(", InvalidRegex),
        ("a{e<=1}", InvalidRegex),
        ("x*", InvalidParameter),
        ("$", InvalidParameter),
        ("(((a{99}){99}){99})", ConstraintTooComplex),
        ("(" * 90 + "a{99}" + "){99}" * 90, ConstraintTooComplex),
        ("(" * 400 + "a" + ")" * 400, ConstraintTooComplex),
        ("a" * 1025, InvalidParameter),
        ("", InvalidParameter),
    ],
)
def test_patterns_that_are_refused_at_the_door(pattern: str, kind: type[SglError]) -> None:
    with pytest.raises(kind) as caught:
        sampling_from_mapping({"stop_regex": [pattern]})
    assert caught.value.param == "stop_regex"
