"""Running sums over samples, which stay on the device of the tokens until someone reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Any, ClassVar, Self

import numpy as np

from sketchssm.arrays import interop
from sketchssm.arrays.space import Space
from sketchssm.calibrate.windows import Carry, Reads, host_tokens, take_array, take_tokens, visit
from sketchssm.layer.recurrence import Layer, Tokens

ARGUMENTS = {"gradient": "grad", "perturbation": "weight", "error": "neither"}
"""The arguments of an update by weighting."""

LARGEST_SUM = 1e100
"""Largest moment or score: the product of two, over all heads, still has room in float64."""


class RunningSum:
    """A sum of an `Accumulator`, as an attribute: a NumPy array, copied from the device when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        held = vars(owner)[self._name]
        if type(held) is not np.ndarray:
            held = vars(owner)[self._name] = interop.to_host(held, self._name)
        return held

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value


class Accumulator(ABC):
    """Sums over the samples of `sketchssm.calibrate.windows.visit`."""

    layer: Layer
    window: int
    weighting: str | None
    """What the sums of products weight errors by: "gradient", "perturbation" or, without weights, "error"."""
    sums: ClassVar[tuple[str, ...]]
    of_gradients: ClassVar[tuple[str, ...]] = ()
    """Sums of products with squared gradients or with weights."""

    @abstractmethod
    def _add(self, space: Space, reads: Reads, sums: dict[str, Any], dtype: str) -> None:
        """Add some samples to sums."""

    def _update(self, inputs: tuple[Any, ...], grad: Any, weight: Any, carry: Carry | None) -> Carry:
        """Add the samples of some tokens, all or none.

        Products are in float32 unless an input is float64, and sums of each block's products in float64. If float32
        has no room for a product, all is computed again in float64.
        """
        space, tokens, good = take_tokens(self.layer, *inputs)
        top, facts = 1.0, dict[str, str]()
        if "weighting" in vars(self):
            given = [name for name, x in (("gradient", grad), ("perturbation", weight)) if x is not None] or ["error"]
            facts["weighting"] = given[0]
            if len(given) > 1 or self.weighting not in (None, *given):
                came = " and ".join(ARGUMENTS[x] for x in given)
                came += f" after {ARGUMENTS[self.weighting]}" if self.weighting else ""
                raise ValueError(f"grad, weight: expected the same one, or neither, at every update, got {came}")
        if grad is not None or weight is not None:
            grad, top = _slope(space, grad, weight, tokens.v.shape)
        wide = any(x is not None and str(x.dtype).endswith("float64") for x in (*tokens, grad))
        for dtype in ("float64",) if wide else ("float32", "float64"):
            sums, after = self._summed(space, tokens, grad, carry, dtype, top)
            if not bool(good):  # the first wait for a device
                host_tokens(self.layer, *inputs)  # names the argument
            good = True
            try:
                totals = added(self, sums)
                break
            except ValueError:
                if dtype == "float64":
                    raise
        self.__dict__.update(totals, **facts)
        return after

    def _columns(self, space: Space, heads: slice, dtype: str) -> Any:
        """Columns ``(heads, K, G)`` of the basis of some heads; on a device they stay there."""
        if not space.on_device:
            return space.array(vars(self)["_omega"][heads], dtype)
        held = vars(self).get("_on_device")
        if held is None or not (space.holds(held) and str(held.dtype).endswith(dtype)):
            held = vars(self)["_on_device"] = space.array(vars(self)["_omega"], dtype)
        return held[heads]

    def _summed(
        self, space: Space, tokens: Tokens, grad: Any, carry: Carry | None, dtype: str, top: float
    ) -> tuple[dict[str, Any], Carry]:
        """Sums over some tokens alone, and the positions after them."""
        sums = {name: space.zeros(vars(self)[name].shape, _type_of(name)) for name in self.sums}

        def add(reads: Reads) -> None:
            self._add(space, reads, sums, dtype)

        after = visit(space, self.layer, tokens, self.window, carry, add, dtype=dtype, grad=grad, scale=top)
        for name in self.of_gradients:
            sums[name] *= top**2
        return sums, after

    def _joined(self, other: Self, *settings: str) -> Self:
        """Scores over the samples of both; ValueError unless basis, window, weighting and some settings agree."""
        for name in ("layer", "window", *settings):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"scores: expected the same {name} to add, got {getattr(self, name)} and {getattr(other, name)}"
                )
        if not np.array_equal(vars(self)["_omega"], vars(other)["_omega"]):
            raise ValueError("scores: expected the same basis to add")
        if None not in (self.weighting, other.weighting) and self.weighting != other.weighting:
            raise ValueError(f"scores: expected the same weighting, got {self.weighting} and {other.weighting}")
        total = type(self).__new__(type(self))
        total.__dict__.update(self.__dict__, weighting=self.weighting or other.weighting)
        total.__dict__.update(added(self, {name: getattr(other, name) for name in self.sums}))
        return total


