"""`@function`: a Python function that writes a prompt becomes a program that can be run.

Owns the decorator, running a body (here, or on a thread when streaming), and batches of rows. Bodies run eagerly; what
they append is buffered by `interpreter.Program` and submitted when a value is needed or the body ends.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal, overload

import msgspec

from sgl.errors import Cancelled, InvalidParameter, Unsupported
from sgl.lang.backend import Backend
from sgl.lang.defaults import default_backend, sampling_defaults
from sgl.lang.expressions import refuse
from sgl.lang.graph import ProgramOptions, Sampling, sampling_values
from sgl.lang.inspection import Inspectable
from sgl.lang.interpreter import Program
from sgl.lang.state import ProgramState

Row = Mapping[str, Any] | Sequence[Any]
_WINDOW = 200
"""Rows that a generator-style batch has under way at most."""
_SAMPLING = (
    "max_new_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
)
"""Arguments of `run` and `run_batch` that are sampling parameters."""


def _run_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for generations that do not say it themselves: fields of `Sampling`, checked.

    Args:
        given: the arguments of `run` or `run_batch` by name; others than the sampling parameters may be among them.

    Raises:
        InvalidParameter: a wrong type, or a value out of range.
        Unsupported: an argument that no backend executes yet.
    """
    refuse(return_text_in_logprobs=given["return_text_in_logprobs"])
    values = sampling_values({name: given[name] for name in _SAMPLING})
    Sampling(**values)  # checks
    return values


def _check_backend(backend: object) -> None:
    if backend is not None and not isinstance(backend, Backend):
        raise InvalidParameter(f"backend is {backend!r}; expected an engine or another backend", param="backend")


