"""The tensors of a checkpoint, one after another: of safetensors files, of a GGUF file, or random ones.

Owns the streaming: a few tensors at a time are in memory, so that the peak while loading is the model plus its largest
tensors in float32. Names are the checkpoint's own. Called by `checkpoint`; importing it imports no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.kernels.native.types import TYPES, packed_bytes
from sgl.runtime.loading.folder import json_object, model_file
from sgl.runtime.loading.gguf_config import GGUF_ROPE_TENSORS
from sgl.runtime.loading.gguf_reader import GGUFFile, TensorInfo
from sgl.runtime.loading.quantized import WeightScheme, dequantized, is_calibration, parts_beside

if TYPE_CHECKING:
    import torch

    from sgl.runtime.loading.placing import Blocks

_DUMMY_SEED = 20250101
_DUMMY_DRAWN = 2**21 - 9
"""Numbers drawn for one matrix at most; no multiple of a row's length, so that rows differ."""
_INDEX = "model.safetensors.index.json"
_WEIGHT_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "torch.float64")
"""Types of numbers that mean what they say; an integer or an 8-bit float would need scales that are not there."""
_DECODE_THREADS = 2


def dummy_tensors(expected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, the same on every machine and in every run: norms of ones, matrices of unit gain. A large matrix
    repeats its first numbers: a model of billions would take minutes to draw."""
    import torch

    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    for name, shape in sorted(expected.items()):
        if len(shape) == 1:
            yield name, torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
            continue
        size = math.prod(shape)
        drawn = torch.randn(min(size, _DUMMY_DRAWN), generator=generator) * shape[-1] ** -0.5
        yield name, drawn.repeat(-(-size // len(drawn)))[:size].view(shape)


def gguf_tensors(
    file: GGUFFile, names: Collection[str], *, keep_blocks: bool
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """All tensors of a GGUF file that are weights.

    Args:
        names: of those that the model has; others come as they are, to be complained about.
        keep_blocks: do not expand what the native kernels multiply as it is.
    """
    import torch

    from sgl.runtime.loading.placing import Blocks

    file.read_ahead()
    weights = [name for name in file.tensors if name not in GGUF_ROPE_TENSORS]
    kept = [name for name in weights if keep_blocks and name in names and can_be_kept(file.tensors[name])]
    for name in kept:
        info = file.tensors[name]
        yield name, Blocks(file.rows(name), info.type_name, info.shape)
    expanded = set(weights) - set(kept)
    for name, values in _decoded(file, [name for name in weights if name in expanded]):
        yield name, torch.from_numpy(values)


def can_be_kept(info: TensorInfo) -> bool:
    """Whether the native kernels multiply a tensor as the file has it: matrices of a type that they know."""
    return len(info.shape) > 1 and info.type_name in TYPES


def kept_bytes(info: TensorInfo) -> int:
    """What a tensor of a GGUF file takes for the native kernels; what they do not know becomes bfloat16."""
    if len(info.shape) == 1:
        return 4 * math.prod(info.shape)
    *matrices, rows, cols = info.shape
    return math.prod(matrices) * packed_bytes(info.type_name if can_be_kept(info) else "BF16", rows, cols)


def _decoded(file: GGUFFile, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Tensors in order, decoded by a few threads ahead of their use: numpy works without the interpreter's lock, and
    half of the time is the system's, handing out memory. What is decoded and not yet taken is never more than the
    largest tensor, as the memory plan says."""
    sizes = {name: math.prod(file.tensors[name].shape) for name in names}
    room = max(sizes.values(), default=0)
    with ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="sgl-decode") as pool:
        waiting = deque(names)
        ahead: deque[tuple[str, Future[Any]]] = deque()
        held = 0
        while waiting or ahead:
            while waiting and (not held or held + sizes[waiting[0]] <= room):
                held += sizes[waiting[0]]
                ahead.append((waiting[0], pool.submit(file.load, waiting.popleft())))
            name, values = ahead.popleft()
            yield name, values.result()
            held -= sizes[name]


def safetensors_tensors(
    folder: Path, scheme: WeightScheme | None = None, left_out: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder, mapped: nobody may keep one without copying it.

    Args:
        scheme: how quantized matrices are stored; they come as numbers in float32, under the name of a plain one.
        left_out: names of tensors that are not wanted, whatever they hold.

    Raises:
        CorruptModel: a file is damaged or missing, or a matrix's parts do not fit each other.
        UnsupportedModel: numbers of a type that needs scales, and no scheme says which.
    """
    from safetensors import SafetensorError, safe_open

    path = folder
    try:
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for path in _weight_files(folder):
                file = stack.enter_context(safe_open(path, framework="pt"))
                if twice := files.keys() & file.keys():
                    raise CorruptModel(
                        f"{path} has unexpected tensors, which another file has too: {min(twice)}",
                        hint="fetch the folder again",
                    )
                files.update(dict.fromkeys(file.keys(), file))
            done: set[str] = set()
            for name, file in files.items():
                # Frequencies were written by old converters, and are computed here.
                if name in done or name.endswith(".rotary_emb.inv_freq") or left_out(name):
                    continue
                if scheme is not None and is_calibration(name):
                    continue
                if scheme is not None and (parts := parts_beside(name, files)):
                    done.update(parts.values())
                    tensors = {part: files[its_name].get_tensor(its_name) for part, its_name in parts.items()}
                    stem = name.rpartition(".")[0]
                    yield f"{stem}.weight", dequantized(scheme, stem, tensors)
                    continue
                yield name, _plain(name, file.get_tensor(name), folder)
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{path} cannot be read: {error}", hint="fetch the file again") from None


def _plain(name: str, tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    if str(tensor.dtype) not in _WEIGHT_DTYPES:
        raise UnsupportedModel(
            f"tensor {name} of {folder} is of type {tensor.dtype}",
            hint="use weights of type bfloat16, float16 or float32, or a GGUF file",
        )
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    """Files of the index, else `model.safetensors`, else all there are; each is one of the folder's own."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if model_file(folder, _INDEX) is not None:
        weight_map = json_object(folder, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptModel(f"{folder / _INDEX} has no weight_map", hint="fetch the file again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise CorruptModel(
                    f"{folder / _INDEX} names the file {name!r}", hint="shards lie beside their index, as *.safetensors"
                )
        names = sorted(set(weight_map.values()))
    elif "model.safetensors" in names:
        names = ["model.safetensors"]
    files = []
    for name in names:
        path = model_file(folder, name)
        if path is None:
            raise CorruptModel(f"{folder / name} is missing, and {_INDEX} names it", hint="fetch the folder again")
        files.append(path)
    return files
