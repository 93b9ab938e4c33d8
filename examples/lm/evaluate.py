"""Perplexity and needle recall of a small language model whose recurrent layers decode with different systems.

    python examples/lm/evaluate.py --model gdn.safetensors --tokens TOKENS --out RESULTS

TOKENS is a folder with ``calib.npy`` and ``test.npy`` (token ids) and ``tokenizer.json``. Test text is decoded from
its first token on. In a prompt, the text except its last `--decoded` tokens is processed exactly, as in a prefill;
then each system decodes these tokens, the question and the answer. `--tasks` adds tasks of `sketchssm.study.tasks`.
"""

import argparse
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import systems as catalogue
import torch
from figure import Comparison, draw
from model import HybridLM
from prompts import ROOM, WORDING, mixed_rows, needle_prompts, questions, text_rows
from recurrence import Chunked, Heads
from runs import command, commit, devices, encoder
from torch.nn import functional as F

from sketchssm.calibrate.allocation import METHODS
from sketchssm.cli.output import Output
from sketchssm.layer.coefficients import DEFAULT_MAP, MAPS
from sketchssm.layer.formats import FORMATS
from sketchssm.layer.residual import RESIDUAL_BITS
from sketchssm.study.tables import percent, share
from sketchssm.study.tasks import TASKS, Score, make_prompts


@dataclass(frozen=True)
class Result:
    """Results of a system in the model.

    Attributes
    ----------
    name, family : str
        The system, and its method.
    backend : str
        Where its heads ran.
    reduction : float
        Traffic reduction relative to standard decode.
    loss : float
        Cross-entropy of test text in nats a token.
    perplexity : float
        Its exponential.
    increase : float
        Loss minus loss of standard decode.
    increase_error : float
        Standard error of the increase, over rows of text.
    divergence : float
        Kullback-Leibler divergence of the next token's distribution from the distribution of standard decode, mean
        over tokens. Unlike in the increase, errors do not cancel in the divergence.
    divergence_error : float
        Standard error of the divergence, over rows of text.
    agreement : float
        Share of positions at which the likeliest next token is the same as in standard decode.
    recall, recall_error : float
        Share of needle prompts answered word for word, and its standard error.
    tasks : dict of str to Score
        The same for each of `--tasks` at each distance.
    """

    name: str
    family: str
    backend: str
    reduction: float
    loss: float
    perplexity: float
    increase: float
    increase_error: float
    divergence: float
    divergence_error: float
    agreement: float
    recall: float = float("nan")
    recall_error: float = float("nan")
    tasks: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Prefilled:
    """A batch of prompts after the exact prefill: states by layer and the model's other caches."""

    states: dict
    cache: dict
    rest: torch.Tensor


class Scores(NamedTuple):
    """Scores of test text, arrays ``(rows, tokens - 1)``, and the hidden vectors behind them.

    Attributes
    ----------
    losses : ndarray
        Loss of each next token.
    guesses : ndarray
        Likeliest next tokens.
    divergences : ndarray
        Kullback-Leibler divergences from the distributions of standard decode.
    hidden : tensor
        Hidden vectors ``(rows, tokens - 1, d)``.
    """

    losses: np.ndarray
    guesses: np.ndarray
    divergences: np.ndarray
    hidden: torch.Tensor


@torch.no_grad()
def score_text(model, heads, ids, standard=None):
    """Score test text, decoded from zero states, against the `Scores` of standard decode."""
    core = Heads(heads)
    core.reset()
    hidden = model(ids, core)[:, :-1]
    found = []
    # row by row, as logits are large; in float64, as small divergences are differences of large numbers
    for row, exact, following in zip(hidden, hidden if standard is None else standard.hidden, ids[:, 1:], strict=True):
        logits, want = (F.log_softmax(model.head(x).double(), -1) for x in (row, exact))
        loss = F.nll_loss(logits, following.to(logits.device), reduction="none")
        found.append([x.cpu().numpy() for x in (loss, logits.argmax(-1), (want.exp() * (want - logits)).sum(-1))])
    return Scores(*(np.stack(x) for x in zip(*found, strict=True)), hidden)


def mean_and_error(rows):
    """Mean of the means of some rows, and its standard error (NaN for one row)."""
    return float(rows.mean()), float(rows.std(ddof=1) / len(rows) ** 0.5) if len(rows) > 1 else float("nan")


@torch.no_grad()
def prefill(model, ids, stop):
    """Prefill the first `stop` tokens of prompts exactly."""
    core, cache = Chunked(), {}
    if stop:
        model(ids[:, :stop], core, cache)
    return Prefilled(core.states, cache, ids[:, stop:])


@torch.no_grad()
def continued(model, heads, batch, wipe=False):
    """Likeliest next token ``(rows, tokens)`` of each token after a prefill; `wipe` zeroes the states at its end."""
    core = Heads(heads)
    core.reset()
    if not wipe:
        core.load(batch.states)
    hidden = model(batch.rest, core, dict(batch.cache))
    return np.stack([model.head(row).argmax(-1).cpu().numpy() for row in hidden])


