"""Prompt states as the engine would have them, without the engine: text, chat template and token ids alone.

Owns the renderer of a model (see `sgl.lang.rendering`): the same tokenizer, template and rules for units as
`program_run`, in the client half, so without torch. Explaining, the token-exact mock and the HTML view use it. A test
holds that its ids are those of the engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from sgl.errors import InvalidProgram
from sgl.runtime.config import EngineConfig
from sgl.runtime.selection import Selection
from sgl.runtime.text.template import template_clock
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.text.transcript import Transcript


class ModelRenderer:
    """Makes prompt states for a model.

    Args:
        name: of the model, for people.
        tokenizer: the model's, with its chat template.
        rerender: what to do where the template rewrites earlier turns (see `EngineConfig.rerender`).

    Example:
        >>> state = ModelRenderer("toy", Tokenizer.toy()).state()
        >>> state.begin("user"); state.add_text("Hi"); state.end(); state.flush()
        >>> len(state.ids), state.text
        (10, '<|im_start|>user\\nHi<|im_end|>\\n')
    """

    exact = True

    def __init__(self, name: str, tokenizer: Tokenizer, rerender: Literal["template", "keep"] = "template") -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._rerender = rerender
        self._unit = next((text for text in (" a", "a") if len(tokenizer.encode("b" + text * 2)) == 3), "a")

    def state(self, now: float | None = None, template_kwargs: Mapping[str, Any] | None = None) -> ModelState:
        """An empty state (see `ProgramOptions` for `now` and `template_kwargs`)."""
        variables = {**(template_kwargs or {}), **template_clock(now)}
        return ModelState(self.tokenizer, Transcript(self.tokenizer, self._rerender, variables))

    def filler(self, num_tokens: int) -> str:
        """Text that is encoded as that many tokens behind other text."""
        return self._unit * num_tokens

    def count(self, text: str) -> int:
        """Tokens of a text alone."""
        return len(self.tokenizer.encode(text)) if text else 0

    def split(self, text: str) -> list[str]:
        """A text alone as its tokens' texts."""
        return self.pieces(self.tokenizer.encode(text)) if text else []

    def tool_text(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """What the model's own chat template writes of tools behind the content of a system turn; `None` where it
        knows no tools, or writes of them elsewhere.

        Args:
            tools: as OpenAI's API has functions.
        """
        template = self.tokenizer.chat_template
        if template is None:
            return None
        content = "\ue000the system's own words\ue000"
        messages = [{"role": "system", "content": content}, {"role": "user", "content": "?"}]
        try:
            without, told = template.render(messages), template.render(messages, tools=list(tools))
        except InvalidProgram:
            return None
        before, _, after = without.partition(content)
        begins = before + content
        if told == without or not told.startswith(begins) or not told.endswith(after):
            return None
        return told[len(begins) : len(told) - len(after)]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; one that ends within a character leaves it to the next."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.tokenizer.token_bytes(id, skip_special_tokens=False)) for id in ids]


class ModelState:
    """One prompt state: a transcript and its ids (see `sgl.lang.rendering.RenderedState`)."""

    def __init__(self, tokenizer: Tokenizer, transcript: Transcript) -> None:
        self.ids: list[int] = []
        self.rerendered = 0
        self._tokenizer = tokenizer
        self._transcript = transcript

    @property
    def text(self) -> str:
        """All text of the state."""
        return self._transcript.text

    def copy(self) -> ModelState:
        """A state that continues this one."""
        other = ModelState(self._tokenizer, self._transcript.copy())
        other.ids = list(self.ids)
        return other

    def add_text(self, text: str) -> None:
        """Append text as written."""
        self._transcript.add_text(text)

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append token ids as they are.

        Raises:
            InvalidProgram: one is outside the vocabulary.
        """
        self.flush()
        for token_id in ids:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise InvalidProgram(f"token id {token_id} is outside the vocabulary of {self._tokenizer.vocab_size}")
        self.ids.extend(ids)
        self._transcript.add_generated(self._tokenizer.decode(ids, skip_special_tokens=False), len(ids))

    def take_turns(self, turns: Sequence[Mapping[str, str]]) -> None:
        """Begin an empty state with whole turns (see `Transcript.take_turns`)."""
        self._transcript.take_turns(turns)

    def begin(self, role: str) -> None:
        """Begin a chat turn."""
        self._transcript.begin(role)
        self._follow_cuts()

    def end(self) -> None:
        """End the open turn."""
        self._transcript.end()
        self._follow_cuts()

    def _follow_cuts(self) -> None:
        for cut in self._transcript.cuts:
            if cut.drop_tokens:
                del self.ids[cut.keep_tokens :]
                self.rerendered += cut.drop_tokens
        self._transcript.cuts.clear()

    def flush(self) -> None:
        """Encode the pending unit."""
        self.ids.extend(self._transcript.flush())

    def add_generated(self, text: str, ids: Sequence[int] | None = None) -> None:
        """Append what a generation gave."""
        self.flush()
        own = self._tokenizer.encode(text) if ids is None and text else list(ids or ())
        self.ids.extend(own)
        self._transcript.add_generated(text, len(own))

    def options(self, choices: Sequence[str]) -> Selection:
        """Encode the options with the last unit; the state ends with the last stable token."""
        reopened = self._transcript.reopen()
        if reopened:
            del self.ids[len(self.ids) - reopened :]
        unit, encoded = self._tokenizer.encode_continuations(
            self._transcript.pending_pieces, choices, start=not self.ids
        )
        selection = Selection(unit, encoded)
        self.ids.extend(unit[: selection.num_stable])
        return selection

    def choose(self, choice: str, path: Sequence[int]) -> None:
        """Append the option that a select took."""
        self.ids.extend(path)
        self._transcript.add_text(choice)
        self._transcript.flush()  # the same ids again: the unit and the option in one


def model_renderer(config: EngineConfig) -> ModelRenderer:
    """The renderer of the model that an engine with this configuration would run; fetches what is not here.

    Raises:
        ModelError: the model cannot be found, fetched or read.
    """
    tokenizer = _tokenizer(
        config.model_path, config.load_format, config.offline, config.revision, config.tokenizer_path
    )
    return ModelRenderer(config.model_path, tokenizer, config.rerender)


@lru_cache(maxsize=8)
def _tokenizer(
    model_path: str, load_format: Any, offline: bool, revision: str | None, tokenizer_path: str | None
) -> Tokenizer:
    from sgl.runtime.loading.checkpoint import open_tokenizer
    from sgl.runtime.loading.sources import locate

    if tokenizer_path is not None:
        return Tokenizer.from_folder(tokenizer_path)
    return open_tokenizer(locate(model_path, load_format=load_format, offline=offline, revision=revision))
