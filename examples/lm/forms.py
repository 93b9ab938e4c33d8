"""Divergence and recall of a model whose states are read through forms of a residual at equal bytes.

    PYTHONPATH=benchmarks python examples/lm/forms.py --models MODELS/*.safetensors --tokens TOKENS --out RESULTS

The forms are those of `benchmarks/residual_forms.py`, with the same rank and bits in every head. Reads between flushes
take the form of the state at the window's start, computed in float64; states and outputs of flushes are exact. The
table has a form's divergence from standard decode over that of the stored form (rank 4 in int8, 2 bits) with the same
bytes: geometric mean over the models, and largest.
"""

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import evaluate
import numpy as np
import residual_forms
import systems as catalogue
import torch
from model import HybridLM
from narrow import collect_windows
from prompts import needle_prompts, text_rows
from recurrence import CHUNK, chunked
from runs import command, commit, encoder

from sketchssm.cli.output import Output
from sketchssm.study.evaluate.measure import rounded
from sketchssm.study.systems import System

residual_forms.STORED = [(4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 3)]
FORMS = "rank *", "ridge*", "U fitted*", "levels*", "Lloyd-Max, 2 bits", "three levels*", "Hadamard*", "calibrated*"
"""Those that come near the stored form in either error of docs/evaluation.md, *Residuals*."""


class FormHead:
    """A head of windows of `CHUNK` tokens that reads ``make(head, states)`` in place of the states."""

    backend = "torch"

    def __init__(self, make):
        self.make, self.state = make, None

    def reset(self):
        """Start again from zero states."""
        self.state = None

    def load_state(self, state):
        """Continue from some states ``(rows, heads, V, K)``, at the start of a window."""
        self.state = state

    def served(self):
        """What reads take for the states."""
        states = self.state.double().mT.numpy(force=True)
        made = [self.make(head, states[:, head]) for head in range(states.shape[1])]
        return torch.from_numpy(np.stack(made, 1)).to(self.state)

    def step(self, *tokens):
        """Decode tokens ``(rows, tokens, ...)`` from the start of a window on."""
        found = []
        for part in zip(*([None] * tokens[2].shape[1] if x is None else x.split(CHUNK, 1) for x in tokens)):  # noqa: B905
            out, after = chunked(*part, state=self.state)
            if self.state is not None:
                read = chunked(*part, state=self.served())[0]
                out[:, : CHUNK - 1] = read[:, : CHUNK - 1]
            found.append(out)
            self.state = after
        return torch.cat(found, 1)


def listed(calibrations):
    """Standard decode and every form in all layers, and the bytes of each form."""
    sizes, layers = {}, {}
    for place, own in calibrations.items():
        windows = collect_windows(own.layer, own.tokens)[1]
        turns = np.linalg.eigh(np.einsum("nhwk,nhwl->hkl", windows, windows))[1][..., ::-1]
        for name, size, make in residual_forms.forms(own.layer, own.basis, turns):
            if not any(fnmatchcase(name, kept) for kept in FORMS):
                continue
            sizes[name] = size
            system = System(name, lambda slots, backend, make=make: FormHead(make), float("nan"))
            layers.setdefault(name, {})[place] = system
    exact = catalogue.baselines(calibrations, "exact")[0]
    return [exact, *(catalogue.ModelSystem(name, "form", own) for name, own in layers.items())], sizes


def results_of(path, options, step):
    """Recall of standard decode in one model; divergence, loss increase and recall of every form."""
    model, rng = HybridLM.load(path), np.random.default_rng(options.seed)
    calib, test = (np.load(options.tokens / f"{part}.npy") for part in ("calib", "test"))
    text = text_rows(test, options.rows, options.length, rng)
    prompts = needle_prompts(test, encoder(options.tokens), options.prompts, options.length, rng)
    seen = torch.from_numpy(text_rows(calib, options.calib_rows, options.length, rng))
    systems, sizes = listed(catalogue.calibrate(model, seen))
    found = evaluate.evaluate(model, systems, text, prompts, backend="cpu", step=lambda name: step(path.stem))[0]
    kept = "increase", "increase_error", "divergence", "divergence_error", "recall"
    forms = {x.name: {"bytes": sizes[x.name]} | {name: getattr(x, name) for name in kept} for x in found[1:]}
    return found[0].recall, forms


def main(given=None):
    """Run all models, print the table, and write ``lm-forms.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="weights: safetensors files")
    add("--tokens", type=Path, required=True, help="folder of calib.npy, test.npy and tokenizer.json")
    add("--calib-rows", type=int, default=6, help="rows of calibration text")
    add("--rows", type=int, default=8, help="rows of test text")
    add("--prompts", type=int, default=64, help="needle prompts")
    add("--length", type=int, default=512, help="tokens of a row and of a prompt")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args(given)
    report = {"commit": commit(), "command": command("forms.py", options), "standard": {}, "models": {}}
    output = Output(str(options.out / "lm-forms.json"))
    with output.progress("forms", 17 * len(options.models)) as step:
        for path in options.models:
            report["standard"][path.stem], report["models"][path.stem] = results_of(path, options, step)
            report["ratios"] = residual_forms.ratios(report["models"], "divergence")
            output.finish(rounded(report))
    models = report["models"]
    rows = [
        [name, f"{mean:.2f}", f"{most:.2f}", " ".join(f"{100 * own[name]['recall']:.1f}" for own in models.values())]
        for name, (mean, most) in report["ratios"].items()
    ]
    output.table("Divergence at equal bytes", ("form", "mean", "largest", " ".join(models)), rows)


if __name__ == "__main__":
    sys.exit(main())
