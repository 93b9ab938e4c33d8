"""Triton kernels of `sketchssm.vllm.inputs`.

Arrays may have any distance from row to row; within a row they are dense. Each program takes a few heads of a row.
Row counts and strides change from call to call, so no kernel is specialised on them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_skip", "delta_inputs", "mamba_inputs", "normalised"]

HEADS_PER_PROGRAM = 8


@triton.jit
def _softplus(x):
    """Accurate also where the exponential is small beside one."""
    power = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + power
    rounded = tl.where(more == 1.0, 1.0, more - 1.0)
    return tl.where(x > 20.0, x, tl.where(more == 1.0, power, tl.log(more) * (power / rounded)))


@triton.jit(do_not_specialize=["x_row", "dt_row"])
def _mamba(
    x, dt, rate, bias, v, g, x_row, dt_row, HEADS: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = head < HEADS
    raw = tl.load(dt + row * dt_row + head, mask=inside, other=0.0).to(tl.float32)
    raw += tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    step = _softplus(raw)
    decay = tl.load(rate + head, mask=inside, other=0.0).to(tl.float32) * step
    tl.store(g + row * HEADS + head, decay, mask=inside)
    channel = tl.arange(0, BV)
    place = head[:, None] * V + channel[None, :]
    both = inside[:, None] & (channel < V)[None, :]
    value = tl.load(x + row * x_row + place, mask=both, other=0.0).to(tl.float32) * step[:, None]
    tl.store(v + row * (HEADS * V) + place, value.to(v.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["out_row", "x_row"])
def _skip(out, x, skip, out_row, x_row, HEADS: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel = tl.arange(0, BV)
    place = head[:, None] * V + channel[None, :]
    both = (head < HEADS)[:, None] & (channel < V)[None, :]
    factor = tl.load(skip + head, mask=head < HEADS, other=0.0).to(tl.float32)
    have = tl.load(out + row * out_row + place, mask=both, other=0.0).to(tl.float32)
    more = tl.load(x + row * x_row + place, mask=both, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(out + row * out_row + place, (have + more).to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["q_row", "k_row"])
def _normalise(
    q, k, unit_q, unit_k, q_row, k_row, scale, HEADS: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel = tl.arange(0, BK)
    place = head[:, None] * K + channel[None, :]
    both = (head < HEADS)[:, None] & (channel < K)[None, :]
    query = tl.load(q + row * q_row + place, mask=both, other=0.0).to(tl.float32)
    query *= (scale * tl.rsqrt(tl.sum(query * query, 1) + 1e-6))[:, None]
    tl.store(unit_q + row * (HEADS * K) + place, query.to(unit_q.dtype.element_ty), mask=both)
    key = tl.load(k + row * k_row + place, mask=both, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
    tl.store(unit_k + row * (HEADS * K) + place, key.to(unit_k.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["a_row", "b_row"])
def _gates(a, b, rate_log, bias, g, beta, a_row, b_row, HEADS: tl.constexpr, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    inside = head < HEADS
    raw = tl.load(a + row * a_row + head, mask=inside, other=0.0).to(tl.float32)
    raw += tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    step = _softplus(raw)
    decay = -tl.exp(tl.load(rate_log + head, mask=inside, other=0.0).to(tl.float32)) * step
    tl.store(g + row * HEADS + head, decay, mask=inside)
    write = tl.load(b + row * b_row + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + row * HEADS + head, tl.sigmoid(write), mask=inside)


def _grid(x: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and block sizes for an array ``(tokens, heads, dim)``."""
    tokens, heads, dim = x.shape
    blocks = {"HEADS": heads, "BH": HEADS_PER_PROGRAM}
    return (tokens, triton.cdiv(heads, HEADS_PER_PROGRAM)), blocks | {"D": dim, "BD": triton.next_power_of_2(dim)}


def mamba_inputs(
    x: torch.Tensor, dt: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.vllm.inputs.mamba_inputs`."""
    grid, size = _grid(x)
    v = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g = torch.empty(dt.shape, dtype=torch.float32, device=x.device)
    _mamba[grid](x, dt, rate, bias, v, g, x.stride(0), dt.stride(0), size["HEADS"], size["D"], size["BH"], size["BD"])
    return v, g


def add_skip(out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor) -> None:
    """See `sketchssm.vllm.inputs.add_skip`."""
    grid, size = _grid(x)
    _skip[grid](out, x, skip, out.stride(0), x.stride(0), size["HEADS"], size["D"], size["BH"], size["BD"])


def normalised(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.vllm.inputs.normalised`."""
    grid, size = _grid(q)
    units = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    strides = q.stride(0), k.stride(0)
    _normalise[grid](q, k, *units, *strides, size["D"] ** -0.5, size["HEADS"], size["D"], size["BH"], size["BD"])
    return units[0], units[1]


def delta_inputs(
    a: torch.Tensor, b: torch.Tensor, rate_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.vllm.inputs.delta_inputs`."""
    tokens, heads = a.shape
    gates = [torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2)]
    _gates[tokens,](a, b, rate_log, bias, *gates, a.stride(0), b.stride(0), heads, triton.next_power_of_2(heads))
    return gates[0], gates[1]
