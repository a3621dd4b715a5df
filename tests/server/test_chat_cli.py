"""`sgl chat`: the conversation as one program (what is computed is counted), a pipe, and a terminal (a real pty)."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.serving import serving

import sgl
from sgl.cli import main
from sgl.cli.conversation import Conversation
from sgl.errors import InvalidParameter, SglError
from sgl.runtime.engine import Engine

WAIT_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "sgl.cli", "chat")
EXACT = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def said(talk: Conversation, text: str) -> str:
    return "".join(piece.text for piece in talk.ask(text) if not piece.is_reasoning)


@pytest.fixture
def talk(dummy_engine: Engine) -> Iterator[Conversation]:
    dummy_engine.flush_cache(wait_s=10)
    with closing(Conversation(dummy_engine, system="Be brief.")) as conversation:
        for name, value in EXACT.items():
            conversation.set(name, value)
        yield conversation


# --- the conversation -----------------------------------------------------------------------------------------------


def test_the_second_turn_computes_only_what_is_new(talk: Conversation, dummy_engine: Engine) -> None:
    said(talk, "A long first question that takes its tokens.")
    before = dummy_engine.stats()
    said(talk, "B?")
    after = dummy_engine.stats()
    first, second = talk.turns
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1
    assert after["prefill_tokens"] - before["prefill_tokens"] == second.prefill_tokens
    assert second.prefill_tokens == second.prompt_tokens - second.cached_tokens
    # What is new: the end of the answer's turn, the question and the beginning of the next answer; the byte vocabulary
    # has a token for each character.
    assert second.prefill_tokens < len("<|im_end|>\n<|im_start|>user\nB?<|im_end|>\n<|im_start|>assistant\n") + 8
    assert after["programs"] == before["programs"]  # it is the same one


def test_undo_goes_back_in_the_same_program(talk: Conversation, dummy_engine: Engine) -> None:
    said(talk, "One.")
    wanted = said(talk, "Two.")
    programs = dummy_engine.stats()["programs"]
    assert talk.undo()
    assert said(talk, "Two.") == wanted
    assert [turn.user for turn in talk.turns] == ["One.", "Two."]
    assert talk.turns[1].prefill_tokens < 12
    assert dummy_engine.stats()["programs"] == programs
    assert (talk.undo(), talk.undo(), talk.undo()) == (True, True, False)


def test_a_stopped_answer_is_kept_and_the_chat_goes_on(talk: Conversation) -> None:
    talk.set("max_tokens", 500)
    pieces = talk.ask("Count.")
    begun = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert (talk.turns[0].finish, talk.turns[0].assistant) == ("stopped", begun.text)
    talk.set("max_tokens", 4)
    said(talk, "Go on.")
    assert talk.turns[1].cached_tokens > len("Be brief.Count.")


def test_a_failed_turn_leaves_no_trace(talk: Conversation) -> None:
    said(talk, "One.")
    with pytest.raises(SglError):
        said(talk, "x" * 100_000)
    assert [turn.user for turn in talk.turns] == ["One."]
    said(talk, "Two.")
    assert len(talk.turns) == 2


def test_a_conversation_is_saved_and_loaded(talk: Conversation, dummy_engine: Engine, tmp_path: Path) -> None:
    said(talk, "One.")
    talk.set_schema({"enum": ["yes", "no"]})
    assert json.loads(said(talk, "Sure?")) in ("yes", "no")
    talk.save(tmp_path / "chat.json")
    with closing(Conversation(dummy_engine)) as other:
        other.load(tmp_path / "chat.json")
        assert (other.turns, other.settings, other.schema, other.system) == (
            talk.turns, talk.settings, talk.schema, "Be brief.",
        )  # fmt: skip
        assert json.loads(said(other, "Again?")) in ("yes", "no")
        (tmp_path / "chat.json").write_text('{"turns": 1}')
        with pytest.raises(InvalidParameter, match="no saved chat"):
            other.load(tmp_path / "chat.json")
        assert len(other.turns) == 3


class Reasoner(sgl.MockBackend):
    """A model that has a form of reasoning."""

    def server_info(self) -> dict[str, Any]:
        return {**super().server_info(), "formats": {"reasoning": "qwen3"}}


def test_reasoning_is_told_apart_and_no_part_of_the_turn() -> None:
    with closing(Conversation(Reasoner(["<think>Two twos.</think>4", "5"]))) as talk:
        pieces = list(talk.ask("2 + 2?"))
        assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "Two twos."
        assert "".join(piece.text for piece in pieces if not piece.is_reasoning) == "4"
        assert said(talk, "And one more?") == "5"
        assert [turn.assistant for turn in talk.turns] == ["4", "5"]


@pytest.mark.parametrize(("name", "value"), [("temprature", 1), ("temperature", "hot"), ("top_p", 2), ("n", 2)])
def test_settings_are_checked_when_they_are_set(name: str, value: object) -> None:
    with closing(Conversation(sgl.MockBackend())) as talk:
        with pytest.raises(InvalidParameter):
            talk.set(name, value)
        assert talk.settings == {}


def test_over_http_a_lease_that_ended_costs_a_prefill_and_no_turn(dummy_engine: Engine) -> None:
    with serving(dummy_engine, program_lease=0.2) as served:
        remote = sgl.RemoteEngine(served.url)
        with closing(Conversation(remote)) as talk:
            talk.set("max_tokens", 4)
            said(talk, "One.")
            end = time.monotonic() + WAIT_S
            while dummy_engine.stats()["num_programs"] and time.monotonic() < end:
                time.sleep(0.02)
            said(talk, "Two.")
            assert [turn.user for turn in talk.turns] == ["One.", "Two."]
        remote.shutdown()


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(dummy_engine: Engine) -> Iterator[str]:
    with serving(dummy_engine) as served:
        yield served.url


class Outcome(NamedTuple):
    """How the command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def piped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `sgl chat ARGS` in this process, with its input from a pipe."""

    def run(*args: str, prompt: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
        with pytest.raises(SystemExit) as ended:
            main(["chat", *args])
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    return run


def test_a_pipe_gets_the_answer_and_nothing_else(piped: Command, url: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["tea"]}')
    done = piped("--url", url, "--schema", str(schema), "--set", "temperature=0", prompt="What?\n")
    assert done == Outcome(0, '"tea"\n', "")


def test_an_engine_of_its_own_answers_a_pipe() -> None:
    options = ("dummy", "--num-threads", "1", "--set", "max_tokens=3", "--set", "regex=[a-z]{3}")
    done = subprocess.run(
        [*COMMAND, *options], input="Hi", capture_output=True, text=True, timeout=WAIT_S, check=False
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"[a-z]{3}\n", done.stdout)


@pytest.mark.parametrize(
    ("args", "prompt", "message"),
    [
        ((), " \n", "standard input is empty"),
        (("--set", "warmth=1"), "Hi", "warmth"),
        (("--load", "nowhere.json"), "Hi", "nowhere.json"),
        (("--num-threads", "1"), "Hi", "--url is given"),
    ],
)
def test_what_is_wrong_is_said(piped: Command, url: str, args: tuple[str, ...], prompt: str, message: str) -> None:
    done = piped("--url", url, *args, prompt=prompt)
    assert done.code in (1, 2)
    assert done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err


class Tty:
    """The command on a terminal: what it shows, and what is typed."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.shown = ""

    def until(self, pattern: str) -> str:
        """Wait for a pattern in what is new; the new text up to it."""
        end = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < end, f"{pattern!r} never came: {self.shown!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def interrupt_until(self, pattern: str) -> str:
        """Ctrl-C, again when nothing comes: a line editor shows its prompt a moment before it hears of signals."""
        end = time.monotonic() + WAIT_S
        os.kill(self.process.pid, signal.SIGINT)
        while not re.search(pattern, self.shown, re.DOTALL):
            assert time.monotonic() < end, f"{pattern!r} never came: {self.shown!r}"
            if select.select([self._master], [], [], 2.0)[0]:
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
            else:
                os.kill(self.process.pid, signal.SIGINT)
        return self.until(pattern)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


