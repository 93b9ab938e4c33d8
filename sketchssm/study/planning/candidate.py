"""Settings that all layers of a model share in a plan: map, format and window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from sketchssm.calibrate.joint_allocation import MAP
from sketchssm.calibrate.joint_scores import some_of
from sketchssm.layer.checks import check_items
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import check_window
from sketchssm.layer.residual import STEPS

MAPS = (CoefficientMap(MAP),)
SKETCH_DTYPES = ("bfloat16", "int8")
WINDOWS = (16, 32)


@dataclass(frozen=True)
class Candidate:
    """Settings of a plan besides its ranks, which are at most 16; a head that needs more reads its full state.

    Parameters
    ----------
    map : CoefficientMap or str
        Coefficient map; a name stands for the map with its default parameters.
    sketch_dtype : str, default "bfloat16"
        Format of sketches and maps, see `SketchFormat`.
    window : int, default 16
        Tokens from one flush to the next (W).
    residual_bits : sequence of {1, 2, 3}, default ()
        Bits that a head's residual may have. Each head then gets a rank and one of these, see `allocate_joint`. None:
        heads have no residuals.

    Raises
    ------
    ValueError
        If a setting is unknown or out of range, or residuals are asked of another map than "subspace".
    """

    map: CoefficientMap
    sketch_dtype: str = "bfloat16"
    window: int = 16
    residual_bits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "map", CoefficientMap.of(self.map))
        SketchFormat.of(self.sketch_dtype)
        object.__setattr__(self, "window", check_window(self.window))
        bits = check_items("residual_bits", self.residual_bits, "integers")
        object.__setattr__(self, "residual_bits", some_of("residual_bits", bits, STEPS) if bits else ())
        if self.residual_bits and self.map.name != MAP:
            raise ValueError(f"map: expected {MAP!r} with residuals, got {self.map.name!r}")

    def __str__(self) -> str:
        """All settings: ``ridge(ridge=0.001), int8, window 16``."""
        bits = f", residuals of {'/'.join(map(str, self.residual_bits))} bits" if self.residual_bits else ""
        return f"{self.map}, {self.sketch_dtype}, window {self.window}{bits}"


def candidates(
    maps: Iterable[str | CoefficientMap] = MAPS,
    sketch_dtypes: Sequence[str] = SKETCH_DTYPES,
    windows: Sequence[int] = WINDOWS,
) -> list[Candidate]:
    """List all combinations of settings.

    Parameters
    ----------
    maps : iterable of CoefficientMap or str
        Coefficient maps; a name stands for the map with its default parameters. Default: `subspace`, which has
        residuals of 1 to 3 bits. Sketches of the others, `ridge` and `lowrank`, have none: they forget what a model
        remembers in its states alone, which an error of outputs does not show.
    sketch_dtypes : sequence of str, default ("bfloat16", "int8")
        Formats.
    windows : sequence of int, default (16, 32)
        Tokens from one flush to the next.

    Returns
    -------
    list of Candidate
        The combinations.

    Raises
    ------
    ValueError
        If a setting is unknown, or one has no values.
    """
    known = [CoefficientMap.of(map) for map in check_items("maps", maps, "maps")]
    formats = check_items("sketch_dtypes", sketch_dtypes, "formats")
    windows = check_items("windows", windows, "integers")
    for name, values in {"maps": known, "sketch_dtypes": formats, "windows": windows}.items():
        if not values:
            raise ValueError(f"{name}: expected at least one, got none")
    bits = {MAP: tuple(STEPS)}
    return [
        Candidate(map, form, window, bits.get(map.name, ())) for map, form, window in product(known, formats, windows)
    ]
