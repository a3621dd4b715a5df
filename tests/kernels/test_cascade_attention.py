"""The torch reference of attention with common prefixes against float64, one query at a time, and who has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl.kernels import registry
from sgl.kernels.attention import plan_attention
from sgl.kernels.prefix_groups import PrefixGroup
from sgl.kernels.registry import OpFacts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("equal", [True, False])
def test_groups_rows_alone_and_a_chunk(dtype: torch.dtype, tolerance: float, equal: bool) -> None:
    """Two groups of rows, equally long and not, a row in none, and a chunk."""
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, dim, prefix = 6, 2, 16, 40
    ends = [60] * 6 if equal else [45, 70, 3, 41, 90, 66]
    # Rows 0, 3, 5 begin alike, and rows 1, 4; then a chunk of four tokens.
    leaders = {3: 0, 5: 0, 4: 1}
    tables = [np.arange(100, dtype=np.int32)[: end + 4] + 100 * i for i, end in enumerate([*ends, 9])]
    for row, leader in leaders.items():
        tables[row] = np.concatenate([tables[leader][:prefix], tables[row][prefix:]])
    keys, values = (torch.randn(800, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(10, heads, dim, generator=generator).to(dtype)
    groups = [PrefixGroup((0, 3, 5), prefix), PrefixGroup((1, 4), prefix)]
    plan = plan_attention([*(end - 1 for end in ends), 9], [*[1] * 6, 4], tables, 1, groups=groups)
    got = registry.get("cascade_attention")(query, keys, values, plan, dim**-0.5)
    assert got.dtype == dtype
    contexts = [
        *((table, end) for table, end in zip(tables, ends, strict=False)),
        *((tables[6], 10 + i) for i in range(4)),
    ]
    for row, (table, end) in enumerate(contexts):
        slots = torch.from_numpy(table[:end].astype(np.int64))
        key, value = keys[slots].double(), values[slots].double()
        scores = torch.einsum("kgd,lkd->kgl", query[row].double().view(kv_heads, -1, dim), key) * dim**-0.5
        expected = torch.einsum("kgl,lkd->kgd", scores.softmax(dim=-1), value).reshape(heads, dim)
        assert (got[row].double() - expected).norm() < tolerance * expected.norm()


def test_who_has_it() -> None:
    def choice(**facts: object) -> registry.Choice:
        return next(choice for choice in registry.explain(OpFacts(**facts)) if choice.op == "cascade_attention")

    assert choice(device="cuda", triton=True).chosen == "triton"
    windowed = choice(device="cuda", triton=True, window=100)
    assert windowed.chosen == "torch"
    assert "layers of this model at 100 tokens" in dict(windowed.rejected)["triton"]
