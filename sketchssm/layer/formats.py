"""Formats of stored sketches: bits, bytes and scales of each `sketch_dtype`.

=============  ==============================================
sketch_dtype   numbers of a sketch and its map
=============  ==============================================
"float32"      32 bits
"bfloat16"     16 bits
"int8"         integer codes of -127 to 127, times a scale
=============  ==============================================

`ridge` stores U ``(V, G)`` and C ``(G, K)`` in float32 and bfloat16. In codes it stores ``Q (V, G)`` and
``B (G, K)``, the *split form* with the same product. A column of Q and its row of B have one float32 scale, the
product of the two. The other maps store the codes of U with one float32 scale per column, and the codes of the map's
rows with one float32 scale per row; F and w stay float32. `sketchssm.reference.codes` defines the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_choice
from sketchssm.layer.coefficients import CoefficientMap

SCALE_BYTES = 4
"""Bytes of a scale."""


@dataclass(frozen=True)
class SketchFormat:
    """How a state's sketch and coefficient map are stored: elements of `bits` bits.

    Codes have magnitudes up to `top`; None: the element itself is stored, without a scale. `noise` is the energy of
    the change of a read by codes / energy of the read, which allocation counts as a loss.
    """

    name: str
    bits: int
    top: float | None = None
    noise: float = 0.0

    @classmethod
    def of(cls, name: Any) -> SketchFormat:
        """Return the format of a `sketch_dtype`; ValueError if there is none."""
        check_choice("sketch_dtype", name, FORMATS)
        return FORMATS[name]

    @property
    def scaled(self) -> bool:
        """Whether codes with scales are stored."""
        return self.top is not None

    def shadows(self, state_dtype: str) -> bool:
        """Whether full-state heads have a *shadow*: flushes also store the state in bfloat16, and reads use this copy.

        Sketches in float32 ask for exact reads of full states, and a state of 16 bits is as small as its shadow.
        """
        return self.bits < 32 and state_dtype == "float32"

    def splits(self, map: CoefficientMap) -> bool:
        """Whether a map is stored in the split form, ``Q`` and ``B`` instead of U and C."""
        return self.scaled and map.storage == "dense"

    def bytes(self, map: CoefficientMap, rank: npt.ArrayLike, key_dim: int, value_dim: int) -> npt.NDArray[np.float64]:
        """Bytes that a state stores as its sketch and coefficient map, in the shape of `rank`.

        Ranks are at least 0; fractions stand for the mean of a budget.
        """
        g = np.asarray(rank, dtype=np.float64)
        if not self.scaled:
            return self.bits / 8 * (g * value_dim + map.elements(g, key_dim))
        if self.splits(map):
            return g * (value_dim + key_dim + SCALE_BYTES)
        rows = map.rows(g)
        small = map.elements(g, key_dim) - rows * key_dim
        return g * (value_dim + SCALE_BYTES) + rows * (key_dim + SCALE_BYTES) + 4.0 * small


FORMATS = {
    form.name: form
    for form in (
        SketchFormat("float32", 32),
        SketchFormat("bfloat16", 16),
        SketchFormat("int8", 8, 127.0, 4.4e-4),
    )
}
"""Every format, by its `sketch_dtype`. The noise of int8 is the mean over nine layers
(``benchmarks/results/narrow.json``); it is 1.2e-4 to 1.2e-3 in each."""

DEFAULT_FORMAT = "bfloat16"
"""The `sketch_dtype` of a plan that names none."""
