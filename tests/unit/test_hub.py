"""Hub ids, against a hub on the loopback interface with huggingface-hub's real client."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_hub import COMMIT, OLD_COMMIT, FakeHub
from support.tiny_llama import write_llama

from sgl.errors import AccessDenied, ConfigError, DiskFull, DownloadFailed, ModelNotFound, UnsupportedModel
from sgl.runtime.loading import cache, hub
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.hub import HubId, looks_like_id, parse_id
from sgl.runtime.loading.sources import check_model, locate
from sgl.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository: a tiny Llama in shards with a tokenizer, and what must never be fetched."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, tie_word_embeddings=True, vocab_size=512)
    (folder / "tokenizer.json").write_text(Tokenizer.toy().to_json())
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in wanted) > 1
    unwanted = ("modeling_evil.py", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors")
    unwanted += ("../evil.safetensors",)
    return {**wanted, **dict.fromkeys(unwanted, b"never")}


@pytest.fixture
def server(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants as constants

    with FakeHub(files).serving() as fake:
        # Read from the environment when huggingface_hub is imported, which an earlier test may have done.
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield fake


def fetched_names(server: FakeHub) -> set[str]:
    return {line.rpartition("/")[2] for line in server.requests if line.startswith("GET") and "/resolve/" in line}


def test_a_repository_is_fetched_loaded_and_then_used_offline(server: FakeHub, files: dict[str, bytes]) -> None:
    seen: list[tuple[int, int | None]] = []
    source = locate("org/tiny", progress=lambda done, total: seen.append((done, total)))
    assert (source.name, source.kind) == ("org/tiny", "safetensors")
    assert source.path is not None
    assert {path.name for path in source.path.iterdir()} == {name for name in files if files[name] != b"never"}
    assert not {name.rpartition("/")[2] for name in files if files[name] == b"never"} & (
        fetched_names(server) - {"model.safetensors"}
    )
    assert not list(source.path.parents[2].rglob("evil*"))
    wanted = sum(len(files[path.name]) for path in source.path.iterdir())
    assert seen[-1] == (wanted, wanted)
    open_checkpoint(source).build_model()
    assert Tokenizer.from_folder(source.path).vocab_size == 512

    server.requests.clear()
    assert locate("org/tiny", offline=True) == source
    assert server.requests == []
    assert locate("org/tiny") == source
    assert fetched_names(server) == set()


def test_the_files_of_sentence_transformers_come_along(server: FakeHub, files: dict[str, bytes]) -> None:
    """Without them pooling would be another than the makers'."""
    beside = {
        "modules.json": b"[]",
        "sentence_bert_config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "vocab.txt": b"",
    }
    server.commits[COMMIT] = {**files, **beside, "onnx/model.safetensors": b"never", "onnx/config.json": b"never"}
    folder = locate("org/tiny").path
    assert folder is not None
    assert {name for name in beside if (folder / name).is_file()} == set(beside)
    assert not (folder / "onnx").exists()


def test_revisions(server: FakeHub, files: dict[str, bytes]) -> None:
    changed = json.dumps({**json.loads(files["config.json"]), "rope_parameters": {"rope_theta": 7.0}}).encode()
    server.commits[OLD_COMMIT] = {**files, "config.json": changed}
    for model, revision in (
        ("org/tiny@v1", None),
        ("org/tiny", "v1"),
        ("org/tiny@v1", "v1"),
        (f"org/tiny@{OLD_COMMIT}", None),
    ):
        source = locate(model, revision=revision)
        assert open_checkpoint(source).config.rope_theta == 7.0
        assert source.path is not None
        assert source.path.name == OLD_COMMIT
    assert open_checkpoint(locate("org/tiny")).config.rope_theta == 10000.0
    server.requests.clear()
    locate("org/tiny", revision=OLD_COMMIT)
    assert server.requests == [], "a commit that is here was looked up"
    with pytest.raises(ModelNotFound, match=r"no revision 'v9'"):
        locate("org/tiny@v9")
    with pytest.raises(ConfigError, match=r"'v1'.*'v2'") as caught:
        locate("org/tiny@v1", revision="v2")
    assert caught.value.param == "revision"
    with pytest.raises(ConfigError, match="no hub id"):
        locate("dummy", revision="v1")


def test_only_the_shape_for_dummy_weights(server: FakeHub) -> None:
    source = locate("org/tiny", load_format="dummy")
    assert source.kind == "dummy"
    assert source.path is not None
    assert not list(source.path.glob("*.safetensors"))
    with pytest.raises(DownloadFailed, match="offline"):
        locate("org/tiny", offline=True)


