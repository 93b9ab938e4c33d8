"""Heads of every decode system, made alike, for the tests that all of them must pass."""

import numpy as np
from samples import plan_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE

WINDOW = 4
SLOTS = 5
RANKS = np.array([FULL_STATE, 2, 3, FULL_STATE])
SYSTEMS = ("standard", "replay", "sketch", "copy")


def maker(system, backend, layer):
    """A function that makes equal heads."""
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)

    def new(slots=SLOTS):
        if system == "standard":
            return ss.StandardHead(layer, slots, backend)
        if system == "replay":
            return ss.ReplayHead(layer, slots, backend, window=WINDOW)
        if system == "copy":
            return ss.CopyReadHead(layer, slots, backend, window=WINDOW)
        return ss.SketchHead(plan, slots, backend)

    return new
