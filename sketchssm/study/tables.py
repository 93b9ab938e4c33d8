"""Tables of results, made beside the results and printed by the command line or a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.study.tasks import Score

T = TypeVar("T")


class Table(NamedTuple):
    """A table: the first `words` columns are text, an empty row is a rule, the note explains the columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    words: int = 1


def ruled(items: Iterable[T], key: Callable[[T], Hashable], row: Callable[[T], list[str]]) -> list[list[str]]:
    """Rows of some items, grouped by a key, with a rule between the groups."""
    groups: dict[Hashable, list[list[str]]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(row(item))
    return [each for group in groups.values() for each in ([], *group)][1:]


def number(value: float, form: str = "g", blank: str = "-", before: str = "") -> str:
    """Format a number after some text; `blank` stands for NaN, as a mean rank is if no head has a sketch."""
    return blank if math.isnan(value) else f"{before}{value:{form}}"


def percent(share: float, digits: int = 2) -> str:
    """Format a share of one."""
    return f"{100 * share:.{digits}f}%"


def share(score: Score) -> str:
    """Format a share of right answers with its standard error."""
    return percent(score.share, 1) + number(100 * score.error, ".1f", "", " ± ")


def scientific(number: float) -> str:
    """Format an error."""
    return f"{number:.1e}" if number else "0"


def ranks_text(ranks: Any, bits: Any) -> str:
    """Ranks of the heads of a layer, with the bits of residuals if any; a summary for more than 16 heads."""
    full, some = ranks == FULL_STATE, bits.any()
    if len(ranks) <= 16:
        names = (f"{rank}+{own}" if some else str(rank) for rank, own in zip(ranks, bits, strict=True))
        return " ".join("full" if read else name for read, name in zip(full, names, strict=True))
    sketched, kept = ranks[~full], bits[~full]
    span = f"{sketched.min()} to {sketched.max()}, mean {sketched.mean():.2f}" if sketched.size else "none"
    span += f", with {kept.min()} to {kept.max()} bits" if some else ""
    return f"{span}; {int(full.sum())} full"
