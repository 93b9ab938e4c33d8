"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from sketchssm import cuda
from sketchssm.backends import BACKENDS
from sketchssm.calibrate.allocation import METHODS
from sketchssm.calibrate.moments import WEIGHTINGS
from sketchssm.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.formats import DEFAULT_FORMAT, FORMATS

__all__ = [
    "MAP_SETTINGS",
    "FiniteRange",
    "Numbers",
    "backend",
    "check_backend",
    "check_files",
    "map_settings",
    "needs_matplotlib",
    "output",
    "plots",
    "refuse",
    "seed",
    "trace_files",
]

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """Numbers in a range, without NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``"0.5"``."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


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


def plots(**settings: Any) -> Callable[[F], F]:
    """``--plots``, with the settings of the option; refused before any work if matplotlib is missing."""
    return click.option("--plots", callback=needs_matplotlib, **settings)


def needs_matplotlib(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Check for matplotlib if an option needs it: a callback of the option."""
    if value:
        from sketchssm import figures

        figures.check()
    return value


def backend(command: F) -> F:
    """``--backend``."""
    return click.option(
        "--backend",
        type=click.Choice(["auto", *BACKENDS]),
        default="auto",
        show_default=True,
        callback=check_backend,
        help="Backend of the heads.",
    )(command)


def check_backend(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a missing GPU before any work: a callback of an option."""
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
    """``TRACES...``; optional if `sketchssm.cli.models.model_options` has a model."""
    return click.argument("traces", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))(command)


def rank_max(command: F) -> F:
    """``--rank-max``."""
    return click.option(
        "--rank-max",
        type=click.IntRange(min=1),
        help="Largest rank of a head.  [default: what the CUDA kernels have room for]",
    )(command)


def map_settings(command: F) -> F:
    """Options of plans, as one argument `settings`."""

    @wraps(command)
    def gathered(
        *args: Any,
        window: int,
        map_name: str,
        pivots: int | None,
        ridge: float | None,
        method: str | None,
        weighting: str,
        sketch_dtype: str,
        **others: Any,
    ) -> Any:
        from sketchssm.calibrate.plans import Settings

        settings = Settings(window, CoefficientMap(map_name, pivots, ridge), method, weighting, sketch_dtype)
        return command(*args, settings=settings, **others)

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
        click.option("--ridge", type=FiniteRange(min=0), help="Regularisation.  [default: the map's own]"),
        click.option(
            "--sketch-dtype",
            type=click.Choice(list(FORMATS)),
            default=DEFAULT_FORMAT,
            show_default=True,
            help="Format of sketches; int8+int4 serves the maps ridge and exact.",
        ),
        click.option(
            "--method",
            type=click.Choice(METHODS),
            help="Rank allocation.  [default: gradient if the traces have gradients, else error]",
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
        gathered = option(gathered)
    return cast(F, gathered)


def check_files(reads: Iterable[Path | None], **writes: str | Path | Iterable[Path] | None) -> None:
    """Refuse to write a file over one that the command reads or writes for another option.

    Parameters
    ----------
    reads : iterable of Path or None
        Files that the command reads.
    **writes : str, Path, iterable of Path or None
        Files that the command writes, by the names of the options; "-" is standard output.
    """
    taken = {path.resolve() for path in reads if path is not None}
    for option, given in writes.items():
        paths = [Path(given)] if isinstance(given, str | Path) else list(given or ())
        for path in paths:
            if str(path) == "-":
                continue
            if path.resolve() in taken:
                raise click.UsageError(f"--{option}: expected a separate file, got {path}")
            if path.is_dir():
                raise click.UsageError(f"--{option}: expected a file, got the folder {path}")
            if path.exists() and not path.is_file():
                continue  # /dev/null may be written twice
            taken.add(path.resolve())


MAP_SETTINGS = ("window", "map_name", "pivots", "ridge", "method", "weighting", "sketch_dtype")
"""Names of the options of `map_settings`."""


def refuse(reason: str, names: Sequence[str]) -> None:
    """Refuse options of the current command that were given and would be ignored.

    Parameters
    ----------
    reason : str
        Reason why they would be ignored.
    names : sequence of str
        Names of the parameters.
    """
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]}: has no effect {reason}")
