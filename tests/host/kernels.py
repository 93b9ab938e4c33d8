"""Layers, tolerances and small steps that the tests of the kernels on the host share."""

import numpy as np

from host import standin
from sketchssm.cuda import modules
from sketchssm.recurrence import FULL_STATE, Layer, Tokens

LAYERS = {
    "mamba2": Layer("mamba2", 16, 128, 64, 2),
    "mamba2-80": Layer("mamba2", 4, 64, 80, 1),
    "mamba2-128": Layer("mamba2", 2, 128, 128, 1),  # raw keys with two places for states
    "gdn": Layer("gdn", 4, 128, 128, 2),
    "gdn-96": Layer("gdn", 2, 64, 96, 2),
    "kda": Layer("kda", 3, 128, 128, 3),
    "kda-64": Layer("kda", 2, 64, 64, 1),
    "kda-raw": Layer("kda", 3, 128, 128, 3),  # raw gate inputs
    "kda-64-bounded": Layer("kda", 2, 64, 64, 1),
}
RANKS = {"mamba2": [5, 1, 17, FULL_STATE, 40, 8], "gdn": [7, FULL_STATE, 16, 2], "kda": [9, 33, 1]}

_modules = {}  # compiled once for all tests of a file


def install(monkeypatch):
    """The stand-in for CuPy, with threads in a random order."""
    standin.install(monkeypatch)
    monkeypatch.setattr(modules, "_modules", _modules)
    monkeypatch.setattr(standin, "order", 0x5EED)
    return standin


def poisoned(engine):
    """The warm engine, with NaN in its ring, which kernels must write before they read."""
    engine.warmup()
    for ring in engine.ring:
        ring.view(np.uint8)[...] = 0xFF
    return engine


def token(tokens, t, rows=slice(None)):
    return Tokens(*(None if x is None else np.ascontiguousarray(x[rows, t : t + 1]) for x in tokens))
