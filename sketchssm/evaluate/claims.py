"""The paper's claims, in terms of output error, held against the results of an evaluation.

A claim that the chosen systems can't test is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.findings import GROWS, ablations, growth, headline, own_sketches, times
from sketchssm.evaluate.measure import Measurement

__all__ = ["Claim", "claims"]

Verdict = tuple[bool, str] | None
Reason = Callable[[Sequence[LayerResults], Sequence[LayerResults]], str]
"""Why a claim does not hold, from the layers where it does not and all that were tested; empty where unknown."""


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
        Why it does not hold everywhere, if that is known.
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
            bad = [layer for layer in layers if layer.name in tested and not tested[layer.name][0]]
            rest = [layer for layer in layers if layer.name in tested]
            found.append(Claim(says, tested, reason(bad, rest) if bad else ""))
    return found


def _said(system: Measurement) -> str:
    return f"{system.name} {system.output_error:.1e} at {system.reduction:.2f}x"


def _beats_compressed(layer: LayerResults) -> Verdict:
    found = headline(layer)
    if found.worst is None or found.rival is None or found.margin is None:
        return None
    return found.margin > 1, (
        f"{_said(found.worst)}, {_said(found.rival)}; half-life of the slowest head {max(layer.half_life):.0f} tokens"
    )


def _grow(*families: str) -> Callable[[LayerResults], Verdict]:
    """Whether errors of some families' outputs or states grow, in the median over their settings."""

    def check(layer: LayerResults) -> Verdict:
        found = growth(layer, [s for s in layer.systems if s.family in families])
        if not found:
            return None
        outputs, states = ([getattr(g, what) or 1.0 for g in found] for what in ("output", "state"))
        return max(float(np.median(factors)) for factors in (outputs, states)) > GROWS, (
            f"output errors {min(outputs):.2f}x to {max(outputs):.2f}x, state errors {min(states):.2f}x to "
            f"{max(states):.2f}x from the first quarter of the tokens to the last, over {len(found)} settings; "
            f"half-life of the slowest head {max(layer.half_life):.0f} tokens"
        )

    return check


def _sketch_stays(layer: LayerResults) -> Verdict:
    found = growth(layer, headline(layer).sketches)
    if not found:
        return None
    factor, exact = _sketch_growth(layer), all(g.state is None for g in found)
    return factor <= GROWS and exact, (
        f"output errors {factor:.2f}x from the first quarter of the tokens to the last; "
        f"states {'exact to float32 rounding' if exact else 'not exact'}; "
        "{:.0%} and {:.0%} of the outputs' energy are read from states there".format(*layer.facts["read_share"])
    )


def _sketch_growth(layer: LayerResults) -> float:
    return max((g.output or 1.0 for g in growth(layer, headline(layer).sketches)), default=1.0)


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
    """Whether a read-only copy errs less than the quantised state that comes nearest to its reduction from below."""
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


def _forgets(text: str) -> Reason:
    """Give a reason where every head that does not agree forgets within a tenth of the text."""
    return lambda bad, layers: text if all(max(x.half_life) < x.facts["test_tokens"] / 10 for x in bad) else ""


def _fills(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """Whether the share that is read from states explains the growth: error energy follows it."""
    shares = [layer.facts["read_share"] for layer in bad]
    explained = all(_sketch_growth(x) <= GROWS * math.sqrt(b / a) for x, (a, b) in zip(bad, shares, strict=True) if a)
    return (
        "Nothing is carried over, since states are exact and every window starts afresh. What grows is the share of "
        "an output that is read from the state, as a state fills up from its zero start."
        if explained
        else ""
    )


def _serves_the_loss(rival: str) -> Reason:
    """Whether the other allocation has the larger gradient-weighted score wherever its outputs err less."""

    def reason(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
        for layer in bad:
            ours, theirs = (layer.find(f"ablation/allocation-{method}") for method in ("gradient", rival))
            if not (ours and theirs and ours.objective and (theirs.objective or 0.0) > ours.objective):
                return ""
        return (
            "Gradients weigh an error by what the model's loss feels of it, and this is the bare error: by the "
            "gradient-weighted score, on the sequences that ranks were scored on, they do best here too."
        )

    return reason


def _retained(layer: LayerResults, rank: int = 8) -> float | None:
    """Retained energy of the exact map at one rank, mean over heads."""
    for curve in layer.curves:
        if (curve.basis, curve.map) == ("calibrated", "exact") and rank in curve.ranks:
            return float(np.mean(np.array(curve.retained)[:, curve.ranks.index(rank)]))
    return None


def _unknown(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    return ""


def _retained_at_four(layer: LayerResults) -> Verdict:
    mean = _retained(layer, 4)
    return None if mean is None else (mean >= 0.884, f"{100 * mean:.1f}% retained")


CLAIMS: tuple[tuple[str, Callable[[LayerResults], Verdict], Reason], ...] = (
    (
        "At 9x to 11x less traffic the sketch loses less than every quantised or pruned state at 4x or more.",
        _beats_compressed,
        _forgets(
            "Where gates forget within a few tokens, a quantised state forgets its errors as fast and they do not add "
            "up: a few bits are then enough."
        ),
    ),
    (
        "Errors of quantised states grow over tokens.",
        _grow("quantised"),
        _forgets(
            "Where gates forget within a few tokens, errors are forgotten as fast as they are made, and reach their "
            "level before the first point of the curve."
        ),
    ),
    (
        "Errors of pruned and key-reduced states grow over tokens.",
        _grow("pruned", "key-reduced"),
        lambda bad, layers: (
            "What is pruned is missing from the first token on, and its share of a state does not grow; channels that "
            "are kept are updated without rounding."
        ),
    ),
    ("The sketch's errors do not grow over tokens.", _sketch_stays, _fills),
    ("A calibrated basis loses less than a random orthogonal one.", _against("random-basis"), _unknown),
    ("A state-dependent map loses less than an offline map, at the same ranks.", _against("offline-map"), _unknown),
    (
        "Allocation by gradients loses less than uniform ranks.",
        _gradient_pays("uniform"),
        _serves_the_loss("uniform"),
    ),
    (
        "Allocation by gradients loses less than allocation by error alone.",
        _gradient_pays("error"),
        _serves_the_loss("error"),
    ),
    (
        "Allocation by gradients loses less than allocation by sensitivity alone.",
        _gradient_pays("sensitivity"),
        _serves_the_loss("sensitivity"),
    ),
    (
        "With exact updates, a quantised copy for reads loses less than a quantised state that saves no more traffic.",
        _copies_beat_states,
        _forgets(
            "Where gates forget within a few tokens, requantising adds little to the error of one quantisation, and "
            "then the bits decide."
        ),
    ),
    (
        "A sketch loses less than a quantised copy or a fixed low-rank read at comparable traffic.",
        _sketch_beats_copies,
        _unknown,
    ),
    (
        "At rank 4 least-squares coefficients retain at least 88.4% of the state reads' energy.",
        _retained_at_four,
        _unknown,
    ),
)
