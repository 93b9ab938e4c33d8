"""Errors that heads report of themselves: on prose, on which plans were calibrated, and on text of other kinds.

    python examples/lm/errors.py --model gdn.safetensors --tokens TOKENS --texts TEXTS --out RESULTS

Plans are calibrated on prose (TOKENS). TEXTS is a folder of plain text, one file a kind of text, as for `stress.py`.
Each head decodes what its layer of the exact model receives. The reported errors are sums over the flush tokens
(`SketchHead.errors`). The true ones are sums over all other tokens, against the recurrence in float64.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import systems as catalogue
import torch
from model import HybridLM
from prompts import needle_prompts, text_rows
from recurrence import Recorder, chunked
from runs import encoder, origin
from stress import texts_of

import sketchssm as ss
from sketchssm.cli.output import Output

SUMS = "reported error", "reported energy", "true error", "true energy"
PROSE = "prose"


@torch.no_grad()
def errors_on(model, heads, rows):
    """`SUMS` of every layer and head, ``(4, layers, heads)``; heads take the rows from zero states."""
    recorder = Recorder()
    model(rows, recorder)
    found = []
    for place, head in heads.items():
        inputs = recorder.inputs[place]
        exact = chunked(*(x if x is None else x.double() for x in inputs))[0].numpy(force=True)
        head.reset()
        difference = head.step(*inputs).double().numpy(force=True) - exact
        own = head.errors(range(len(rows)))
        between = np.arange(exact.shape[1]) % head.window < head.window - 1
        true = [np.square(x[:, between]).sum((0, 1, 3)) for x in (difference, exact)]
        found.append([own.error.sum(0), own.energy.sum(0), *true])
    return np.stack(found, 1)


def arguments(given=None, description=__doc__, factor=None):
    """Command line; `tolerance.py` has a factor too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="weights: a safetensors file")
    add("--tokens", type=Path, required=True, help="folder of calib.npy, test.npy and tokenizer.json")
    add("--texts", type=Path, required=True, help="folder of NAME.txt, a kind of text each")
    add("--rank", type=float, default=8, help="mean rank of sketches in int8")
    add("--reduction", type=float, default=9, help="less traffic of joint plans")
    add("--window", type=int, default=16, help="tokens from one flush to the next")
    add("--calib-rows", type=int, default=24, help="rows of calibration text")
    add("--rows", type=int, default=16, help="rows of each kind of text, and prompts")
    add("--length", type=int, default=512, help="tokens of a row and of a prompt")
    add("--backend", default="auto", help="backend of the heads")
    add("--seed", type=int, default=0)
    add("--commit", help="for the report, where this is no clone")
    add("--out", type=Path, help="folder for the report")
    if factor is not None:
        add("--factor", type=float, default=factor, help="tolerance of a layer, over its error on prose")
    return parser.parse_args(given)


def prepared(options):
    """Load a model; return it, rows of every kind of text, prose first, and systems that prose has calibrated."""
    model, encode = HybridLM.load(options.model), encoder(options.tokens)
    calib, test = (np.load(options.tokens / f"{part}.npy") for part in ("calib", "test"))
    rng, size = np.random.default_rng(options.seed), (options.rows, options.length)
    kinds, _ = texts_of(options.texts, encode, model.emb.num_embeddings, rng)
    texts = {PROSE: text_rows(test, *size, rng)} | {
        name: text_rows(own, *size, rng) for name, (_, own) in kinds.items()
    }
    asked = needle_prompts(test, encode, *size, rng).ids
    texts["needles"] = np.stack([ids[-min(map(len, asked)) :] for ids in asked])
    rows = torch.from_numpy(text_rows(calib, options.calib_rows, options.length, rng))
    calibrations = catalogue.calibrate(model, rows, options.window, None, True)
    made = catalogue.sketches(calibrations, [options.rank], options.window, "ridge", None, "int8")
    return model, texts, (*made, *catalogue.joint(calibrations, [options.reduction]))


def main(given=None):
    """Calibrate on prose, measure on every kind of text, and print both errors."""
    options = arguments(given)
    model, texts, made = prepared(options)
    systems, settings = [], (options.rows, options.backend)
    for system in made:
        heads = {place: ss.SketchHead(own.plan, *settings, monitor=1) for place, own in system.layers.items()}
        found = {text: errors_on(model, heads, torch.from_numpy(ids)) for text, ids in texts.items()}
        growth = {
            text: np.log(x[::2] / x[1::2]) - np.log(found[PROSE][::2] / found[PROSE][1::2])
            for text, x in found.items()
        }
        results = {
            text: dict(zip(SUMS, x.sum((1, 2)).tolist(), strict=True))
            | {"correlation": float(np.corrcoef(growth[text].reshape(2, -1))[0, 1]) if text != PROSE else None}
            for text, x in found.items()
        }
        systems.append({"name": system.name, "reduction": system.reduction, "texts": results})
    report = origin("errors.py", options, [next(iter(heads.values())).backend], model) | {"systems": systems}
    output = Output(None if options.out is None else str(options.out / f"errors-{options.model.stem}.json"))
    show(output, report)
    output.finish(report)


def show(output, report):
    """Print both errors, and their ratios to those on prose."""
    for system in report["systems"]:
        rows, base = [], None
        for text, x in system["texts"].items():
            errors = np.array([x[SUMS[0]] / x[SUMS[1]], x[SUMS[2]] / x[SUMS[3]]])
            base = errors if base is None else base
            shown = [f"{error:.1e} ({ratio:.2f}x)" for error, ratio in zip(errors, errors / base, strict=True)]
            rows.append([text, *shown, "" if x["correlation"] is None else f"{x['correlation']:.2f}"])
        columns = ["text", "reported", "true", "correlation of heads' growths"]
        output.table(f"{report['model']}, {system['name']}: relative squared errors", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
