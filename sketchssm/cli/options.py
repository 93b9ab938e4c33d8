"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from sketchssm import cuda
from sketchssm.calibrate.allocation import METHODS, budget_of
from sketchssm.heads.registry import BACKENDS
from sketchssm.layer.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS
from sketchssm.layer.residual import RESIDUAL_BITS

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.transformers.loading import ModelText

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """Numbers in a range, without NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``"0.5"``."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


COUNT = click.IntRange(min=1)
POSITIVE = FiniteRange(min=0, min_open=True)
NOT_NEGATIVE = FiniteRange(min=0)
AT_LEAST_ONE = FiniteRange(min=1)
PATH = click.Path(path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
OLD_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OLD_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


class Commas(click.ParamType[tuple[Any, ...]]):
    """Values with commas between them: `take` makes each one from its text, or raises a ValueError."""

    def __init__(self, name: str, take: Callable[[str], Any]) -> None:
        self.name, self._take = name, take

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Parse ``"2,4,8"``."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._take(part.strip()) for part in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected positive integers such as 2,4,8, got {text!r}")
    return int(text)


NUMBERS = Commas("n,n,...", _number)


def needs_matplotlib(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Check for matplotlib before any work if an option needs it: a callback of the option."""
    if value:
        from sketchssm.study import figures

        figures.load_pyplot()
    return value


def check_backend(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a missing GPU before any work: a callback of an option."""
    lack = cuda.missing() if value == "cuda" else ""
    if lack:
        raise click.BadParameter(f"'cuda' can't run here: {lack}")
    return value


output = click.option("--json", "json_file", metavar="FILE|-", help="Write the results as JSON; - is standard output.")
backend = click.option(
    "--backend",
    type=click.Choice(["auto", *BACKENDS]),
    default="auto",
    callback=check_backend,
    help="Backend of the heads.",
)
time_on = click.option(
    "--time-on",
    type=click.Choice(["cpu", "cuda"]),
    callback=check_backend,
    help="Measure times on this backend.  [default: count bytes]",
)
seed = click.option("--seed", type=int, default=0, help="Seed of random bases and inputs.")
rank_max = click.option("--rank-max", type=COUNT, help="Largest rank of a head.  [default: 16, the most on CUDA]")
residual_bits = click.option(
    "--residual-bits",
    type=click.Choice([str(bits) for bits in RESIDUAL_BITS]),
    default="0",
    help="Bits of the codes of what a sketch leaves of its state, with --map subspace.",
)
trace_files = click.argument("traces", nargs=-1, type=OLD_FILE)


def gather(name: str, make: Callable[..., Any], *options: Callable[[F], F]) -> Callable[[F], F]:
    """Pass the values of some options to a command as one argument, which `make` makes from them by their names."""

    def decorate(command: F) -> F:
        @wraps(command)
        def gathered(**given: Any) -> Any:
            own = {each: given.pop(each) for each in signature(make).parameters}
            return command(**given, **{name: make(**own)})

        decorated = cast(F, gathered)
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _settings(
    window: int,
    map_name: str | None,
    pivots: int | None,
    ridge: float | None,
    sketch_dtype: str | None,
    residual_bits: str,
    method: str | None,
) -> Settings:
    from sketchssm.calibrate.plans import Settings

    params = click.get_current_context().params
    if method == "perturbation" and not (params.get("model") or params.get("calibration")):
        raise click.UsageError("--method: expected perturbation with --model or --from only")
    residual = residual_bits != "0"
    if "reduction" in params:  # of `calibrate`: a budget that asks for residuals too
        rank = None if params["reduction"] else params["mean_rank"]  # the command refuses both
        if not residual and budget_of(rank, params["reduction"], map_name, method)[1] is not None:
            refuse("as 0 without --mean-rank: other budgets have residuals", ("residual_bits",))
            residual = True
    map = CoefficientMap(map_name or ("subspace" if residual else DEFAULT_MAP), pivots, ridge)
    form = sketch_dtype or ("int8" if residual else DEFAULT_FORMAT)
    return Settings(window, map, method, form, int(residual_bits))


MAP_SETTINGS = tuple(signature(_settings).parameters)
"""Names of the options of `map_settings`."""

map_settings = gather(
    "settings",
    _settings,
    click.option("--window", type=click.IntRange(min=2), default=16, help="Tokens from one flush to the next."),
    click.option(
        "--map",
        "map_name",
        type=click.Choice(MAPS),
        help=f"Coefficient map.  [default: subspace with residuals, else {DEFAULT_MAP}]",
    ),
    click.option("--pivots", type=COUNT, help="Pivot count of lowrank.  [default: the map's own]"),
    click.option("--ridge", type=NOT_NEGATIVE, help="Regularisation.  [default: the map's own]"),
    click.option(
        "--sketch-dtype",
        type=click.Choice(list(FORMATS)),
        help=f"Format of sketches.  [default: int8 with residuals, else {DEFAULT_FORMAT}]",
    ),
    residual_bits,
    click.option(
        "--method",
        type=click.Choice(METHODS),
        help="Rank allocation.  [default: gradient; error for traces without, perturbation for models without]",
    ),
)
"""Settings of plans, as one argument `settings`."""


def _source(
    model: Path | None, text: Path | None, rows: int, length: int, dtype: str, device: str
) -> ModelText | None:
    params = click.get_current_context().params
    traces = params["traces"]
    if params.get("calibration"):  # of `calibrate`
        refuse("with --from", (*signature(_source).parameters, "traces"))
        return None
    if model is None:
        refuse("without --model", tuple(signature(_source).parameters))
        if not traces:
            raise click.UsageError("TRACES: expected trace files, or --model DIR")
        return None
    if traces:
        raise click.UsageError("--model: expected no trace files with a model")
    if text is None and not params.get("imported"):
        raise click.UsageError("--text: expected a text for the model to read")
    from sketchssm.transformers.loading import ModelText

    return ModelText(model, text, rows, length, dtype, device)


model_options = gather(
    "source",
    _source,
    click.option("--model", type=OLD_FOLDER, help="Instead of TRACES: folder of a model of transformers."),
    click.option("--text", type=OLD_FILE, help="Text for --model: UTF-8, or token ids in an npy file."),
    click.option("--rows", type=COUNT, default=12, help="Rows to take from the beginning of --text."),
    click.option("--length", type=click.IntRange(min=2), default=1024, help="Tokens of a row of --text."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Type of the parameters of --model; auto is the type of the files.",
    ),
    click.option(
        "--device", default="auto", help="Where --model runs: auto prefers a CUDA device; balanced spreads it."
    ),
)
"""A model and a text, as one argument `source`: None for a command with `trace_files`."""


def refuse(reason: str, names: Sequence[str]) -> None:
    """Refuse options (parameters by name) of the current command that were given and would be ignored."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]}: has no effect {reason}")


