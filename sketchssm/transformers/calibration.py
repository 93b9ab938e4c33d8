"""Calibrate the recurrent layers of a model of transformers, while text runs through the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sketchssm.arrays import interop
from sketchssm.calibrate.allocation import METHODS, budget_of
from sketchssm.calibrate.basis import fit_basis
from sketchssm.calibrate.calibration import Calibration, LayerCalibration
from sketchssm.calibrate.joint_scores import WINDOWS, JointScores
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.plans import check_settings
from sketchssm.calibrate.scores import RankScores
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.checks import check_choice, check_items, check_size
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import check_window
from sketchssm.layer.residual import STEPS
from sketchssm.plans.model_plans import ModelPlans
from sketchssm.transformers.identity import fingerprint, whole_digest
from sketchssm.transformers.modeling import layers
from sketchssm.transformers.passes import (
    Mask,
    Sums,
    backward,
    forward,
    perturbation_shares,
    perturbed,
    without_gradients,
)
from sketchssm.transformers.resuming import Resumable, digest_of
from sketchssm.transformers.text import Ids, check_ids, token_rows


def calibrate(
    model: torch.nn.Module,
    text: Any,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    sample: tuple[int, int] | None = None,
    mean_rank: float | None = None,
    reduction: float | None = None,
    prompts: Any = None,
    answers: Any = None,
    window: int = 16,
    map: str | CoefficientMap | None = None,
    sketch_dtype: str | None = None,
    residual_bits: int = 0,
    method: str | None = None,
    rank_max: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelPlans:
    """Make plans of all recurrent layers of a model, under one budget.

    Two thirds of the rows of text (rounded down) fit the bases, and the others score the ranks. Rows run one at a
    time, without a cache. Moments and scores are summed while the model runs, so that at most the inputs of one row
    are in memory. A score with gradients needs a backward pass through the model, without gradients of parameters.
    Where it does not reach a layer, as with some kinds of quantised weights, ranks are scored by perturbation.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers for causal language modelling. Layers may be on several devices, and on the host or on
        disk where accelerate offloads them (``device_map="auto"``).
    text : str, sequence of str, or array of int
        Calibration text. Strings are tokenised and joined, with the tokenizer's end-of-sequence token between them,
        and cut into rows; so is an array of token ids ``(tokens,)``. An array ``(rows, tokens)`` and a sequence of
        arrays ``(tokens,)`` are rows already.
    tokenizer : PreTrainedTokenizerBase, optional
        For strings: the model's tokenizer.
    length : int, optional
        Tokens of a row that is cut; default 1024.
    sample : (int, int), optional
        Tokens, in whole rows, that fit the bases and that score the ranks; what is left of the text is not used.
        Default: two thirds and one third of the rows.
    mean_rank : float, optional
        Budget: the read traffic of all heads of all layers at this rank, without residuals. Default: 7 with a `map` or
        a `method` that has no residuals.
    reduction : float, optional
        Budget of plans with residuals, in place of `mean_rank`: how many times less state traffic than standard
        decode. Each head gets a rank and 1 to 3 bits, see `sketchssm.allocate_joint`. Default: 10 with `prompts`,
        else 9.
    prompts : array of int, (rows, tokens), or sequence of arrays, optional
        For plans with residuals: rows of token ids with questions about what stands before, 16 or so. They keep in
        the sketches what the model has to remember.
    answers : array of bool, (rows, tokens), or sequence of arrays, optional
        Which tokens of `prompts` are answers.
    window : int, default 16
        Tokens of a window (W).
    map : CoefficientMap or str, optional
        Coefficient map of the plans. Default: "subspace" with residuals, which need it, else "ridge".
    sketch_dtype : {"float32", "bfloat16", "int8"}, optional
        Format of the sketches, see `sketchssm.allocate_ranks`. Default: "int8" with residuals, else "bfloat16".
    residual_bits : {0, 1, 2, 3}, default 0
        Bits of the residual's codes of every sketched head, see `sketchssm.SketchPlan`. 0 with a `reduction`: the
        allocation chooses them.
    method : {"gradient", "perturbation", "error", "uniform"}, optional
        Score for the allocation, see `sketchssm.allocate_ranks` and, for plans with residuals,
        `sketchssm.allocate_joint`. "gradient" uses gradients of the summed next-token cross-entropy by the layers'
        outputs. "perturbation" measures in forward passes how much an error of a head changes the output of its
        block, and this the distribution of the next token. Default: "gradient" or, with a warning, "perturbation" if
        the backward pass does not reach a layer.
    rank_max : int, optional
        Largest rank to score, where a layer has as many. A head that needs more reads its full state. Default: 16,
        the most that backend "cuda" takes.
    resume : str or PathLike, optional
        File for the sums so far, written about once a minute. If it exists, from a run of the same model, text and
        settings that was interrupted, the rows in it are skipped. It may be removed when the plans are made.
    progress : callable, optional
        Called with a label before each row, and before the bases are fitted.

    Returns
    -------
    ModelPlans
        Plans of all layers, for `patch`; `ModelPlans.save` writes them to one file.

    Raises
    ------
    ValueError
        If a setting or a token id is out of range, there are fewer than two rows of text or tokens than the sample, a
        row is not longer than the window, prompts and answers differ in shape or a prompt has no answer, the file to
        resume has other sums, the model has no known layers, inputs of a layer would let its state grow, or a layer's
        output has no gradient and the method needs one.

    Examples
    --------
    >>> plans = sketchssm.transformers.calibrate(model, text, tokenizer=tokenizer)  # doctest: +SKIP
    >>> plans.save("plans.safetensors")  # doctest: +SKIP
    """
    rank, reduction = budget_of(mean_rank, reduction, map, method, prompts is not None)
    form: Any = {"map": map, "sketch_dtype": sketch_dtype, "residual_bits": residual_bits, "method": method}
    shapes = [x.layer for x in layers(model).values()]
    map, sketch_dtype, bits = check_settings(shapes, window, rank, reduction, rank_max, **form)
    joint = bool(bits) and method != "uniform"
    if prompts is not None and not joint:
        raise ValueError(
            f"prompts: expected None without residuals, got {type(prompts).__name__} at mean rank {rank:g}"
        )
    collected = collect(
        model,
        text,
        tokenizer=tokenizer,
        length=length,
        sample=sample,
        resume=resume,
        scores=("joint",) if joint else ("ranks",),
        prompts=prompts,
        answers=answers,
        window=window,
        sketch_dtype=sketch_dtype if joint else "int8",
        bits=bits or tuple(STEPS),
        method=method,
        rank_max=rank_max,
        progress=progress,
    )
    chosen: Any = {"map": map, "sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    return collected.plans(None if reduction else rank, reduction, method=method, **chosen)


def collect(
    model: torch.nn.Module,
    text: Any,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    sample: tuple[int, int] | None = None,
    prompts: Any = None,
    answers: Any = None,
    window: int = 16,
    rank_max: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    scores: Sequence[str] = ("ranks", "joint"),
    sketch_dtype: str = "int8",
    bits: Sequence[int] = tuple(STEPS),
    method: str | None = None,
) -> Calibration:
    """Collect bases and scores of all recurrent layers of a model, which give plans for any budget.

    Text runs through the model as in `calibrate`.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers for causal language modelling.
    text, tokenizer, length, sample, prompts, answers, window, rank_max, resume, progress : object
        As of `calibrate`.
    scores : sequence of {"ranks", "joint"}, default both
        Which scores: "ranks" for plans of a mean rank, "joint" for plans with residuals, which take about ten times
        longer to score on a CPU.
    sketch_dtype : {"float32", "bfloat16", "int8"}, default "int8"
        Format of the sketches of plans with residuals.
    bits : sequence of {1, 2, 3}, default all
        Bits of residuals to score.
    method : {"gradient", "perturbation", "error", "uniform"}, optional
        "gradient" uses gradients and needs a backward pass; the others do not. Default: as of
        `calibrate`.

    Returns
    -------
    Calibration
        Bases and scores; `Calibration.plans` makes plans.

    Raises
    ------
    ValueError
        If an argument of `calibrate` is refused, or a kind of scores is unknown.
    """
    if method is not None:
        check_choice("method", method, METHODS)
    kinds = tuple(check_items("scores", scores, "names"))
    if not kinds:
        raise ValueError("scores: expected 'ranks', 'joint' or both, got none")
    for kind in kinds:
        check_choice("scores", kind, ("ranks", "joint"))
    if rank_max is not None:
        check_size("rank_max", rank_max)
    found = layers(model)
    check_window(window)
    rows = token_rows(text, tokenizer, length, least=window + 2, rows=2)
    check_ids(model, rows)
    identity = fingerprint(model)  # before any work: a model with offloaded layers has none
    questions, wanted = _answered(prompts, answers, window + 2)
    check_ids(model, questions, "prompts")
    if questions and ("joint" not in kinds or method not in (None, "gradient")):
        how = f"the scores {', '.join(kinds)} and the method {method!r}"
        raise ValueError(f"prompts: expected None without the scores 'joint' and the method 'gradient', got {how}")
    fit, score = _split(rows, sample)
    if method in (None, "gradient"):
        lack = without_gradients(model, score[0][: window + 2])
        need = f"needs gradients of the layers' outputs, but {lack}"
        if lack and questions:
            raise ValueError(f"prompts: expected None, as an answer {need}; got {len(questions)} rows")
        if lack and method:
            raise ValueError(f"method: {method!r} {need}; expected 'perturbation', 'error' or 'uniform'")
        if lack:
            warnings.warn(f"method: {lack}; ranks are scored by perturbation", RuntimeWarning, stacklevel=2)
        method = "perturbation" if lack else method or "gradient"

    step = progress or (lambda label: None)
    form: Any = {"bits": tuple(bits), "sketch_dtype": sketch_dtype}
    whole = None if resume is None else whole_digest(model)  # inputs of layers depend on all parameters
    settings = identity, whole, window, rank_max, kinds, form, method, len(fit), len(score)
    run = Resumable(resume, digest_of(settings, [*fit, *score, *questions, *wanted]), step)
    moments = {name: Moments(x.layer, window=window) for name, x in found.items()}
    run.hold("moments", moments)
    for row in run.rows("moments", fit):
        forward(model, {name: [own] for name, own in moments.items()}, row)
    step("bases")
    bases = {}
    for name, sums in moments.items():
        layer = sums.layer
        try:
            bases[name] = fit_basis(sums, min(rank_max or MAX_RANK, layer.key_dim, layer.value_dim))
        except ValueError as error:  # a layer that writes no state
            raise ValueError(f"layer {name}: {error}") from error
    every = max(1, sum(row.size // window for row in score) // WINDOWS)
    made: dict[str, dict[str, Any]] = {name: {} for name in found}
    for name, basis in bases.items():
        if "ranks" in kinds:
            made[name]["ranks"] = RankScores(basis)
        if "joint" in kinds:
            made[name]["joint"] = JointScores(basis, every=every, **form)
    scored: Sums = {name: list(own.values()) for name, own in made.items()}
    for kind in kinds:
        run.hold(kind, {name: own[kind] for name, own in made.items()})
    shares: dict[str, float] = {}
    for row in run.rows("scores", score):
        if method == "perturbation":
            shares = shares or perturbation_shares(model, score[0])
            perturbed(model, scored, row, shares)
        else:
            (backward if method == "gradient" else forward)(model, scored, row)
    if questions and "joint" in kinds:
        asked = {name: JointScores(basis, **form) for name, basis in bases.items()}
        run.hold("answers", asked)
        for row, marks in run.rows("answers", list(zip(questions, wanted, strict=True))):
            backward(model, {name: [own] for name, own in asked.items()}, row, marks)
        made = {name: own | {"answers": asked[name]} for name, own in made.items()}
    parts = {name: LayerCalibration(bases[name], **own) for name, own in made.items()}
    return Calibration(parts, identity, sum(row.size for row in (*fit, *score)))


def _split(rows: list[Ids], sample: tuple[int, int] | None) -> tuple[list[Ids], list[Ids]]:
    """Rows that fit bases, and rows that score ranks."""
    if sample is None:
        return rows[: len(rows) * 2 // 3], rows[len(rows) * 2 // 3 :]
    parts, start = [], 0
    for size in check_items("sample", sample, "two numbers of tokens"):
        stop, left = start, check_size("sample", size)
        while left > 0 and stop < len(rows):
            left -= rows[stop].size
            stop += 1
        if left > 0:
            raise ValueError(f"sample: expected at most the {sum(x.size for x in rows)} tokens of rows, got {sample}")
        parts.append(rows[start:stop])
        start = stop
    if len(parts) != 2:
        raise ValueError(f"sample: expected two numbers of tokens, for bases and for ranks, got {sample}")
    return parts[0], parts[1]


def _answered(prompts: Any, answers: Any, least: int) -> tuple[list[Ids], list[Mask]]:
    """Rows of prompts and the places of their answers, checked; none if both are None."""
    if prompts is None and answers is None:
        return [], []
    for name, given, other in (("prompts", prompts, "answers"), ("answers", answers, "prompts")):
        if given is None:
            raise ValueError(f"{name}: expected an argument beside {other}, got None")
    rows = token_rows(prompts, least=least, name="prompts")
    marks = [interop.to_host(row, "answers") for row in check_items("answers", answers, "rows of bool")]
    if [mark.shape for mark in marks] != [row.shape for row in rows]:
        raise ValueError(f"answers: expected the {len(rows)} rows of prompts with as many tokens each, got others")
    for index, mark in enumerate(marks):
        if mark.dtype != bool:
            raise ValueError(f"answers: expected bool, got {mark.dtype} in row {index}")
        if not mark[1:].any():  # nothing predicts the first token
            raise ValueError(f"answers: expected one True after the first token of row {index}, got none")
    return rows, marks


def progress_steps(rows: int) -> int:
    """Number of calls of `progress` by `calibrate` for some number of rows, of text and of prompts."""
    return rows + 1
