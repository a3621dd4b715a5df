"""One `Gen` while it runs in the engine: its request, and the value that it becomes.

Owns the request and the generation of one node. What to draw and when to stop is `generation.py`; nodes, queues and
events are the program run's, which makes one of these for each `Gen` and asks it for deltas and for the value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sgl.errors import EmptyPrompt
from sgl.grammars.formats import message_parser, reasoning_format
from sgl.grammars.matcher import CompiledGrammar
from sgl.grammars.partial_json import open_pointer
from sgl.grammars.reasoning import ReasoningGrammar
from sgl.grammars.spec import JsonSchema
from sgl.grammars.validation import CheckedGrammar
from sgl.lang.graph import DeltaEvent, Gen, ProgramOptions, Usage, ValueEvent
from sgl.runtime.branch import Branch
from sgl.runtime.generation import Generation
from sgl.runtime.healing import Seam
from sgl.runtime.prompt_logprobs import output_logprobs, prompt_logprobs, prompt_scores
from sgl.runtime.sequence import Request
from sgl.runtime.services import Services
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.thinking import ReasoningCount


class Drawing:
    """A generation under way.

    Args:
        branch: what it continues; its pending unit is encoded.
        grammar: the node's constraint, compiled.
        seed: for a node that has none.
        seam: where the first token is drawn over the end of the text, which the branch's state is without.

    Raises:
        EmptyPrompt: there is nothing to continue.
        InvalidParameter: the prompt is shorter than where its log-probabilities should start.
    """

    def __init__(
        self,
        node: Gen,
        branch: Branch,
        grammar: CompiledGrammar | None,
        services: Services,
        options: ProgramOptions,
        *,
        seed: int,
        seam: Seam | None = None,
    ) -> None:
        sequence, sampling = branch.sequence, node.sampling
        if not sequence.token_ids:
            raise EmptyPrompt(
                "the prompt is empty and this model has no beginning-of-sequence token",
                hint="append some text before generating",
            )
        self.node = node
        self.branch = branch
        self._grammar = grammar
        self._scheduler = services.scheduler
        self._streams = options.stream
        new_tokens = min(sampling.max_new_tokens, max(0, services.config.context_len - len(sequence)))
        matcher = grammar.matcher() if grammar is not None else None
        steering = None
        if grammar is not None and matcher is not None:
            steering = services.compiler.closer.steering(grammar, matcher, new_tokens)
        self._generation = Generation(
            sampling,
            services.tokenizer,
            services.tokenizer.eos_ids,
            seed=sampling.seed if sampling.seed is not None else seed,
            max_new_tokens=new_tokens,
            matcher=matcher,
            steering=steering,
            seam=seam,
            reasoning=self._reasoning_count(services.tokenizer),
            forces=not services.config.disable_forced_tokens,
            limits=services.limits,
        )
        if services.faults is not None:
            self._generation.before_text = partial(services.faults.reach, "in_detok", options.name)
        self.request = Request(
            sequence,
            generation=self._generation if sampling.max_new_tokens else None,
            scores=prompt_scores(sequence.token_ids, sampling),
            top=sampling.top_logprobs_num,
            new_tokens=new_tokens,
            priority=options.priority,
        )

    @property
    def requests(self) -> list[Request]:
        """The request, alone."""
        return [self.request]

    @property
    def steps_left(self) -> int:
        """Most steps until it ends."""
        return self.request.new_tokens - self.request.completion_tokens

    def delta(self) -> DeltaEvent | None:
        """What became final since the last call, for a program that streams."""
        if not self._streams:
            return None
        text, ids = self._generation.take_delta()
        if not text and not ids:
            return None
        self.branch.num_streamed += len(text)
        start = len(self._generation.output_ids) - len(ids)
        return DeltaEvent(
            node=self.node.id,
            branch=self.branch.id,
            name=self.node.name,
            text=text,
            token_ids=ids,
            logprobs=output_logprobs(self.request, self._generation.logprobs, self.node.sampling, start),
        )

    def finish(self) -> ValueEvent:
        """The value, once the request is done. What stays of the output is in the branch's state from now on."""
        generation, request, branch = self._generation, self.request, self.branch
        value, kept = generation.text, generation.keep()
        usage = request.usage()
        if kept.num_tokens < len(generation.output_ids):
            self._scheduler.truncate(branch.sequence, request.prompt_len + kept.num_tokens)
            if kept.rest:
                healed = Usage(healed_tokens=1)
                self._scheduler.stats.add(healed)
                usage += healed
        answer = self._answer(value)
        if answer is None:
            branch.transcript.add_generated(kept.text, kept.num_tokens)
            if kept.rest:
                branch.transcript.add_text(kept.rest)
            if self._streams:
                branch.num_streamed -= len(value) - len(kept.text) - len(kept.rest)
        else:
            usage += self._without_reasoning(answer)
        return ValueEvent(
            node=self.node.id,
            branch=branch.id,
            name=self.node.name,
            value=value,
            token_ids=tuple(generation.output_ids),
            finish=generation.finish or "length",
            matched=generation.matched,
            usage=usage,
            logprobs=output_logprobs(request, generation.logprobs, self.node.sampling),
            prompt_logprobs=prompt_logprobs(request, self.node.sampling),
            truncated_at=self._truncated_at(value),
            forced=tuple(generation.forced),
        )

    def value_check(self, event: ValueEvent) -> Callable[[], tuple[()]] | None:
        """What checks the finished value, off the step loop, where its schema is not enforced in full. A value that
        broke off is no JSON, which `truncated_at` says; the check raises `SchemaViolation`."""
        grammar, matcher, value = self._grammar, self._generation.matcher, event.value
        if isinstance(grammar, ReasoningGrammar):
            value, grammar = grammar.answer(value), grammar.inner
        if not isinstance(grammar, CheckedGrammar) or matcher is None or not matcher.is_complete():
            return None

        checked = grammar

        def check() -> tuple[()]:
            checked.check(value)
            return ()

        return check

    def _reasoning_count(self, tokenizer: Tokenizer) -> ReasoningCount | None:
        """What counts the tokens of reasoning; `None` where there is none, or where a matcher has to know them."""
        if self.node.reasoning is None or isinstance(self._grammar, ReasoningGrammar):
            return None
        return ReasoningCount(reasoning_format(self.node.reasoning), self.branch.transcript.text, tokenizer)

    def _answer(self, value: str) -> str | None:
        """What the state keeps of a value with reasoning in it; `None` when that is everything."""
        if self.node.reasoning is None:
            return None
        prompt = self.branch.transcript.text  # which may have opened the reasoning
        answer = message_parser(reasoning=reasoning_format(self.node.reasoning), prompt=prompt).parse(value).content
        return answer if answer != value else None

    def _without_reasoning(self, answer: str) -> Usage:
        """Go back to the prompt and go on with the answer, which is encoded with the text that follows it."""
        branch, request = self.branch, self.request
        dropped = Usage(rerendered_tokens=len(branch.sequence) - request.prompt_len)
        self._scheduler.truncate(branch.sequence, request.prompt_len)
        self._scheduler.stats.add(dropped)
        branch.transcript.add_text(answer)
        branch.num_streamed = len(branch.transcript.text)
        return dropped

    def _truncated_at(self, value: str) -> str | None:
        """Where the budget broke off a value of a JSON schema."""
        matcher = self._generation.matcher
        if self._generation.finish != "length" or matcher is None or not isinstance(self.node.constraint, JsonSchema):
            return None
        if isinstance(self._grammar, ReasoningGrammar):
            value = self._grammar.answer(value)
        return None if matcher.is_complete() else open_pointer(value)

    def release(self) -> None:
        """Nothing: its sequence is the branch's."""