@contextmanager
def terminal(*args: str) -> Iterator[Tty]:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    try:
        process = subprocess.Popen(
            [*COMMAND, *args], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        try:
            yield Tty(process, master)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    finally:
        os.close(master)
        os.close(slave)


def test_a_conversation_at_a_terminal(url: str, tmp_path: Path) -> None:
    schema, kept = tmp_path / "schema.json", tmp_path / "chat.json"
    schema.write_text('{"enum": ["tea"]}')
    with terminal("--url", url, "--set", "temperature=0") as tty:
        tty.until(r"/help lists .*\n> ")
        tty.type("/set max_tokens=6\n")
        tty.until(r"temperature=0, max_tokens=6\r\n> ")
        tty.type("/system Be brief.\n")
        tty.until(r"system prompt: Be brief\.\r\n> ")
        tty.type(f"/schema {schema}\n")
        tty.until("answers fit .*> ")
        tty.type('"""\nfirst\nsecond\n"""\n')
        tty.until('"tea"\r\n> ')
        tty.type("one \\\nmore\n")
        tty.until('"tea"\r\n> ')
        tty.type("/tokens\n")
        assert re.search(r"2: prompt \d+, \d+ cached, \d+ computed; \d+ generated", tty.until(r"generated\r\n> "))
        tty.type(f"/save {kept}\n")
        tty.until("saved to .*> ")
        tty.type("/undo\n/nonsense\n")
        tty.until("1 turns")
        tty.until("there is no /nonsense.*> ")
        tty.type("/set temperature=hot\n")
        tty.until("error:.* temperature is 'hot'")
        tty.type("/reset\n/tokens\n")
        tty.until("no answers yet.*> ")
        tty.type(f"/load {kept}\n/quit\n")
        tty.process.wait(WAIT_S)
        assert tty.process.returncode == 0
    turns = json.loads(kept.read_text())["turns"]
    assert [turn["user"] for turn in turns] == ["first\nsecond", "one \nmore"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(url: str, dummy_engine: Engine) -> None:
    before = dummy_engine.stats()["forwards"]
    with terminal("--url", url, "--set", "max_tokens=1800", "--set", "ignore_eos=true") as tty:
        tty.until(r"/help lists .*\n> ")
        tty.type("Count to a million.\n")
        end = time.monotonic() + WAIT_S
        while dummy_engine.stats()["forwards"] < before + 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(tty.process.pid, signal.SIGINT)
        tty.until("stopped\r\n> ")
        tty.interrupt_until("\r\n> ")  # nothing runs: a new line, and on
        tty.type("/set max_tokens=2\n")
        tty.until("max_tokens=2.*> ")
        tty.type("Again.\n")
        tty.until(r"max_tokens=.* raises it\)\r\n> ")
        tty.type("\x04")
        tty.process.wait(WAIT_S)
        assert tty.process.returncode == 0
    assert dummy_engine.stats()["forwards"] - before < 1800
