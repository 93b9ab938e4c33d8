"""Rank scores: the error of each head at each rank, and its effect on the model's loss (section 4.2).

With ideal least-squares coefficients, the residual of a rank-G read is ``delta(G) = (I - Q_G Q_G^T) o`` for the state
read ``o = S0^T x`` and an orthonormal basis ``Q_G`` of the first G sketch columns. One QR factorisation of the widest
sketch serves every rank (equation *alloc-qr*).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.arrays.space import Space
from sketchssm.calibrate.prefixes import prefix_basis
from sketchssm.calibrate.sums import Accumulator, RunningSum
from sketchssm.calibrate.windows import Carry, Reads
from sketchssm.layer.checks import check_choice, check_instance, check_size
from sketchssm.layer.recurrence import check_window
from sketchssm.plans.basis import SketchBasis
from sketchssm.reference.recurrence import Array

SCORES = ("gradient", "perturbation", "error")
"""Methods of `RankScores.objective`."""

SUMS = ("error", "paired", "weighted", "samples")


class RankScores(Accumulator):
    """Running per-head, per-rank sums of the residuals of ideal sketch reads.

    Samples are those of `Moments`: tokens read through the sketch of a nonzero state. Use other traces than those of
    the basis.

    Parameters
    ----------
    basis : SketchBasis
        Bases to score. Only their nested spans matter.
    window : int, optional
        Tokens from one flush to the next (W). Default: the basis's window.
    rank_max : int, optional
        Largest rank to score. Default: the basis's `rank_max`.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    error : ndarray of float64, (heads, rank_max + 1)
        Sum of ``|delta(G)|^2`` for G = 0 to `rank_max`. Rank 0 reads nothing, so column 0 is the whole energy.
    paired : ndarray of float64, (heads, rank_max + 1)
        Sum of ``(grad^T delta(G))^2``, or of ``weight |delta(G)|^2``.
    weighted : ndarray of float64, (heads, rank_max + 1)
        Sum of ``|grad|^2 |o_G|^2``, or of ``weight V |o_G|^2``, with the read ``o_G = Q_G Q_G^T o``.
    samples : ndarray of int64, (heads,)
        Number of samples.
    weighting : {"gradient", "perturbation", "error"} or None
        What errors are weighted by: gradients, weights of perturbations, or nothing. None before the first update.
    window, rank_max
        As given, or their defaults.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    sums = SUMS
    of_gradients = ("paired", "weighted")
    error, paired, weighted, samples = RunningSum(), RunningSum(), RunningSum(), RunningSum()

    def __init__(self, basis: SketchBasis, window: int | None = None, rank_max: int | None = None) -> None:
        check_instance("basis", basis, SketchBasis)
        rank = basis.rank_max if rank_max is None else check_size("rank_max", rank_max)
        if rank > basis.rank_max:
            raise ValueError(f"rank_max: expected at most the basis's, {basis.rank_max}, got {rank}")
        self.layer = basis.layer
        self.window = check_window(basis.window if window is None else window)
        self.rank_max = rank
        self.weighting: str | None = None
        self._omega = basis.omega[..., :rank]
        shape = (self.layer.heads, self.rank_max + 1)
        self.error, self.paired, self.weighted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.samples = np.zeros(self.layer.heads, dtype=np.int64)

    def update(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any = None,
        grad: Any = None,
        *,
        weight: Any = None,
        carry: Carry | None = None,
    ) -> Carry:
        """Add the samples of some tokens, on the device of their arrays (see `Moments.update`).

        Parameters
        ----------
        q, k : array, (batch, tokens, key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, tokens, heads, V)
            Values.
        g : array, (batch, tokens, heads) or, for kda and gla, (batch, tokens, heads, K)
            Log-decays, <= 0.
        beta : array, (batch, tokens, heads), optional
            Write gates; None for mamba2 and gla.
        grad : array, (batch, tokens, heads, V), optional
            Gradient of the loss with respect to the recurrence's output, on one scale for all layers and calls. Pass
            gradients at every call or at none.
        weight : array, (batch, tokens, heads), optional
            In place of gradients: weight of the squared error of each output, at least 0 and on one scale for all
            layers and calls (`sketchssm.transformers.calibrate` measures such weights by perturbation).
        carry : Carry, optional
            Result of the previous call, to continue the same sequences.

        Returns
        -------
        Carry
            Positions of the sequences.

        Raises
        ------
        ValueError
            Naming the argument, before anything is added: input that `Moments.update` refuses, gradients or weights
            of the wrong shape or not finite, negative weights, or gradients or weights at some calls only.
        TypeError
            If an argument is not a real floating-point array.
        """
        return self._update((q, k, v, g, beta), grad, weight, carry)

    def _add(self, space: Space, reads: Reads, sums: dict[str, Any], dtype: str) -> None:
        heads = reads.heads
        omega = self._columns(space, heads, dtype)
        lead = tuple(reads.states.shape[:3])
        sketch = reads.states.reshape(*lead[:2], -1, self.layer.key_dim) @ omega
        basis = prefix_basis(space, sketch.reshape(*lead, self.layer.value_dim, -1), dtype)
        output = space.product(reads.queries, reads.states.swapaxes(-1, -2))
        seen = output @ basis
        rest = output - seen @ basis.swapaxes(-1, -2)  # what the last rank leaves; others leave its later columns too
        energy = space.cast(space.xp.square(space.cast(seen, "float64")), "float64")
        last = space.cast(space.xp.square(rest).sum(-1), "float64")
        sums["error"][heads] += _tails(space, last.sum((0, 2, 3)), energy.sum((0, 2, 3)))
        counts = space.array(np.array(reads.counts), "int64")
        sums["samples"][heads] += (space.cast(reads.live, "int64") * counts).sum((0, 2))
        if reads.slope is None:
            return
        steep = space.cast(space.xp.square(reads.slope).sum(-1), "float64")
        if reads.slope.shape[-1] == self.layer.value_dim:
            missed = space.cast((reads.slope * rest).sum(-1), "float64")
            along = space.cast(reads.slope @ basis, "float64") * space.cast(seen, "float64")
            sums["paired"][heads] += space.xp.square(_tails(space, missed, along)).sum((0, 2, 3))
        else:  # roots of weights
            missed, along = (steep * last).sum((0, 2, 3)), (steep[..., None] * energy).sum((0, 2, 3))
            sums["paired"][heads] += _tails(space, missed, along)
            steep = steep * self.layer.value_dim
        sums["weighted"][heads, 1:] += space.xp.cumsum((steep[..., None] * energy).sum((0, 2, 3)), -1)

    @property
    def retained(self) -> Array:
        """Retained output fraction rho_G ``(heads, rank_max + 1)``; 1 for a head without energy."""
        whole = self.error[:, :1]
        return 1.0 - np.divide(self.error, whole, out=np.zeros_like(self.error), where=whole > 0)

    def objective(self, method: str | None = None) -> Array:
        """Score every head and rank: the expected loss of reading through a rank-G sketch.

        Parameters
        ----------
        method : {"gradient", "perturbation", "error"}, optional
            "gradient" is the paper's paired score ``E[(grad^T delta(G))^2]`` (equation *m-head-objective*) and
            "error" its gradient-free ablation ``E[|delta(G)|^2]``. "perturbation" is ``E[weight |delta(G)|^2]``.
            Default: the `weighting`.

        Returns
        -------
        ndarray, (heads, rank_max + 1)
            Mean scores; zero for a head without samples.

        Raises
        ------
        ValueError
            If the method is unknown or needs gradients or weights that were not given.
        """
        method = method or self.weighting or "error"
        check_choice("method", method, SCORES)
        if method not in ("error", self.weighting):
            what = "weights" if method == "perturbation" else "gradients"
            raise ValueError(f"method: {method!r} needs {what}, and the scores were updated without")
        count = np.maximum(self.samples, 1)[:, None]
        return (self.error if method == "error" else self.paired) / count

    def noise_objective(self, method: str | None = None) -> Array:
        """Score noise with the energy of a read through the first G columns, for every head and G.

        The noise of codes has no preferred direction. So under "gradient" its score is ``E[|grad|^2 |o_G|^2] / V``,
        with the read ``o_G = Q_G Q_G^T o``, and under "perturbation" ``E[weight |o_G|^2]``. The paired score of the
        read itself can't replace it: gradients may avoid the direction of the output. In 32 heads of six real layers
        the paired score of the whole read is 0.05 to 5.2 times the score of noise.

        Parameters
        ----------
        method : {"gradient", "perturbation", "error"}, optional
            See `objective`.

        Returns
        -------
        ndarray, (heads, rank_max + 1)
            Mean scores; zero for G = 0 and for a head without samples.

        Raises
        ------
        ValueError
            If the method is unknown or needs gradients or weights that were not given.
        """
        curves = self.objective(method)
        if (method or self.weighting) in ("gradient", "perturbation"):
            return self.weighted / (np.maximum(self.samples, 1)[:, None] * self.layer.value_dim)
        return curves[:, :1] - curves

    def __add__(self, other: RankScores) -> RankScores:
        """Scores over both sets of traces; ValueError unless basis, window and weighting agree."""
        return self._joined(other, "rank_max") if isinstance(other, RankScores) else NotImplemented


def _tails(space: Space, last: Any, parts: Any) -> Any:
    """Sums ``(..., G + 1)`` of the last part and the parts ``(..., G)`` from each on: no differences, which cancel."""
    xp = space.xp
    whole = xp.concatenate([last[..., None], xp.flip(parts, (-1,))], -1)
    return xp.flip(xp.cumsum(whole, -1), (-1,))
