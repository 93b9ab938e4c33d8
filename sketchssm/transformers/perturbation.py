"""Weights of errors by forward perturbation, for models that cannot run backward.

An error of a head passes through the rest of its block: the gated norm, the output projection, the MLP. Its weight is
the squared relative change of the block's output, per squared error, times the Kullback-Leibler divergence of the next
token's distribution per squared relative change of this block's output. The first factor is measured for every token
and head, the second for every layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PASSES = 4
"""Calls of a block that measure weights. Each call perturbs one head of every token, since blocks act on each token by
itself after the recurrence."""

SIZE = 0.25
"""Size of a perturbation, relative to the output of its head: errors of sketches are of this order, and the change of
a block's output is above the rounding of bfloat16, which made the scores of the small kda model 27 % larger, with a
spread of 7 % between heads (of float16 0.4 %)."""

NOISE = 0.05
"""Size of a perturbation of a block's output, relative to the output."""

ROWS = 64
"""Tokens whose logits are in float64 at once."""


def output_weights(
    run: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor, whole: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """Squared relative change of a block's output per squared change of a head's output, ``(batch, tokens, heads)``.

    `run` is the rest of the block: its output ``(batch, tokens, ...)`` for an output of the recurrence, of which `out`
    ``(batch, tokens, heads, V)`` is the exact one and `whole` its result. Heads that no pass perturbs at a token have
    the weight zero there, and the others count for them.
    """
    heads, channels = out.shape[-2:]
    random = torch.Generator().manual_seed(seed)
    order = torch.rand(out.shape[:3], generator=random).argsort(-1).to(out.device)
    exact, passes = out.float(), min(PASSES, heads)
    rms = exact.square().mean(-1, keepdim=True).sqrt()
    energy = whole.float().square().flatten(2).sum(-1)
    weights = torch.zeros_like(rms[..., 0])
    for chosen in order[..., :passes].unbind(-1):
        one = torch.zeros_like(rms).scatter_(2, chosen[..., None, None], SIZE)
        signs = torch.randint(0, 2, (*out.shape[:2], 1, channels), generator=random).to(out.device) * 2 - 1
        other = (exact + one * rms * signs).to(out.dtype)
        size = (other.float() - exact).square().sum((-1, -2))
        change = (run(other).float() - whole.float()).square().flatten(2).sum(-1)
        weight = torch.where(size * energy > 0, change / (size * energy), 0.0)
        weights.scatter_(2, chosen[..., None], weight[..., None] * (heads / passes))
    return weights


def noisy(whole: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A block's output ``(batch, tokens, ...)`` with noise of the share `NOISE` of each token's norm."""
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed)).to(whole.device)
    axes = tuple(range(2, whole.dim()))
    size = NOISE * (whole.float().square().sum(axes, keepdim=True) / noise.square().sum(axes, keepdim=True)).sqrt()
    return (whole.float() + size * noise).to(whole.dtype)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of logits ``(tokens, vocabulary)``, per squared share of `noisy`.

    It is computed in float64, for some tokens at a time: in float32 a small one may be negative.
    """
    total = torch.zeros((), dtype=torch.float64, device=exact.device)
    for pair in zip(exact.split(ROWS), other.split(ROWS), strict=True):
        p, q = (logits.double().log_softmax(-1) for logits in pair)
        total += (p.exp() * (p - q)).sum()
    return max(0.0, float(total) / len(exact)) / NOISE**2