def recall(model, heads, prompts, decoded=0, batch=16):
    """Scores of prompts with each of several systems' heads, and with the first and states that are wiped."""
    said = []
    for ids in torch.from_numpy(prompts.ids).split(batch):
        prefilled = prefill(model, ids, prompts.question - decoded)
        runs = [(own, False) for own in heads] + [(heads[0], True)]
        said.append([continued(model, own, prefilled, wipe) for own, wipe in runs])
    return [prompts.score(np.concatenate(rows)) for rows in zip(*said, strict=True)]


def evaluate(
    model,
    systems,
    text,
    prompts,
    tasks=None,
    *,
    decoded=0,
    batch=16,
    backend="auto",
    step=lambda label: None,
    save=lambda *found: None,
):
    """Run all systems and compare them with the first. Returns results, recall without states, and that of tasks.

    Parameters
    ----------
    model : HybridLM
        The model.
    systems : list of ModelSystem
        Systems to compare.
    text : ndarray of int64, (rows, tokens)
        Test text.
    prompts : Prompts
        Needle prompts.
    tasks : dict of str to Prompts, optional
        Further prompts.
    decoded : int
        Tokens of the haystack that systems decode.
    batch : int
        Prompts that decode at once.
    backend : str
        Where heads run.
    step : callable
        Called with a label before each part.
    save : callable
        Called with what is returned, as far as it is known, before and after each of `tasks`.
    """
    least = min(x.question for x in (prompts, *(tasks or {}).values()))
    if not 0 <= decoded <= least:
        raise ValueError(f"decoded: expected 0 to {least} tokens of haystack, got {decoded}")
    rows = torch.from_numpy(text)
    slots = max(len(rows), batch)
    heads = [system.heads(slots, backend) for system in systems]
    results, base = [], None
    for system, own in zip(systems, heads, strict=True):
        step(system.name)
        found = score_text(model, own, rows, base)
        base = base or found
        loss = float(found.losses.mean())
        results.append(
            Result(
                system.name,
                system.family,
                own[model.recurrent[0]].backend,
                system.reduction,
                loss,
                float(np.exp(loss)),
                *mean_and_error((found.losses - base.losses).mean(axis=1)),
                *mean_and_error(found.divergences.mean(axis=1)),
                float((found.guesses == base.guesses).mean()),
            )
        )
    step("recall")
    *scores, without = recall(model, heads, prompts, decoded, batch)
    results = [replace(x, recall=y.share, recall_error=y.error) for x, y in zip(results, scores, strict=True)]
    wiped = {}
    save(results, without.share, wiped)
    for name, own in (tasks or {}).items():
        step(name)
        *scores, wiped[name] = recall(model, heads, own, decoded, batch)
        for result, score in zip(results, scores, strict=True):
            result.tasks[name] = score
        save(results, without.share, wiped)
    return results, without.share, wiped


def listed(options, calibrations):
    """Systems by the options: standard decode, other exact systems, then the rest."""
    systems = catalogue.baselines(calibrations, "exact", options.window)
    for family in options.systems:
        if family == "joint":
            for by_error in sorted({method == "error" for method in options.method or (None,)}):
                systems += catalogue.joint(calibrations, options.reductions, by_error)
        elif family == "sketch":
            layer, window = next(iter(calibrations.values())).layer, options.window
            for name, form, kept, method in product(
                options.maps, options.formats, options.residual_bits, options.method or (None,)
            ):
                if kept and name != "subspace":  # other maps have no residuals
                    continue
                beside = [catalogue.rank_of_copy(layer, bits, window, name, form) for bits in options.copy_bits or ()]
                settings = window, name, method, form, kept
                systems += catalogue.sketches(calibrations, [*options.ranks, *beside], *settings)
        else:
            systems += catalogue.baselines(calibrations, family, options.window)
    return systems[:1] + [x for x in systems[1:] if any(fnmatchcase(x.name, name) for name in options.only)]


def show(output, kind, results, without, wiped):
    """Print the comparison."""
    rows = [
        (
            x.name,
            f"{x.reduction:.2f}x",
            f"{x.loss:.4f}",
            f"{x.perplexity:.2f}",
            f"{x.increase:+.4f} ± {x.increase_error:.4f}",
            f"{x.divergence:.2e}",
            percent(x.agreement),
            share(Score(x.recall, x.recall_error)),
        )
        for x in results
    ]
    columns = ("system", "less traffic", "loss (nats)", "perplexity", "loss increase", "KL", "same top-1", "recall")
    output.table(f"{kind}: a language model's recurrent layers under several decode systems", columns, rows)
    output.say(f"Recall with the recurrent states wiped at the end of the prefill: {percent(without, 1)}")
    rows = [(x.name, *map(share, x.tasks.values())) for x in results] + [("states wiped", *map(share, wiped.values()))]
    output.table("Right answers, by task and distance", ("system", *wiped), rows if wiped else [])


