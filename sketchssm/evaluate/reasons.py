"""Why a claim of the paper does not hold on a layer: reasons that are given where the results bear them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.findings import GROWS, growth, headline, last_over_first, sketches_and_copies
from sketchssm.evaluate.measure import Measurement
from sketchssm.recurrence import ROUNDING

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
    """Give a reason where all heads forget within a tenth of the text, and no quantised state's error grows."""

    def steady(layer: LayerResults) -> bool:
        quantised = growth(layer, [s for s in layer.systems if s.family == "quantised"])
        return all((g.output or 1.0) <= GROWS for g in quantised)

    return lambda bad, layers: (
        text if all(max(x.half_life) < x.facts["test_tokens"] / 10 and steady(x) for x in bad) else ""
    )


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
    exact, steady, rest = [], [], []
    curves = {layer.name: _kept_curves(layer) for layer in bad}
    for layer in bad:
        grown = [last_over_first(curve) or 1.0 for curve in curves[layer.name]]
        if grown and max(map(max, curves[layer.name])) < ROUNDING:
            exact.append(layer.name)
        elif grown and layer.kind != "mamba2" and float(np.median(grown)) <= GROWS:
            steady.append(layer.name)
        else:
            rest.append(layer.name)
    found = [
        (
            exact,
            "the states of kept channels are exact to float32 rounding, so that nothing is carried over; what is "
            "pruned is missing from the first token on.",
        )
    ]
    if steady:
        coupled = [curve for name in steady for curve in curves[name]]
        grown = [last_over_first(curve) or 1.0 for curve in coupled]
        text = (
            f"erasure couples channels, and the states of kept ones err by up to {max(map(max, coupled)):.1e}, but in "
            f"the last quarter {min(grown):.2f}x to {max(grown):.2f}x as much as in the first: what is carried over "
            f"does not add up. {_lasts(steady, bad)}"
        )
        found.append((steady, text))
    return _by_place([*((", ".join(names), text) for names, text in found if names), *((name, "") for name in rest)])


def _lasts(names: Sequence[str], layers: Sequence[LayerResults]) -> str:
    """Whether errors of kept channels are gone before they can add up: half of one, at least, by the text's end."""
    left = [
        s.drift["left_error"][-1]
        for layer in layers
        if layer.name in names
        for s in layer.systems
        if s.drift.get("left_error")
    ]
    if not left or max(left) > 0.5:
        return "What keeps it from that is not known."
    return (
        f"Of the error that they have halfway through the text {min(left):.0%} to {max(left):.0%} is left at its end: "
        "decay and erasure take it away with what it lies on, and as much comes in."
    )


def _kept_curves(layer: LayerResults) -> list[list[float]]:
    """Errors of the states of kept channels over tokens, of every system that has fewer and enough points."""
    return [s.drift["kept_error"] for s in layer.systems if len(s.drift.get("kept_error", ())) >= 4]


def copies_win(bad: Sequence[LayerResults], layers: Sequence[LayerResults]) -> str:
    """Which of basis, ranks and map keeps sketches behind a read-only variant of their traffic."""
    return _by_place(
        [
            (f"{layer.name}, {copy.setting}", _limit(layer, sketch, copy))
            for layer in bad
            for sketch, copy in sketches_and_copies(layer)
            if sketch.output_error >= copy.output_error
        ]
    )


def _by_place(found: Sequence[tuple[str, str]]) -> str:
    """What was found at each place, or that it is not known; empty if nothing was found at any."""
    if not any(text for _, text in found):
        return ""
    return " ".join(f"{place}: {text or UNKNOWN}" for place, text in found)


def _limit(layer: LayerResults, sketch: Measurement, copy: Measurement) -> str:
    """What stands between a sketch and a copy: its basis, if no map and no ranks would do, else its ranks or map."""
    ideal = layer.facts.get("ideal")
    if not ideal or copy.setting not in ideal["least"] or sketch.setting not in ideal["same_ranks"]:
        return ""
    share, least, same = np.array(ideal["share"]), ideal["least"][copy.setting], ideal["same_ranks"][sketch.setting]
    ours, theirs = (share * (1.0 - np.array(s.head_retained)) for s in (sketch, copy))
    lost, rival = float(ours.sum()), float(theirs.sum())
    if least["bound"] > rival:
        head = int(ours.argmax())
        return (
            "neither map nor ranks. With the best coefficients for every token and the best ranks in hindsight, "
            f"sketches of this basis and traffic lose at least {least['bound']:.2%} of the energy read from states, "
            f"the copy {rival:.2%}; with a basis fitted to the test text itself, at least {least['test_basis']:.2%}. "
            f"Head {head}, with {share[head]:.0%} of that energy and gates that halve in {layer.half_life[head]:.0f} "
            f"tokens, makes {ours[head] / lost:.0%} of the sketch's loss."
        )
    if same > rival:
        return (
            f"the ranks, with which no map would do. With the best coefficients for every token they lose {same:.2%} "
            f"of the energy read from states, the copy {rival:.2%}, and ranks chosen in hindsight "
            f"{least['found']:.2%}."
            if least["found"] <= rival
            else ""
        )
    if lost > rival:
        return (
            f"the map. At these ranks it loses {lost:.2%} of the energy read from states, the best coefficients for "
            f"every token {same:.2%}, the copy {rival:.2%}."
        )
    return ""
