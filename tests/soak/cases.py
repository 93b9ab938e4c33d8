"""Heads that a soak drives: every system and kind, with ranks of both sorts, with and without a clock."""

from typing import NamedTuple

import numpy as np
from samples import LAYERS, plan_of

import sketchssm as ss
from sketchssm.recurrence import DENSE, Layer
from soak.places import Host
from soak.server import Server

WINDOW = 8
MISSING = {"reference": (), "cpu": ()}
"""Operations that a backend does not have yet."""

# Errors relative to the norms of what an output is made of, for exact heads and for sketched ones. Float64: a hundred
# operations of 2^-53 each, and for sketches a condition number of 1e4 at most (the ridge's floor). Float32: the same
# of 2^-24 over some ten tokens; a ridge of 0.02 enlarges what rounding does to a Gram matrix up to 50 times.
TOLERANCE = {"reference": (1e-13, 1e-10), "cpu": (1e-6, 1e-4)}


class Case(NamedTuple):
    """One head: a system, a kind of layer, where its clock begins, and the slot that means padding."""

    system: str
    kind: str
    phase: int | None = None
    pad_slot: int = -1

    def __str__(self):
        clock = "" if self.phase is None else f"-clock{self.phase}"
        return f"{self.system}-{self.kind}{clock}" + (f"-pad{self.pad_slot}" if self.pad_slot != -1 else "")


CASES = [
    Case("sketch", "gdn", 3),
    Case("sketch", "mamba2"),
    Case("sketch", "kda", 0, 0),
    Case("replay", "kda", 7),
    Case("replay", "gdn"),
    Case("standard", "gdn"),
    Case("standard", "mamba2", None, 99),
]


def plan_for(layer):
    """A plan with exact and sketched heads."""
    return plan_of(np.random.default_rng(7), layer, [DENSE, 2, 3, DENSE], ridge=0.02, window=WINDOW)


def server(backend, case, requests, seed, slots=64, mean_length=12.0):
    """A server of one case on a backend of the host."""
    layer: Layer = LAYERS[case.kind]
    plan = plan_for(layer) if case.system == "sketch" else None
    without = MISSING[backend]
    settings = {"pad_slot": case.pad_slot, "phase": case.phase}
    if "memory" in without:
        settings = {}
    phase = settings.get("phase")
    if case.system == "standard":
        settings.pop("phase", None)

    def make(slots, memory):
        own = settings if memory is None else settings | {"memory": memory}
        if case.system == "standard":
            drafts = {} if "draft" in without else {"drafts": 4}
            return ss.StandardHead(layer, slots, backend, **own, **drafts)
        if case.system == "replay":
            return ss.ReplayHead(layer, slots, backend, window=WINDOW, **own)
        return ss.SketchHead(plan, slots, backend, sketch_dtype="float32", **own)

    place = Host(make, slots, without)
    return Server(place, layer, requests, seed, TOLERANCE[backend], plan, phase, without, mean_length)
