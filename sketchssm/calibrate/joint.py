"""Joint allocation: a rank and the bits of a residual for every head, by the errors of the stored form.

A head with a residual reads ``S^T x ~ (U B^T + R) x`` (`sketchssm.layer.residual`). What rank a head needs depends on
its bits, so every pair of a rank G and bits b has its own score, with the error of that stored form:

    J(G, b) = E[(grad^T (S_served - S)^T x)^2].

One text does not show what a model has to remember. A second task is therefore added, each task as a share of its sum
over all heads at rank 2 with 2 bits: the loss of answers to questions about a text or, without questions, the error
``|S_served - S|_F^2 / |S|_F^2``, which favours no direction of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sketchssm import cuda
from sketchssm.arrays.space import Space
from sketchssm.calibrate.allocation import Allocation, Traffic
from sketchssm.calibrate.coding import residual_error, stored
from sketchssm.calibrate.knapsack import Actions
from sketchssm.calibrate.prefixes import prefix_basis
from sketchssm.calibrate.sums import Accumulator, RunningSum, common_weighting
from sketchssm.calibrate.windows import Carry, Reads
from sketchssm.layer.checks import check_items, check_number, check_size
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, check_instance, check_window
from sketchssm.layer.residual import STEPS
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis
from sketchssm.reference.recurrence import Array

RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Ranks that are scored by default, as far as a basis has them."""

MAP = "subspace"
"""The map of sketches with residuals."""

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
        at = np.s_[:, :, some] if len(some) < len(reads.numbers) else np.s_[...]
        states, x, live = (array[at] for array in (reads.states, reads.queries, reads.live))
        slope = None if reads.slope is None else reads.slope[at]
        counts = space.array(np.array([reads.counts[i] for i in some]), "float64")
        energy = space.cast(space.xp.square(states).sum((-1, -2)), "float64")
        weight = space.xp.where(live, counts / space.xp.where(live, energy, 1.0), 0.0)
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
        omega = space.array(self._omega[heads], dtype)[:, None]
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


def allocate_joint(
    scores: JointScores | Sequence[JointScores],
    reduction: float = 10.0,
    answers: JointScores | Sequence[JointScores] | None = None,
) -> Allocation:
    """Allocate a rank and the bits of a residual to every head, within one budget of traffic.

    Every head gets at least one bit: without codes a head forgets what its sketch does not cover, which the loss of
    text does not show.

    Parameters
    ----------
    scores : JointScores or sequence of them
        Scores on text, of one layer or of several layers that share the budget.
    reduction : float, default 10
        Budget: how many times less state traffic than standard decode, of all layers together.
    answers : JointScores or sequence of them, optional
        Scores of the same layers on prompts with questions, with gradients of the loss of the answers alone. Without
        them the second task is the isotropic error of the states on the text.

    Returns
    -------
    Allocation
        Ranks and bits with their certificate. `method` is "joint" if all layers have gradients, "joint-perturbation"
        if all have weights, else "joint-error": the score on text is then ``E[|delta|^2]``.

    Raises
    ------
    ValueError
        If there are no scores, no samples of a layer, or only gradients of zero, a score is not finite, settings of
        layers or tasks differ, answers have no gradients, or no allocation has so little traffic.
    """
    single = isinstance(scores, JointScores)
    layers = _checked("scores", scores)
    check_number("reduction", reduction, "a finite number above 0", lambda number: 0 < number < np.inf)
    weighting = common_weighting(layers)
    tasks = [_task("scores", layers, "error" if weighting == "error" else "paired")]
    if answers is None:
        tasks.append(_task("scores", layers, "isotropic"))
    else:
        asked = _checked("answers", answers)
        if [x.layer for x in asked] != [x.layer for x in layers] or _settings(asked[0]) != _settings(layers[0]):
            raise ValueError("answers: expected the layers, ranks, bits, window and format of scores, got others")
        if common_weighting(asked) != "gradient":
            raise ValueError("answers: expected scores with gradients, got some without")
        tasks.append(_task("answers", asked, "paired"))
    values = [sum(parts) for parts in zip(*tasks, strict=True)]
    table = Actions.joined([_actions(layer, cast("Array", own)) for layer, own in zip(layers, values, strict=True)])

    window = layers[0].window
    standard = sum(x.layer.heads * traffic.standard(x.layer.key_dim, x.layer.value_dim) for x in layers)
    # the bytes of a token are ((W - 1) read + standard) / W; the share covers rounding
    budget = (window * standard / reduction - standard) / (window - 1) * (1 + 1e-12)
    _check_least(reduction, window, standard, float(table.cost.min(axis=1).sum()))
    table = table.front()
    choice, bound = table.solve(budget)
    objective, used = table.totals(choice)
    ends = np.cumsum([x.layer.heads for x in layers])[:-1]
    ranks, bits = (np.split(x, ends) for x in table.taken(choice))
    spent = Traffic(used, window * standard / ((window - 1) * used + standard))
    chosen = (ranks[0], bits[0]) if single else (ranks, bits)
    method = "joint" if weighting == "gradient" else f"joint-{weighting}"
    return Allocation(chosen[0], objective, bound, budget, spent, method, layers[0].sketch_dtype, chosen[1])


