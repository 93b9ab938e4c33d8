"""Decode systems of a whole model: one calibrated `sketchssm.study.systems.System` for every recurrent layer."""

from dataclasses import dataclass
from functools import partial

import torch
from recurrence import Recorder
from torch.nn import functional as F

import sketchssm as ss
from sketchssm.calibrate.joint_scores import some_scores
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.evaluate.baselines import (
    key_reduced_systems,
    pruned_systems,
    quantised_systems,
    read_only_systems,
)
from sketchssm.study.systems import exact_systems, sketch_system
from sketchssm.transformers.perturbation import divergence, noisy, output_weights


@dataclass(frozen=True)
class Calibration:
    """Calibration results of one layer.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Inputs of the recurrence that the basis was fitted on, ``(sequences, tokens, ...)``.
    basis : SketchBasis
        Calibrated bases.
    scores : RankScores
        Rank scores with gradients, from other sequences.
    perturbed : RankScores or None
        Rank scores of the same sequences with weights by perturbation.
    joint, answers : JointScores or None
        Scores of ranks with residuals on the same sequences, and on questions with the loss of the answers alone.
    """

    layer: ss.Layer
    tokens: Tokens
    basis: ss.SketchBasis
    scores: ss.RankScores
    perturbed: ss.RankScores | None = None
    joint: ss.JointScores | None = None
    answers: ss.JointScores | None = None


@dataclass(frozen=True)
class ModelSystem:
    """A system in every recurrent layer of a model.

    Attributes
    ----------
    name : str
        Name in tables.
    family : str
        Method of the system.
    layers : dict of int to System
        System of each layer.
    """

    name: str
    family: str
    layers: dict

    @property
    def reduction(self):
        """Traffic reduction of all layers (of equal shape): the ratio of their total bytes."""
        return len(self.layers) / sum(1 / system.reduction for system in self.layers.values())

    def heads(self, slots, backend="auto"):
        """Decode heads by layer."""
        return {place: system.build(slots, backend) for place, system in self.layers.items()}


