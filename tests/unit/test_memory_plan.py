"""The memory plan over invented models and machines: it fits or says which one option to change, and that is enough."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl.errors import ConfigError
from sgl.kernels.workspace import GATHERED_SLOTS, decode_attention_bytes, rows_at_once
from sgl.runtime.config import EngineConfig, Facts, config_from_mapping
from sgl.runtime.loading.facts import held_bytes, memory_limits
from sgl.runtime.memory_plan import GiB, MiB, Sizes, plan_memory
from sgl.runtime.resolution import resolve

SMOL = Facts(
    cpu_count=2,
    available_bytes=8 * GiB,
    model_context_len=8192,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    num_parameters=134_515_008,
    largest_tensor=49152 * 576,
    weights_kind="gguf",
)
SIZES = Sizes(
    device="cpu",
    dtype="float32",
    context_len=8192,
    pool_tokens=10_000,
    max_running_requests=64,
    chunked_prefill_size=512,
)


def on(available: int, **changes: object) -> Facts:
    return msgspec.structs.replace(SMOL, available_bytes=available, **changes)


def test_parts_are_what_they_say() -> None:
    plan = plan_memory(SIZES, SMOL)
    assert plan.bytes_of("weights") == 4 * 134_515_008
    assert plan.bytes_of("KV pool") == 10_000 * 2 * 30 * 3 * 64 * 4
    assert plan.bytes_of("loading buffer") == 4 * 49152 * 576
    assert plan.bytes_of("logits") >= 512 * 49152 * 4
    assert all(item.why for item in plan.items)
    assert plan.loading_bytes == sum(plan.bytes_of(name) for name in ("weights", "libraries", "loading buffer"))
    others = ("weights", "libraries", "KV pool", "activations", "attention", "logits")
    assert plan.serving_bytes == plan.needed_bytes == sum(plan.bytes_of(name) for name in others)
    assert plan.fits
    assert "KV pool 439 MiB" in plan.summary()


def test_the_pool_takes_what_is_left_up_to_what_a_cpu_fills() -> None:
    small = resolve(EngineConfig(), on(2 * GiB))
    assert small.memory is not None
    token = small.kv_bytes_per_token
    assert 0.9 * 2 * GiB - token < small.memory.serving_bytes <= 0.9 * 2 * GiB
    assert 10_000 < small.pool_tokens < 64 * 1024 == resolve(EngineConfig(), on(64 * GiB)).pool_tokens
    assert "leaves room for" in {reason.field: reason.why for reason in small.reasons}["max_total_tokens"]


def test_what_is_not_known_does_not_limit() -> None:
    resolved = resolve(EngineConfig(), on(0, available_source="unknown"))
    assert resolved.pool_tokens == 64 * 1024
    assert resolved.memory is not None
    assert "an unknown amount" in resolved.memory.summary()


def test_attention_of_single_tokens_is_bounded_in_slots() -> None:
    assert rows_at_once(8192) * 8192 <= GATHERED_SLOTS
    one, many = (decode_attention_bytes(rows, 8192, 3, 64, 4) for rows in (8, 64))
    assert many - one == 56 * 8192 * 9  # slot numbers and mask; keys and values are gathered for eight at a time


def advice(error: ConfigError) -> tuple[str, str]:
    """The field and the value that a hint says to set."""
    found = re.fullmatch(r"set (\w+) to (.*)", error.hint or "")
    assert found is not None, error.hint
    assert found[1] == error.param
    return found[1], found[2]


@pytest.mark.parametrize(
    ("wish", "available", "field"),
    [
        ({"max_total_tokens": 500_000}, 4 * GiB, "max_total_tokens"),
        ({"chunked_prefill_size": 8192}, 2 * GiB, "chunked_prefill_size"),
        ({"mem_fraction_static": 0.1}, 4 * GiB, "mem_fraction_static"),
        ({}, 1300 * MiB, "chunked_prefill_size"),
        ({"dtype": "float32", "chunked_prefill_size": 32}, 900 * MiB, "dtype"),
        ({}, 300 * MiB, "model_path"),
    ],
)
def test_advice_names_first_what_the_user_set(wish: dict[str, object], available: int, field: str) -> None:
    with pytest.raises(ConfigError, match="available") as caught:
        resolve(EngineConfig(**wish), on(available))
    assert advice(caught.value)[0] == field


machines = st.builds(
    on,
    st.integers(100 * MiB, 64 * GiB),
    num_layers=st.integers(1, 80),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    num_heads=st.sampled_from([8, 24, 64]),
    head_dim=st.sampled_from([64, 128]),
    hidden_size=st.sampled_from([64, 576, 4096]),
    intermediate_size=st.sampled_from([128, 1536, 14336]),
    vocab_size=st.sampled_from([512, 49152, 151_936]),
    num_parameters=st.integers(10**5, 2 * 10**9),
    largest_tensor=st.integers(10**4, 10**8),
    model_context_len=st.sampled_from([512, 8192, 131_072]),
    cuda_bytes=st.sampled_from([0, 0, 8 * GiB, 80 * GiB]),
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "max_total_tokens": st.integers(64, 10**6),
        "mem_fraction_static": st.sampled_from([0.05, 0.4, 0.8]),
        "max_running_requests": st.sampled_from([1, 64, 1000]),
        "chunked_prefill_size": st.sampled_from([16, 512, 16_384]),
        "page_size": st.sampled_from([1, 16, 64]),
        "context_length": st.sampled_from([300, 512]),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    },
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(machines, wishes)
def test_following_the_advice_is_enough(facts: Facts, wish: dict[str, object]) -> None:
    try:
        resolved = resolve(EngineConfig(**wish), facts)
    except ConfigError as error:
        field, value = advice(error)
        if field == "model_path":  # no option is enough: then the amount that it names is
            needed = int(float(re.search(r"needs ([\d.]+) GiB", value)[1]) * GiB)  # type: ignore[index]
            resolved = resolve(
                EngineConfig(**wish),
                msgspec.structs.replace(facts, available_bytes=needed, cuda_bytes=facts.cuda_bytes and needed),
            )
        else:
            typed = int(value) if value.isdigit() else float(value) if value[0] == "0" else value
            resolved = resolve(config_from_mapping({**wish, field: typed}), facts)
    assert resolved.memory is not None
    assert resolved.memory.fits
    assert resolved.num_pages >= 1


# --- what limits this process ---------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root like a container's: 24 GB of machine, of which this process holds 100 MB."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 25000000 kB\nMemAvailable: 24000000 kB\n")
    (tmp_path / "proc/self/status").write_text(
        "Name:\tx\nVmSize:\t 900000 kB\nVmData:\t 200000 kB\nRssAnon:\t 90000 kB\nRssFile:\t 5000 kB\n"
        "RssShmem:\t 10000 kB\n"
    )
    return tmp_path


def limit(tree: Path) -> dict[str, int]:
    return {each.source: each.bytes for each in memory_limits(tree)}


def test_the_machine_alone(tree: Path) -> None:
    assert held_bytes(tree) == 100_000 * 1024
    assert limit(tree) == {"MemAvailable of the machine": 24_100_000 * 1024}


def test_a_container_of_two_gigabytes_in_version_2(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/\n")
    mount = tree / "sys/fs/cgroup"
    mount.mkdir(parents=True)
    (mount / "memory.max").write_text(f"{2 * GiB}\n")
    (mount / "memory.current").write_text(f"{300 * MiB}\n")
    (mount / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MiB}\n")
    found = limit(tree)
    assert found["memory.max of cgroup v2 /"] == 2 * GiB - 200 * MiB + 100_000 * 1024
    available = min(found.values())
    resolved = resolve(EngineConfig(), on(available, available_source="memory.max of cgroup v2 /"))
    assert resolved.dtype == "float32"
    assert resolved.pool_tokens >= 8192
    assert resolved.memory is not None
    assert resolved.memory.needed_bytes < 0.9 * available
    assert "memory.max of cgroup v2 /" in resolved.memory.summary()


def test_version_1_counts_the_groups_above(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("4:memory:/box/inner\n1:cpu:/\n")
    inner = tree / "sys/fs/cgroup/memory/box/inner"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner.parent / "memory.limit_in_bytes").write_text(f"{GiB}\n")
    (inner.parent / "memory.usage_in_bytes").write_text(f"{2 * GiB}\n")
    found = limit(tree)
    assert found == {
        "MemAvailable of the machine": 24_100_000 * 1024,
        "memory.limit_in_bytes of cgroup v1 /memory/box": 100_000 * 1024,  # nothing is left but what is held
    }


def test_resource_limits_count_what_they_count(tree: Path) -> None:
    (tree / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {2 * GiB}           unlimited            bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n"
    )
    found = limit(tree)
    assert found["RLIMIT_DATA"] == 2 * GiB - 200_000 * 1024 - 192 * MiB + 100_000 * 1024
    assert "RLIMIT_AS" not in found
