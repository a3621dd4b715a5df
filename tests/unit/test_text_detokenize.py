"""Streaming text: UTF-8 over tokens and stop strings over tokens (rows 21 and 22 of the fault table)."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.runtime.text.detokenize import StreamDecoder


class Scripted:
    """A vocabulary of the given byte strings; the id is the position."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def run(tokens: list[bytes], *stop: str, keep_stop: bool = False) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(Scripted(*tokens), stop, keep_stop=keep_stop)
    shown = [decoder.push(index) for index in range(len(tokens))]
    return [*shown, decoder.finish()], decoder


def test_stop_split_over_tokens_does_not_leak() -> None:
    shown, decoder = run([b"ABC", b"DEF", b"G", b"HI", b"J"], "FGH")
    assert shown == ["ABC", "DE", "", "", "", ""]
    assert decoder.finished_by == "FGH"
    assert decoder.text == "ABCDE"
    assert decoder.num_tokens == 4
    assert decoder.tokens_for_text(len(decoder.text)) == (1, "DE")


@given(st.lists(st.binary(max_size=3), max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_tokens_that_are_added_together_are_those_added_one_by_one(tokens: list[bytes], cuts: list[int]) -> None:
    shown, decoder = run(tokens)
    together = StreamDecoder(Scripted(*tokens))
    edges = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    text = "".join(together.push_all(range(*edge)) for edge in pairwise(edges)) + together.finish()
    assert text == "".join(shown) == decoder.text == together.text
    assert together.num_tokens == decoder.num_tokens
    for length in range(len(text) + 1):
        assert together.tokens_for_text(length) == decoder.tokens_for_text(length)


def test_held_text_is_released_when_ambiguity_ends() -> None:
    shown, decoder = run([b"DEF", b"G", b"X", b"F"], "FGH")
    assert shown == ["DE", "", "FGX", "", "F"]
    assert decoder.finished_by is None
    assert decoder.text == "DEFGXF"


def test_stop_that_begins_with_a_newline() -> None:
    shown, decoder = run([b"a", b"\n", b"\n", b"Q:"], "\n\nQ:", "\nA:")
    assert "".join(shown) == "a"
    assert decoder.finished_by == "\n\nQ:"
    assert run([b"a", b"\n"], "\n\nQ:")[0] == ["a", "", "\n"]


def test_first_completed_stop_wins_and_the_longest_of_equals() -> None:
    assert run([b"xabcd"], "bcd", "c")[1].finished_by == "c"
    assert run([b"xabcd"], "cd", "bcd")[1].finished_by == "bcd"


def test_keep_stop() -> None:
    shown, decoder = run([b"ab", b"cd"], "bc", keep_stop=True)
    assert "".join(shown) == decoder.text == decoder.trim(keep_stop=True) == "abc"
    assert decoder.trim(keep_stop=False) == "a"
    assert run([b"ab", b"cd"], "bc")[1].trim(keep_stop=True) == "abc"


def test_emoji_over_tokens() -> None:
    emoji = "🎉".encode()
    assert run([emoji[:2], emoji[2:], b"!"])[0] == ["", "🎉", "!", ""]
    assert run([emoji[i : i + 1] for i in range(4)])[0] == ["", "", "", "🎉", ""]


def test_invalid_bytes_are_flushed_once() -> None:
    shown, decoder = run(["🎉".encode()[:3]])
    assert shown == ["", "\ufffd"]
    assert decoder.finish() == ""
    assert run([b"a\xff", b"b"])[0] == ["a\ufffd", "b", ""]


def test_rest_is_text_when_a_token_ends_inside_a_character() -> None:
    emoji = "🎉".encode()
    _, decoder = run([b"a", emoji[:2], emoji[2:] + b"STOP"], "STOP")
    assert decoder.text == "a🎉"
    assert decoder.tokens_for_text(2) == (1, "🎉")


def test_tokens_after_the_end_are_ignored() -> None:
    shown, decoder = run([b"a.", b"b"], ".")
    assert shown == ["a", "", ""]
    assert decoder.num_tokens == 1


STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3)


@settings(deadline=None)
@given(st.text("ab\né🎉", max_size=30), STOPS, st.data())
def test_result_does_not_depend_on_tokens(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    shown, decoder = run([raw[a:b] for a, b in pairwise(cuts)], *stops)
    expected, by = text, None
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            by = max(matches, key=len)
            expected = text[: end - len(by)]
            break
    assert "".join(shown) == decoder.text == expected
    assert decoder.finished_by == by
    for length in range(len(expected) + 1):
        tokens, rest = decoder.tokens_for_text(length)
        assert raw[: cuts[tokens]].decode() + rest == expected[:length]