def test_what_the_hub_refuses(server: FakeHub, files: dict[str, bytes]) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder nor a hub repository 'org/other'") as missing:
        locate("org/other")
    assert "HF_TOKEN" in missing.value.hint
    with pytest.raises(AccessDenied, match="gated") as gated:
        locate("org/gated")
    assert gated.value.status == 403
    assert "HF_TOKEN" in gated.value.hint
    assert "/org/gated" in gated.value.hint
    server.commits[COMMIT] = {"config.json": files["config.json"], "pytorch_model.bin": b"x", "model.Q4_0.gguf": b"y"}
    with pytest.raises(UnsupportedModel, match=r"no \*\.safetensors file, only model\.Q4_0\.gguf, pytorch_model\.bin"):
        locate("org/tiny")
    server.commits[COMMIT] = {"README.md": b""}
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        locate("org/tiny")
    assert fetched_names(server) == set()


def test_without_a_network_what_is_here_is_used(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DownloadFailed, match="sgl pull org/tiny"):
        locate("org/tiny", offline=True)
    source = locate("org/tiny")
    server.status = 503
    with caplog.at_level(logging.WARNING, "sgl.loading"):
        assert locate("org/tiny") == source
    assert [record.getMessage() for record in caplog.records if record.name == "sgl.loading"] == [
        f"the hub {server.url} cannot be reached; using what is here of org/tiny"
    ]
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert locate("org/tiny") == source
    with pytest.raises(DownloadFailed, match="cannot be reached") as caught:
        locate("org/other")
    assert "HF_ENDPOINT" in caught.value.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert locate("org/tiny") == source
    with pytest.raises(DownloadFailed, match="offline"):
        locate("org/other")
    assert server.requests == []


def test_a_disk_that_cannot_hold_it_is_named_before_anything_is_fetched(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1000)
    with pytest.raises(DiskFull, match=r"has no space left: \d+ bytes needed, 1000 free") as caught:
        locate("org/tiny")
    assert (caught.value.folder, caught.value.free_bytes) == (str(tmp_path / "hub"), 1000)
    assert caught.value.needed_bytes > 1000
    assert "HF_HUB_CACHE" in caught.value.hint
    assert fetched_names(server) == set()


def test_a_disk_that_fills_up_meanwhile_leaves_no_half_file(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import file_download

    def fill(url: str, temp_file: Any, **_: Any) -> None:
        temp_file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", fill)
    with pytest.raises(DiskFull, match="no space left"):
        locate("org/tiny")
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and path.read_bytes() == b"half"]


def test_a_download_that_is_interrupted_ends_at_once_and_leaves_no_half_file(
    server: FakeHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_POLL_S", 0.0)

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locate("org/tiny", progress=interrupt)
    assert not list((tmp_path / "hub").rglob("*.incomplete"))
    source = locate("org/tiny")
    assert source.path is not None
    open_checkpoint(source).build_model()


def test_forms() -> None:
    assert parse_id("a/b-c.d@refs/pr/1") == HubId("a/b-c.d", "refs/pr/1")
    for path in (
        "./a/b",
        "../a",
        "a/b/c",
        "/a/b",
        "a",
        "a/b.gguf",
        "pypi:a/b.gguf",
        "a/..",
        "a b/c",
        "~/models",
        "a/b--c",
        "a..b/c",
        "\u00f6/b",
        "-a/b",
        "a/b.",
        "a/b.git",
        "a/" + "b" * 97,
    ):
        assert not looks_like_id(path), path
    check_model("org/tiny@v1", revision="v1")
    with pytest.raises(ConfigError):
        check_model("org/tiny@v1", revision="v2")


def test_a_folder_of_that_name_wins(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, server: FakeHub
) -> None:
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(files.get(name, b""))
    monkeypatch.chdir(tmp_path)
    assert locate("org/tiny").path == Path("org/tiny")
    assert server.requests == []


def test_the_environment_decides_and_nothing_is_imported_without_need(
    server: FakeHub, clean_env: dict[str, str], tmp_path: Path
) -> None:
    """A process of its own: HF_ENDPOINT and HF_HOME are read when huggingface_hub is imported."""
    code = (
        "import sys\n"
        "from sgl.runtime.loading.sources import locate\n"
        "locate('dummy')\n"
        "assert 'huggingface_hub' not in sys.modules and 'torch' not in sys.modules\n"
        "print(locate('org/tiny').path)\n"
    )
    home = tmp_path / "home"
    env = {**clean_env, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(home / "hub")
    env = {**env, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    again = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout
