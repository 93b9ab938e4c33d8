"""Why a claim of the paper does not hold on a layer: reasons that are given where the results bear them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.findings import EXACT, GROWS, growth, headline, last_over_first, sketches_and_copies
from sketchssm.evaluate.measure import Measurement

__all__ = [
    "UNKNOWN",
    "Reason",
    "copies_win",
    "fills",
    "forgets",
    "kept_channels",
    "serves_the_loss",
    "sketch_growth",
    "unknown",
]

Reason = Callable[[Sequence[LayerResults], Sequence[LayerResults]], str]
"""Why a claim does not hold, from the layers where it does not and all that were tested; empty where unknown."""

UNKNOWN = "The reason is not known."


def unknown(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """Give no reason."""
    return ""


def forgets(text: str) -> Reason:
    """Give a reason where every head that does not agree forgets within a tenth of the text."""
    return lambda bad, layers: text if all(max(x.half_life) < x.facts["test_tokens"] / 10 for x in bad) else ""


def sketch_growth(layer: LayerResults) -> float:
    """How many times the output errors of the sketches in the band grow, at most."""
    return max((g.output or 1.0 for g in growth(layer, headline(layer).sketches)), default=1.0)


def fills(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """Whether the share that is read from states explains the growth: error energy follows it."""
    shares = [layer.facts["read_share"] for layer in bad]
    explained = all(sketch_growth(x) <= GROWS * math.sqrt(b / a) for x, (a, b) in zip(bad, shares, strict=True) if a)
    return (
        "Nothing is carried over, since states are exact and every window starts afresh. What grows is the share of "
        "an output that is read from the state, as a state fills up from its zero start."
        if explained
        else ""
    )


def serves_the_loss(rival: str) -> Reason:
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


def kept_channels(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """What the states of kept channels do, which alone could carry errors on: nothing, or errors that do not grow."""
    said = []
    for layer in bad:
        curves = [s.drift["kept_error"] for s in layer.systems if len(s.drift.get("kept_error", ())) >= 4]
        worst = max((max(curve) for curve in curves), default=math.inf)
        grown = [last_over_first(curve) or 1.0 for curve in curves]
        if worst < EXACT:
            said.append(
                f"{layer.name}: the states of kept channels are exact to float32 rounding, so that nothing is carried "
                "over; what is pruned is missing from the first token on."
            )
        elif layer.kind != "mamba2" and curves and float(np.median(grown)) <= GROWS:
            said.append(
                f"{layer.name}: erasure couples channels, and the states of kept ones err by up to {worst:.1e}, but "
                f"their last quarter {min(grown):.2f}x to {max(grown):.2f}x as much as their first. Likely, not "
                "measured: gates and erasure forget these errors as fast as the missing channels make them."
            )
        else:
            said.append(f"{layer.name}: {UNKNOWN[0].lower()}{UNKNOWN[1:]}")
    return " ".join(said) if any(not text.endswith(UNKNOWN[1:]) for text in said) else ""


def copies_win(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """Which of basis, ranks and map keeps sketches behind a read-only variant of their traffic."""
    said = []
    for layer in bad:
        lost = [(s, c) for s, c in sketches_and_copies(layer) if s.output_error >= c.output_error]
        found = [_limit(layer, sketch, copy) for sketch, copy in lost]
        if not all(found):
            return ""
        said += [f"{layer.name}, {copy.setting}: {text}" for (_, copy), text in zip(lost, found, strict=True)]
    return " ".join(said)


def _limit(layer: LayerResults, sketch: Measurement, copy: Measurement) -> str:
    """What stands between a sketch and a copy: its basis, if no map and no ranks would do, else its ranks or map."""
    ideal = layer.facts.get("ideal")
    if not ideal or copy.setting not in ideal["least"] or sketch.setting not in ideal["same_ranks"]:
        return ""
    share, least = np.array(ideal["share"]), ideal["least"][copy.setting]
    theirs = float(share @ (1.0 - np.array(copy.head_retained)))
    ours = float(share @ (1.0 - np.array(sketch.head_retained)))
    same = ideal["same_ranks"][sketch.setting]
    heads = np.array(least["heads"])
    head = int(heads.argmax())
    if least["bound"] > theirs:
        return (
            f"neither map nor ranks. With the best coefficients for every token and the best ranks in hindsight, "
            f"sketches of this basis and traffic lose at least {least['bound']:.2%} of the energy read from states, "
            f"the copy {theirs:.2%}. Head {head}, with {share[head]:.0%} of that energy, makes "
            f"{heads[head] / heads.sum():.0%} of the sketches' loss, at rank {least['ranks'][head]}: its reads spread "
            "over more directions than the bytes pay for, and the copy keeps them all."
        )
    if same > theirs:
        return (
            f"the ranks. With the best coefficients for every token they lose {same:.2%} of the energy read from "
            f"states, the copy {theirs:.2%}; ranks chosen in hindsight could lose {heads.sum():.2%}."
        )
    if ours > theirs:
        return (
            f"the map. At these ranks it loses {ours:.2%} of the energy read from states, the best coefficients for "
            f"every token {same:.2%}, the copy {theirs:.2%}."
        )
    return ""