def _actions(layer: JointScores, values: Array) -> Actions:
    """Pairs of rank and bits by rising cost, then the full read."""
    shape, pairs = layer.layer, np.array([(rank, bits) for rank in layer.ranks for bits in layer.bits])
    costs = _read_bytes(layer, pairs[:, 0], pairs[:, 1])
    order = np.argsort(costs, kind="stable")
    full = float(_read_bytes(layer, np.array(FULL_STATE), np.array(0)))
    score = values.reshape(shape.heads, -1)[:, order]
    score = np.append(np.where(costs[order] < full, score, np.inf), np.zeros((shape.heads, 1)), axis=1)
    own = (
        np.append(costs[order], full),
        *(np.append(x[order], end) for x, end in zip(pairs.T, (FULL_STATE, 0), strict=True)),
    )
    return Actions(score, *(np.broadcast_to(x, score.shape) for x in own))


def _read_bytes(layer: JointScores, rank: npt.NDArray[Any], bits: npt.NDArray[Any]) -> Array:
    return _bytes_of(layer.layer, layer.window, layer.sketch_dtype, rank, bits)


def _bytes_of(shape: Layer, window: int, form: str, rank: npt.NDArray[Any], bits: npt.NDArray[Any]) -> Array:
    how: Any = {"sketch_dtype": form, "residual_bits": bits}
    found: Array = traffic.sketch_read(shape.kind, shape.key_dim, shape.value_dim, rank, window, MAP, **how)
    return found


def check_reduction(reduction: float, layers: Sequence[Layer], window: int, form: str, bits: Sequence[int]) -> None:
    """Refuse, before any scores, a reduction beyond that of rank 1 and the fewest bits in every head."""
    check_number("reduction", reduction, "a finite number above 0", lambda number: 0 < number < np.inf)
    standard = sum(x.heads * traffic.standard(x.key_dim, x.value_dim) for x in layers)
    least = 0.0
    for x in layers:
        pairs = np.array([1, FULL_STATE]), np.array([min(bits), 0])
        least += x.heads * float(_bytes_of(x, window, form, *pairs).min())
    _check_least(reduction, window, standard, least)


def _check_least(reduction: float, window: int, standard: float, least: float) -> None:
    most = window * standard / ((window - 1) * least + standard)
    if reduction > most * (1 + 1e-12):
        raise ValueError(f"reduction: expected at most {most:.4g}, that of the fewest bytes scored, got {reduction:g}")


def _task(name: str, layers: Sequence[JointScores], kind: str) -> list[Array]:
    """Mean scores ``(heads, ranks, bits)`` of each layer, as shares of their sum at rank 2 with 2 bits."""
    means = [getattr(layer, kind) / np.maximum(layer.samples, 1)[:, None, None] for layer in layers]
    if kind == "paired":
        for index, mean in enumerate(means):
            if not mean.any():
                what = "weights" if layers[index].weighting == "perturbation" else "gradients"
                raise ValueError(f"{name}: expected {what}, got only zeros for layer {index}")
    at = (_nearest(layers[0].ranks, 2), _nearest(layers[0].bits, 2))
    return [mean / (sum(x[:, *at].sum() for x in means) or 1.0) for mean in means]


def _checked(name: str, scores: Any) -> list[JointScores]:
    layers = [scores] if isinstance(scores, JointScores) else list(check_items(name, scores, "JointScores"))
    if not layers:
        raise ValueError(f"{name}: expected scores of at least one layer, got none")
    for index, layer in enumerate(layers):
        check_instance(name, layer, JointScores)
        if not layer.samples.any():
            raise ValueError(
                f"{name}: expected samples of at least one head of every layer, got none for layer {index}: sequences "
                f"must be longer than the window of {layer.window} tokens and write a state"
            )
        if not all((np.isfinite(x) & (x >= 0)).all() for x in (getattr(layer, each) for each in SUMS)):
            raise ValueError(f"{name}: expected finite sums of at least 0, got others for layer {index}")
        if _settings(layer) != _settings(layers[0]):
            raise ValueError(f"{name}: expected {_settings(layers[0])} of layer 0, got {_settings(layer)} for {index}")
    return layers


def _settings(layer: JointScores) -> str:
    """What layers and tasks of one allocation share."""
    return f"ranks {layer.ranks}, bits {layer.bits}, window {layer.window} and format {layer.sketch_dtype}"


def _nearest(values: Sequence[int], wanted: int) -> int:
    return int(np.abs(np.array(values) - wanted).argmin())


def some_of(name: str, given: Any, known: Any) -> tuple[int, ...]:
    """Rising values of an argument, all of them known."""
    values = check_items(name, given, "integers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value not in known:
            raise ValueError(f"{name}: expected numbers from {min(known)} to {max(known)}, got {value!r}")
    if not values:
        raise ValueError(f"{name}: expected at least one number, got none")
    return tuple(sorted({int(value) for value in values}))
