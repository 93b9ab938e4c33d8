"""Kernels between a model's layer and a head: gates, values, norms, the skip connection and tapes, one launch each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sketchssm.cuda.constants import ACCESS, TYPES
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load

THREADS = 256
"""Threads of a block."""


def layer_inputs_variant(heads: int, dim: int, types: tuple[str, ...]) -> Variant:
    """Variant of ``layer_inputs.cu``; types of activations, of raw gates, of rates and skips, and of biases."""
    activation, raw, rate, bias = (TYPES[name] for name in types)
    sizes = {"HEADS": heads, "KEY_HEADS": heads, "K": 32, "V": dim}
    kinds = {"ACT": activation, "OUT": activation, "STATE": TYPES["float32"], "RAW": raw, "RATE": rate, "BIAS": bias}
    return Variant("layer_inputs", sizes | kinds | {"ERASES": 0, "CHANNEL_DECAYS": 0, "RAW_GATE": 0})


class LayerInputs:
    """The kernels of ``layer_inputs.cu`` for layers of one shape; not from two threads at once.

    Arrays are given as addresses, with elements from row to row where the name ends with ``stride``. `dim` are
    elements of a head; `types` as of `layer_inputs_variant`.
    """

    def __init__(self, heads: int, dim: int, types: tuple[str, ...]) -> None:
        module = load(layer_inputs_variant(heads, dim, types))
        most = ACCESS // (4 if types[0] == "float32" else 2)
        piece = math.gcd(dim, most)
        self._pieces = heads * dim // piece
        self._heads, self._values = heads, heads * dim
        scale = (np.float32(dim**-0.5),)

        def kernel(name: str, varying: str, last: tuple[Any, ...] = ()) -> Launcher:
            return Launcher(module.get_function(name), (), "i" + varying, last, overlaps=False)

        self._mamba, self._skip = kernel("mamba_inputs", "QqQqQQQQ"), kernel("add_skip", "QqQqQ")
        self._normalised, self._delta = kernel("normalised", "QqQqQQ", scale), kernel("delta_inputs", "QqQqQQQQ")
        self._tape = kernel("write_tape", "iiiQQq" + "QqQ" * 5)

    def mamba_inputs(self, rows: int, *arguments: int) -> None:
        """Compute values and log-decays of mamba2: x, x_stride, dt, dt_stride, rate, bias, v, g."""
        self._launch(self._mamba, rows, self._pieces, arguments)

    def add_skip(self, rows: int, *arguments: int) -> None:
        """Add the skip connection of mamba2: out, out_stride, x, x_stride, skip."""
        self._launch(self._skip, rows, self._pieces, arguments)

    def normalised(self, rows: int, *arguments: int) -> None:
        """Normalise queries and keys: q, q_stride, k, k_stride, unit_q, unit_k."""
        self._launch(self._normalised, rows, 32 * self._heads, arguments)

    def delta_inputs(self, rows: int, *arguments: int) -> None:
        """Compute gates of gdn: a, a_stride, b, b_stride, rate_log, bias, g, beta."""
        self._launch(self._delta, rows, self._heads, arguments)

    def write_tape(self, rows: int, keys: int, gates: int, betas: int, *arguments: int) -> None:
        """Copy followed rows to a tape.

        `keys`, `gates` and `betas` are elements of a row of k, g and beta, whose types are those of activations, of
        raw gates and of rates. Arguments are the rows' sources and places, the place of rows that are not there, and
        for each of q, k, v, g and beta its address, stride and tape.
        """
        width = 2 * keys + self._values + gates + betas
        self._launch(self._tape, rows, width, (keys, gates, betas, *arguments))

    def _launch(self, launch: Launcher, rows: int, threads_of_row: int, arguments: tuple[int, ...]) -> None:
        if rows:
            launch(-(-rows * threads_of_row // THREADS), THREADS, rows, *arguments)
