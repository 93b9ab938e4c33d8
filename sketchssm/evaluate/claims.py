"""The paper's claims, in terms of output error, held against the results of an evaluation.

A claim that the chosen systems can't test is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.findings import GROWS, RIVALS, ablations, growth, headline, own_sketches, times
from sketchssm.evaluate.measure import Measurement

__all__ = ["Claim", "claims"]

Verdict = tuple[bool, str] | None


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, in terms of output error, held against every layer.

    Attributes
    ----------
    says : str
        What the paper says.
    layers : dict of str to tuple
        Whether it holds on a layer, with the numbers.
    reason : str
        Why it may not hold, if that is known.
    """

    says: str
    layers: dict[str, tuple[bool, str]]
    reason: str

    @property
    def holds(self) -> bool:
        """Whether it holds on all layers."""
        return all(good for good, _ in self.layers.values())


def claims(layers: Sequence[LayerResults]) -> list[Claim]:
    """Hold the paper's claims against the results.

    Parameters
    ----------
    layers : sequence of LayerResults
        Results of all layers.

    Returns
    -------
    list of Claim
        Those that the measured systems can test.
    """
    found = []
    for says, check, reason in CLAIMS:
        tested = {layer.name: result for layer in layers if (result := check(layer)) is not None}
        if tested:
            found.append(Claim(says, tested, reason))
    return found


def _said(system: Measurement) -> str:
    return f"{system.name} {system.output_error:.1e} at {system.reduction:.2f}x"


def _beats_compressed(layer: LayerResults) -> Verdict:
    found = headline(layer)
    if found.worst is None or found.rival is None or found.margin is None:
        return None
    return found.margin > 1, f"{_said(found.worst)}, {_said(found.rival)}"


def _compressed_grow(layer: LayerResults) -> Verdict:
    rivals = growth(layer, [s for s in layer.systems if s.family in RIVALS])
    if not rivals:
        return None
    factors = [g.state if g.state is not None else 1.0 for g in rivals]
    grown = sum(factor > GROWS for factor in factors)
    lives = [math.inf if life is None else life for life in layer.facts["half_life"]]
    return grown == len(rivals), (
        f"state errors of {grown} of {len(rivals)} grow, median {np.median(factors):.2f}x from the first quarter of "
        f"the tokens to the last; gates halve a state in {np.median(lives):.0f} tokens in the median head, "
        f"{max(lives):.0f} in the slowest"
    )


def _sketch_stays(layer: LayerResults) -> Verdict:
    found = growth(layer, headline(layer).sketches)
    if not found:
        return None
    factor = max(g.output or 1.0 for g in found)
    exact = all(g.state is None for g in found)
    return factor <= GROWS and exact, (
        f"output errors {factor:.2f}x from the first quarter of the tokens to the last; "
        f"states {'exact to float32 rounding' if exact else 'not exact'}"
    )


def _against(setting: str) -> Callable[[LayerResults], Verdict]:
    """Whether an ablation has a larger error than the base."""

    def check(layer: LayerResults) -> Verdict:
        found = {a.setting: a for a in ablations(layer)}
        if setting not in found:
            return None
        ablation = found[setting]
        return ablation.error > 1, (
            f"{ablation.error:.2f}x the output error at {ablation.reduction:.2f}x less traffic, "
            f"{100 * ablation.retained:+.2f} points of retained energy lost"
        )

    return check


def _gradient_pays(rival: str) -> Callable[[LayerResults], Verdict]:
    """Whether gradient-weighted allocation has less output error than another, at one budget."""

    def check(layer: LayerResults) -> Verdict:
        ours, theirs = (layer.find(f"ablation/allocation-{method}") for method in ("gradient", rival))
        if ours is None or theirs is None:
            return None
        text = f"{times(theirs.output_error, ours.output_error):.2f}x the output error"
        if ours.objective and theirs.objective is not None:
            text += f", {theirs.objective / ours.objective:.2f}x the gradient-weighted score that gradient minimises"
        return ours.output_error < theirs.output_error, text

    return check