def calibrate(model, ids, window=16, rank_max=None, joint=False, questions=(), perturb=False, kind=ss.JointScores):
    """Fit bases on the first two thirds of some rows of tokens and score ranks, with gradients, on the others.

    Gradients are those of the summed next-token cross-entropy, so that layers compare on one scale.

    Parameters
    ----------
    model : HybridLM
        The model.
    ids : tensor of int64, (rows, tokens)
        Calibration text.
    window : int
        Tokens from one flush to the next.
    rank_max : int, optional
        Largest rank to score, at most min(K, V); a head that needs more reads its full state. Default: 16, the most
        that backend "cuda" takes.
    joint : bool
        Score ranks with residuals too.
    questions : sequence of Prompts
        Prompts whose answers are the second task of `joint`.
    perturb : bool
        Score ranks by perturbation too.
    kind : type
        Class of the joint scores.

    Returns
    -------
    dict of int to Calibration
        By layer.
    """
    fit, score = ids.tensor_split([max(1, len(ids) * 2 // 3)])
    if not len(score):
        raise ValueError(f"ids: expected at least 2 rows of calibration text, got {len(ids)}")
    layer = model.layer
    seen = {place: [] for place in model.recurrent}
    with torch.no_grad():
        for row in fit.split(1):
            recorder = Recorder()
            model(row, recorder)
            for place, inputs in recorder.inputs.items():
                seen[place].append(inputs)
    found = {}
    for place, rows in seen.items():
        tokens = Tokens(*(None if x[0] is None else torch.cat(x).numpy(force=True) for x in zip(*rows, strict=True)))
        moments = ss.Moments(layer, window=window)
        moments.update(*tokens)
        basis = ss.fit_basis(moments)
        scores = ss.RankScores(basis, rank_max=min(rank_max or MAX_RANK, basis.rank_max))
        perturbed = ss.RankScores(basis, rank_max=scores.rank_max) if perturb else None
        residual = kind(basis) if joint else None
        answers = kind(basis) if joint and questions else None
        found[place] = Calibration(layer, tokens, basis, scores, perturbed, residual, answers)
    for row in score.split(1):
        add(("scores", "joint"), found, graded(model, row))
    if perturb:
        add_perturbed(model, found, score)
    for asked in questions if joint else ():
        for row, ((start, stop),) in zip(asked.ids, asked.spans, strict=True):
            add(("answers",), found, graded(model, torch.from_numpy(row[None, :stop]), start))
    return found


def add(names, calibrations, recorder):
    """Add one recorded pass to some of the scores."""
    for place, calibration in calibrations.items():
        for scores in filter(None, (getattr(calibration, name) for name in names)):
            scores.update(*recorder.inputs[place], grad=recorder.outputs[place].grad)


def keep(given, place, block, inputs, out):
    """Keep what a block gets and returns, by its place: a forward hook."""
    given[place] = inputs[0], out


@torch.no_grad()
def add_perturbed(model, calibrations, ids):
    """Score ranks of rows of tokens by perturbation, as `sketchssm.transformers.calibrate` does."""
    shares = {}
    for number, row in enumerate(ids.split(1)):
        given, recorder = {}, Recorder()
        hooks = [model.blocks[place].register_forward_hook(partial(keep, given, place)) for place in model.recurrent]
        exact = model.head(model(row, recorder)[0])
        for hook in hooks:
            hook.remove()
        for place, own in calibrations.items():
            block, (hidden, whole) = model.blocks[place], given[place]
            if not number:
                hook = block.register_forward_hook(lambda block, inputs, out: noisy(out))
                shares[place] = divergence(exact, model.head(model(row)[0]))
                hook.remove()

            def rest(other, block=block, hidden=hidden):
                return block(hidden, None, lambda place, *inputs: other, {})

            weight = output_weights(rest, recorder.outputs[place], whole) * shares[place]
            own.perturbed.update(*recorder.inputs[place], weight=weight)


def graded(model, ids, start=1):
    """Record one forward and backward pass of the summed cross-entropy of the tokens from `start` on."""
    recorder = Recorder()
    # the embeddings need a gradient to start the backward pass; the weights need none
    with torch.enable_grad():
        hook = model.emb.register_forward_hook(lambda module, given, x: x.detach().requires_grad_())
        try:
            hidden = model(ids, recorder)
        finally:
            hook.remove()
        logits = model.head(hidden[:, start - 1 : -1])
        wanted = ids[:, start:].flatten().to(logits.device)
        F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum").backward()
    return recorder


def rank_of_copy(layer, bits, window=16, map="ridge", sketch_dtype="bfloat16"):
    """Mean rank at which sketches have the traffic of a read-only copy of so many bits."""

    def token(rank):
        shape = layer.kind, layer.key_dim, layer.value_dim
        return float(ss.traffic.sketch(*shape, rank, window, map, sketch_dtype=sketch_dtype))

    copy = ss.traffic.read_only_copy(layer.key_dim, layer.value_dim, bits, window)
    return (copy - token(0.0)) / (token(1.0) - token(0.0))  # bytes are linear in the rank


def sketches(calibrations, ranks, window=16, map="ridge", method=None, sketch_dtype="bfloat16", residual_bits=0):
    """Sketches of all layers under one budget, at each of several mean ranks."""
    systems, form = [], {"sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    for rank in ranks:
        rule = "uniform" if residual_bits else method  # rank scores do not know residuals
        kind = "perturbed" if rule == "perturbation" else "scores"
        scores = [getattr(calibration, kind) for calibration in calibrations.values()]
        ranked = ss.allocate_ranks(scores, rank, rule, map=map, **form)
        family = f"sketch, {map} map" + ("" if sketch_dtype == "bfloat16" else f", {sketch_dtype}")
        family += f", {residual_bits}-bit residual" if residual_bits else ""
        name = f"{family}, rank {round(rank, 1):g}" + (f", by {method}" if method else "")
        layers = {
            place: sketch_system(ss.SketchPlan(calibration.basis, own, window, map, **form), name)
            for (place, calibration), own in zip(calibrations.items(), ranked.ranks, strict=True)
        }
        systems.append(ModelSystem(name, family, layers))
    return systems


def joint(calibrations, reductions, by_error=False):
    """Sketches with residuals of all layers, ranks and bits allocated under one budget, at each of several budgets.

    `by_error` leaves out gradients and questions.
    """
    systems = []
    text, answers = ([getattr(x, name) for x in calibrations.values()] for name in ("joint", "answers"))
    if by_error:
        text, answers = [some_scores(x, x.bits, None, weighted=False) for x in text], [None]
    for reduction in reductions:
        found = ss.allocate_joint(text, reduction, None if None in answers else answers)
        name = f"joint, {reduction:g}x" + ", by error" * by_error
        systems.append(allocated(calibrations, found, name))
    return systems


def allocated(calibrations, found, name):
    """The system of ranks and bits by `allocate_joint`."""
    tables = zip(calibrations.items(), found.ranks, found.residual_bits, strict=True)
    layers = {
        place: sketch_system(ss.SketchPlan(x.basis, ranks, None, "subspace", found.sketch_dtype, bits), name)
        for (place, x), ranks, bits in tables
    }
    return ModelSystem(name, "joint", layers)


def baselines(calibrations, family, window=16):
    """The systems of one of `FAMILIES` in every layer; none for a kind without the method."""
    columns = {place: FAMILIES[family](x.layer, x.tokens, window) for place, x in calibrations.items()}
    return [
        ModelSystem(systems[0].name, family, dict(zip(columns, systems, strict=True)))
        for systems in zip(*columns.values(), strict=True)
    ]


FAMILIES = {
    "exact": lambda layer, tokens, window: exact_systems(layer, window),
    "quantised": partial(quantised_systems, bits=(10, 8, 6, 4, 3)),
    "pruned": pruned_systems,
    "key-reduced": key_reduced_systems,
    "copy": partial(read_only_systems, bits=(8, 6, 5, 4, 3, 2), ranks=()),
    "low-rank": partial(read_only_systems, bits=(), ranks=(16, 8, 4)),
}
"""Families of systems to compare: functions of a layer's shape, its calibration tokens and a window."""
