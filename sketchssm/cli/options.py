"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sketchssm import cuda
from sketchssm.backends import BACKENDS
from sketchssm.calibrate.allocation import METHODS
from sketchssm.calibrate.moments import WEIGHTINGS
from sketchssm.coefficients import DEFAULT_MAP, MAPS

__all__ = ["Numbers", "backend", "map_settings", "output", "plots", "seed", "trace_files"]

F = TypeVar("F", bound=Callable[..., Any])


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive integers with commas between them."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse ``"2,4,8"``."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"expected positive integers such as 2,4,8, got {value!r}", param, ctx)
        return numbers


def output(command: F) -> F:
    """``--json``."""
    return click.option(
        "--json", "json_file", metavar="FILE|-", help="Write the results as JSON; - is standard output."
    )(command)


def plots(command: F) -> F:
    """``--plots``."""
    return click.option(
        "--plots",
        type=click.Path(file_okay=False, path_type=Path),
        help="Draw pictures into this folder (needs matplotlib).",
    )(command)


def backend(command: F) -> F:
    """``--backend``."""
    return click.option(
        "--backend",
        type=click.Choice(["auto", *BACKENDS]),
        default="auto",
        show_default=True,
        callback=_check_backend,
        help="Where to decode.",
    )(command)


def _check_backend(context: click.Context, param: click.Parameter, value: str) -> str:
    """Refuse a GPU that is not there before any work is done."""
    lack = cuda.missing() if value == "cuda" else ""
    if lack:
        raise click.BadParameter(f"'cuda' can't run here: {lack}")
    return value


def seed(command: F) -> F:
    """``--seed``."""
    return click.option("--seed", type=int, default=0, show_default=True, help="Seed of random bases and inputs.")(
        command
    )


def trace_files(command: F) -> F:
    """``TRACES...``."""
    return click.argument(
        "traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
    )(command)


def map_settings(command: F) -> F:
    """``--window --map --pivots --ridge --method --weighting``: how a plan is made."""
    options = [
        click.option(
            "--window",
            type=click.IntRange(min=2),
            default=16,
            show_default=True,
            help="Tokens from one flush to the next.",
        ),
        click.option(
            "--map",
            "map_name",
            type=click.Choice(MAPS),
            default=DEFAULT_MAP,
            show_default=True,
            help="Coefficient map.",
        ),
        click.option(
            "--pivots",
            type=click.IntRange(min=1),
            help="Pivot count of lowrank and prior.  [default: the map's own]",
        ),
        click.option("--ridge", type=click.FloatRange(min=0), help="Regularisation.  [default: the map's own]"),
        click.option(
            "--method",
            type=click.Choice(METHODS),
            help="Rank allocation.  [default: gradient where the traces have gradients, else error]",
        ),
        click.option(
            "--weighting",
            type=click.Choice(WEIGHTINGS),
            default="uniform",
            show_default=True,
            help="Weight of a sample in the basis; output minimises the relative error.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
