"""`SglFunction`: a Python function that writes a prompt, as a program that can be run.

Owns running one body: here, on a thread (streams of `def` programs), or as a task (`async def`
programs). Bodies run eagerly; what they append is buffered by `interpreter.Program` and submitted when a value is
needed or the body ends. Batches of rows are in `batch`, the decorator is in `decorator`.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from sgl.errors import InvalidParameter, InvalidProgram
from sgl.lang.async_state import AsyncProgramState
from sgl.lang.backend import Backend
from sgl.lang.batch import Batch, Row, check_batch
from sgl.lang.inspection import Inspectable
from sgl.lang.interpreter import Program
from sgl.lang.options import RunOptions, current_backend
from sgl.lang.pending import Pending
from sgl.lang.state import ProgramState, StateBase, let_go_cancels, outer_state

if TYPE_CHECKING:
    import typing_extensions

    P = typing_extensions.ParamSpec("P", default=...)
    R = typing_extensions.TypeVar("R", default=Any)
else:
    P = ParamSpec("P")
    R = TypeVar("R")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SglFunction(Inspectable, Generic[P, R]):
    """A program: what `@function` makes. Behaves like the function it wraps (name, docstring, signature, methods).

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def capital(s, country):
        ...     "Ask for a capital."
        ...     s += f"The capital of {country} is " + sgl.gen("city", stop=".")
        >>> capital.__name__, str(capital.__signature__)
        ('capital', '(country)')
        >>> capital.run("France", backend=sgl.MockBackend(["Paris."]))["city"]
        'Paris'
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        receiver: tuple[Any, ...] = (),
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(func):
            raise InvalidParameter(f"function got {func!r}; expected a function", hint="put @sgl.function above a def")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise InvalidParameter(
                f"{func.__name__} is a generator function (it has a yield), which a program cannot be",
                hint="append to the state, and stream with text_iter()",
            )
        if isinstance(func, SglFunction):
            raise InvalidParameter(f"{func.__name__} is a program already", hint="one @sgl.function is enough")
        if not hasattr(func, "__qualname__"):
            raise InvalidParameter(f"function got {func!r}; expected a def", hint="wrap it: def program(s, ...): ...")
        functools.update_wrapper(self, func)
        self.func = func
        self.key = f"{func.__module__}.{func.__qualname__}"  # of its last run
        self.is_async = inspect.iscoroutinefunction(func)
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments: dict[str, Any] = dict(bound or {})
        self._receiver = receiver
        self._is_method = False
        parameters = list(inspect.signature(func).parameters.values())[len(receiver) :]
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise InvalidParameter(
                f"{func.__name__} takes no prompt state; its first parameter is the state", hint="def program(s, ...)"
            )
        self.__signature__ = inspect.Signature(parameters[1:])
        self.arg_names = [parameter.name for parameter in parameters[1:]]

    def __repr__(self) -> str:
        return f"<sgl.function {self.__name__}{self.__signature__}>"

    __name__: str
    __qualname__: str

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True

    def __get__(self, instance: Any, owner: type | None = None) -> SglFunction[P, R]:
        if instance is None or self._receiver:
            return self
        return SglFunction(self.func, self.num_api_spec_tokens, (instance,), self.bind_arguments)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]:
        """`run`."""
        if args and isinstance(args[0], StateBase):
            raise InvalidParameter(
                f"{self.__name__} is called with a state",
                hint=f"to go on with that state: s.call({self.__name__}, ...); as an argument: run(state)",
            )
        run: Callable[..., ProgramState[R]] = self.run  # which takes options beside the program's own arguments
        return run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> SglFunction[..., R]:
        """The same program with some arguments fixed; a value given here wins over one given later."""
        self._check_names(kwargs)
        return SglFunction(self.func, self.num_api_spec_tokens, self._receiver, {**self.bind_arguments, **kwargs})

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.__signature__.parameters.values())
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown and not free:
            raise InvalidParameter(
                f"{self.__name__} has no parameter {unknown[0]!r}",
                hint=f"it takes {', '.join(self.arg_names) or 'none'}",
                param=unknown[0],
            )

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        merged = {**kwargs, **self.bind_arguments}
        if self._is_method:
            raise InvalidParameter(
                f"{self.__qualname__} is a method", hint=f"call it on an instance: instance.{self.__name__}(...)"
            )
        try:
            self.__signature__.bind(*args, **merged)
        except TypeError as error:
            taken = [name for name in self.arg_names if name in _RUN_OPTIONS and name not in merged]
            unknown = [name for name in merged if name not in self.arg_names]
            if unknown and unknown[0] in _RUN_OPTIONS:
                raise InvalidParameter(
                    f"{self.__name__}{self.__signature__} has no parameter {unknown[0]!r}",
                    hint=f"it is an option of a whole run, for all rows: run_batch(rows, {unknown[0]}=...)",
                    param=unknown[0],
                ) from None
            near = difflib.get_close_matches(unknown[0], sorted(_RUN_OPTIONS), n=1) if unknown else []
            hint = f"{taken[0]!r} is an option of run() itself: pass it by position" if taken else "check the arguments"
            free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.__signature__.parameters.values())
            fault = str(error)
            if unknown and not free:
                others = f"; {error}" if fault.startswith("missing") else ""
                fault = f"there is no parameter {unknown[0]!r}{others}"
            raise InvalidParameter(
                f"{self.__name__}{self.__signature__}: {fault}",
                hint=f"did you mean {near[0]!r}?" if near else hint,
                param=unknown[0] if unknown else "",
            ) from None
        return tuple(args), merged

    # --- one run ---

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Backend | None = None,
        use_thread: bool = True,
        cache_salt: str = "",
        seed: int | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> ProgramState[R]:
        """Run the program and wait for its end; its state, with all values.

        Args:
            max_new_tokens, stop, temperature, ...: for generations that do not say it themselves. `None` is what the
                model recommends, or else the constant of `sgl.lang.sampling.Sampling`.
            cache_salt: computed prefixes are shared with programs of the same salt only, for example one per tenant.
            seed: of the program: each generation draws with a seed derived from it and from its place in the program,
                so that the same program says the same again. A `gen(seed=)` keeps its own.
            deadline_s: seconds from now after which the program fails with `DeadlineExceeded`: on the backend and where
                it waits. A body that computes, or waits for a tool, finds out when it next sends something.
            priority: larger is more urgent.
            chat_template_kwargs: further variables for the model's chat template, such as `{"enable_thinking": False}`.
            stream: return at once; the body runs on a thread and `text_iter` gives text as it appears.
            backend: what executes it; the default backend otherwise.
            use_thread: with `stream`, False runs the body here before returning.
            args, kwargs: the program's own arguments.

        Raises:
            InvalidParameter: a wrong argument; nothing was run.
            InvalidProgram: an `async def` program, inside of a running event loop (`await run_async(...)` there).
            SglError: the program failed; `location` is its line.
            Exception: what the body raised, unchanged.
        """
        options = RunOptions.of(self.__name__, locals(), self.num_api_spec_tokens, self.key)
        arguments = self._arguments(args, kwargs)
        program = options.start()
        if stream and use_thread:
            state = outer_state(ProgramState(program))
            self._run_on_thread(program, state, arguments)
            return state
        state = ProgramState(program)
        self._run_here(program, state, arguments)
        if not stream:
            self._finish(program)
            _print_when_asked(state)
        return outer_state(state)

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """`run(..., stream=True)`."""
        return self.run(*args, stream=True, **kwargs)

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """`run` for asyncio: an `async def` body runs as part of this task, a `def` body on a thread.

        Takes what `run` takes. The state that comes back has ended, so reading it does not wait. Cancelling the task
        cancels the program.

        Example:
            >>> import asyncio, sgl
            >>> @sgl.function
            ... async def double(s, n):
            ...     s += f"{n} + {n} = " + sgl.gen("sum")
            ...     return int(await s["sum"])
            >>> asyncio.run(double.run_async(2, backend=sgl.MockBackend(["4"]))).ret_value
            4
        """
        options, arguments = self._split(args, kwargs)
        program = options.start()
        state: ProgramState[R] = ProgramState(program)
        await self._run_to_end(program, state, arguments)
        return state

    def start_async(self, *args: Any, **kwargs: Any) -> AsyncProgramState:
        """Start a streaming run on the running event loop; its state, whose reads and streams are awaited.

        Takes what `run` takes. A `def` body runs on a thread, an `async def` body as a task.

        Example:
            >>> import asyncio, sgl
            >>> @sgl.function
            ... async def hello(s):
            ...     s += "Hello " + sgl.gen("who")
            >>> async def main():
            ...     state = hello.start_async(backend=sgl.MockBackend(["new world"]))
            ...     return [piece async for piece in state.text_iter("who")]
            >>> asyncio.run(main())
            ['new', ' world']
        """
        options, arguments = self._split(args, {**kwargs, "stream": True})
        program = options.start()
        state = AsyncProgramState(program, outside=True)
        let_go_cancels(state._view)
        if not self.is_async:
            self._run_on_thread(program, ProgramState(program, state._core), arguments)
            return state
        program.body_open = True
        program.body_task = asyncio.get_running_loop().create_task(
            self._beside(program, ProgramState(program, state._core), arguments), name=f"sgl-{self.__name__}"
        )
        return state

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[RunOptions, Arguments]:
        """The options of a run and the program's own arguments, out of what was given together."""
        given = {**_RUN_DEFAULTS, **{name: value for name, value in kwargs.items() if name in _RUN_DEFAULTS}}
        own = {name: value for name, value in kwargs.items() if name not in _RUN_DEFAULTS}
        return RunOptions.of(self.__name__, given, self.num_api_spec_tokens, self.key), self._arguments(args, own)

    # --- bodies ---

    def _body_on(self, state: StateBase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the body on a state; a coroutine, of an `async def` body."""
        if self.is_async and not isinstance(state, AsyncProgramState):
            raise InvalidProgram(
                f"{self.__name__} is async; a def program cannot go on with it", hint="make the caller async def"
            )
        positional, named = self._arguments(args, kwargs)
        return self.func(*self._receiver, state, *positional, **named)

    def _body_state(self, state: ProgramState[Any]) -> StateBase:
        """The same state as the body is given it."""
        return AsyncProgramState(state._program, state._core) if self.is_async else ProgramState(
            state._program, state._core
        )  # fmt: skip

    def _run_here(self, program: Program, state: ProgramState[Any], arguments: Arguments) -> None:
        """Run the body to its end on this thread."""
        if self.is_async:
            _run_coroutine(self._run_async_body(program, state, arguments), self.__name__)
            return
        with _body_of(program):
            program.returned = self._body_on(self._body_state(state), *arguments)
            program.flush(finish=True)

    async def _run_async_body(self, program: Program, state: ProgramState[Any], arguments: Arguments) -> None:
        with _body_of(program):
            returned = await self._body_on(self._body_state(state), *arguments)
            if isinstance(returned, Pending):
                returned.refuse("it is returned")
            program.returned = returned
            program.flush(finish=True)

    async def _run_to_end(self, program: Program, state: ProgramState[Any], arguments: Arguments) -> None:
        """Run a body of either kind, and wait for the program's end."""
        try:
            if self.is_async:
                await self._run_async_body(program, state, arguments)
            else:
                await asyncio.to_thread(self._run_here, program, state, arguments)
            await program.wait_end_async()
        except BaseException:
            program.cancel()
            raise

    def _finish(self, program: Program) -> None:
        try:
            program.wait_end()
        except BaseException:
            program.cancel()
            raise

    async def _beside(self, program: Program, state: ProgramState[Any], arguments: Arguments) -> None:
        """Run an async body as a task of its own; what it raises is raised where the state is read."""
        try:
            await self._run_async_body(program, state, arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the state is read
            program.body_error = error
        finally:
            program.end_body()

    def _run_on_thread(self, program: Program, state: ProgramState[Any], arguments: Arguments) -> None:
        inner: ProgramState[Any] = ProgramState(program, state._core)

        def body() -> None:
            program.body_thread = threading.get_ident()
            started.set()
            try:
                self._run_here(program, inner, arguments)
            except BaseException as error:  # noqa: BLE001 - raised where the state is read
                program.body_error = error
            finally:
                program.end_body()

        program.body_open = True
        started = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(body,), name=f"sgl-{self.__name__}", daemon=True).start()
        started.wait()

    # --- batches ---

    def run_batch(
        self,
        batch_kwargs: Sequence[Row],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_result: Callable[[int, Any], None] | None = None,
        stop_on_error: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        cache_salt: str = "",
        seed: int | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the program for every row; the states in the order of the rows.

        Args:
            batch_kwargs: per row a dict of arguments, or a list or tuple of them by position. Rows are not changed.
            max_new_tokens, ..., chat_template_kwargs: as `run` takes them; each row has a seed derived from `seed`.
            num_threads: bodies that run at the same time; `auto` is max(96, 16 per core), or 1024 of `async def`
                programs, which need no threads.
            generator_style: an iterator that gives the states as they are ready, in order.
            on_result: called here with (index, state or error) as rows end.
            on_error: `raise` the first error; `return` it in the place of its row.
            stop_on_error: with `raise`, cancel the rows that run and raise; Python code in their bodies is waited for.
                False lets every row end, and be given to `on_result`, before the first error is raised; an iterator
                then stops at the row that failed.

        Raises:
            InvalidParameter: a row does not fit the program's parameters; nothing was run.
        """
        check_batch(on_result, on_error, num_threads)
        options = RunOptions.of(self.__name__, locals(), self.num_api_spec_tokens, self.key)
        batch = self._batch(batch_kwargs, options, num_threads, on_result)
        if not len(batch):
            return iter(()) if generator_style else []
        if generator_style:
            return batch.in_order(progress_bar, on_error, stop_on_error)
        return batch.all(progress_bar, on_error, stop_on_error)

    def batch(
        self,
        rows: Sequence[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        on_result: Callable[[int, Any], None] | None = None,
        **options: Any,
    ) -> Batch[R]:
        """Rows that run when the batch is iterated: results as they are ready, with their index; or `events()`.

        Takes the options of `run` besides. At most `num_threads` rows are under way or wait to be looked at, so a slow
        consumer slows the batch and not its memory.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def echo(s, word):
            ...     s += word + sgl.gen("more")
            >>> batch = echo.batch([["a"], ["b"]], backend=sgl.MockBackend(lambda prompt, node: prompt * 2))
            >>> sorted((result.index, result.state["more"]) for result in batch)
            [(0, 'aa'), (1, 'bb')]
        """
        check_batch(on_result, "return", num_threads)
        for name in options:
            if name not in _RUN_DEFAULTS:
                raise InvalidParameter(f"{name!r} is no option of a batch", hint="arguments go into rows", param=name)
        run_options = RunOptions.of(self.__name__, {**_RUN_DEFAULTS, **options}, self.num_api_spec_tokens, self.key)
        return self._batch(rows, run_options, num_threads, on_result)

    def _batch(
        self,
        rows: Sequence[Row],
        options: RunOptions,
        num_threads: int | Literal["auto"],
        on_result: Callable[[int, Any], None] | None,
    ) -> Batch[R]:
        if not hasattr(rows, "__iter__") or isinstance(rows, (str, bytes, Mapping)):
            raise InvalidParameter(f"batch_kwargs is {rows!r}; expected a list of rows", param="batch_kwargs")
        arguments = [self._row(index, row) for index, row in enumerate(rows)]
        return Batch(self, arguments, options.chosen() if arguments else options, num_threads, on_result)

    def _row(self, index: int, row: Row) -> Arguments:
        if isinstance(row, Mapping):
            args, kwargs = (), dict(row)
        elif isinstance(row, (list, tuple)):
            args, kwargs = tuple(row), {}
        else:
            raise InvalidParameter(f"row {index} is {row!r}; expected a dict, list or tuple", param="batch_kwargs")
        try:
            return self._arguments(args, kwargs)
        except InvalidParameter as error:
            raise InvalidParameter(f"row {index}: {error.message}", hint=error.hint, param="batch_kwargs") from None


@contextmanager
def _body_of(program: Program) -> Iterator[None]:
    """While a body runs: programs that it runs use its backend, and what it raises ends its program."""
    token = current_backend.set(program.backend)
    try:
        yield
    except BaseException:
        program.cancel()
        raise
    finally:
        current_backend.reset(token)


def _print_when_asked(state: ProgramState[Any]) -> None:
    """What `global_config.verbosity` asks for, where somebody has set it."""
    compat = sys.modules.get("sgl.lang.compat")
    if compat is not None and compat.global_config.verbosity >= 2:
        sys.stdout.write(state.text() + "\n")


def _run_coroutine(body: Coroutine[Any, Any, None], name: str) -> None:
    """Run an async body from a synchronous caller."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(body)
        return
    body.close()
    raise InvalidProgram(f"{name}.run() would block the event loop that runs here", hint=f"await {name}.run_async(...)")


_RUN_PARAMETERS = inspect.signature(SglFunction.run).parameters
_RUN_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in _RUN_PARAMETERS.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
_RUN_OPTIONS = frozenset(_RUN_DEFAULTS)
"""Names that `run` takes for itself."""
