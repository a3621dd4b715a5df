"""`sgl doctor`: what this machine has, what would run on it, and why.

Owns the `Report` and how it is gathered. Reads the machine and the model cache; starts no engine and downloads nothing.
A model that cannot be used is reported, not raised. Imports torch, so the command line imports this on demand.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl import environment, limits
from sgl.errors import DownloadFailed, ErrorInfo, SglError
from sgl.kernels import registry
from sgl.kernels.native import library
from sgl.runtime.config import EngineConfig, ResolvedConfig, config_from_mapping, limits_of
from sgl.runtime.encoder_start import ResolvedEncoder, find_machine, resolve_encoder
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.encoder_checkpoint import encoder_checkpoint
from sgl.runtime.loading.facts import available_bytes, cpu_count, memory_limits, native_folder
from sgl.runtime.loading.sources import CachedModel, cache_folder, cached_models, locate
from sgl.runtime.memory_plan import MemoryLimit
from sgl.runtime.models.encoder_config import EncoderConfig
from sgl.runtime.models.registry import ModelConfig, architectures
from sgl.runtime.resolution import resolve

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "jinja2",
    "msgspec",
    "pyzmq",
    "triton",
    "flashinfer-python",
)
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Instruction sets that numerics can use, x86-64 and arm64; the rest of the list would be noise."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The host as this process sees it: control groups and the affinity mask count."""

    system: str
    cpu: str
    cpu_flags: tuple[str, ...]
    usable_cpus: int
    memory_bytes: int
    available_bytes: int
    memory_limits: tuple[MemoryLimit, ...]
    gpus: tuple[str, ...]
    torch_threads: int


class NativeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The native CPU kernels: what they are built with and where they lie; `obstacle` says why they cannot be built,
    `build_s` how long it took just now."""

    instruction_set: str = ""
    compiler: str = ""
    path: str = ""
    built: bool = False
    build_s: float = 0.0
    obstacle: str = ""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model: whether it is here, and what an engine on it would run with; an encoder has `encoder` and `runs` in
    place of `config` and `resolved`. `error` says why it would not start."""

    model: str
    local: bool
    path: str | None = None
    config: ModelConfig | None = None
    resolved: ResolvedConfig | None = None
    encoder: EncoderConfig | None = None
    runs: ResolvedEncoder | None = None
    error: ErrorInfo | None = None


class Limit(msgspec.Struct, frozen=True):
    """One bound on a request; `option` says whether an engine can be given another one."""

    name: str
    value: int | float
    meaning: str
    option: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `sgl doctor` prints."""

    sgl: str
    location: str
    python: str
    executable: str
    packages: dict[str, str | None]
    machine: Machine
    cache_folder: str
    cached_models: tuple[CachedModel, ...]
    architectures: tuple[str, ...]
    native: NativeReport
    kernels: tuple[registry.Choice, ...]
    model: ModelReport
    environment: tuple[environment.Variable, ...]
    unknown_variables: tuple[tuple[str, str | None], ...]
    limits: tuple[Limit, ...]


def examine(fields: Mapping[str, Any], *, build: bool = False) -> Report:
    """The report for an engine with these options.

    Args:
        fields: as for `EngineConfig`; the environment adds those that are not given.
        build: compile the native kernels if that has not been done.

    Raises:
        ConfigError: unknown or invalid options.
    """
    fields = environment.with_environment(fields, EngineConfig)
    bounds = limits_of(config_from_mapping(fields))
    model = examine_model(fields)
    return Report(
        sgl=sgl.__version__,
        location=str(Path(sgl.__file__).parent),
        python=platform.python_version(),
        executable=sys.executable,
        packages={name: _version(name) for name in PACKAGES},
        machine=machine(),
        cache_folder=str(cache_folder()),
        cached_models=tuple(cached_models()),
        architectures=tuple(sorted(architectures())),
        native=examine_native(build=build),
        kernels=tuple(registry.explain(_op_facts(model))),
        model=model,
        environment=environment.table(EngineConfig),
        unknown_variables=environment.unknown_variables(EngineConfig),
        limits=tuple(
            Limit(name, getattr(bounds, name), meaning, name in limits.ENGINE_LIMITS)
            for name, _, meaning in limits.describe()
        ),
    )


def examine_model(fields: Mapping[str, Any]) -> ModelReport:
    """What `resolve` decides for the model, if its files are here."""
    wish = config_from_mapping(fields)
    try:
        source = locate(wish.model_path, load_format=wish.load_format, offline=True, revision=wish.revision)
    except DownloadFailed:
        return ModelReport(model=wish.model_path, local=False)
    except SglError as error:
        return ModelReport(model=wish.model_path, local=False, error=error.to_info())
    path = None if source.path is None else str(source.path)
    try:
        if (found := encoder_checkpoint(source)) is not None:
            found.tokenizer()  # which may be missing, or one that is not read
            runs = resolve_encoder(wish, found.config, found.num_parameters(), find_machine())
            return ModelReport(model=wish.model_path, local=True, path=path, encoder=found.config, runs=runs)
        checkpoint = open_checkpoint(source, wish.json_model_override_args, wish.model_impl)
        resolved = resolve(wish, checkpoint.facts())
        checkpoint.check(deterministic=resolved.deterministic, context_len=resolved.context_len)
    except SglError as error:
        return ModelReport(model=wish.model_path, local=True, path=path, error=error.to_info())
    return ModelReport(model=wish.model_path, local=True, path=path, config=checkpoint.config, resolved=resolved)


def examine_native(*, build: bool = False) -> NativeReport:
    """The native kernels of this machine, built now if `build` says so."""
    try:
        plan = library.plan(native_folder())
        seconds = library.build(plan) if build else 0.0
    except library.NativeUnavailable as reason:
        return NativeReport(obstacle=str(reason))
    return NativeReport(
        instruction_set=plan.instruction_set,
        compiler=plan.compiler,
        path=plan.path,
        built=plan.done,
        build_s=round(seconds, 2),
    )


def machine() -> Machine:
    """This host, from `/proc`, control groups and torch."""
    import torch

    cpu = _fields(Path("/proc/cpuinfo"))
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu.get("model name") or platform.processor() or "unknown",
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        usable_cpus=cpu_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_bytes(),
        memory_limits=memory_limits(),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        torch_threads=torch.get_num_threads(),
    )


def _op_facts(model: ModelReport) -> registry.OpFacts:
    """What the kernels would be chosen by; plain defaults when the model is not here to ask."""
    if model.resolved is None or model.config is None:
        return registry.OpFacts()
    config = msgspec.structs.replace(model.config, context_len=model.resolved.context_len)
    return registry.OpFacts(
        device=model.resolved.device,
        dtype=model.resolved.dtype,
        head_dim=config.head_dim,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        page_size=model.resolved.page_size,
        window=config.longest_window,
        softcap=config.attention_softcap,
        deterministic=model.resolved.deterministic,
        native=model.resolved.kernels == "native",
        triton=model.resolved.kernels == "triton",
    )


def _fields(path: Path) -> dict[str, str]:
    """The first `name : value` of each name in a file of `/proc`; empty where there is no such file."""
    found: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
