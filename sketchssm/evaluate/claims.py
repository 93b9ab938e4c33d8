"""The paper's claims, in terms of output error, held against the results of an evaluation.

A claim that the chosen systems can't test is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.findings import GROWS, ablations, growth, headline, sketches_and_copies, times
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.reasons import (
    UNKNOWN,
    Reason,
    copies_win,
    fills,
    forgets,
    kept_channels,
    serves_the_loss,
    sketch_growth,
    unknown,
)

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
        Why it does not hold everywhere, or that this is not known; empty where it holds.
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
            found.append(Claim(says, tested, reason(bad, rest) or UNKNOWN if bad else ""))
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
    factor, exact = sketch_growth(layer), all(g.state is None for g in found)
    return factor <= GROWS and exact, (
        f"output errors {factor:.2f}x from the first quarter of the tokens to the last; "
        f"states {'exact to float32 rounding' if exact else 'not exact'}; "
        "{:.0%} and {:.0%} of the outputs' energy are read from states there".format(*layer.facts["read_share"])
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
        if ours is None or theirs is None or (ours.ranks and ours.ranks == theirs.ranks):
            return None  # the same ranks tell nothing of the methods
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
    """Whether, for each read-only variant, the best sketch with no more traffic errs less."""
    return _all_less(sketches_and_copies(layer))


def _all_less(pairs: Sequence[tuple[Measurement, Measurement]]) -> Verdict:
    """Whether the first of every pair has the smaller error, with the pairs where it does not, else all."""
    if not pairs:
        return None
    lost = [(ours, theirs) for ours, theirs in pairs if ours.output_error >= theirs.output_error]
    return not lost, "; ".join(f"{_said(ours)}, {_said(theirs)}" for ours, theirs in lost or pairs)


def _retained(layer: LayerResults, rank: int = 8) -> float | None:
    """Retained energy of the exact map at one rank, mean over heads."""
    for curve in layer.curves:
        if (curve.basis, curve.map) == ("calibrated", "exact") and rank in curve.ranks:
            return float(np.mean(np.array(curve.retained)[:, curve.ranks.index(rank)]))
    return None


def _retained_at_four(layer: LayerResults) -> Verdict:
    mean = _retained(layer, 4)
    return None if mean is None else (mean >= 0.884, f"{100 * mean:.1f}% retained")


CLAIMS: tuple[tuple[str, Callable[[LayerResults], Verdict], Reason], ...] = (
    (
        "At 9x to 11x less traffic the sketch loses less than every quantised or pruned state at 4x or more.",
        _beats_compressed,
        forgets(
            "Where gates forget within a few tokens, a quantised state forgets its errors as fast and they do not add "
            "up: a few bits are then enough."
        ),
    ),
    (
        "Errors of quantised states grow over tokens.",
        _grow("quantised"),
        forgets(
            "Where gates forget within a few tokens, errors are forgotten as fast as they are made, and reach their "
            "level before the first point of the curve."
        ),
    ),
    (
        "Errors of pruned and key-reduced states grow over tokens.",
        _grow("pruned", "key-reduced"),
        kept_channels,
    ),
    ("The sketch's errors do not grow over tokens.", _sketch_stays, fills),
    ("A calibrated basis loses less than a random orthogonal one.", _against("random-basis"), unknown),
    ("A state-dependent map loses less than an offline map, at the same ranks.", _against("offline-map"), unknown),
    (
        "Allocation by gradients loses less than uniform ranks.",
        _gradient_pays("uniform"),
        serves_the_loss("uniform"),
    ),
    (
        "Allocation by gradients loses less than allocation by error alone.",
        _gradient_pays("error"),
        serves_the_loss("error"),
    ),
    (
        "Allocation by gradients loses less than allocation by sensitivity alone.",
        _gradient_pays("sensitivity"),
        serves_the_loss("sensitivity"),
    ),
    (
        "With exact updates, a quantised copy for reads loses less than a quantised state that saves no more traffic.",
        _copies_beat_states,
        forgets(
            "Where gates forget within a few tokens, requantising adds little to the error of one quantisation, and "
            "then the bits decide."
        ),
    ),
    (
        "A sketch loses less than a quantised copy or a fixed low-rank read at comparable traffic.",
        _sketch_beats_copies,
        copies_win,
    ),
    (
        "At rank 4 least-squares coefficients retain at least 88.4% of the state reads' energy.",
        _retained_at_four,
        unknown,
    ),
)
