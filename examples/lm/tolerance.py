"""Requests whose sketches err too much: what exact reads do for them.

    python examples/lm/tolerance.py --model recall-kda.safetensors --tokens TOKENS --texts TEXTS --out RESULTS

Plans, texts and options are those of `errors.py`. Each head measures every flush. Its tolerance is `--factor` times
the error that its layer reports on every other row of prose; the other half of all rows is compared.
"""

import sys

import numpy as np
import torch
from errors import PROSE, arguments, prepared
from evaluate import mean_and_error, score_text
from runs import origin

import sketchssm as ss
from sketchssm.cli.output import Output
from sketchssm.study.tables import percent


def compared(model, standard, watched, bounded, rows):
    """What a tolerance changes in rows of tokens: shares that are read exactly, of requests and of their slots.

    `changed` has requests that are read exactly in some layer: the increases of their loss and their divergences,
    each a mean over tokens with its standard error over requests, first without and then with a tolerance.
    """
    base = score_text(model, standard, rows)
    free, held = (score_text(model, heads, rows, base) for heads in (watched, bounded))
    exact = np.stack([head.errors(range(len(rows))).exact for head in bounded.values()])
    changed = exact.any(axis=0)
    found = {"requests": float(changed.mean()), "slots": float(exact.mean()), "changed": None}
    if changed.any():
        increases = [mean_and_error((x.losses - base.losses)[changed].mean(axis=1)) for x in (free, held)]
        divergences = [mean_and_error(x.divergences[changed].mean(axis=1)) for x in (free, held)]
        found["changed"] = {"increase": increases, "divergence": divergences}
    return found


def main(given=None):
    """Calibrate on prose, set tolerances on prose, and decode every kind of text without and with them."""
    options = arguments(given, __doc__, 2)
    model, texts, made = prepared(options)
    rows = {text: torch.from_numpy(ids) for text, ids in texts.items()}
    first, size = rows[PROSE][::2], len(rows[PROSE][::2])
    rows = {text: ids[1::2] for text, ids in rows.items()}
    settings, systems = (size, options.backend), []
    standard = {place: ss.StandardHead(model.layer, *settings) for place in model.recurrent}
    for system in made:
        plans = {place: own.plan for place, own in system.layers.items()}
        watched = {place: ss.SketchHead(plan, *settings, monitor=1) for place, plan in plans.items()}
        score_text(model, watched, first)
        errors = {place: head.errors(range(size)).relative for place, head in watched.items()}
        bounded = {
            place: ss.SketchHead(plan, *settings, monitor=1, tolerance=options.factor * errors[place])
            for place, plan in plans.items()
        }
        found = {text: compared(model, standard, watched, bounded, ids) for text, ids in rows.items()}
        systems.append({"name": system.name, "reduction": system.reduction, "texts": found})
    report = origin("tolerance.py", options, [next(iter(standard.values())).backend], model) | {"systems": systems}
    output = Output(None if options.out is None else str(options.out / f"tolerance-{options.model.stem}.json"))
    show(output, report, options.factor)
    output.finish(report)


def show(output, report, factor):
    """Print the shares, and what the changed requests gain."""
    for system in report["systems"]:
        table = []
        for text, x in system["texts"].items():
            pairs = [] if x["changed"] is None else x["changed"].values()
            shown = [f"{mean:+.4f} ± {error:.4f}" for pair in pairs for mean, error in pair]
            table.append([text, percent(x["requests"]), percent(x["slots"]), *(shown or [""] * 4)])
        columns = ["text", "requests", "slots", "loss increase", "with tolerance", "divergence", "with tolerance"]
        output.table(f"{report['model']}, {system['name']}: errors above {factor:g}x those on prose", columns, table)


if __name__ == "__main__":
    sys.exit(main())
