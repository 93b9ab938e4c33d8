"""Heads that a soak drives: every system and kind, with ranks of both sorts, with and without a clock."""

from typing import NamedTuple

import numpy as np
from samples import LAYERS, plan_of

import sketchssm as ss
from sketchssm.recurrence import DENSE, Layer
from soak.devices import Device
from soak.places import Host
from soak.server import Server

WINDOW = 8
MISSING = {
    "reference": (),
    "cpu": (),
    "cuda": ("memory", "adopt", "copy", "snapshot", "left_out", "streams", "standard drafts", "pad_slot"),
}
"""Operations that a backend does not have yet."""

# Errors relative to the norms of what an output is made of, for exact heads and for sketched ones. Float64: a hundred
# operations of 2^-53 each, and for sketches a condition number of 1e4 at most (the ridge's floor). Float32: the same
# of 2^-24 over some ten tokens; a ridge of 0.02 enlarges what rounding does to a Gram matrix up to 50 times.
TOLERANCE = {"reference": (1e-13, 1e-10), "cpu": (1e-6, 1e-4), "cuda": (2e-6, 1e-3)}


# the kernels of a device take these shapes
DEVICE_LAYERS = {
    "mamba2": Layer("mamba2", 4, 64, 80, 2),
    "gdn": Layer("gdn", 4, 64, 64, 2),
    "kda": Layer("kda", 4, 64, 64, 4),
}


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


def server(backend, case, requests, seed, slots=64, mean_length=12.0, graphs=False):
    """A server of one case; with graphs, its steps on a device are captured once and replayed."""
    layer: Layer = (DEVICE_LAYERS if backend == "cuda" else LAYERS)[case.kind]
    plan = plan_for(layer) if case.system == "sketch" else None
    without = set(MISSING[backend])
    settings = {} if "pad_slot" in without else {"pad_slot": case.pad_slot}
    if backend == "cuda":
        settings |= {"activation_dtype": "bfloat16", "output_dtype": "float32"}
    if case.system == "standard":
        if "standard drafts" in without:
            without.add("draft")
        settings |= {} if "draft" in without else {"drafts": 4}
    else:
        settings |= {"phase": case.phase}

    def make(slots, memory):
        own = settings if memory is None else settings | {"memory": memory}
        if case.system == "standard":
            return ss.StandardHead(layer, slots, backend, **own)
        if case.system == "replay":
            return ss.ReplayHead(layer, slots, backend, window=WINDOW, **own)
        return ss.SketchHead(plan, slots, backend, sketch_dtype="float32", **own)

    place = Device(make, slots, without, graphs) if backend == "cuda" else Host(make, slots, without)
    return Server(place, layer, requests, seed, TOLERANCE[backend], plan, case.phase, without, mean_length)


def attempts(backend):
    """The operations that a backend may lack, by name, on a small head."""
    device = backend == "cuda"
    layer, slots = (DEVICE_LAYERS if device else LAYERS)["gdn"], [0]
    types = {"activation_dtype": "bfloat16"} if device else {}

    def head(**settings):
        return ss.ReplayHead(layer, 2, backend, window=WINDOW, **types, **settings)

    return {
        "memory": lambda: head(memory={}).parts,
        "phase": lambda: head(phase=1),
        "pad_slot": lambda: head(pad_slot=0),
        "draft": lambda: head().commit([0], slots),
        "standard drafts": lambda: ss.StandardHead(layer, 2, backend, drafts=4, **types).commit([0], slots),
        "adopt": lambda: head().adopt(slots),
        "copy": lambda: head().copy([0], [1]),
        "snapshot": lambda: head().restore(head().snapshot(slots), slots),
        "left_out": lambda: head().left_out(),
    }
