"""`BaseBackend`: a backend of one's own, by a few methods.

Owns the class that users derive from, as they do from SGLang's of the same name: `generate` (and `generate_stream`,
`select`) are given the state of a branch and say what comes next. Graphs, forks, joins, stops, streams, deadlines and
failures are `sgl.lang.api.session`'s. Methods run on threads of the backend, several at a time; what they raise ends
the program that asked, with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from sgl.errors import Unsupported
from sgl.grammars.spec import Ebnf, JsonSchema, Regex
from sgl.lang.api.capabilities import Capabilities
from sgl.lang.api.messages import ApiPrompt, Ask, Reply
from sgl.lang.api.options import Taken
from sgl.lang.api.session import ApiBackend, ApiSession
from sgl.lang.backend import EventSink
from sgl.lang.chat_template import ChatTemplate, get_chat_template
from sgl.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sgl.lang.executor import Branch
from sgl.lang.graph import ChoiceScore, Fork, Gen, Media, ProgramOptions, Sampling, Select, Usage

_ABLE = Capabilities(
    is_chat=False,
    json_schema=True,
    regex=True,
    ebnf=True,
    images=True,
    video=True,
    seed=True,
    top_logprobs=20,
    max_stops=16,
    max_temperature=1000.0,
    sampling=Sampling.__struct_fields__,
)
"""Everything: what a backend cannot do, its methods refuse."""


@dataclass(frozen=True)
class BranchView:
    """What a method of a backend sees of a branch. Names are those of SGLang's `StreamExecutor`.

    Attributes:
        sid: the same for all branches of a program.
        text_: the prompt, turns written out by the backend's chat template.
        messages_: its closed turns; `cur_role` is the role of the open one.
        images_: the bytes of its images and videos, in order.
    """

    sid: str
    text_: str
    messages_: list[dict[str, str]]
    cur_role: str | None
    images_: list[bytes]


class BaseBackend(ApiBackend):
    """Derive from this, and define `generate`.

    Example:
        >>> import sgl
        >>> class Parrot(sgl.BaseBackend):
        ...     def generate(self, s, sampling_params):
        ...         return s.text_[-sampling_params.max_new_tokens:], {}
        >>> @sgl.function
        ... def program(s):
        ...     s += "hello" + sgl.gen("x", max_tokens=2)
        >>> program.run(backend=Parrot())["x"]
        'lo'
    """

    def __init__(self) -> None:
        super().__init__(_Hooks(self), type(self).__name__)
        self.takes_turns = True
        self.chat_template = get_chat_template("default")

    # --- what a derived class defines ---

    def get_chat_template(self) -> ChatTemplate:
        """How turns are written out."""
        return self.chat_template

    def generate(self, s: BranchView, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        """What comes next, and facts about it (`prompt_tokens`, `completion_tokens`, `finish_reason`).

        Args:
            sampling_params: fields of `sgl.lang.sampling.Sampling`, and `regex`, `json_schema`, `ebnf`.
        """
        raise Unsupported(f"{self.name} does not generate", hint="define generate(self, s, sampling_params)")

    def generate_stream(self, s: BranchView, sampling_params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """The same in pieces; without it a stream has one."""
        yield self.generate(s, sampling_params)

    def select(
        self,
        s: BranchView,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        """Which option comes next."""
        raise Unsupported(f"{self.name} does not select", hint="define select(self, s, choices, temperature, ...)")

    def commit_lazy_operations(self, s: BranchView) -> None:
        """A branch is about to be forked: a chance to have its prompt computed once."""

    def concatenate_and_append(self, src_rids: Sequence[str], dst_rid: str) -> None:
        """Never called: the text of children is appended here."""

    def cache_prefix(self, prefix_str: str) -> None:
        """Have a prompt computed ahead, for `program.cache(backend)`."""

    def end_program(self, s: BranchView) -> None:
        """A program has ended."""

    # --- the protocol ---

    def session(self, sink: EventSink, options: ProgramOptions) -> ApiSession:
        """A session that asks the methods above."""
        self.style = self.get_chat_template()
        return _HookSession(self, sink, options)


class _Hooks:
    """The methods of a backend as a client that `ApiSession` asks."""

    capabilities = _ABLE

    def __init__(self, backend: BaseBackend) -> None:
        self._backend = backend

    def ask(self, ask: Ask) -> Reply:
        view, params = ask.view, _params(ask)
        if ask.max_tokens == 0:
            self._backend.cache_prefix(view.text_)
            return Reply("")
        if ask.on_text is None:
            text, facts = self._backend.generate(view, params)
            return _reply(text, facts)
        pieces: list[str] = []
        last: dict[str, Any] = {}
        for piece, facts in self._backend.generate_stream(view, params):
            pieces.append(piece)
            last = facts
            if piece and not ask.on_text(piece):
                break
        return _reply("".join(pieces), last)

    def score(self, prompts: list[str]) -> list[list[tuple[int, float]]]:
        raise Unsupported(f"{self._backend.name} scores no texts")

    def close(self) -> None:
        """Nothing is held."""


def _params(ask: Ask) -> SimpleNamespace:
    sampling, constraint = ask.sampling, ask.constraint
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SimpleNamespace(
        **{**fields, "stop": list(ask.stops), "max_new_tokens": ask.max_tokens},
        regex=constraint.pattern if isinstance(constraint, Regex) else None,
        json_schema=constraint.schema if isinstance(constraint, JsonSchema) else None,
        ebnf=constraint.grammar if isinstance(constraint, Ebnf) else None,
    )


def _reply(text: str, facts: dict[str, Any]) -> Reply:
    num_prompt, num_cached = facts.get("prompt_tokens", 0), facts.get("cached_tokens", 0)
    usage = Usage(
        prompt_tokens=num_prompt,
        cached_tokens=num_cached,
        prefill_tokens=num_prompt - num_cached,
        completion_tokens=facts.get("completion_tokens", 0),
    )
    reason = facts.get("finish_reason")
    finish = reason.get("type") if isinstance(reason, dict) else reason
    return Reply(text, "length" if finish == "length" else "stop", usage)


class _HookSession(ApiSession):
    """One program on a backend of one's own."""

    _backend: BaseBackend

    def _view(self, prompt: ApiPrompt) -> BranchView:
        turns, _, _ = prompt.turns()
        return BranchView(
            f"{id(self):x}",
            prompt.text,
            [{"role": turn.role, "content": turn.text} for turn in turns],
            prompt.role,
            [item.data for item in prompt.items if isinstance(item, Media)],
        )

    def _ask(self, prompt: ApiPrompt, node: Gen | Select, sampling: Sampling) -> Ask:
        return replace(super()._ask(prompt, node, sampling), view=self._view(prompt))

    def _execute(self, branch: Branch[ApiPrompt], node: Any) -> bool:
        if isinstance(node, Fork):
            self._backend.commit_lazy_operations(self._view(branch.prompt))
        return super()._execute(branch, node)

    def _option(self, node: Select, ask: Ask) -> Taken:
        found = self._backend.select(ask.view, list(node.choices), node.temperature, ChoicesSamplingMethod(node.method))
        told = found.meta_info or {}
        means = told.get("normalized_prompt_logprobs") or [0.0] * len(node.choices)
        scores = tuple(
            ChoiceScore(choice, (), (mean,), mean, float(choice == found.decision), complete=False)
            for choice, mean in zip(node.choices, means, strict=True)
        )
        return Taken(found.decision, scores, Usage())

    def ending(self) -> None:
        main = ApiPrompt(self._backend.style)
        super().ending()
        self._backend.end_program(self._view(main))
