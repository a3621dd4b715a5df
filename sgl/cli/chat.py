"""`sgl chat`: talk to a model in the terminal.

Owns the command and the terminal: prompts, several lines, commands that begin with `/`, Ctrl-C. The conversation itself
is `sgl.cli.conversation`. Where standard input is no terminal, all of it is one prompt, and standard output is the
answer and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.console import guarded, say, show_error
from sgl.cli.options import engine_options
from sgl.errors import ConfigError, SglError

if TYPE_CHECKING:
    from sgl.cli.conversation import Conversation
    from sgl.lang.backend import Backend

FENCE = '"""'
DIM = "\x1b[2m{}\x1b[0m"
"""How reasoning stands apart from the answer."""

HELP = f"""\
/system [TEXT]       show or set the system prompt; the turns stay
/set NAME=VALUE      temperature, max_tokens, top_p, seed, stop, ...; an empty value takes it back, alone shows all
/schema FILE | off   answers are JSON that fits a schema
/tokens              tokens of each answer: prompt, of it cached, generated
/undo                take back the last turn
/reset               forget all turns
/save FILE           keep the conversation
/load FILE           go on with one
/help                this
/quit                leave (also Ctrl-D)
Several lines: end a line with \\, or put them between lines of {FENCE}. Ctrl-C stops an answer."""


