"""Models of a Hugging Face hub (`ORG/NAME`, `ORG/NAME@REVISION`), through huggingface-hub and its own cache.

A repository is fetched file by file into the cache that other programs of this user share (`HF_HOME`, `HF_HUB_CACHE`);
`HF_ENDPOINT`, `HF_TOKEN` and proxies are huggingface-hub's. Only configuration, tokenizer and safetensors of the
repository's root are fetched: no code, no pickles.

A branch or tag is looked up at each start, so that a repository's new state is seen; a commit that is here needs no
look. Without a network, what is here is used, with a line in the log. `offline` or `HF_HUB_OFFLINE` never looks.

The download runs in a thread, so that Ctrl-C ends it after at most one chunk and no half file stays. Called by
`sources`; huggingface-hub is imported when a hub id is first used.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from sgl.errors import AccessDenied, ConfigError, DownloadFailed, ModelNotFound, UnsupportedModel
from sgl.runtime.loading.cache import Progress, check_space, unwritable

_NAME = r"(?!\S*(--|\.\.))[A-Za-z0-9_]([\w.-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII)
"""As the hub itself has it: no `--` and no `..`, and a name begins and ends with a letter, a digit or `_`."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_POLL_S = 0.2
_CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_Pooling/config.json",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_IGNORED = ("*/*.safetensors", "*/*.safetensors.index.json", "consolidated*")
"""Other copies of the same weights, in folders or in their makers' own form."""
_CACHE_VARIABLE = "HF_HUB_CACHE"

log = logging.getLogger("sgl.loading")


class HubId(msgspec.Struct, frozen=True):
    """A repository, and the branch, tag or commit of it that is wanted; empty means its main branch."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def looks_like_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, and not that of a file's path."""
    return _ID.fullmatch(text) is not None and not text.endswith((".gguf", ".safetensors", ".json", ".git"))


def parse_id(text: str, revision: str | None = None) -> HubId:
    """The repository that `text` names, at `revision` where that is given.

    Raises:
        ConfigError: both name a revision, and not the same.

    Example:
        >>> parse_id("org/name@v1.0")
        HubId(repository='org/name', revision='v1.0')
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise ModelNotFound(f"{text!r} is no hub id", hint="a hub id is ORG/NAME or ORG/NAME@REVISION")
    own = match["revision"] or ""
    if revision and own and revision != own:
        raise ConfigError(
            f"model_path says revision {own!r}, and revision says {revision!r}",
            hint="leave out one of them",
            param="revision",
        )
    return HubId(match["repository"], revision or own)


def fetched(wanted: HubId, *, weights: bool = True, offline: bool = False, progress: Progress | None = None) -> Path:
    """The folder of a repository's files, fetched where they are not here.

    Args:
        weights: also the safetensors, not only configuration and tokenizer.
        offline: use what is in the cache, never the network.
        progress: called from this thread while bytes arrive.

    Raises:
        ModelNotFound: no such repository or revision, or a private one.
        AccessDenied: a gated repository.
        UnsupportedModel: it has no safetensors or no config.json.
        DownloadFailed: no network and not cached; the hub failed; the cache cannot be written (`DiskFull` if
            it is full).
    """
    import huggingface_hub
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    offline = offline or huggingface_hub.is_offline_mode()
    if offline or _COMMIT.fullmatch(wanted.revision):
        here = _cached(wanted, weights)
        if here is not None:
            return here
        if offline:
            raise DownloadFailed(
                f"{wanted} is not in the hub's cache {cache}, and offline is set",
                hint=f"run `sgl pull {wanted}` once with a network, or point HF_HOME at a cache that has it",
            )
    try:
        with _typed_errors(wanted):
            needed = _missing_bytes(wanted, weights, cache)
            check_space(cache, needed, _CACHE_VARIABLE)
            return _download(wanted, weights, needed, progress)
    except _Unreachable as unreachable:
        here = _cached(wanted, weights)
        if here is None:
            raise DownloadFailed(
                f"{wanted} is not in the hub's cache {cache}, and the hub {constants.ENDPOINT} cannot be reached: "
                f"{unreachable}",
                hint="check the network, the proxy and HF_ENDPOINT, then try again",
            ) from None
        log.warning("the hub %s cannot be reached; using what is here of %s", constants.ENDPOINT, wanted)
        return here
    except OSError as error:
        raise unwritable(cache, error, None, _CACHE_VARIABLE) from error
    finally:
        huggingface_hub.close_session()  # its connections would stay open as long as the worker lives


def _patterns(weights: bool) -> list[str]:
    return [*_CONFIG_FILES, *(_WEIGHT_FILES if weights else ())]


def _cached(wanted: HubId, weights: bool) -> Path | None:
    """The folder in the cache, if it is complete as far as huggingface-hub can tell and has what a model needs."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                wanted.repository,
                revision=wanted.revision or None,
                local_files_only=True,
                allow_patterns=_patterns(weights),
                ignore_patterns=list(_IGNORED),
            )
        )
    except LocalEntryNotFoundError:
        return None
    complete = (folder / "config.json").is_file() and (not weights or any(folder.glob("*.safetensors")))
    return folder if complete else None


