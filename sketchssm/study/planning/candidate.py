"""Settings that all layers of a model share in a plan: map, format, window and flushes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from sketchssm.layer.checks import check_items, check_size
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import check_flush_every, check_window

__all__ = ["Candidate", "candidates"]

MAPS = (
    CoefficientMap("ridge"),
    CoefficientMap("ridge", ridge=0.01),
    CoefficientMap("lowrank"),
    CoefficientMap("prior"),
    CoefficientMap("offline"),
)
SKETCH_DTYPES = ("bfloat16", "int8", "int8+int4")
WINDOWS = (16, 32)
FLUSHES = (1, 4)
MOST_TOKENS = 128


@dataclass(frozen=True)
class Candidate:
    """Settings of a plan besides its ranks.

    Parameters
    ----------
    map : CoefficientMap or str
        Coefficient map; a name stands for the map with its default parameters.
    sketch_dtype : str, default "bfloat16"
        Format of sketches and maps, see `SketchFormat`.
    window : int, default 16
        Tokens from one sketch to the next (W).
    flush_every : int, optional
        Tokens from one flush of the state to the next, a multiple of `window`. Default: the window.
    rank_max : int, optional
        Largest rank of a head, in layers with larger K and V. A head that needs more reads its full state, except with
        refreshes. Default: a rank for which backend "cuda" has room on the H100, H200 and B200, see *Limits* on the
        page of the CUDA backend.

    Raises
    ------
    ValueError
        If a setting is unknown or out of range, or the format does not serve the map.
    """

    map: CoefficientMap
    sketch_dtype: str = "bfloat16"
    window: int = 16
    flush_every: int = None  # type: ignore[assignment]  # stands for the window until __post_init__
    rank_max: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "map", CoefficientMap.of(self.map))
        SketchFormat.of(self.sketch_dtype).check_map(self.map)
        object.__setattr__(self, "window", check_window(self.window))
        object.__setattr__(self, "flush_every", check_flush_every(self.flush_every, self.window))
        if self.rank_max is not None:
            object.__setattr__(self, "rank_max", check_size("rank_max", self.rank_max))

    def __str__(self) -> str:
        """All settings: ``ridge(ridge=0.001), int8, window 16, flush 64, ranks to 24``."""
        ranks = "" if self.rank_max is None else f", ranks to {self.rank_max}"
        return f"{self.map}, {self.sketch_dtype}, window {self.window}, flush {self.flush_every}{ranks}"


def candidates(
    maps: Iterable[str | CoefficientMap] = MAPS,
    sketch_dtypes: Sequence[str] = SKETCH_DTYPES,
    windows: Sequence[int] = WINDOWS,
    flushes: Sequence[int] = FLUSHES,
    rank_maxes: Sequence[int | None] = (None,),
) -> list[Candidate]:
    """List all combinations of settings that exist.

    Parameters
    ----------
    maps : iterable of CoefficientMap or str
        Coefficient maps; a name stands for the map with its default parameters. Default: `ridge` with 0.001 and 0.01,
        `lowrank`, `prior` and `offline`.
    sketch_dtypes : sequence of str, default ("bfloat16", "int8", "int8+int4")
        Formats. Combinations with a map that a format does not serve are left out.
    windows : sequence of int, default (16, 32)
        Tokens from one sketch to the next.
    flushes : sequence of int, default (1, 4)
        Windows from one flush of the state to the next. Combinations of more than 128 tokens are left out.
    rank_maxes : sequence of int or None, default (None,)
        Limits of a head's rank; None for the default of `Candidate`. The CUDA kernels are fastest up to rank 16.

    Returns
    -------
    list of Candidate
        The combinations.

    Raises
    ------
    ValueError
        If a setting is unknown or no combination exists.
    """
    known = [CoefficientMap.of(map) for map in check_items("maps", maps, "maps")]
    formats = [SketchFormat.of(name) for name in check_items("sketch_dtypes", sketch_dtypes, "formats")]
    windows = [check_window(window) for window in check_items("windows", windows, "integers")]
    flushes = [check_size("flushes", flush) for flush in check_items("flushes", flushes, "integers")]
    rank_maxes = check_items("rank_maxes", rank_maxes, "integers or None")
    found = [
        Candidate(map, form.name, window, window * flush, most)
        for map, form, window, flush, most in product(known, formats, windows, flushes, rank_maxes)
        if form.serves(map) and window * flush <= MOST_TOKENS
    ]
    if not found:
        given: dict[str, Sequence[object]] = {
            "maps": known,
            "sketch_dtypes": [form.name for form in formats],
            "windows": windows,
        }
        given |= {"flushes": flushes, "rank_maxes": rank_maxes}
        came = ", ".join(f"{name} {', '.join(map(str, items)) or 'none'}" for name, items in given.items())
        raise ValueError(
            "candidates: expected a format that serves one of the maps, and a window times flushes of at most "
            f"{MOST_TOKENS} tokens, got {came}"
        )
    return found
