"""What a decoder layer does to one token at a time, in Triton: norms, rotary embedding with the KV write, activation.

Each is one pass over memory. Statistics are computed in float32 whatever the dtype, as the torch references do. What
other kernels write is read after the wait (`chaining.py`).

Shapes: T tokens, N features, H query heads, K key/value heads, D head size, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels.triton.chaining import chained


@triton.jit
def _rms_norm(x, residual, weight, out, N, eps, BLOCK_N: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """Norm of one row; with `ADD` the row is first added to the residual, which is changed."""
    row = tl.program_id(0).to(tl.int64) * N
    ids = tl.arange(0, BLOCK_N)
    inside = ids < N
    scale = tl.load(weight + ids, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row + ids, mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + row + ids, mask=inside, other=0.0).to(tl.float32)).to(
            values.dtype
        )
        tl.store(residual + row + ids, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / N + eps)
    tl.store(out + row + ids, (normed.to(scale.dtype) * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """As `sgl.kernels.elementwise.rms_norm`."""
    return _normed(x_TN, None, weight_N, eps)


def add_rms_norm(x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to the residual in place; the norm of what it is then."""
    return _normed(x_TN, residual_TN, weight_N, eps)


def _normed(x_TN: torch.Tensor, residual: torch.Tensor | None, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    x_TN = x_TN.contiguous()
    num_tokens, size = x_TN.shape
    out = torch.empty_like(x_TN)
    block = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        x_TN, x_TN if residual is None else residual, weight_N, out, size, eps,
        BLOCK_N=block, ADD=residual is not None, num_warps=max(1, min(16, block // 512)), **chained(x_TN.device),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_and_write(
    qkv,
    cos,
    sin,
    slots,
    query,
    keys,
    values,
    query_norm,
    key_norm,
    eps,
    stride_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one token: queries go to `query`, keys and values to their slot of the pool."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    ids = tl.arange(0, HALF)[None, :]
    is_head = (heads < H + 2 * K)[:, None]
    source = qkv + (token * (H + 2 * K) + heads)[:, None] * (2 * HALF) + ids
    first = tl.load(source, mask=is_head, other=0.0)
    second = tl.load(source + HALF, mask=is_head, other=0.0)
    is_rotated = (heads < H + K)[:, None]
    is_query = (heads < H)[:, None]
    if NORM:
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)[:, None]
        shrink = tl.rsqrt(squares / (2 * HALF) + eps)
        scale = tl.where(is_query, tl.load(query_norm + ids), tl.load(key_norm + ids))
        scaled_first = ((wide_first * shrink).to(scale.dtype) * scale).to(first.dtype)
        first = tl.where(is_rotated, scaled_first, first)
        scale = tl.where(is_query, tl.load(query_norm + HALF + ids), tl.load(key_norm + HALF + ids))
        scaled_second = ((wide_second * shrink).to(scale.dtype) * scale).to(second.dtype)
        second = tl.where(is_rotated, scaled_second, second)
    c = tl.load(cos + token * (2 * HALF) + ids).to(tl.float32)
    s = tl.load(sin + token * (2 * HALF) + ids).to(tl.float32)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    first = tl.where(is_rotated, (a * c - b * s).to(first.dtype), first)
    second = tl.where(is_rotated, (b * c + a * s).to(second.dtype), second)
    slot = tl.load(slots + token).to(tl.int64)
    is_key = is_rotated & (heads >= H)[:, None]
    is_value = is_head & (heads >= H + K)[:, None]
    to_query = query + (token * H + heads)[:, None] * (2 * HALF) + ids
    to_key = keys + slot * stride_slot + (heads - H)[:, None] * (2 * HALF) + ids
    to_value = values + slot * stride_slot + (heads - H - K)[:, None] * (2 * HALF) + ids
    tl.store(to_query, first, mask=is_query)
    tl.store(to_query + HALF, second, mask=is_query)
    tl.store(to_key, first, mask=is_key)
    tl.store(to_key + HALF, second, mask=is_key)
    tl.store(to_value, first, mask=is_value)
    tl.store(to_value + HALF, second, mask=is_value)


def rotate_and_write(
    qkv_TN: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    slots_T: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated queries `[T, H, D]` of packed products `[T, (H + 2 K) D]`; rotated keys, and values, go to their slots.

    Args:
        cos_TD, sin_TD: both halves equal, as for `sgl.kernels.elementwise.rotary`.
        norms: weights `[D]` of the norms of each query head and each key head, which come before the rotation.
    """
    num_tokens = qkv_TN.shape[0]
    _, K, D = keys_SKD.shape
    query = torch.empty(num_tokens, num_heads, D, dtype=qkv_TN.dtype, device=qkv_TN.device)
    block = 16
    _rotate_and_write[(num_tokens, triton.cdiv(num_heads + 2 * K, block))](
        qkv_TN, cos_TD, sin_TD, slots_T, query, keys_SKD, values_SKD, *(norms or (qkv_TN, qkv_TN)), eps,
        keys_SKD.stride(0), H=num_heads, K=K, HALF=D // 2, BLOCK_H=block, NORM=norms is not None, num_warps=4,
        **chained(qkv_TN.device),
    )  # fmt: skip
    return query


@triton.jit
def _silu_mul(gate_up, out, N, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = ids < N
    gate = tl.load(gate_up + token * 2 * N + ids, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * N + N + ids, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + token * N + ids, activated * up, mask=inside)


def silu_mul_packed(gate_up_TN: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of packed products `[T, 2 N]`: `[T, N]`."""
    num_tokens, packed = gate_up_TN.shape
    size = packed // 2
    out = torch.empty(num_tokens, size, dtype=gate_up_TN.dtype, device=gate_up_TN.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[(num_tokens, triton.cdiv(size, block))](
        gate_up_TN, out, size, BLOCK_N=block, num_warps=4, **chained(gate_up_TN.device)
    )  # fmt: skip
    return out
