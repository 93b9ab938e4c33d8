"""Joint scores: the error of every rank with every number of bits of a residual, for each head.

A head with a residual reads ``S^T x ~ (U B^T + R) x`` (`sketchssm.layer.residual`). What rank a head needs depends on
its bits, so every pair of a rank G and bits b has its own score, with the error of that stored form:

    J(G, b) = E[(grad^T (S_served - S)^T x)^2].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm import cuda
from sketchssm.arrays.space import Space
from sketchssm.calibrate.coding import residual_error, stored
from sketchssm.calibrate.prefixes import prefix_basis
from sketchssm.calibrate.sums import Accumulator, RunningSum
from sketchssm.calibrate.windows import Carry, Reads
from sketchssm.layer.checks import check_instance, check_items, check_size
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, check_window
from sketchssm.layer.residual import STEPS
from sketchssm.plans.basis import SketchBasis

RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Ranks that are scored by default, as far as a basis has them."""

WINDOWS = 512
"""Windows of a model's text that are scored, at even distances."""

SUMS = ("paired", "error", "isotropic", "energy", "samples")


class JointScores(Accumulator):
    """Running sums of the errors of sketches with residuals, for each head, rank and number of bits.

    Samples are those of `RankScores`. Use other traces than those of the basis.

    Parameters
    ----------
    basis : SketchBasis
        Bases to score.
    window : int, optional
        Tokens from one flush to the next (W). Default: the basis's window.
    ranks : sequence of int, optional
        Ranks to score. Default: 1, 2, 3, 4, 6, 8, 12 and 16, as far as the basis has them.
    bits : sequence of {1, 2, 3}, optional
        Bits of a residual to score. Default: all.
    sketch_dtype : {"float32", "bfloat16", "int8"}, default "int8"
        Format of the sketches.
    every : int, default 1
        Score the first of so many windows in each call, from the second window on. More is faster.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    paired : ndarray of float64, (heads, ranks, bits)
        Sum of ``(grad^T delta)^2``, or of ``weight |delta|^2``, with the error ``delta = (S_served - S)^T x`` of a
        read.
    error : ndarray of float64, (heads, ranks, bits)
        Sum of ``|delta|^2``.
    isotropic : ndarray of float64, (heads, ranks, bits)
        Sum of ``|S_served - S|_F^2 / |S|_F^2``.
    energy : ndarray of float64, (heads,)
        Sum of ``|S^T x|^2``.
    samples : ndarray of int64, (heads,)
        Number of samples.
    weighting : {"gradient", "perturbation", "error"} or None
        What errors are weighted by: gradients, weights of perturbations, or nothing. None before the first update.
    window, ranks, bits, sketch_dtype, every
        As given, or their defaults; `ranks` and `bits` rise.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    sums = SUMS
    of_gradients = ("paired",)
    paired, error, isotropic = RunningSum(), RunningSum(), RunningSum()
    energy, samples = RunningSum(), RunningSum()

    def __init__(
        self,
        basis: SketchBasis,
        window: int | None = None,
        *,
        ranks: Sequence[int] | None = None,
        bits: Sequence[int] = tuple(STEPS),
        sketch_dtype: str = "int8",
        every: int = 1,
    ) -> None:
        check_instance("basis", basis, SketchBasis)
        self.layer = basis.layer
        self.window = check_window(basis.window if window is None else window)
        most = min(basis.rank_max, self.layer.key_dim, self.layer.value_dim)
        known = [rank for rank in RANKS if rank <= most]
        self.ranks = some_of("ranks", known if ranks is None else ranks, range(1, most + 1))
        self.bits = some_of("bits", bits, STEPS)
        self.sketch_dtype = SketchFormat.of(sketch_dtype).name
        self.every = check_size("every", every)
        self.weighting: str | None = None
        self._omega = basis.omega[..., : self.ranks[-1]].astype(np.float64)
        shape = (self.layer.heads, len(self.ranks), len(self.bits))
        self.paired, self.error, self.isotropic = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.energy = np.zeros(self.layer.heads)
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
        q, k, v, g : array
            As of `RankScores.update`.
        beta, grad, weight : array, optional
            As of `RankScores.update`.
        carry : Carry, optional
            Result of the previous call, to continue the same sequences.

        Returns
        -------
        Carry
            Positions of the sequences.

        Raises
        ------
        ValueError
            Naming the argument, before anything is added, as `RankScores.update`.
        TypeError
            If an argument is not a real floating-point array.
        """
        return self._update((q, k, v, g, beta), grad, weight, carry)

    def _add(self, space: Space, reads: Reads, sums: dict[str, Any], dtype: str) -> None:
        some = [i for i, number in enumerate(reads.numbers) if not (number - 1) % self.every]
        if not some:
            return
        heads = reads.heads
        at = np.s_[:, :, some[0] :: self.every]
        states, x, live = (array[at] for array in (reads.states, reads.queries, reads.live))
        slope = None if reads.slope is None else reads.slope[at]
        counts = space.array(np.array([reads.counts[i] for i in some]), "float64")
        energy = space.cast(space.xp.square(states).sum((-1, -2)), "float64")
        any_energy = live & (energy > 0)  # in float32 squares of states below 1e-23 vanish
        weight = space.xp.where(any_energy, counts / space.xp.where(any_energy, energy, 1.0), 0.0)
        image, rows = self._sketches(space, states, heads, dtype)
        found = self._measured(space, states, image, rows, x, slope, dtype)
        sums["error"][heads] += found[..., 0].sum((0, 2))
        sums["isotropic"][heads] += (found[..., 1] * weight[..., None, None]).sum((0, 2))
        sums["paired"][heads] += found[..., 2].sum((0, 2))
        read = space.cast(space.xp.square(space.product(x, states.swapaxes(-1, -2))).sum(-1), "float64")
        sums["energy"][heads] += read.sum((0, 2, 3))
        sums["samples"][heads] += space.cast((space.cast(live, "float64") * counts).sum((0, 2)), "int64")

    def retained(self, ranks: npt.NDArray[np.int64], bits: npt.NDArray[np.int64]) -> float:
        """Share of the energy of all heads' state reads that some ranks and bits retain.

        Parameters
        ----------
        ranks, bits : ndarray of int64, (heads,)
            Of each head, both scored; or `FULL_STATE` with any bits.

        Returns
        -------
        float
            1 - energy of the errors / energy of the reads.
        """
        lost = 0.0
        for head, (rank, own) in enumerate(zip(ranks.tolist(), bits.tolist(), strict=True)):
            if rank != FULL_STATE:
                lost += self.error[head, self.ranks.index(rank), self.bits.index(own)]
        return float(1.0 - lost / (self.energy.sum() or 1.0))

    def _sketches(self, space: Space, states: Any, heads: slice, dtype: str) -> tuple[Any, Any]:
        """Columns ``(..., G, V)`` and bases ``(..., G, K)`` of the sketches of states ``(..., V, K)``, as stored.

        The bases of ranks are nested (`sketchssm.reference.maps.subspace`), so each rank adds columns to the last.
        """
        form, turned = SketchFormat.of(self.sketch_dtype), states.swapaxes(-1, -2)
        omega = self._columns(space, heads, dtype)[:, None]
        rows = prefix_basis(space, space.product(turned, states @ omega), dtype).swapaxes(-1, -2)
        return stored(space, form, space.product(rows, turned)), stored(space, form, rows)

    def _measured(self, space: Space, states: Any, image: Any, rows: Any, x: Any, slope: Any, dtype: str) -> Any:
        """Sums ``(..., ranks, bits, 3)`` of squares of errors of states ``(..., V, K)`` with their sketches.

        They are errors of reads with queries ``(..., W, K)``, of the state, and of reads times slopes.
        """
        xp, kernels = space.xp, cuda.calibration(states) if dtype == "float32" else None
        if kernels:
            found = kernels.joint_sums(space, states, image, rows, x, slope, self.ranks, self.bits)
            if found is not None:
                return found
        found = space.zeros((*states.shape[:-2], len(self.ranks), len(self.bits), 3), "float64")
        left, part, start = states + 0, space.empty(tuple(states.shape), dtype), 0
        ones = space.zeros((self.layer.key_dim, 1), dtype) + 1 / self.layer.key_dim  # a product is faster than a mean
        for i, rank in enumerate(self.ranks):
            new = np.s_[..., start:rank, :]
            left -= xp.matmul(image[new].swapaxes(-1, -2), rows[new], out=part)
            start, squares = rank, xp.square(left)
            spread = xp.sqrt((squares @ ones)[..., 0])
            for j, bits in enumerate(self.bits):
                error = residual_error(space, left, squares, spread, bits)
                delta = space.product(x * error.columns[..., None, :], error.matrix.swapaxes(-1, -2))
                delta = delta * error.rows[..., None, :]
                found[..., i, j, 0] = space.cast(xp.square(delta).sum(-1), "float64").sum(-1)
                found[..., i, j, 1] = error.energy
                if slope is not None:
                    paired = slope * delta  # of roots of weights, each channel counts by itself
                    if slope.shape[-1] == self.layer.value_dim:
                        paired = paired.sum(-1)[..., None]
                    found[..., i, j, 2] = xp.square(space.cast(paired, "float64")).sum((-2, -1))
        return found

    def __add__(self, other: JointScores) -> JointScores:
        """Scores over both sets of traces; ValueError unless basis, settings and weighting agree."""
        settings = "ranks", "bits", "sketch_dtype"
        return self._joined(other, *settings) if isinstance(other, JointScores) else NotImplemented


def some_scores(scores: JointScores, bits: Sequence[int], rank_max: int | None, weighted: bool = True) -> JointScores:
    """Scores of some of the bits and of ranks up to a limit, with or without their weighting."""
    chosen = some_of("bits", bits, scores.bits)
    ranks = [rank for rank in scores.ranks if rank <= (rank_max or scores.ranks[-1])]
    part = JointScores.__new__(JointScores)
    part.__dict__.update(scores.__dict__)
    part.ranks, part.bits, part.weighting = tuple(ranks), chosen, scores.weighting if weighted else "error"
    for name in ("paired", "error", "isotropic"):
        setattr(part, name, getattr(scores, name)[:, : len(ranks), [scores.bits.index(each) for each in chosen]])
    return part


def some_of(name: str, given: Any, known: Any) -> tuple[int, ...]:
    """Rising values of an argument, all of them known."""
    values = check_items(name, given, "integers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value not in known:
            raise ValueError(f"{name}: expected numbers from {min(known)} to {max(known)}, got {value!r}")
    if not values:
        raise ValueError(f"{name}: expected at least one number, got none")
    return tuple(sorted({int(value) for value in values}))