def common_options(description):
    """A parser with the options that scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="weights: a safetensors file")
    add("--tokens", type=Path, required=True, help="folder of calib.npy, test.npy and tokenizer.json")
    add("--reductions", nargs="+", type=float, default=(10, 9), help="less traffic of jointly allocated residuals")
    add("--questions", type=int, default=16, help="needle prompts of calibration text that score them")
    add("--window", type=int, default=16, help="tokens from one flush to the next")
    add("--rank-max", type=int, help="largest rank of a head (default: 16, the most on CUDA)")
    add("--calib-rows", type=int, default=9, help="rows of calibration text")
    add("--rows", type=int, default=16, help="rows of test text")
    add("--prompts", type=int, default=128, help="needle prompts, and prompts of each task")
    add("--tasks", nargs="+", choices=TASKS, default=(), help="further recall tasks")
    add("--distance", nargs="+", type=int, help="tokens from a fact to its question in --tasks (default: 1024)")
    add("--length", type=int, default=1024, help="tokens of a row and of a prompt")
    add("--decoded", type=int, default=0, help="tokens of the haystack that systems decode")
    add("--backend", default="auto", help="backend of the heads")
    add("--device", default="cpu", help="PyTorch's name of the model's device")
    add("--batch", type=int, default=16, help="prompts that decode at once")
    add("--seed", type=int, default=0)
    add("--commit", help="for the report, where this is no clone")
    add("--out", type=Path, help="folder for the results")
    return parser


def arguments(given=None):
    """Command line."""
    parser = common_options(__doc__)
    add = parser.add_argument
    choices = ("sketch", "joint", *(family for family in catalogue.FAMILIES if family != "exact"))
    add("--systems", nargs="+", choices=choices, default=choices, help="systems besides the exact ones")
    add("--only", nargs="+", default=("*",), help="names of systems, with wildcards; others are left out")
    add("--ranks", nargs="*", type=float, default=(4, 8, 16), help="mean ranks of sketches")
    add("--copy-bits", nargs="*", type=float, help="also sketches of the traffic of copies of so many bits")
    add("--maps", nargs="+", choices=MAPS, default=(DEFAULT_MAP,), help="coefficient maps of sketches")
    add("--formats", nargs="+", choices=FORMATS, default=("bfloat16",), help="formats of sketches")
    add("--residual-bits", nargs="+", type=int, choices=RESIDUAL_BITS, default=(0,), help="with the map subspace")
    add("--method", nargs="+", choices=METHODS, help="rank allocations; joint ones by error, or else by gradients")
    add("--calib-needles", action="store_true", help="begin every other row with a needle prompt")
    return checked(parser, given)


def checked(parser, given=None):
    """Parse a command line."""
    options = parser.parse_args(given)
    if options.distance and not options.tasks:
        parser.error("--distance: has no effect without --tasks")
    return options


def task_prompts(options, text, encode):
    """Prompts of all tasks and distances of the options, by name."""
    # their own generator: calibration does not depend on them
    settings = text, encode, options.prompts, np.random.default_rng((options.seed, 1))
    return {
        f"{task} {distance}": make_prompts(
            task, *settings, length=options.length - ROOM, distance=distance, wording=WORDING
        )
        for task, distance in product(options.tasks, options.distance or (1024,))
    }


def main(given=None):
    """Calibrate, compare, print, and write the files of `--out`."""
    options = arguments(given)
    output, revision = Output(None), options.commit or commit()
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; products have float32 by default
    model = HybridLM.load(options.model).to(options.device)
    kind, name = model.layer.kind, options.model.stem
    calib, test = (np.load(options.tokens / f"{part}.npy") for part in ("calib", "test"))
    rng = np.random.default_rng(options.seed)
    text = text_rows(test, options.rows, options.length, rng)
    encode = encoder(options.tokens)
    prompts = needle_prompts(test, encode, options.prompts, options.length, rng)
    seen = text_rows(calib, options.calib_rows, options.length, rng)
    if options.calib_needles:
        seen = mixed_rows(seen, calib, encode, rng)
    with output.progress("calibration", 1) as step:
        step("calibration")
        settings = options.window, options.rank_max, "joint" in options.systems
        asked = questions(options, calib, encode, rng)
        perturb = "perturbation" in (options.method or ())
        calibrations = catalogue.calibrate(model, torch.from_numpy(seen), *settings, asked, perturb)
        systems = listed(options, calibrations)
    tasks = task_prompts(options, test, encode)

    def save(results, without, wiped):
        """Write the report; of a long run, also before its end."""
        if options.out is not None:
            report = {
                "commit": revision,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "devices": devices([x.backend for x in results], model),
                "command": command("evaluate.py", options),
                "model": name,
                "kind": kind,
                "systems": [asdict(x) for x in results],
                "recall_without_states": without,
                "tasks_without_states": wiped,
            }
            Output(str(options.out / f"lm-{name}.json")).finish(report)

    with output.progress("", len(systems) + 1 + len(tasks)) as step:
        settings = {"decoded": options.decoded, "batch": options.batch, "backend": options.backend}
        found = evaluate(model, systems, text, prompts, tasks, **settings, step=step, save=save)
    show(output, kind, *found)
    save(*found)
    if options.out is not None:
        picture = draw([Comparison(name, *found[:2])], options.out / f"lm-{name}.png")
        output.say(f"written: {picture}")


if __name__ == "__main__":
    sys.exit(main())
