"""The text side of one branch: what its state says, what waits to be tokenized, and its chat turns.

Owns, for one branch, the text of the state with its token counts, the pending pieces and the messages. Does not own
token ids: they belong to the program run that owns the transcript. Contract between the two:

* `flush()` ends a text unit: its ids are to be appended to the state. `pending_pieces` shows it without ending it.
* `add_generated()` tells of ids that are in the state already.
* `begin()` and `end()` may record a `Cut`: the owner drains `cuts` after each and truncates its ids to `keep_tokens`;
  what the state lost is pending again, as the template now writes it.

Roles are rendered by the model's own chat template: `begin` adds what the template writes before the turn's content,
`end` what it writes after it. Both compare the template's rendering of the whole conversation with the state. Where
the rendering does not extend the state (the template trims, drops earlier reasoning, merges turns) policy "template"
makes the state follow the rendering, and policy "keep" leaves the state and continues it with what the template writes
around this turn alone. Text outside roles is part of the state, not of the conversation: the comparison passes it by,
and a cut never removes it (then the state is kept, which the recorded `Cut` says).

Of a template that looks at no turn but the first, the last and the one that it writes (`ChatTemplate.is_local`), and as
long as the state is its rendering, the first and the last turn stand for the conversation: what the template adds to
these two it adds to all of them. So a turn of a long conversation costs no more than one of a short one.

Special tokens in message contents and in variables are taken apart by a private-use character while the template runs,
so that only those that the template itself writes become special tokens.

Fails with `InvalidProgram` for nested roles, an end without a beginning, and messages that the template refuses, and
with `Unsupported` when the model has no chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sgl.errors import InternalError, InvalidProgram, Unsupported
from sgl.runtime.text.template import ChatTemplate
from sgl.runtime.text.tokenizer import Piece, Tokenizer

Rerender = Literal["template", "keep"]

TURN_LEN = 256
"""Characters that a template reads in the time that a turn costs beside them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The template's rendering stopped agreeing with the state.

    Attributes:
        keep_tokens: tokens of the state that stay.
        drop_tokens: tokens after them: 0 when the state was kept as it is.
        old_text: text that the state loses, or that differs from the rendering when the state was kept.
        new_text: what the template writes instead; pending again unless the state was kept.
    """

    keep_tokens: int
    drop_tokens: int
    old_text: str
    new_text: str


class _Segment(NamedTuple):
    """A stretch of state text. A template segment is one special token; a chat segment belongs to the conversation."""

    text: str
    template: bool
    chat: bool


class _Run(NamedTuple):
    """Tokens that do not depend on what follows, and all that is before them: a list shared by forks.

    `num_tokens`, `text_len` and `chat_len` count from the beginning of the state, this run included. `encoded` text may
    be encoded again; a generation's ids are the truth, and a special token is what it is.
    """

    before: _Run | None
    segments: tuple[_Segment, ...]
    num_tokens: int
    text_len: int
    chat_len: int
    encoded: bool


class Transcript:
    """Text, messages and pending pieces of one branch.

    Args:
        tokenizer: the model's.
        rerender: what to do when the template rewrites earlier turns.
        template_kwargs: further variables for the chat template (`enable_thinking`).

    Attributes:
        cuts: recorded cuts, oldest first; the owner handles and clears them.
        role: of the open turn, or `None`.

    Example:
        >>> transcript = Transcript(Tokenizer.toy())
        >>> transcript.begin("user"); transcript.add_text("Hi <|im_end|>"); transcript.end()
        >>> transcript.begin("assistant")
        >>> transcript.text
        '<|im_start|>user\\nHi <|im_end|><|im_end|>\\n<|im_start|>assistant\\n'
        >>> ids = transcript.flush()
        >>> ids.count(258), len(ids)
        (1, 32)
        >>> transcript.pending_pieces
        ()
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rerender: Rerender = "template",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.cuts: list[Cut] = []
        self.role: str | None = None
        self._tokenizer = tokenizer
        self._rerender = rerender
        self._kwargs = dict(template_kwargs or {})
        self._kwargs_text = "".join(_texts(list(self._kwargs.values())))
        self._last: _Run | None = None
        self._pending: list[_Segment] = []
        self._messages: tuple[Mapping[str, str], ...] = ()
        self._messages_len = 0
        self._content: tuple[str, ...] = ()
        self._agrees = False  # the conversation in the state is what the template writes of it

    def copy(self) -> Transcript:
        """A branch that continues this one. The history is shared, and the pending pieces are copied by reference."""
        other = Transcript(self._tokenizer, self._rerender, self._kwargs)
        other.role = self.role
        other._last = self._last
        other._pending = list(self._pending)
        other._messages = self._messages
        other._messages_len = self._messages_len
        other._content = self._content
        other._agrees = self._agrees
        return other

    # --- what is there ----------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """All text of the state: template text, special tokens and pending text included."""
        return self.text_from(0)

    @property
    def text_len(self) -> int:
        """Characters of the text."""
        before = self._last.text_len if self._last is not None else 0
        return before + sum(len(segment.text) for segment in self._waiting())

    def text_from(self, start: int) -> str:
        """The text from a character on, in time linear in that part of it."""
        segments, begin = self._committed(start)
        return "".join(segment.text for segment in (*segments, *self._waiting()))[max(start - begin, 0) :]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns so far; an open one with its content so far."""
        turns = [dict(message) for message in self._messages]
        if self.role is not None:
            turns.append({"role": self.role, "content": "".join(self._content)})
        return turns

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._last is None and not self._pending and not self._messages and self.role is None

    @property
    def turn_len(self) -> int:
        """What the template is shown when the next turn begins or the open one ends: their characters, and `TURN_LEN`
        for each turn."""
        template = self._tokenizer.chat_template
        ends = self._ends(template) if template is not None else None
        shown = self._messages_len if ends is None else sum(_turn_len(turn) for turn in ends)
        return shown + sum(map(len, self._content))

    @property
    def num_tokens(self) -> int:
        """Tokens in the state: what was flushed and generated."""
        return self._last.num_tokens if self._last is not None else 0

    @property
    def pending_pieces(self) -> tuple[Piece, ...]:
        """The unit that `flush` would encode; pass `start=num_tokens == 0` to `encode_pieces`."""
        return tuple(Piece(segment.text, segment.template) for segment in self._waiting())

    # --- text -------------------------------------------------------------------------------------------------------

    def add_text(self, text: str) -> None:
        """Append text as written; inside a role it is content."""
        if not text:
            return
        if self.role is None and self._last is None and not self._pending:
            self._pending = self._waiting()  # BOS, where the checkpoint wants it before plain text
        self._pending.append(_Segment(text, template=False, chat=self.role is not None))
        if self.role is not None:
            self._content += (text,)

    def flush(self) -> list[int]:
        """Encode the pending unit, now part of the state; its ids (none when nothing is pending).

        Raises:
            InvalidParameter: the text cannot be encoded; it stays pending.
        """
        segments = self._waiting()
        pieces = [Piece(segment.text, segment.template) for segment in segments]
        runs = self._tokenizer.encode_runs(pieces, start=self._last is None)
        position = 0
        ids: list[int] = []
        for run in runs:
            stretch = segments[position : position + run.num_pieces]
            self._append(stretch, len(run.ids), encoded=not stretch[0].template)
            position += run.num_pieces
            ids.extend(run.ids)
        self._pending = []
        return ids

    def reopen(self) -> int:
        """Make the text at the end of the state pending again, so that what follows is encoded with it.

        Returns:
            The tokens that the state loses: 0 when it ends in a generation or a special token, or text is pending.
        """
        last = self._last
        if self._pending or last is None or not last.encoded:
            return 0
        self._last = last.before
        self._pending = list(last.segments)
        return last.num_tokens - (last.before.num_tokens if last.before is not None else 0)

    def take_back(self, text: str) -> bool:
        """Take the last token, whose text is `text`, out of the state; `add_generated` brings the text back.

        False, and no change, where it does not end text that somebody wrote: the template's own text stays as it is.
        """
        last = self._last
        if self._pending or last is None or not last.encoded or not last.segments[-1].text.endswith(text):
            return False
        segment = last.segments[-1]
        if segment.chat and not (self._content and self._content[-1].endswith(text)):
            return False
        kept = segment._replace(text=segment.text.removesuffix(text))
        chat_len = last.chat_len - (len(text) if segment.chat else 0)
        self._last = last._replace(
            segments=(*last.segments[:-1], kept),
            num_tokens=last.num_tokens - 1,
            text_len=last.text_len - len(text),
            chat_len=chat_len,
        )
        if segment.chat:
            self._content = (*self._content[:-1], self._content[-1].removesuffix(text))
        return True

    def add_generated(self, text: str, num_tokens: int) -> None:
        """Append the text of `num_tokens` ids that are in the state already; inside a role it is content.

        Raises:
            InternalError: text before it was not flushed.
        """
        if self._pending:
            raise InternalError("text is pending before a generation; flush it first")
        self._append([_Segment(text, template=False, chat=self.role is not None)], num_tokens, encoded=False)
        if self.role is not None and text:
            self._content += (text,)

    # --- turns ------------------------------------------------------------------------------------------------------

    def take_turns(self, turns: Sequence[Mapping[str, str]]) -> None:
        """Begin a conversation with whole turns, `{"role": ..., "content": ...}`, which the next `begin` writes too.

        One rendering for all of them, where to begin and end each is one rendering or more of all before it.

        Raises:
            InternalError: something was written already.
        """
        if not self.is_empty:
            raise InternalError("whole turns are taken by an empty transcript alone")
        self._messages = tuple(turns)
        self._messages_len = sum(map(_turn_len, self._messages))

    def begin(self, role: str) -> None:
        """Begin a turn: what the template writes before its content becomes pending.

        Raises:
            InvalidProgram: a turn is open, or the template refuses this role here.
            Unsupported: the model has no chat template.
        """
        template = self._template(role)
        if self.role is not None:
            raise InvalidProgram(
                f"role {role!r} begins inside role {self.role!r}", hint=f"end {self.role!r} first: roles do not nest"
            )
        if (added := self._added_by_beginning(template, role)) is not None:
            self._extend(added)
        else:
            rendering = self._render_beginning(template, self._messages, role)
            self._agrees = rendering is not None and self._follow(rendering)
            if rendering is not None and not self._agrees:
                alone = self._render(template, self._messages)
                delta = _after(rendering, alone)
                if delta is None:
                    delta = self._render_beginning(template, (), role) or []
                self._extend(delta)
        self.role = role
        self._content = ()

    def end(self) -> None:
        """End the open turn: what the template writes after its content becomes pending.

        Raises:
            InvalidProgram: no turn is open, or the template refuses the conversation.
        """
        if self.role is None:
            raise InvalidProgram("a role ends that did not begin", hint="begin it first, or remove the end")
        template = self._template(self.role)
        turn = {"role": self.role, "content": "".join(self._content)}
        messages = (*self._messages, turn)
        if (added := self._added_by_ending(template, turn)) is not None:
            self._extend(added)
        else:
            self._follow_ending(template, messages)
        self._messages = messages
        self._messages_len += _turn_len(turn)
        self.role = None
        self._content = ()

    def _follow_ending(self, template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> None:
        """Make the state what the template writes of a conversation whose last turn ends."""
        self._agrees = False
        try:
            rendering = self._render(template, messages)
        except InvalidProgram:
            if self.role != "system":
                raise
            # Some templates write the system message only with the user turn that follows: it waits for that.
            rendering = self._render(template, self._messages) if self._messages else []
            if not self._follow(rendering):
                self._extend(self._render_ending(template, messages[-1]))
            return
        self._agrees = self._follow(rendering)
        if not self._agrees:
            self._extend(self._render_ending(template, messages[-1]))

    # --- the first and the last turn for all of them ----------------------------------------------------------------

    def _ends(self, template: ChatTemplate) -> tuple[Mapping[str, str], ...] | None:
        """The two turns that stand for the conversation, where they do."""
        if not (template.is_local and self._agrees and len(self._messages) > 2):
            return None
        return (self._messages[0], self._messages[-1])

    def _added_by_beginning(self, template: ChatTemplate, role: str) -> list[Piece] | None:
        """What the template writes before the content of a new turn; `None` where all of it has to be compared."""
        if (ends := self._ends(template)) is None:
            return None
        try:
            rendering = self._render_beginning(template, ends, role)
        except InvalidProgram:
            return None
        return _after(rendering, self._render(template, ends)) if rendering is not None else None

    def _added_by_ending(self, template: ChatTemplate, turn: Mapping[str, str]) -> list[Piece] | None:
        """The same behind the content of the open turn."""
        if (ends := self._ends(template)) is None:
            return None
        try:
            before, whole = self._render_beginning(template, ends, turn["role"]), self._render(template, (*ends, turn))
        except InvalidProgram:
            return None
        return _after(whole, [*before, Piece(turn["content"])]) if before is not None else None

    # --- rendering --------------------------------------------------------------------------------------------------

    def _template(self, role: str) -> ChatTemplate:
        template = self._tokenizer.chat_template
        if template is None:
            raise Unsupported(
                f"role {role!r} needs a chat template and this model has none",
                hint="write the prompt as plain text, or use an instruction-tuned model",
            )
        return template

    def _render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, str]], generation_prompt: bool = False
    ) -> list[Piece]:
        """The rendering as pieces, each special token that the template wrote alone."""
        joint = _unused_character([*messages, {"content": self._kwargs_text}] if self._kwargs else messages)
        pattern = self._tokenizer.special_pattern

        def apart(text: str) -> str:
            return pattern.sub(lambda match: match.group()[:1] + joint + match.group()[1:], text)

        guarded = [{**message, "content": apart(message["content"])} for message in messages]
        kwargs = {name: _mapped(value, apart) for name, value in self._kwargs.items()}
        text = template.render(guarded, add_generation_prompt=generation_prompt, **kwargs)
        pieces = self._tokenizer.split_template(text)
        pieces = [Piece(piece.text.replace(joint, ""), piece.template) for piece in pieces]
        if self._has_own_bos() and pieces and pieces[0] == Piece(self._tokenizer.bos_token, template=True):
            del pieces[0]
        return pieces

    def _render_beginning(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, str]], role: str
    ) -> list[Piece] | None:
        """The rendering up to the content of a new turn; `None` when the template writes that turn only later."""
        if role == "assistant":
            return self._render(template, messages, generation_prompt=True)
        marker = _unused_character(messages, skip=1)
        try:
            pieces = self._render(template, (*messages, {"role": role, "content": marker}))
        except InvalidProgram:
            if role == "system":
                return None
            raise
        for index in range(len(pieces) - 1, -1, -1):
            before, found, _ = pieces[index].text.rpartition(marker)
            if found:
                return [*pieces[:index], Piece(before)] if before else pieces[:index]
        return None

    def _render_ending(self, template: ChatTemplate, turn: Mapping[str, str]) -> list[Piece]:
        """What the template writes after the content of the last turn, whatever that content is."""
        marker = _unused_character(self._messages, skip=1)
        pieces = self._render(template, (*self._messages, {**turn, "content": marker}))
        for index in range(len(pieces) - 1, -1, -1):
            _, found, after = pieces[index].text.rpartition(marker)
            if found:
                return [Piece(after), *pieces[index + 1 :]] if after else pieces[index + 1 :]
        return []

    def _follow(self, rendering: list[Piece]) -> bool:
        """Make the conversation in the state equal `rendering`; False (and nothing changed) if it must not be."""
        committed = self._last.chat_len if self._last is not None else 0
        old = "".join(segment.text for segment in self._committed()[0] if segment.chat)
        new = "".join(piece.text for piece in rendering)
        if new.startswith(old):
            return self._replace_pending(_drop(rendering, committed))
        agree = _common_length(old, new)
        run, dropped = self._last, 0
        only_chat = all(segment.chat for segment in self._pending)
        while run is not None and run.chat_len > agree:
            only_chat = only_chat and all(segment.chat for segment in run.segments)
            run, dropped = run.before, dropped + 1
        keep_tokens = run.num_tokens if run is not None else 0
        kept_len = run.chat_len if run is not None else 0
        if self._rerender == "keep" or not only_chat:
            self.cuts.append(Cut(self.num_tokens, 0, old[agree:], new[agree:]))
            return False
        self.cuts.append(Cut(keep_tokens, self.num_tokens - keep_tokens, old[kept_len:], new[kept_len:]))
        self._last = run
        self._pending = _chat(_drop(rendering, kept_len))
        return True

    def _replace_pending(self, rest: list[Piece]) -> bool:
        """Make the conversation in the pending pieces equal `rest`; False if text outside roles is in the way."""
        kept: list[_Segment] = []
        text = "".join(piece.text for piece in rest)
        position = 0
        for index, segment in enumerate(self._pending):
            if segment.chat:
                if not text.startswith(segment.text, position):
                    if not all(later.chat for later in self._pending[index:]):
                        self.cuts.append(Cut(self.num_tokens, 0, segment.text, text[position:]))
                        return False
                    break
                position += len(segment.text)
            kept.append(segment)
        self._pending = kept + _chat(_drop(rest, position))
        return True

    # --- segments ---------------------------------------------------------------------------------------------------

    def _append(self, segments: Sequence[_Segment], num_tokens: int, *, encoded: bool) -> None:
        chat_len = sum(len(segment.text) for segment in segments if segment.chat)
        before = self._last
        self._last = _Run(
            before,
            tuple(segments),
            num_tokens + (before.num_tokens if before is not None else 0),
            sum(len(segment.text) for segment in segments) + (before.text_len if before is not None else 0),
            chat_len + (before.chat_len if before is not None else 0),
            encoded,
        )

    def _extend(self, pieces: Sequence[Piece]) -> None:
        self._pending.extend(_chat(pieces))

    def _committed(self, start: int = 0) -> tuple[list[_Segment], int]:
        """The segments of the runs that reach beyond a character of the text, and where the first of them begins."""
        runs: list[tuple[_Segment, ...]] = []
        run = self._last
        while run is not None and run.text_len > start:
            runs.append(run.segments)
            run = run.before
        begin = run.text_len if run is not None else 0
        return [segment for segments in reversed(runs) for segment in segments], begin

    def _waiting(self) -> list[_Segment]:
        """The pending segments; in an empty state, BOS where the checkpoint wants it before plain text."""
        if self._pending or self._last is not None or self.role is not None or not self._tokenizer.add_bos:
            return self._pending
        return [_Segment(self._tokenizer.bos_token, template=True, chat=False)]

    def _has_own_bos(self) -> bool:
        if not self._tokenizer.add_bos:
            return False
        first = next(iter(self._committed()[0]), None) or next(iter(self._pending), None)
        return first == _Segment(self._tokenizer.bos_token, template=True, chat=False)


def _turn_len(turn: Mapping[str, str]) -> int:
    return len(turn["content"]) + TURN_LEN


def _chat(pieces: Sequence[Piece]) -> list[_Segment]:
    return [_Segment(piece.text, piece.template, chat=True) for piece in pieces if piece.text]


def _drop(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces after the first `length` characters; a special token that is cut through becomes plain text."""
    for index, piece in enumerate(pieces):
        if length < len(piece.text):
            first = piece if length == 0 else Piece(piece.text[length:])
            return [first, *pieces[index + 1 :]]
        length -= len(piece.text)
    return []


def _after(whole: Sequence[Piece], beginning: Sequence[Piece]) -> list[Piece] | None:
    """What `whole` has after `beginning`, or `None` when it does not begin so."""
    text = "".join(piece.text for piece in beginning)
    return _drop(whole, len(text)) if "".join(piece.text for piece in whole).startswith(text) else None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(name, change): _mapped(each, change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change) for each in value]
    return value


def _texts(value: Any) -> list[str]:
    """The texts in a JSON value."""
    found: list[str] = []

    def see(text: str) -> str:
        found.append(text)
        return text

    _mapped(value, see)
    return found


def _common_length(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _unused_character(messages: Sequence[Mapping[str, str]], skip: int = 0) -> str:
    """A private-use character that no content has, after passing by `skip` of them."""
    used = set().union(*(message["content"] for message in messages))
    for code in range(0xE000, 0xF900):
        if chr(code) not in used:
            if skip == 0:
                return chr(code)
            skip -= 1
    raise InvalidProgram("the messages use every private-use character of Unicode", hint="remove some of them")
