"""The functions of `sketchssm.serving.inputs` and `Followed.write` on a GPU, one launch for each.

Arrays may have any distance from row to row; each row is contiguous.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sketchssm import cuda

_kernels: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


def _of(heads: int, dim: int, *typed: torch.Tensor) -> tuple[Any, AbstractContextManager[Any]]:
    """Kernels for a shape and the types of some tensors, and the context of PyTorch's current stream.

    The tensors stand for activations, raw gates, rates and biases.
    """
    device = typed[0].get_device()
    key = device, heads, dim, *(x.dtype for x in typed)
    found = _kernels.get(key)
    if found is None:
        types = tuple(str(x.dtype).removeprefix("torch.") for x in typed)
        with _lock:
            found = _kernels.setdefault(key, cuda.load_layer_inputs(device, heads, dim, types))
    kernels, stream = found
    return kernels, stream()


def _row_address(x: torch.Tensor) -> tuple[int, int]:
    """Address, and elements from row to row, of an array with contiguous rows."""
    if x.shape[0] and not x[0].is_contiguous():
        raise ValueError(f"expected rows that are contiguous, got strides {x.stride()} of shape {tuple(x.shape)}")
    return x.data_ptr(), x.stride(0)


def mamba_inputs(
    x: torch.Tensor, dt: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.serving.inputs.mamba_inputs`."""
    rows, heads, dim = x.shape
    v = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g = torch.empty(dt.shape, dtype=torch.float32, device=x.device)
    kernels, stream = _of(heads, dim, x, dt, rate, bias)
    with stream:
        addresses = (y.data_ptr() for y in (rate, bias, v, g))
        kernels.mamba_inputs(rows, *_row_address(x), *_row_address(dt), *addresses)
    return v, g


def add_skip(out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor) -> None:
    """See `sketchssm.serving.inputs.add_skip`."""
    rows, heads, dim = x.shape
    kernels, stream = _of(heads, dim, x, skip, skip, skip)
    with stream:
        kernels.add_skip(rows, *_row_address(out), *_row_address(x), skip.data_ptr())


def normalised(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.serving.inputs.normalised`."""
    rows, heads, dim = q.shape
    units = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    kernels, stream = _of(heads, dim, q, q, q, q)
    with stream:
        kernels.normalised(rows, *_row_address(q), *_row_address(k), *(x.data_ptr() for x in units))
    return units[0], units[1]


def delta_inputs(
    a: torch.Tensor, b: torch.Tensor, rate_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sketchssm.serving.inputs.delta_inputs`."""
    rows, heads = a.shape
    g, beta = (torch.empty(rows, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    kernels, stream = _of(heads, 32, a, a, rate_log, bias)
    with stream:
        addresses = (y.data_ptr() for y in (rate_log, bias, g, beta))
        kernels.delta_inputs(rows, *_row_address(a), *_row_address(b), *addresses)
    return g, beta


def write_tape(
    tape: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor | None],
    sources: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """See `sketchssm.serving.following.Followed.write`. The last place is not written."""
    given = [x for x in tokens if x is not None]
    q, _, v, g = given[:4]
    if any(x.dtype != tape[0].dtype for x in given[:3]):
        raise ValueError(f"expected q, k and v of the tape's type {tape[0].dtype}, got {[x.dtype for x in given[:3]]}")
    arrays = [number for x, to in zip(given, tape, strict=True) for number in (*_row_address(x), to.data_ptr())]
    arrays += [0] * (15 - len(arrays))
    keys, gates, betas = q.shape[1:].numel(), g.shape[1:].numel(), v.shape[1] * (len(given) - 4)
    kernels, stream = _of(*v.shape[1:], q, g, given[-1], g)
    with stream:
        kernels.write_tape(
            len(sources), keys, gates, betas, sources.data_ptr(), places.data_ptr(), len(tape[0]) - 1, *arrays
        )