def _copies_beat_states(layer: LayerResults) -> Verdict:
    """Whether a read-only copy errs less than any quantised state of at most its reduction."""
    copies = [s for s in layer.systems if s.family == "read-only" and "bit" in s.setting]
    pairs = []
    for copy in copies:
        states = [s for s in layer.systems if s.family == "quantised" and s.reduction <= copy.reduction]
        if states:
            pairs.append((copy, max(states, key=lambda s: s.reduction)))
    return _all_less(pairs)


def _sketch_beats_copies(layer: LayerResults) -> Verdict:
    """Whether, for each read-only variant, a sketch of the map in use with no more traffic errs less."""
    own = own_sketches(layer)
    pairs = []
    for copy in (s for s in layer.systems if s.family == "read-only"):
        sketches = [s for s in own if s.reduction >= copy.reduction * 0.995]
        if sketches:
            pairs.append((copy, min(sketches, key=lambda s: s.output_error)))
    return _all_less([(sketch, copy) for copy, sketch in pairs])


def _all_less(pairs: Sequence[tuple[Measurement, Measurement]]) -> Verdict:
    """Whether the first of every pair has the smaller error, with the pairs where it does not, else all."""
    if not pairs:
        return None
    lost = [(ours, theirs) for ours, theirs in pairs if ours.output_error >= theirs.output_error]
    return not lost, "; ".join(f"{_said(ours)}, {_said(theirs)}" for ours, theirs in lost or pairs)


def _retained_at_four(layer: LayerResults) -> Verdict:
    curve = next((c for c in layer.curves if (c.basis, c.map) == ("calibrated", "exact") and 4 in c.ranks), None)
    if curve is None:
        return None
    mean = float(np.mean(np.array(curve.retained)[:, curve.ranks.index(4)]))
    return mean >= 0.884, f"{100 * mean:.1f}% retained"


FORGETS = (
    "Gates that forget fast forget a compression error with the state it is in: it then reaches its level within a "
    "few half-lives, before the first points of the curves, and stays there. The paper's models are large and "
    "generate tens of thousands of tokens."
)

CLAIMS: tuple[tuple[str, Callable[[LayerResults], Verdict], str], ...] = (
    (
        "At 9x to 11x less traffic the sketch loses less than every quantised or pruned state at 4x or more.",
        _beats_compressed,
        "",
    ),
    ("Errors of quantised and pruned states grow over tokens.", _compressed_grow, FORGETS),
    (
        "The sketch's errors do not grow over tokens.",
        _sketch_stays,
        "States are exact to float32 rounding and every window starts afresh, so nothing is carried over. What can "
        "grow is the share of an output that is read from the state, as a state fills up from its zero start.",
    ),
    ("A calibrated basis loses less than a random orthogonal one.", _against("random-basis"), ""),
    (
        "A state-dependent map loses less than an offline map, at the same ranks.",
        _against("offline-map"),
        "",
    ),
    (
        "Allocation by gradients loses less than uniform ranks.",
        _gradient_pays("uniform"),
        "It minimises what the model's loss feels, not the error of the outputs: its own score is lower.",
    ),
    (
        "Allocation by gradients loses less than allocation by error alone.",
        _gradient_pays("error"),
        "The error of the outputs is exactly what allocation by error minimises; the gradient's own score is lower.",
    ),
    (
        "Allocation by gradients loses less than allocation by sensitivity alone.",
        _gradient_pays("sensitivity"),
        "",
    ),
    (
        "With exact updates, a quantised copy for reads loses less than a quantised state that saves no more traffic.",
        _copies_beat_states,
        "A copy of few bits has all of its error at once, and no more later; a state that is requantised reaches its "
        "error over tokens, so that a short sequence favours it.",
    ),
    (
        "A sketch loses less than a quantised copy or a fixed low-rank read at comparable traffic.",
        _sketch_beats_copies,
        "",
    ),
    ("At rank 4 least-squares coefficients retain 88.4 to 97.5% of the state reads' energy.", _retained_at_four, ""),
)