def add_to_all(accumulators: Sequence[Accumulator], inputs: Sequence[Any], carry: Carry | None) -> Any:
    """Add the samples of some tokens ``q, k, v, g, beta``, without weights, to each of some sums of one layer.

    The host does not wait for a device (but for the least log-decay of a block, with write gates and a decay per
    channel). If the inputs or a sum can't be taken, by the rules of `Moments.update`, all sums stay as they are.
    Products are in float32 alone.

    Returns
    -------
    bool, on a device as an array there
        Whether the sums were changed.
    """
    try:
        space, tokens, good = take_tokens(accumulators[0].layer, *inputs)
    except ValueError:
        return False
    found = []
    with np.errstate(all="ignore"):
        for own in accumulators:
            totals = _totals(own, own._summed(space, tokens, None, carry, "float32", 1.0)[0])
            found.append(totals)
            good = good & _have_room(totals)
    for own, totals in zip(accumulators, found, strict=True):
        for name, total in totals.items():
            totals[name] = space.xp.where(good, total, space.array(vars(own)[name], _type_of(name)))
        own.__dict__.update(totals, **({"weighting": "error"} if "weighting" in vars(own) else {}))
    return good


def common_weighting(scores: Iterable[Accumulator]) -> str:
    """Weighting that all scores have; "error", which needs none, if they differ."""
    found = {each.weighting or "error" for each in scores}
    return found.pop() if len(found) == 1 else "error"


def _type_of(name: str) -> str:
    return "int64" if name == "samples" else "float64"


def _slope(space: Space, grad: Any, weight: Any, shape: tuple[int, ...]) -> tuple[Any, float]:
    """Gradients ``(..., V)`` or roots of weights ``(..., 1)`` in a space, and a power of two near the largest."""
    name, given, shape = ("grad", grad, tuple(shape)) if weight is None else ("weight", weight, tuple(shape[:-1]))
    if not space.holds(given):
        given = take_array(given, name) if not space.on_device else space.array(take_array(given, name), "float32")
    if tuple(given.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
    slope = given if weight is None else given[..., None]
    if not slope.shape[0] * slope.shape[1]:
        return slope, 1.0
    if weight is not None:
        if (least := float(given.min())) < 0:
            raise ValueError(f"weight: expected numbers of at least 0, got {least:g}")
        slope = space.xp.sqrt(slope)
    top = float(space.cast(space.xp.abs(slope), "float64").max())
    if not np.isfinite(top):
        take_array(given, name)  # raises
    return slope, float(2.0 ** np.floor(np.log2(top))) if top else 1.0


def added(owner: object, sums: dict[str, Any]) -> dict[str, Any]:
    """Running sums of an object with some more added, by name; ValueError if one is so large that products overflow.

    The object stays as it is. ``owner.__dict__.update(added(owner, sums))`` is one operation: an interrupt comes
    before or after it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        totals = _totals(owner, sums)
        if bool(_have_room(totals)):
            return totals
    name, total = next((name, total) for name, total in totals.items() if not bool(_has_room(total)))
    cause = "grad, weight" if name in ("paired", "weighted") else "q, k, v"
    raise ValueError(
        f"{cause}: expected inputs with a {name} of at most {LARGEST_SUM:g}, got {float(abs(total).max()):g}: "
        "are keys normalised, and values and gradients scaled?"
    )


def _totals(owner: object, sums: dict[str, Any]) -> dict[str, Any]:
    """Running sums of an object with some more added, by name."""
    totals = {}
    for name, more in sums.items():
        space, held = Space(more), vars(owner)[name]
        totals[name] = (space.array(held, _type_of(name)) if space.on_device else _host(held, name)) + more
    return totals


def _have_room(totals: dict[str, Any]) -> Any:
    return reduce(and_, (_has_room(total) for name, total in totals.items() if name != "samples"))


def _has_room(total: Any) -> Any:
    return (abs(total) <= LARGEST_SUM).all() if hasattr(total, "all") else abs(total) <= LARGEST_SUM


def _host(held: Any, name: str) -> Any:
    return held if np.isscalar(held) else interop.to_host(held, name)
