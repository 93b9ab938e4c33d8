"""Formats of stored sketches: bits, bytes and scales of each `sketch_dtype`.

=============  ==========================================================  =============================
sketch_dtype   numbers of a sketch and its map                             maps
=============  ==========================================================  =============================
"float32"      32 bits                                                     all
"bfloat16"     16 bits                                                     all
"int8"         integer codes of -127 to 127, times a scale                 all
"fp8"          e4m3 codes of up to 448, times a scale                      all
"int8+int4"    `wide` columns in int8, the others in codes of -7 to 7      `exact`, `ridge`
=============  ==========================================================  =============================

`exact` and `ridge` store U ``(V, G)`` and C ``(G, K)`` in float32 and bfloat16. In codes they store ``Q (V, G)`` and
``B (G, K)``, the *split form* with the same product. A column of Q and its row of B have one float32 scale, the
product of the two. The other maps store the codes of U with one float32 scale per column, and the codes of the map's
rows with one float32 scale per row; F and w stay float32. `sketchssm.reference.narrow` defines the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, check_choice

__all__ = ["DEFAULT_FORMAT", "FORMATS", "FP8", "INT4", "INT8", "Code", "SketchFormat"]

Numbers = npt.NDArray[Any]


class Code(NamedTuple):
    """How one element is stored.

    Attributes
    ----------
    name : {"float32", "bfloat16", "int8", "fp8", "int4"}
        Name of the code.
    bits : int
        Bits of an element.
    top : float or None
        Largest magnitude of a code. None: the element itself is stored, without a scale.
    noise : float, default 0.0
        Energy of the change of a read by codes / energy of the read through these columns. Allocation counts the
        noise as a loss.
    """

    name: str
    bits: int
    top: float | None
    noise: float = 0.0

    def bytes(self, elements: int) -> int:
        """Bytes of a column or row of so many elements."""
        return -(-self.bits * elements // 8)


INT8, FP8, INT4 = Code("int8", 8, 127.0, 4.4e-4), Code("fp8", 8, 448.0, 6.6e-4), Code("int4", 4, 7.0, 9.2e-2)
"""Codes with scales. Their noise is the mean over nine layers (``benchmarks/results/narrow.json``): over the layers,
int8 has 1.2e-4 to 1.2e-3, fp8 4.9e-4 to 9.0e-4, and int4 4.4e-2 to 1.7e-1 on the half of the columns with less
energy."""

SCALE_BYTES = 4
"""Bytes of a scale."""


@dataclass(frozen=True)
class SketchFormat:
    """How a state's sketch and coefficient map are stored.

    Parameters
    ----------
    name : str
        The `sketch_dtype`.
    code : Code
        Code of an element; in a mixed format, code of the leading columns.
    tail : Code, optional
        Mixed formats only: code of the columns after the leading columns.
    """

    name: str
    code: Code
    tail: Code | None = None

    @classmethod
    def of(cls, name: Any) -> SketchFormat:
        """Return the format of a `sketch_dtype`.

        Parameters
        ----------
        name : {"float32", "bfloat16", "int8", "fp8", "int8+int4"}
            The `sketch_dtype`.

        Returns
        -------
        SketchFormat
            The format.

        Raises
        ------
        ValueError
            If there is no such format.
        """
        check_choice("sketch_dtype", name, FORMATS)
        return FORMATS[name]

    @property
    def scaled(self) -> bool:
        """Whether codes with scales are stored."""
        return self.code.top is not None

    @property
    def mixed(self) -> bool:
        """Whether columns have two widths."""
        return self.tail is not None

    def noise(self, read: Any, wide: Any) -> Any:
        """Energy, or another score, of the noise that codes add to a read.

        Parameters
        ----------
        read : array_like
            Energy of the read through all columns.
        wide : array_like
            Energy of the read through the columns of `code`; ignored if the format is not mixed.

        Returns
        -------
        array_like
            The noise; zero for formats without codes.
        """
        if self.tail is None:
            return self.code.noise * read
        return self.code.noise * wide + self.tail.noise * (read - wide)

    def stored_as(self, sketch_dtype: Any) -> SketchFormat:
        """Format in which a head stores the sketches of a plan of this format.

        Parameters
        ----------
        sketch_dtype : str or None
            Format given to the head; None for the plan's.

        Returns
        -------
        SketchFormat
            The format.

        Raises
        ------
        ValueError
            If there is no such format, or it would ignore or need the plan's `wide`.
        """
        form = self if sketch_dtype is None else SketchFormat.of(sketch_dtype)
        if form.mixed and not self.mixed:
            raise ValueError(f"sketch_dtype: {form.name!r} needs a plan of this format, got a plan of {self.name!r}")
        if self.mixed and not form.mixed and form.name != "float32":
            raise ValueError(
                f"sketch_dtype: expected None or 'float32' for a plan of {self.name!r}, got {form.name!r}"
            )
        return form

    def splits(self, map: CoefficientMap) -> bool:
        """Whether a map is stored in the split form, ``Q`` and ``B`` instead of U and C."""
        return self.scaled and map.storage == "dense"

    def serves(self, map: CoefficientMap) -> bool:
        """Whether a map can be stored in this format: a mixed format takes only maps with a split form."""
        return not self.mixed or self.splits(map)

    def check_map(self, map: CoefficientMap) -> None:
        """Check that a map can be stored in this format.

        Parameters
        ----------
        map : CoefficientMap
            The map.

        Raises
        ------
        ValueError
            If the format is mixed and the map has no split form.
        """
        if not self.serves(map):
            raise ValueError(f"sketch_dtype: {self.name!r} serves the maps exact and ridge, got map {map}")

    def check_wide(self, wide: Any, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Check the numbers of leading columns.

        Parameters
        ----------
        wide : array_like of int, (heads,), or None
            Leading columns of each head, 0 to its rank; 0 for a head that reads its full state.
        ranks : ndarray of int64, (heads,)
            Rank of each head, `FULL_STATE` for a full read.

        Returns
        -------
        ndarray of int64, (heads,), or None
            The numbers; None unless the format is mixed.

        Raises
        ------
        ValueError
            If a number is out of range, a mixed format comes without numbers, or another format with them.
        """
        if not self.mixed:
            if wide is not None:
                raise ValueError(f"wide: expected None, as sketch_dtype {self.name!r} has one width, got {wide!r}")
            return None
        if wide is None:
            raise ValueError(f"wide: expected the 8-bit columns of each head for {self.name!r}, got None")
        table = np.asarray(wide)
        if table.shape != ranks.shape or table.dtype.kind not in "iu":
            raise ValueError(f"wide: expected {ranks.size} integers, got shape {table.shape} of {table.dtype}")
        most = np.where(ranks == FULL_STATE, 0, ranks)
        wrong = np.flatnonzero((table < 0) | (table > most))
        if wrong.size:
            head = wrong[0]
            raise ValueError(f"wide: expected 0 to {most[head]} for head {head}, got {table[head]}")
        return table.astype(np.int64)

    def bytes(
        self,
        map: CoefficientMap,
        rank: npt.ArrayLike,
        key_dim: int,
        value_dim: int,
        wide: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float64]:
        """Bytes that a state stores as its sketch and coefficient map.

        Parameters
        ----------
        map : CoefficientMap
            The map.
        rank : array_like
            Ranks G, of at least 0; fractions stand for the mean of a budget.
        key_dim, value_dim : int
            K and V.
        wide : array_like, optional
            Leading columns of a mixed format; None in any other.

        Returns
        -------
        ndarray of float64
            Bytes, in the shape of `rank`.

        Raises
        ------
        ValueError
            If the map has no such form, `wide` is missing or out of range, or the format is not mixed.
        """
        self.check_map(map)
        g = np.asarray(rank, dtype=np.float64)
        if self.mixed != (wide is not None):
            expected = "the 8-bit columns of each head" if self.mixed else "None"
            raise ValueError(f"wide: expected {expected} for sketch_dtype {self.name!r}, got {wide!r}")
        if not self.scaled:
            return self.code.bits / 8 * (g * value_dim + map.elements(g, key_dim))
        rows = map.rows(g)
        if not self.splits(map):
            small = map.elements(g, key_dim) - rows * key_dim
            columns = self.code.bytes(value_dim) + SCALE_BYTES
            return g * columns + rows * (self.code.bytes(key_dim) + SCALE_BYTES) + 4.0 * small
        lead = g if wide is None else np.asarray(wide, dtype=np.float64)
        if not ((lead >= 0) & (lead <= g)).all():
            raise ValueError(f"wide: expected numbers from 0 to the rank, got {wide!r}")
        size = lead * (self.code.bytes(value_dim) + self.code.bytes(key_dim))
        if self.tail is not None:
            size = size + (g - lead) * (self.tail.bytes(value_dim) + self.tail.bytes(key_dim))
        return size + SCALE_BYTES * g


FORMATS = {
    form.name: form
    for form in (
        SketchFormat("float32", Code("float32", 32, None)),
        SketchFormat("bfloat16", Code("bfloat16", 16, None)),
        SketchFormat("int8", INT8),
        SketchFormat("fp8", FP8),
        SketchFormat("int8+int4", INT8, INT4),
    )
}
"""Every format, by its `sketch_dtype`."""

DEFAULT_FORMAT = "bfloat16"
"""The `sketch_dtype` of a plan that names none."""
