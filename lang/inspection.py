"""What can be asked of a program besides running it: `trace`, `compile`, `explain`, `cache`.

Owns the mixin of `SglFunction` that offers these; the work is in the modules named so, which are imported when asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from sgl.errors import InvalidParameter
from sgl.lang.backend import Backend

if TYPE_CHECKING:
    from sgl.lang.compile import CompiledProgram
    from sgl.lang.explain import Explanation
    from sgl.lang.function import SglFunction
    from sgl.lang.record import RunRecord
    from sgl.lang.rendering import Renderer
    from sgl.lang.tracing import Assumed, Trace


class Inspectable:
    """A program that can be looked at without running it."""

    __name__: str

    @property
    def last_run(self) -> RunRecord | None:
        """The last run of this program, also of one that failed: `program.last_run.to_html()`.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def hello(s):
            ...     s += "Hello " + sgl.gen("who")
            >>> _ = hello.run(backend=sgl.MockBackend(["<world>"]))
            >>> "&lt;world&gt;" in hello.last_run.to_html()
            True
        """
        from sgl.lang.record import last_run

        return last_run(cast("SglFunction", self).key)

    def trace(self, *args: Any, assume: Assumed | None = None, backend: Backend | None = None, **kwargs: Any) -> Trace:
        """What the body appends, without a model: its graph, with arguments that are not given left open.

        Args:
            assume: values that generations are taken to give, by name: a text, a list of texts in order, or a function
                of the node. Others are not known; they may be appended, and that is all.
            args, kwargs: the program's own arguments; `backend` is taken for compatibility, without effect.

        Raises:
            InvalidProgram: the body needs text that is not known; `location` is its line.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def two(s, question):
            ...     s += "Q: " + question + " A: " + sgl.gen("answer")
            ...     s += " So " + s["answer"] + "?"
            >>> print(two.trace())
            0 [0] text 'Q: '{question}' A: '
            1 [0] gen answer
            2 [0] text ' So '{answer}'?'
        """
        from sgl.lang.tracing import tell_unused, trace_body

        trace = trace_body(cast("SglFunction", self), args, kwargs, assume=assume)
        tell_unused(assume, [trace])
        return trace

    def compile(
        self,
        *args: Any,
        independent: Collection[str] = (),
        scores: bool | Collection[str] = True,
        sampling: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        **kwargs: Any,
    ) -> CompiledProgram:
        """The program as an artefact: checked, optimized, portable as JSON, run without its body.

        Args:
            args, kwargs: arguments that are fixed; parameters with a default get it, the others become parameters of
                the compiled program.
            independent: names of generations that do not depend on each other, to be generated in parallel (see
                `sgl.lang.passes.independent`).
            scores: False, or the names of those selects whose scores of all options are wanted: the others stop as
                soon as the best option is certain.
            sampling: for generations that do not say it themselves, as the arguments of `run`.
            backend: whose model's recommended sampling parameters hold below that; the constants without one.

        Raises:
            InvalidProgram: the body needs text that is not known (control flow on values or open arguments), processes
                such text, or the graph does not make sense; `location` is the line.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def greet(s, name):
            ...     s += "Dear " + name + "," + sgl.gen("rest")
            >>> program = greet.compile()
            >>> [run.text() for run in program.run_batch([["Ada"], ["Bob"]], backend=sgl.MockBackend(["!", "?"]))]
            ['Dear Ada,!', 'Dear Bob,?']
        """
        from sgl.lang.compile import compile_function

        return compile_function(
            cast("SglFunction", self),
            args,
            kwargs,
            independent=independent,
            scores=scores,
            sampling=sampling,
            backend=backend,
        )

    def explain(
        self,
        *args: Any,
        rows: Iterable[Mapping[str, Any] | Sequence[Any]] | None = None,
        assume: Assumed | None = None,
        sampling: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        renderer: Renderer | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """What a run will do, before it: nodes, branches, the critical path, tokens to prefill with and without
        sharing, forwards, and what blocks sharing. `measure()` on it runs the program and shows both.

        Args:
            rows: as for `run_batch`; without them one run with `args` and `kwargs`.
            assume: values that generations are taken to give, as for `trace`. A body that needs a value which is not
                assumed is explained up to there.
            sampling: as for `compile`.
            backend: for whose model tokens are counted; the default model otherwise, whose tokenizer alone is loaded.
            renderer: what counts tokens instead.

        Raises:
            InvalidParameter: a row does not fit the program's parameters.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def ask(s, question):
            ...     s += "Answer in a word. " + question + " " + sgl.gen("answer", max_tokens=4)
            >>> plan = ask.explain(rows=[["How many?"], ["Which one?"]], backend=sgl.MockBackend())
            >>> plan.predicted.requests, plan.predicted.prompt_tokens, plan.predicted.prefill_tokens
            (2, 14, 10)
        """
        from sgl.lang.explain import explain_function
        from sgl.lang.tracing import tell_unused

        if rows is not None and (isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable)):
            raise InvalidParameter(f"rows is {rows!r}; expected a list of rows, as for run_batch", param="rows")
        given = list(rows) if rows is not None else None
        explanation = explain_function(
            cast("SglFunction", self),
            given,
            args,
            kwargs,
            assume=assume,
            sampling=sampling,
            backend=backend,
            renderer=renderer,
        )
        tell_unused(assume, explanation.traces)
        return explanation

    def cache(self, backend: Backend | None = None) -> int:
        """Have the constant beginning of the prompt computed ahead; its length in tokens, 0 where there is none.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def ask(s, question):
            ...     s += "Answer in a word. " + question + sgl.gen("answer")
            >>> ask.cache(sgl.MockBackend())
            5
        """
        from sgl.lang.defaults import backend_of
        from sgl.lang.explain import compute_prefix

        return compute_prefix(cast("SglFunction", self), backend_of(backend))