Paths = str | Path | Iterable[Path] | None


def check_files(reads: Mapping[str, Paths], **writes: Paths) -> None:
    """Refuse, before any work, files that the command could not write, or would write over another file of its own.

    Two options may not name one file, under any name of it, and no file may lie below another. `reads` are by the
    names of the arguments (``"TRACES"``, ``"--plan"``), `writes` by those of the options without dashes. The text "-"
    is standard output.
    """
    taken = {path.resolve(): (name, path) for name, given in reads.items() for path in _paths(given)}
    for name, given in writes.items():
        option = f"--{name}"
        if given == "-":
            continue
        for path in _paths(given):
            real = path.resolve()
            if str(path) == "-":
                raise click.UsageError(f"{option}: expected a file, got -; only --json writes to standard output")
            if path.is_dir():
                raise click.UsageError(f"{option}: expected a file, got the folder {path}")
            if path.exists() and not path.is_file():
                continue  # /dev/null may be written twice
            for other, (owner, named) in taken.items():
                if real == other or real in other.parents or other in real.parents:
                    raise click.UsageError(f"{option}: expected a separate file, got {path}: {owner} has {named}")
            folder = next(parent for parent in real.parents if parent.exists())
            if not folder.is_dir():
                raise click.UsageError(f"{option}: expected a file in a folder, got {path}: {folder} is a file")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise click.UsageError(f"{option}: expected a folder that can be written, got {path} in {folder}")
            taken[real] = option, path


def _paths(given: Paths) -> list[Path]:
    return [Path(given)] if isinstance(given, str | Path) else list(given or ())
