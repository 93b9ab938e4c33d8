"""Heads of every decode system, made alike, for the tests that all of them must pass."""

import numpy as np
from samples import plan_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE

WINDOW = 4
SLOTS = 5
RANKS = np.array([FULL_STATE, 2, 3, FULL_STATE])
SYSTEMS = ("standard", "replay", "sketch", "copy")


def head_of(system, plan, slots, backend, **options):
    """A head of a system for a plan's layer and window."""
    if system == "sketch":
        return ss.SketchHead(plan, slots, backend, **options)
    if system == "standard":
        return ss.StandardHead(plan.layer, slots, backend, **options)
    kind = ss.ReplayHead if system == "replay" else ss.CopyReadHead
    return kind(plan.layer, slots, backend, window=plan.window, **options)


def maker(system, backend, layer):
    """A function that makes equal heads."""
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
    return lambda slots=SLOTS: head_of(system, plan, slots, backend)
