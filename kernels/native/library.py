"""Builds the C++ source of this folder for the machine at hand, and loads it.

Owns the choice of the instruction set, the compiler's command, the cache of built libraries and the one loaded library
of the process. A library's name is the SHA-256 of the source, the flags and the compiler's version, so a changed source
or compiler builds anew and an old file is never wrong; it is written beside its place and renamed, so processes that
build at the same time do not wait for each other. Nothing here needs Python's headers: ctypes passes pointers.

`load` raises `NativeUnavailable` with the reason where there is no compiler or it fails; callers then run on torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

SOURCE = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fpeel-loops",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-ffp-contract=off",
    "-w",
)
"""`-O2` with `-fpeel-loops` compiles in half the time of `-O3` and is as fast: the loops that matter are short, known
and to be unrolled. `-ffp-contract=off`: a multiplication and an addition become one instruction only where the source
says so; otherwise the compiler decides for each copy of a loop, and a row's bits would depend on its neighbours."""
_BUILD_SECONDS = 300

INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512": (
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"),
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
    ),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    "plain": ((), ()),
}
"""Name -> (what the processor must have, as `/proc/cpuinfo` writes it, compiler flags); the best first."""
_EXTENSIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "avx512": (("avx512_bf16", "-mavx512bf16"), ("amx_tile", "-mamx-tile"), ("amx_bf16", "-mamx-bf16")),
    "avx2": (("avx_vnni", "-mavxvnni"),),
    "plain": (),
}
"""Instructions that are used where the processor has them."""


class NativeUnavailable(Exception):
    """There is no native library on this machine; the message says why. Callers run on torch instead."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What would be built here: the instruction set with its flags, and the file that results."""

    instruction_set: str
    compiler: str
    command: tuple[str, ...]
    path: str

    @property
    def done(self) -> bool:
        """Whether the file is there."""
        return Path(self.path).exists()


def plan(folder: Path, instruction_set: str | None = None) -> Build:
    """The build for this machine, or for one of `INSTRUCTION_SETS`; nothing is built.

    Args:
        folder: where libraries are kept.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    found = compiler()
    if found is None:
        raise NativeUnavailable(
            f"there is no C++ compiler ({', '.join(COMPILERS)}); install g++ or clang++ for the fast CPU path"
        )
    name = instruction_set or best_instruction_set()
    extensions = tuple(flag for feature, flag in _EXTENSIONS[name] if feature in cpu_features())
    command = (found, *_FLAGS, *INSTRUCTION_SETS[name][1], *extensions)
    return Build(
        instruction_set=name,
        compiler=_version(found),
        command=command,
        path=str(folder / f"sgl-{name}-{_digest(command, SOURCE)}.so"),
    )


def compiler() -> str | None:
    """Path of the compiler that would be called."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def best_instruction_set() -> str:
    """The first of `INSTRUCTION_SETS` that this processor has all of."""
    features = cpu_features()
    return next(name for name, (needs, _) in INSTRUCTION_SETS.items() if features.issuperset(needs))


def sources(folder: Path = SOURCE) -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])


def _digest(command: tuple[str, ...], source: Path) -> str:
    digest = hashlib.sha256("\0".join((*command, platform.machine(), _version(command[0]))).encode())
    for path in sources(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(planned: Build) -> float:
    """Make the library; seconds that it took, 0 when it is there.

    Raises:
        NativeUnavailable: the compiler failed, with the first of its errors, or the folder cannot be written.
    """
    if planned.done:
        return 0.0
    begin = time.monotonic()
    target = Path(planned.path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            # A copy is compiled, and only if it is what the name was made from: the source may be edited meanwhile.
            for path in sources():
                shutil.copy(path, folder)
            if _digest(planned.command, Path(folder)) not in target.name:
                raise NativeUnavailable(f"the source in {SOURCE} was changed while it was about to be compiled")
            made = Path(folder) / target.name
            command = [*planned.command, str(Path(folder) / "native.cpp"), "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_SECONDS, stdin=subprocess.DEVNULL
            )
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise NativeUnavailable(
                    f"{planned.command[0]} failed (g++ 11 or clang++ 14 is needed): "
                    f"{errors[0] if errors else f'status {done.returncode}'}"
                )
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(
            f"the native library could not be built in {target.parent}: {error}; SGL_CACHE names another folder"
        ) from None
    return time.monotonic() - begin


def open_library(path: str) -> ctypes.CDLL:
    """The library in a file, with the types of its functions declared.

    Raises:
        NativeUnavailable: it cannot be loaded here.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from None
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "sgl_isa": (ctypes.c_char_p, []),
        "sgl_lanes": (ctypes.c_int32, []),
        "sgl_set_threads": (None, [ctypes.c_int32]),
        "sgl_packed_bytes": (integer, [pointer]),
        "sgl_pack": (None, [pointer, pointer]),
        "sgl_rows": (integer, [pointer, pointer, integer, pointer]),
        "sgl_linear": (None, [pointer, pointer, integer, pointer]),
        "sgl_rms_norm": (None, [pointer, pointer, integer, integer, number, pointer]),
        "sgl_silu_mul": (None, [pointer, pointer, integer, integer, pointer]),
        "sgl_rotary": (None, [pointer, pointer, pointer, integer, integer, integer, pointer]),
        "sgl_argmax": (None, [pointer, integer, integer, integer, pointer, integer, pointer]),
        "sgl_top_k": (None, [pointer, integer, integer, integer, integer, pointer, pointer, pointer, pointer]),
        "sgl_attention": (None, [pointer, pointer, integer, pointer, pointer, pointer, pointer]),
        "sgl_decoder": (None, [pointer, pointer, integer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_loaded: ctypes.CDLL | None = None


def load(folder: Path, instruction_set: str | None = None) -> ctypes.CDLL:
    """Build what is missing, load it, and make it the process's library (see `library`).

    Raises:
        NativeUnavailable: see `plan`, `build` and `open_library`.
    """
    global _loaded
    planned = plan(folder, instruction_set)
    build(planned)
    _loaded = open_library(planned.path)
    return _loaded


def library() -> ctypes.CDLL:
    """The process's library.

    Raises:
        NativeUnavailable: `load` was not called, or failed.
    """
    if _loaded is None:
        raise NativeUnavailable("the native library is not loaded; call sgl.kernels.native.library.load first")
    return _loaded


def loaded() -> ctypes.CDLL | None:
    """The process's library, if there is one."""
    return _loaded


def use(other: ctypes.CDLL | None) -> None:
    """Make a loaded library the process's, for tests of several."""
    global _loaded
    _loaded = other


@cache
def cpu_features() -> frozenset[str]:
    """Flags of the processor as Linux writes them; empty where there is no `/proc/cpuinfo`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@cache
def _version(compiler: str) -> str:
    """First line of the compiler's `--version`."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} does not run: {error}") from None
    return (done.stdout.splitlines() or [compiler])[0]
