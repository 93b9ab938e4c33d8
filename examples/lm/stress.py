"""Sketches far from their calibration: text of other kinds, and thousands of tokens decoded freely.

    python examples/lm/stress.py --model gdn.safetensors --tokens TOKENS --texts TEXTS --out RESULTS

TEXTS is a folder of plain text, one file a kind of text: the first half of a file calibrates, the second half tests.
Plans are calibrated on prose (TOKENS) and on a mixture of prose and all files. Random tokens are a kind that no plan
was calibrated on. In free decode every system continues with its own tokens, half of the rows by the likeliest token,
half by sampling at temperature 1; standard decode then reads the same tokens.
"""

import argparse
import sys
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import systems as catalogue
import torch
from evaluate import mean_and_error, prefill, recall, score_text
from model import HybridLM
from prompts import needle_prompts, text_rows
from recurrence import Heads
from runs import command, commit, devices, encoder
from torch.nn import functional as F

from sketchssm.cli.output import Output
from sketchssm.study.tables import percent

GRAM = 8
"""Tokens of a repeated part."""

CONTEXT = 64
"""Tokens of test text that free decode begins with."""

CALIBRATIONS = ("prose", "mixed")
"""Texts that plans are calibrated on."""


@torch.no_grad()
def free_decode(model, heads, standard, ids, tokens, seed):
    """Continue rows of text freely with a system's heads; the first half of the rows takes the likeliest tokens.

    Returns the tokens ``(rows, tokens)``, and the Kullback-Leibler divergence of each next token's distribution from
    that of standard decode after the same tokens.
    """
    before = prefill(model, ids, ids.shape[1] - 1)
    runs = []
    for own in (heads, standard):
        core = Heads(own)
        core.reset()
        core.load(before.states)
        runs.append((core, dict(before.cache)))
    noise = np.random.default_rng(seed)
    said, divergences, last = [], [], ids[:, -1:].to(model.device)
    for _ in range(tokens):
        found, exact = (F.log_softmax(model.head(model(last, *run)[:, -1]).double(), -1) for run in runs)
        divergences.append((exact.exp() * (exact - found)).sum(-1).cpu().numpy())
        drawn = noise.gumbel(size=found.shape)  # the largest sum is a sample of the distribution
        drawn[: len(drawn) // 2] = 0  # the likeliest token
        last = (found + torch.from_numpy(drawn).to(model.device)).argmax(-1, keepdim=True)
        said.append(last[:, 0].cpu().numpy())
    return np.stack(said, 1), np.stack(divergences, 1)


def repeated(rows, size=GRAM):
    """Where the last `size` tokens of rows ``(rows, tokens)`` occurred before in their row."""
    found = np.zeros(rows.shape, bool)
    for row, marks in zip(rows.tolist(), found, strict=True):
        seen, last = set(), deque(maxlen=size)
        for place, token in enumerate(row):
            last.append(token)
            gram = tuple(last)
            marks[place] = gram in seen
            if len(gram) == size:
                seen.add(gram)
    return found


def in_blocks(values, blocks=8):
    """Means over rows of successive blocks of tokens."""
    return [float(part.mean()) for part in np.array_split(values, blocks, axis=1)]


def texts_of(folder, encode, vocabulary, rng):
    """Token ids for calibration and for tests, by kind of text, and characters a token."""
    kinds, density = {}, {}
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text()
        ids = np.array(encode(text))
        kinds[path.stem] = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        density[path.stem] = len(text) / len(ids)
    return kinds | {"random": (None, rng.integers(vocabulary, size=100_000))}, density


def mixture(prose, kinds, rows, length, rng):
    """Calibration rows that take turns between prose and all kinds that may calibrate."""
    parts = [prose, *(calib for calib, _ in kinds.values() if calib is not None)]
    each = [text_rows(part, -(-rows // len(parts)), length, rng) for part in parts]
    return np.stack(each, 1).reshape(-1, length)[:rows]


def systems_of(calibrations, options):
    """Standard decode, and sketches and joint plans of each calibration."""
    systems = []
    for name, own in calibrations.items():
        made = catalogue.sketches(own, [options.rank], options.window, "ridge", None, "int8")
        systems += [(name, system) for system in (*made, *catalogue.joint(own, options.reductions))]
    exact = catalogue.baselines(calibrations[CALIBRATIONS[0]], "exact", options.window)[0]
    return [("", exact), *systems]


def arguments(given=None):
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="weights: a safetensors file")
    add("--tokens", type=Path, required=True, help="folder of calib.npy, test.npy and tokenizer.json")
    add("--texts", type=Path, required=True, help="folder of NAME.txt, a kind of text each")
    add("--rank", type=float, default=16, help="mean rank of sketches in int8")
    add("--reductions", nargs="+", type=float, default=(10, 9), help="less traffic of joint plans")
    add("--window", type=int, default=16, help="tokens from one flush to the next")
    add("--calib-rows", type=int, default=24, help="rows of calibration text")
    add("--questions", type=int, default=8, help="needle prompts of calibration text that score joint plans")
    add("--rows", type=int, default=16, help="rows of each kind of text")
    add("--length", type=int, default=512, help="tokens of a row and of a prompt")
    add("--prompts", type=int, default=100, help="needle prompts")
    add("--generate", type=int, default=4096, help="tokens of free decode")
    add("--streams", type=int, default=16, help="rows of free decode")
    add("--backend", default="auto", help="backend of the heads")
    add("--device", default="cpu", help="PyTorch's name of the model's device")
    add("--seed", type=int, default=0)
    add("--commit", help="for the report, where this is no clone")
    add("--out", type=Path, help="folder for stress-MODEL.json")
    return parser.parse_args(given)


def main(given=None):
    """Calibrate, compare, print, and write the file of `--out` after each part."""
    options = arguments(given)
    output, revision = Output(None), options.commit or commit()
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; products have float32 by default
    model = HybridLM.load(options.model).to(options.device)
    calib, test = (np.load(options.tokens / f"{part}.npy") for part in ("calib", "test"))
    rng, encode = np.random.default_rng(options.seed), encoder(options.tokens)
    kinds, density = texts_of(options.texts, encode, model.emb.num_embeddings, rng)
    texts = {name: text_rows(own, options.rows, options.length, rng) for name, (_, own) in kinds.items()}
    texts = {"prose": text_rows(test, options.rows, options.length, rng)} | texts
    streams = text_rows(test, options.streams, CONTEXT, rng)
    prompts = needle_prompts(test, encode, options.prompts, options.length, rng)
    asked = needle_prompts(calib, encode, options.questions, options.length, rng)
    settings = options.calib_rows, options.length, rng
    seen = dict(zip(CALIBRATIONS, (text_rows(calib, *settings), mixture(calib, kinds, *settings)), strict=True))
    calibrations = {
        name: catalogue.calibrate(model, torch.from_numpy(rows), options.window, None, True, [asked])
        for name, rows in seen.items()
    }
    systems = systems_of(calibrations, options)
    slots = max(options.rows, options.streams, 16)
    heads = [system.heads(slots, options.backend) for _, system in systems]
    found = [
        {
            "name": system.name,
            "calibration": name,
            "backend": own[model.recurrent[0]].backend,
            "reduction": system.reduction,
            "texts": {},
        }
        for (name, system), own in zip(systems, heads, strict=True)
    ]
    report = {
        "commit": revision,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "devices": devices([x["backend"] for x in found], model),
        "command": command("stress.py", options),
        "model": options.model.stem,
        "characters a token": density,
        "systems": found,
    }

    def save():
        if options.out is not None:
            Output(str(options.out / f"stress-{options.model.stem}.json")).finish(report)

    for text, rows in texts.items():
        base = None
        for own, result in zip(heads, found, strict=True):
            scores = score_text(model, own, torch.from_numpy(rows), base)
            base = base or scores
            increase = mean_and_error((scores.losses - base.losses).mean(axis=1))
            divergence = mean_and_error(scores.divergences.mean(axis=1))
            result["texts"][text] = {"loss": float(scores.losses.mean())} | {
                name: dict(zip(("mean", "error"), pair, strict=True))
                for name, pair in (("increase", increase), ("divergence", divergence))
            }
        save()
    *scores, _ = recall(model, heads, prompts)
    for result, score in zip(found, scores, strict=True):
        result["recall"] = score._asdict()
    standard, half = systems[0][1].heads(slots, options.backend), options.streams // 2
    for own, result in zip(heads, found, strict=True):
        if result["calibration"] in ("", CALIBRATIONS[0]):
            settings = torch.from_numpy(streams), options.generate, options.seed
            said, divergences = free_decode(model, own, standard, *settings)
            measures = {"divergence": divergences, "repeated": repeated(said)}
            result["free"] = {
                way: {name: in_blocks(values[rows]) for name, values in measures.items()}
                for way, rows in (("greedy", slice(half)), ("sampled", slice(half, None)))
            }
            save()
    show(output, report)


def show(output, report):
    """Print the comparison."""
    systems, texts = report["systems"], list(report["systems"][0]["texts"])
    rows = []
    for x in systems:
        increases = [x["texts"][text]["increase"] for text in texts]
        shown = [f"{y['mean']:+.4f} ± {y['error']:.4f}" for y in increases]
        row = x["name"], x["calibration"], f"{x['reduction']:.1f}x", *shown, percent(x["recall"]["share"], 1)
        rows.append(row)
    columns = ("system", "calibrated on", "less traffic", *texts, "recall")
    output.table("Loss increase by kind of text", columns, rows, words=2)
    rows = [
        (x["name"], way, name, *(f"{value:.2e}" if name == "divergence" else percent(value, 0) for value in values))
        for x in systems
        for way, measures in x.get("free", {}).items()
        for name, values in measures.items()
    ]
    columns = ("system", "tokens", "measure", *(f"block {i + 1}" for i in range(8)))
    title = f"Free decode, in eight blocks; repeated: the last {GRAM} tokens occurred before"
    output.table(title, columns, rows, words=3)


if __name__ == "__main__":
    sys.exit(main())
