"""Options and work of ``sketchssm calibrate --model`` and ``sketchssm evaluate --model``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from sketchssm.cli import options

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.cli.output import Output

__all__ = ["MODEL_OPTIONS", "ModelText", "calibrate_model", "evaluate_model", "model_options"]

F = TypeVar("F", bound=Callable[..., Any])

MODEL_OPTIONS = ("model", "text", "rows", "length", "dtype", "device")
"""Names of the options of `model_options`."""


@dataclass(frozen=True)
class ModelText:
    """A model and a text on disk, and the settings for reading them: the options of `model_options`.

    Attributes
    ----------
    model : Path
        Folder of the model and its tokenizer.
    text : Path
        UTF-8 text, or token ids in an npy file.
    rows, length : int
        Rows to take from the beginning of the text, and their tokens.
    dtype : str
        Type of the parameters; "auto" for the type of the files.
    device : str
        Device of the model; "auto" for the first CUDA device if there is one.
    """

    model: Path
    text: Path
    rows: int
    length: int
    dtype: str
    device: str

    def load(self, least: int) -> tuple[Any, list[Any]]:
        """Load the model, and at most `rows` rows of token ids.

        Raises
        ------
        ValueError
            If the model or the text can't be read, or there are fewer than `least` rows.
        """
        import numpy as np

        from sketchssm.transformers.modeling import check_version
        from sketchssm.transformers.text import token_rows

        check_version()
        import torch
        import transformers

        if self.text.suffix == ".npy":
            text, tokenizer = np.load(self.text), None
            if text.ndim != 1:
                raise ValueError(f"--text: expected token ids of shape (tokens,), got {text.shape} in {self.text}")
        else:
            try:
                text = self.text.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"--text: expected UTF-8 text or an npy file, got {self.text} ({error})") from error
            tokenizer = _loaded("AutoTokenizer", self.model)
        try:
            rows = token_rows(text, tokenizer, self.length, least=2, rows=least)
        except ValueError as error:
            raise ValueError(f"{self.text}: {error}") from error
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        transformers.utils.logging.disable_progress_bar()
        model = _loaded("AutoModelForCausalLM", self.model, dtype=self.dtype)
        try:
            return model.to(device).eval(), rows[: self.rows]
        except RuntimeError as error:
            raise ValueError(f"--device: {device!r} can't be used ({error})") from error


def _loaded(kind: str, folder: Path, **settings: Any) -> Any:
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # of many types, for folders that hold no model or a damaged one
        raise ValueError(f"--model: {kind} of transformers can't read {folder} ({error})") from error


def model_options(command: F) -> F:
    """``--model --text --rows --length --dtype --device``, as one argument `source`: a `ModelText` or None."""

    @wraps(command)
    def gathered(
        *args: Any,
        model: Path | None,
        text: Path | None,
        rows: int,
        length: int,
        dtype: str,
        device: str,
        **others: Any,
    ) -> Any:
        if model is None:
            options.refuse("without --model", MODEL_OPTIONS)
            if not others["traces"]:
                raise click.UsageError("TRACES: expected trace files, or --model DIR")
            return command(*args, source=None, **others)
        if others["traces"]:
            raise click.UsageError("--model: expected no trace files with a model")
        if text is None:
            raise click.UsageError("--text: expected a text for the model to read")
        return command(*args, source=ModelText(model, text, rows, length, dtype, device), **others)

    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    found = [
        click.option(
            "--model", type=folder, help="Instead of TRACES: folder of a model of Hugging Face transformers."
        ),
        click.option("--text", type=file, help="Text for --model: UTF-8, or token ids in an npy file."),
        click.option(
            "--rows",
            type=click.IntRange(min=1),
            default=12,
            show_default=True,
            help="Rows to take from the beginning of --text.",
        ),
        click.option(
            "--length", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens of a row of --text."
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="Type of the parameters of --model; auto is the type of the files.",
        ),
        click.option(
            "--device", default="auto", show_default=True, help="Where --model runs; auto prefers a CUDA device."
        ),
    ]
    for option in reversed(found):
        gathered = option(gathered)
    return cast(F, gathered)


def calibrate_model(
    source: ModelText,
    out: Path,
    mean_rank: float,
    flush_every: int | None,
    rank_max: int | None,
    settings: Settings,
    output: Output,
) -> None:
    """Make one file with the plans of a model."""
    from sketchssm.cli.output import percent, ranks_text
    from sketchssm.transformers import calibrate
    from sketchssm.transformers.calibration import progress_steps

    model, rows = source.load(least=2)
    with output.progress("calibrating", progress_steps(len(rows))) as step:
        plans = calibrate(
            model,
            rows,
            mean_rank=mean_rank,
            window=settings.window,
            flush_every=flush_every,
            map=settings.map,
            sketch_dtype=settings.sketch_dtype,
            method=settings.method or "gradient",
            weighting=settings.weighting,
            rank_max=rank_max,
            progress=step,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    plans.save(out)
    made = plans.allocation
    table, report = [], {}
    for name, plan in plans.items():
        retained = made.retained[name]
        table.append([name, plan.layer.kind, ranks_text(plan.ranks), f"{plan.reduction:.2f}x", percent(retained)])
        report[name] = {
            "kind": plan.layer.kind,
            "ranks": plan.ranks,
            "sketch_dtype": plan.sketch_dtype,
            "wide": plan.wide,
            "reduction": plan.reduction,
            "retained_ideal": retained,
        }
    title = (
        f"Plans of {plans.fingerprint.model} at mean rank {mean_rank:g} ({settings.map}, {settings.sketch_dtype}, "
        f"window {settings.window}, "
    )
    columns = ["layer", "kind", "ranks", "less traffic", "retained (ideal map)"]
    output.table(f"{title}by {made.method})", columns, table, words=3)
    output.say(
        f"All layers: {plans.reduction:.2f}x less state traffic than standard decode; no table within the budget "
        f"scores better by more than {percent(made.gap)}. {made.tokens} tokens of text. Written: {out}"
    )
    totals = {"reduction": plans.reduction, "gap": made.gap, "method": made.method, "tokens": made.tokens}
    output.finish({"plans": str(out), "model": plans.fingerprint.model, "layers": report, **totals})


def evaluate_model(source: ModelText, plans_file: Path, backend: str, output: Output) -> None:
    """Compare a model with and without heads."""
    from sketchssm.cli.output import percent
    from sketchssm.transformers import ModelPlans, evaluate

    plans = ModelPlans.load(plans_file)
    model, rows = source.load(least=1)
    with output.progress("evaluating", len(rows)) as step:
        found = evaluate(model, rows, plans, backend=backend, progress=step)
    columns = ["", "less traffic", "loss (nats)", "perplexity", "loss increase", "same top-1", "KL (nats)"]
    systems = [
        ["transformers", "1.00x", f"{found.loss:.4f}", f"{found.perplexity:.2f}", "", "", ""],
        [
            "with plans",
            f"{found.reduction:.2f}x",
            f"{found.patched_loss:.4f}",
            f"{found.patched_perplexity:.2f}",
            f"{found.increase:+.4f} ± {found.increase_error:.4f}",
            percent(found.agreement),
            f"{found.divergence:.2e}",
        ],
    ]
    output.table(f"{plans.fingerprint.model} on {found.tokens} tokens, with {plans_file}", columns, systems)
    table = [
        [
            name,
            plans[name].layer.kind,
            f"{plans[name].mean_rank:.2f}",
            f"{cost.standard / 1e3:.1f}",
            f"{cost.patched / 1e3:.1f}",
            f"{cost.standard / cost.patched:.2f}x",
        ]
        for name, cost in found.layers.items()
    ]
    columns = ["layer", "kind", "mean rank", "standard, kB/token", "with plans, kB/token", "less traffic"]
    output.table("State traffic of one sequence", columns, table, words=2)
    facts = ("increase", "perplexity", "patched_perplexity", "reduction")
    output.finish({"plans": str(plans_file)} | {name: getattr(found, name) for name in facts} | vars(found))
