"""Joint allocation: a rank and the bits of a residual for every head, by the errors of the stored form.

One text does not show what a model has to remember. To the scores on text (`sketchssm.calibrate.joint_scores`) a
second task is therefore added, each task as a share of its sum over all heads at rank 2 with 2 bits: the loss of
answers to questions about a text or, without questions, the error ``|S_served - S|_F^2 / |S|_F^2``, which favours no
direction of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import Allocation, Traffic, default_reduction
from sketchssm.calibrate.joint_scores import SUMS, JointScores
from sketchssm.calibrate.knapsack import Actions
from sketchssm.calibrate.sums import common_weighting
from sketchssm.layer.checks import check_instance, check_items, check_number
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.plans import traffic
from sketchssm.reference.recurrence import Array

MAP = "subspace"
"""The map of sketches with residuals."""


def allocate_joint(
    scores: JointScores | Sequence[JointScores],
    reduction: float | None = None,
    answers: JointScores | Sequence[JointScores] | None = None,
) -> Allocation:
    """Allocate a rank and the bits of a residual to every head, within one budget of traffic.

    Every head gets at least one bit: without codes a head forgets what its sketch does not cover, which the loss of
    text does not show.

    Parameters
    ----------
    scores : JointScores or sequence of them
        Scores on text, of one layer or of several layers that share the budget.
    reduction : float, optional
        Budget: how many times less state traffic than standard decode, of all layers together. Default: 10 with
        `answers`, else 9.
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
    if reduction is None:
        reduction = default_reduction(answers is not None)
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
        what = f"that of the fewest bytes scored, with a flush every {window} tokens"
        raise ValueError(f"reduction: expected at most {most:.4g}, {what}, got {reduction:g}")


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