@guarded
@engine_options
def chat(
    model: Annotated[str | None, typer.Argument(help="As --model-path.", show_default=False)] = None,
    *,
    url: Annotated[
        str | None, typer.Option(help="Talk to the sgl server there, in place of an engine of this process.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Of that server.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default=False)] = "",
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers are JSON that fits this JSON schema.")
    ] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Go on with what /save kept.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter of answers, as temperature=0; may repeat."),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Talk to a model: in the terminal, or one prompt from a pipe."""
    from sgl.cli.conversation import Conversation

    fields = engine if model is None else {**engine, "model_path": model}
    if url is not None and fields:
        raise ConfigError(
            f"--url is given, and {min(fields)} for an engine of this process", hint="leave one of them out"
        )
    with _backend(url, api_key, fields) as backend, closing(Conversation(backend, system=system)) as talk:
        if load is not None:
            _on_file(talk.load, load)
        if schema is not None:
            _on_file(lambda path: talk.set_schema(_json_in(path)), schema)
        for setting in set_ or ():
            _set(talk, setting)
        if sys.stdin.isatty() and sys.stdout.isatty():
            Terminal(talk, str(backend.server_info()["model"])).run()
        else:
            answer(talk, sys.stdin.read())


@contextmanager
def _backend(url: str | None, api_key: str | None, fields: dict[str, Any]) -> Iterator[Backend]:
    """What answers, closed at the end."""
    if url is None:
        from sgl.runtime.engine import Engine

        with Engine(**fields) as engine:
            yield engine
        return
    from sgl.lang.api.remote import RemoteEngine

    remote = RemoteEngine(url, api_key=api_key)
    try:
        yield remote
    finally:
        remote.shutdown()


def answer(talk: Conversation, prompt: str) -> None:
    """One prompt in, its answer out.

    Raises:
        ConfigError: there is no prompt.
    """
    if not prompt.strip():
        raise ConfigError("standard input is empty", hint="echo 'Why is the sky blue?' | sgl chat")
    with closing(talk.ask(prompt.strip())) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            if not piece.is_reasoning:
                _write(piece.text)
    _write("\n")


class Terminal:
    """The conversation with somebody at a terminal.

    Args:
        talk: the conversation.
        model: its name, for the first line.
    """

    def __init__(self, talk: Conversation, model: str) -> None:
        self._talk = talk
        self._model = model
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "set": self._set,
            "schema": self._schema,
            "tokens": lambda rest: say(tokens_text(talk)),
            "undo": self._undo,
            "reset": self._reset,
            "save": lambda rest: self._file(talk.save, rest, "saved to"),
            "load": lambda rest: self._file(talk.load, rest, "loaded"),
            "help": lambda rest: say(HELP),
        }

    def run(self) -> None:
        """Until /quit or the end of the input."""
        try:
            import readline  # noqa: F401 - gives `input` history and editing, where there is one
        except ImportError:
            say("no line editing here: this Python has no readline")
        say(f"{self._model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while (text := read_message()) is not None:
            if text.strip() in ("/quit", "/exit"):
                return
            try:
                if text.startswith("/"):
                    self._command(text.strip())
                elif text.strip():
                    self._ask(text)
            except SglError as error:
                show_error(error)

    def _ask(self, text: str) -> None:
        with closing(self._talk.ask(text)) as pieces:  # type: ignore[type-var]
            try:
                for piece in pieces:
                    _write(DIM.format(piece.text) if piece.is_reasoning else piece.text)
            except KeyboardInterrupt:
                _write("\n")
                say("stopped")
                return
        _write("\n")
        if self._talk.turns[-1].finish == "length":
            say("(ended at max_tokens; /set max_tokens=... raises it)")

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            say(f"there is no /{name}; /help lists what there is")
        else:
            command(rest.strip())

    def _system(self, rest: str) -> None:
        if rest:
            self._talk.system = rest
        say(f"system prompt: {self._talk.system or '(none)'}")

    def _set(self, rest: str) -> None:
        if rest:
            _set(self._talk, rest)
        say(", ".join(f"{name}={value!r}" for name, value in self._talk.settings.items()) or "all as the model has it")

    def _schema(self, rest: str) -> None:
        if rest == "off":
            self._talk.set_schema(None)
        else:
            self._file(lambda path: self._talk.set_schema(_json_in(path)), rest, "answers fit")

    def _undo(self, rest: str) -> None:
        say(f"{len(self._talk.turns)} turns" if self._talk.undo() else "there is nothing to undo")

    def _reset(self, rest: str) -> None:
        self._talk.reset()
        say("forgotten")

    def _file(self, act: Callable[[Path], None], rest: str, done: str) -> None:
        if not rest:
            raise ConfigError("no file was named", hint="as in /save chat.json")
        path = Path(rest).expanduser()
        _on_file(act, path)
        say(f"{done} {path}")


def read_message() -> str | None:
    """What somebody types, which may be several lines; None at the end of the input. Ctrl-C begins it again."""
    while True:
        try:
            line = input("> ")
            if line.strip() != FENCE:
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + input(". ")
                return line
            lines: list[str] = []
            while (line := input(". ")).strip() != FENCE:
                lines.append(line)
            return "\n".join(lines)
        except KeyboardInterrupt:
            say("")
        except EOFError:
            say("")
            return None


def tokens_text(talk: Conversation) -> str:
    """What each answer took, as lines.

    Example:
        >>> import sgl
        >>> from sgl.cli.conversation import Conversation
        >>> tokens_text(Conversation(sgl.MockBackend()))
        'no answers yet'
    """
    lines = [
        f"{number}: prompt {turn.prompt_tokens}, {turn.cached_tokens} cached, {turn.prefill_tokens} computed; "
        f"{turn.completion_tokens} generated"
        if turn.prompt_tokens
        else f"{number}: not counted"
        for number, turn in enumerate(talk.turns, 1)
    ]
    return "\n".join(lines) or "no answers yet"


def _set(talk: Conversation, given: str) -> None:
    name, is_given, text = given.partition("=")
    if not is_given:
        raise ConfigError(f"{given!r} is no setting", hint="as in temperature=0.7", param="set")
    try:
        value = json.loads(text) if text.strip() else None
    except ValueError:
        value = text.strip()
    talk.set(name.strip(), value)


def _json_in(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", param="schema") from None


def _on_file(act: Callable[[Path], Any], path: Path) -> None:
    """Do something with a file.

    Raises:
        ConfigError: the system does not let us.
    """
    try:
        act(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", hint="give another file") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