class SglFunction(Inspectable):
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
        if inspect.isgeneratorfunction(func):
            raise InvalidParameter(
                f"{func.__name__} is a generator function (it has a yield), which a program cannot be",
                hint="append to the state, and stream with text_iter()",
            )
        if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise Unsupported(f"{func.__name__} is an async function; programs are plain functions for now",
                              hint="write it with def")  # fmt: skip
        functools.update_wrapper(self, func)
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments: dict[str, Any] = dict(bound or {})
        self._receiver = receiver
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

    def __get__(self, instance: Any, owner: type | None = None) -> SglFunction:
        if instance is None or self._receiver:
            return self
        return SglFunction(self.func, self.num_api_spec_tokens, (instance,), self.bind_arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run`."""
        return self.run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> SglFunction:
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

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        merged = {**kwargs, **self.bind_arguments}
        try:
            self.__signature__.bind(*args, **merged)
        except TypeError as error:
            taken = [name for name in self.arg_names if name in _RUN_OPTIONS and name not in merged]
            unknown = [name for name in merged if name not in self.arg_names]
            near = difflib.get_close_matches(unknown[0], sorted(_RUN_OPTIONS), n=1) if unknown else []
            hint = f"{taken[0]!r} is an option of run() itself: pass it by position" if taken else "check the arguments"
            raise InvalidParameter(
                f"{self.__name__}{self.__signature__}: {error}",
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
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and wait for its end; its state, with all values.

        Args:
            max_new_tokens, stop, temperature, ...: for generations that do not say it themselves. `None` is what the
                model recommends, or else the constant of `sgl.lang.sampling.Sampling`.
            cache_salt: computed prefixes are shared with programs of the same salt only, for example one per tenant.
            stream: return at once; the body runs on a thread and `text_iter` gives text as it appears.
            backend: what executes it; the default backend otherwise.
            use_thread: with `stream`, False runs the body here before returning.
            args, kwargs: the program's own arguments.

        Raises:
            InvalidParameter: a wrong argument; nothing was run.
            SglError: the program failed; `location` is its line.
            Exception: what the body raised, unchanged.
        """
        sampling = _run_sampling(locals())
        _check_backend(backend)
        positional, named = self._arguments(args, kwargs)
        options = ProgramOptions(name=self.__name__, stream=bool(stream), cache_salt=cache_salt)
        state = self._start(sampling, options, backend)
        if stream and use_thread:
            self._run_on_thread(state, positional, named)
            return state
        self._run_body(state, positional, named)
        if not stream:
            self._finish(state)
        return state

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run(..., stream=True)`."""
        return self.run(*args, stream=True, **kwargs)

    def _start(self, sampling: Mapping[str, Any], options: ProgramOptions, backend: Backend | None) -> ProgramState:
        backend = backend if backend is not None else default_backend()
        resolved = msgspec.structs.replace(sampling_defaults(backend), **sampling)
        return ProgramState(Program(backend, options, resolved))

    def _run_body(self, state: ProgramState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        program = state._program
        try:
            state.ret_value = self.func(*self._receiver, state, *args, **kwargs)
            program.flush(finish=True)
        except BaseException:
            program.cancel()
            raise

    def _finish(self, state: ProgramState) -> None:
        try:
            state._program.wait_end()
        except BaseException:
            state._program.cancel()
            raise

    def _run_on_thread(self, state: ProgramState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        program = state._program

        def body() -> None:
            program.body_thread = threading.get_ident()
            started.set()
            try:
                self._run_body(state, args, kwargs)
            except BaseException as error:  # noqa: BLE001 - raised where the state is read
                program.body_error = error
            finally:
                program.body_thread = None
                program.notify()

        started = threading.Event()
        threading.Thread(target=body, name=f"sgl-{self.__name__}", daemon=True).start()
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
    ) -> Any:
        """Run the program for every row; the states in the order of the rows.

        Args:
            batch_kwargs: per row a dict of arguments, or a list or tuple of them by position. Rows are not changed.
            max_new_tokens, ..., cache_salt: as `run` takes them.
            num_threads: bodies that run at the same time; `auto` is max(96, 16 per core), at most one per row.
            generator_style: an iterator that gives the states as they are ready, in order.
            on_result: called here with (index, state or error) as rows end.
            on_error: `raise` the first error; `return` it in the place of its row.
            stop_on_error: with `raise`, cancel the rows that run and raise at once. False lets every row end, and be
                given to `on_result`, before the first error is raised; an iterator then stops at the row that failed.

        Raises:
            InvalidParameter: a row does not fit the program's parameters; nothing was run.
        """
        sampling = _run_sampling(locals())
        _check_backend(backend)
        if not isinstance(batch_kwargs, Iterable) or isinstance(batch_kwargs, (str, bytes, Mapping)):
            raise InvalidParameter(f"batch_kwargs is {batch_kwargs!r}; expected a list of rows", param="batch_kwargs")
        if on_result is not None and not callable(on_result):
            raise InvalidParameter(f"on_result is {on_result!r}; expected a function", param="on_result")
        if on_error not in ("raise", "return"):
            raise InvalidParameter(f"on_error is {on_error!r}; expected 'raise' or 'return'", param="on_error")
        if num_threads != "auto" and (
            isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1
        ):
            raise InvalidParameter(f"num_threads is {num_threads!r}; expected 'auto' or >= 1", param="num_threads")
        options = ProgramOptions(name=self.__name__, cache_salt=cache_salt)
        rows = [self._row(index, row) for index, row in enumerate(batch_kwargs)]
        if not rows:
            return iter(()) if generator_style else []
        chosen = backend if backend is not None else default_backend()
        limit = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
        batch = _Batch(self, rows, sampling, options, chosen, min(limit, len(rows)), on_result, stop_on_error, on_error)
        if generator_style:
            return batch.in_order(progress_bar)
        return batch.all(progress_bar)

    def _row(self, index: int, row: Row) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


class _Batch:
    """Rows of one program that run on a bounded pool."""

    def __init__(
        self,
        function: SglFunction,
        rows: list[tuple[tuple[Any, ...], dict[str, Any]]],
        sampling: Mapping[str, Any],
        options: ProgramOptions,
        backend: Backend,
        num_threads: int,
        on_result: Callable[[int, Any], None] | None,
        stop_on_error: bool,
        on_error: str,
    ) -> None:
        self._function = function
        self._rows = rows
        self._sampling = sampling
        self._options = options
        self._backend = backend
        self._num_threads = num_threads
        self._on_result = on_result
        self._stop_on_error = stop_on_error
        self._on_error = on_error
        self._lock = threading.Lock()
        self._running: set[Program] = set()
        self._stopped = False

    def _run_row(self, index: int) -> ProgramState:
        args, kwargs = self._rows[index]
        state = self._function._start(self._sampling, self._options, self._backend)
        with self._lock:
            if self._stopped:
                raise Cancelled(f"row {index} was not run: another row failed")
            self._running.add(state._program)
        try:
            self._function._run_body(state, args, kwargs)
            self._function._finish(state)
        finally:
            with self._lock:
                self._running.discard(state._program)
        return state

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for program in running:
            program.cancel()

    def _result(self, index: int, future: Future[ProgramState]) -> Any:
        error = future.exception()
        result = error if error is not None else future.result()
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            raise error
        if self._on_result is not None:
            self._on_result(index, result)
        return result

    def all(self, progress_bar: bool) -> list[Any]:
        """Every row's result, in order."""
        results: list[Any] = [None] * len(self._rows)
        first: Exception | None = None
        with (
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="sgl-batch") as pool,
            _bar(len(self._rows), progress_bar) as advance,
        ):
            try:
                pending = {pool.submit(self._run_row, index): index for index in range(len(self._rows))}
                while pending:
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=pending.__getitem__):
                        index = pending.pop(future)
                        results[index] = self._result(index, future)
                        advance()
                        error = results[index]
                        if isinstance(error, Exception) and self._on_error == "raise":
                            first = first if first is not None else error
                            if self._stop_on_error:
                                raise first
            except BaseException:
                self._stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if first is not None:
            raise first
        return results

    def in_order(self, progress_bar: bool) -> Iterator[Any]:
        """Results in the order of the rows, with a bounded number of rows under way."""
        first: Exception | None = None
        with (
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="sgl-batch") as pool,
            _bar(len(self._rows), progress_bar) as advance,
        ):
            try:
                window: deque[Future[ProgramState]] = deque()
                submitted = 0
                for index in range(len(self._rows)):
                    while submitted < len(self._rows) and len(window) < _WINDOW:
                        window.append(pool.submit(self._run_row, submitted))
                        submitted += 1
                    future = window.popleft()
                    result = self._result(index, future)
                    advance()
                    if first is None and isinstance(result, Exception) and self._on_error == "raise":
                        first = result
                        if self._stop_on_error:
                            raise first
                    if first is None:
                        yield result
            except BaseException:
                self._stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if first is not None:
            raise first


class _bar:
    """A progress bar on standard error, or nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._progress: Any = None

    def __enter__(self) -> Callable[[], None]:
        if not self._shown:
            return lambda: None
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True))
        self._progress.start()
        task = self._progress.add_task("rows", total=self._total)
        return lambda: self._progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Make a program of a function whose first parameter (after `self`, in a class) is the prompt state.

    Raises:
        InvalidParameter: the function has no parameter.
        Unsupported: it is an async function.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hello(s, name):
        ...     s += f"Hello {name}, " + sgl.gen("rest")
        >>> hello.run("Ada", backend=sgl.MockBackend(["nice to meet you."])).text()
        'Hello Ada, nice to meet you.'
    """
    if func is None:
        return lambda func: SglFunction(func, num_api_spec_tokens)
    return SglFunction(func, num_api_spec_tokens)


_RUN_OPTIONS = frozenset(inspect.signature(SglFunction.run).parameters) - {"self", "args", "kwargs"}
"""Names that `run` takes for itself."""