def _missing_bytes(wanted: HubId, weights: bool, cache: Path) -> int:
    """Ask the hub what the repository holds; the bytes of it that are wanted and not in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(wanted.repository, revision=wanted.revision or None, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    names = list(filter_repo_objects(files, allow_patterns=_patterns(weights), ignore_patterns=list(_IGNORED)))
    if "config.json" not in names or (weights and not any(name.endswith(".safetensors") for name in names)):
        lacking = "config.json" if "config.json" not in names else "*.safetensors file"
        others = sorted(name for name in files if name.endswith((".gguf", ".bin", ".pt", ".pth")))
        raise UnsupportedModel(
            f"{wanted} has no {lacking}" + (f", only {', '.join(others[:3])}" if others else ""),
            hint="name a repository with safetensors, or download its .gguf file and give the path of that",
        )
    snapshot = cache / repo_folder_name(repo_id=wanted.repository, repo_type="model") / "snapshots" / (info.sha or "")
    return sum(files[name].size or 0 for name in names if not (snapshot / name).exists())


def _download(wanted: HubId, weights: bool, needed: int, progress: Progress | None) -> Path:
    """Fetch what is missing, in a thread that this one can stop."""
    from huggingface_hub import snapshot_download

    counter = _counter()
    outcome: list[str | BaseException] = []

    def fetch() -> None:
        try:
            outcome.append(
                snapshot_download(
                    wanted.repository,
                    revision=wanted.revision or None,
                    allow_patterns=_patterns(weights),
                    ignore_patterns=list(_IGNORED),
                    tqdm_class=counter,
                )
            )
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=fetch, name="sgl-hub", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if progress is not None:
                progress(min(counter.done, needed), needed)
    except BaseException:
        counter.stopped = True
        thread.join()
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return Path(outcome[0])


def _counter() -> Any:
    """A class that huggingface-hub takes for its progress bars: silent, counts bytes, and ends a download at will."""
    from huggingface_hub.utils import tqdm

    class Counter(tqdm):  # type: ignore[misc]
        done = 0
        """Bytes of the bar that is furthest: some versions show the same bytes in two."""
        stopped = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = 0
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if Counter.stopped:
                raise InterruptedError("the download was stopped")
            if self._counts_bytes:
                self._bytes += int(n or 0)
                Counter.done = max(Counter.done, self._bytes)
            return None

    return Counter


class _Unreachable(Exception):
    """The hub did not answer, or not as a hub does."""


@contextmanager
def _typed_errors(wanted: HubId) -> Iterator[None]:
    """huggingface-hub's errors as ours; `_Unreachable` for what may pass."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:  # before RepositoryNotFoundError, of which it is one
        raise AccessDenied(
            f"{wanted} is gated: its owner wants its terms accepted",
            hint=f"accept them at {constants.ENDPOINT}/{wanted.repository} and set HF_TOKEN to a token of that account",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"there is neither a folder nor a hub repository {wanted.repository!r}",
            hint="check the spelling; for a private repository set HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(
            f"{wanted.repository} has no revision {wanted.revision!r}", hint="name a branch, a tag or a commit of it"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise _Unreachable(_first_line(error)) from None
    except errors.HfHubHTTPError as error:
        _raise_status(wanted, error)
    except errors.HTTPError as error:  # of the transport: httpx, in whichever version
        raise _Unreachable(_first_line(error)) from None
    except (TimeoutError, ConnectionError, RuntimeError) as error:  # the last: of hf_xet, whatever went wrong
        raise _Unreachable(_first_line(error)) from None


def _raise_status(wanted: HubId, error: Any) -> NoReturn:
    status = getattr(error.response, "status_code", 0)
    if status in (401, 403):
        raise AccessDenied(
            f"the hub refuses {wanted} ({status})", hint="set HF_TOKEN to a token that may read it"
        ) from None
    raise _Unreachable(_first_line(error)) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
