"""From the activations of an engine's layers to the inputs of heads, in PyTorch; on a GPU, one kernel each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sketchssm.arrays.gates import GateInput
from sketchssm.serving.batches import on_device

EPSILON = 1e-6
"""Added to the squared norms of queries and keys, as in the engines' kernels."""


def mamba_inputs(
    x: torch.Tensor, dt: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and log-decays of mamba2: ``v = step x`` and ``g = rate step`` with ``step = softplus(dt + bias)``.

    Inputs behind the convolution `x (tokens, heads, V)`, raw steps `dt (tokens, heads)`, rates of decay (negative) and
    bias ``(heads,)`` give v of x's type and g in float32.
    """
    if x.is_cuda:
        from sketchssm.serving import kernels

        return kernels.mamba_inputs(x, dt, rate, bias)
    step = F.softplus(dt.float() + bias.float())
    return (step[..., None] * x.float()).to(x.dtype), rate.float() * step


def add_skip(out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor) -> None:
    """Add ``skip x``, with the layer's D, to the outputs ``(tokens, heads, V)`` of mamba2, in place."""
    if x.is_cuda:
        from sketchssm.serving import kernels

        kernels.add_skip(out, x, skip)
        return
    out.copy_((out.float() + skip.float()[:, None] * x.float()).to(out.dtype))


def normalised(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``(tokens, heads, K)`` of norm one, queries divided by the root of K."""
    if q.is_cuda:
        from sketchssm.serving import kernels

        return kernels.normalised(q, k)
    wide = (x.float() for x in (q, k))
    unit, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in wide)
    return (unit * q.shape[-1] ** -0.5).to(q.dtype), key.to(k.dtype)


def delta_inputs(
    a: torch.Tensor, b: torch.Tensor, rate_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decays and write gates of gdn: ``g = -exp(rate_log) softplus(a + bias)``, ``beta = sigmoid(b)``.

    Raw gates `a, b (tokens, heads)`, the layer's A_log and dt_bias ``(heads,)``; results are in float32.
    """
    if a.is_cuda:
        from sketchssm.serving import kernels

        return kernels.delta_inputs(a, b, rate_log, bias)
    return -rate_log.float().exp() * F.softplus(a.float() + bias.float()), b.float().sigmoid()


def write_gates(b: torch.Tensor) -> torch.Tensor:
    """Write gates of kda: ``beta = sigmoid(b)`` in float32."""
    return b.float().sigmoid()


def log_decays(raw: torch.Tensor, gate: GateInput) -> torch.Tensor:
    """Log-decays of raw gates ``(tokens, heads, K)``, as `GateInput.log_decays` gives them."""
    rate, bias = (on_device(x.copy(), raw) for x in (gate.A_log[:, None], gate.dt_bias))
    x = raw.double() + bias
    return -rate.exp() * F.softplus(x) if gate.lower_bound is None else gate.lower_bound * (rate.exp() * x).sigmoid()


def convolved(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolution and SiLU of tokens ``(tokens, channels)`` behind others ``(width - 1, channels)``.

    `weight` is ``(channels, width)``. Rows of the result are contiguous.
    """
    line = torch.cat([before, x]).T.float()
    out = F.conv1d(line, weight[:, None].float(), None if bias is None else bias.float(), groups=len(weight))
    return F.silu(out.T).to(x.dtype).contiguous()
