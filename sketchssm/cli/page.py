"""An evaluation as one page of HTML that needs nothing beside it."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np

import sketchssm
from sketchssm.cli.comparison import ablation_rows, growth_rows, headline_rows, system_rows
from sketchssm.evaluate.claims import Claim, claims
from sketchssm.evaluate.evaluation import Evaluation, LayerResults
from sketchssm.evaluate.findings import BAND, GROWS, LEAST, headline
from sketchssm.evaluate.pictures import draw
from sketchssm.files import write_whole

__all__ = ["write_page"]

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #444; } tr.rule td { border-top: 1px solid #bbb; }
tbody tr:hover { background: #f3f6fa; }
.wide { overflow-x: auto; } figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .88rem; }
.answer { border-left: .35rem solid #0072b2; padding: .4rem 1rem; background: #f3f6fa; font-size: 1.05rem; }
.no { border-color: #d55e00; background: #fdf3ec; }
li { margin: .4rem 0; } li ul { font-size: .88rem; color: #444; }
code { font-size: .9em; overflow-wrap: anywhere; }
</style>
</head>
<body>
$body
</body>
</html>
""")

CAPTIONS = {
    "error-against-traffic": "Relative error of all outputs against the reduction of state traffic; both axes are "
    "logarithmic, lower right is better. Dotted lines: exact systems.",
    "retained-by-rank": "Share of the state reads' energy that each coefficient map loses, in float64, by rank.",
    "drift-of-outputs": "Relative error of the outputs between one point and the next. Compressed states are shown at "
    "the setting nearest above 4x.",
    "drift-of-states": "Relative error of the states. Near 1e-7: exact to float32 rounding.",
    "ranks": "Ranks that each allocation gives to the heads, at the ablations' budget.",
}


def write_page(evaluation: Evaluation, path: Path) -> Path:
    """Write the report, with all pictures in it; ModuleNotFoundError if matplotlib is missing."""
    layers = evaluation.layers
    with tempfile.TemporaryDirectory() as folder:
        pictures = {name: file.read_bytes() for name, file in draw(layers, Path(folder), ".svg").items()}
    parts = [
        *_opening(evaluation),
        *_answer(layers),
        _figure(pictures, "error-against-traffic"),
        *_section("What a sketch retains by rank", _figure(pictures, "retained-by-rank")),
        *_section("What each part is worth", *_ablations(layers)),
        _figure(pictures, "ranks"),
        *_section("Errors over tokens", *_growth(layers)),
        _figure(pictures, "drift-of-outputs"),
        _figure(pictures, "drift-of-states"),
        *_verdicts(layers),
        *_section("Every system", *_systems(layers)),
        *_section("How it was measured", *_method(evaluation)),
    ]
    body = "\n".join(part for part in parts if part)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, PAGE.substitute(title="Evaluation of state sketches", body=body).encode())
    return path


def _opening(evaluation: Evaluation) -> list[str]:
    layers = evaluation.layers
    systems = len(dict.fromkeys(s.name for layer in layers for s in layer.systems))
    rows = [
        [layer.name, layer.kind, *(str(layer.facts[x]) for x in ("heads", "key_heads", "key_dim", "value_dim")),
         f"{layer.facts['test_sequences']} x {layer.facts['test_tokens']}", str(layer.facts["calibration_tokens"]),
         "yes" if layer.facts["gradients"] else "no", _lives(layer)]
        for layer in layers
    ]  # fmt: skip
    columns = ["layer", "kind", "heads", "key heads", "K", "V", "test tokens", "calibration tokens", "gradients",
               "half-life of gates, tokens"]  # fmt: skip
    kinds = " and ".join(dict.fromkeys(layer.kind for layer in layers))
    return [
        "<h1>What a sketch of the state loses, and what the alternatives lose</h1>",
        _text(
            f"{systems} ways to decode were run on {_count(len(layers), 'layer')} ({kinds}), on held-out text, and "
            "judged by the recurrence in float64. Each layer was calibrated on its calibration sequences alone."
        ),
        _table(columns, rows),
        _text(
            "Half-life: tokens in which a head's gates halve what it wrote (for kda: of its slow channels); fastest, "
            "median and slowest head.",
            "note",
        ),
    ]


def _answer(layers: Sequence[LayerResults]) -> list[str]:
    found = [h for h in map(headline, layers) if h.margin is not None]
    low, high = BAND
    asked = f"Does the sketch at {low:g}x to {high:g}x less state traffic lose less than every quantised or "
    asked += f"pruned state at {LEAST:g}x or more?"
    if not found:
        return _section(asked, _text("The chosen systems do not say: it takes sketches and compressed states."))
    margins = [h.margin or 0.0 for h in found]
    lost = [h.layer for h in found if h.margin is not None and h.margin <= 1]
    answer = f"Yes, on {_count(len(found), 'layer')} of {len(found)}." if not lost else (
        f"On {len(found) - len(lost)} of {_count(len(found), 'layer')} yes, with every setting in that band; "
        f"on {', '.join(lost)} no."
    )  # fmt: skip
    answer += (
        f" The worst of these settings has {min(margins):.2f} to {max(margins):.2f} times less output error than "
    )
    answer += "the best compressed state, by layer (below 1: more)."
    head, rows = headline_rows(layers)
    return _section(asked, _text(answer, "answer no" if lost else "answer"), _table(head, rows))


def _ablations(layers: Sequence[LayerResults]) -> Iterable[str]:
    head, rows = ablation_rows(layers)
    if rows:
        yield _text(
            "The full method with one part replaced: how many times its output error, and points of retained energy "
            "lost (negative: gained). Another map, pivot count or window also changes the traffic: see the last table."
        )
        yield _table(head, rows)


def _growth(layers: Sequence[LayerResults]) -> Iterable[str]:
    head, rows = growth_rows(layers)
    if rows:
        yield _text(
            f"Errors of the last quarter of the curve over those of the first, outputs / states; above {GROWS:g}x "
            "they grow. A dash: exact to float32 rounding throughout."
        )
        yield _table(head, rows)


def _verdicts(layers: Sequence[LayerResults]) -> list[str]:
    found = claims(layers)
    differing = [claim for claim in found if not claim.holds]
    agreeing = [claim for claim in found if claim.holds]
    parts = []
    if differing:
        parts += ["<h2>Where these traces differ from the paper</h2>", "<ul>", *map(_differing, differing), "</ul>"]
    if agreeing:
        items = [f"<li>{escape(claim.says)}</li>" for claim in agreeing]
        parts += ["<h2>Where they agree</h2>", "<ul>", *items, "</ul>"]
    return parts


def _differing(claim: Claim) -> str:
    bad = [f"<li>not {escape(name)}: {escape(said)}</li>" for name, (good, said) in claim.layers.items() if not good]
    held = [name for name, (good, _) in claim.layers.items() if good]
    if held:
        bad.append(f"<li>it does hold on {escape(', '.join(held))}</li>")
    why = f"Not on all layers. {escape(claim.reason)}"
    return f"<li><strong>{escape(claim.says)}</strong> {why}<ul>{''.join(bad)}</ul></li>"


def _systems(layers: Sequence[LayerResults]) -> Iterable[str]:
    yield _text("Output error @ reduction of state traffic. Per head: results.csv; over tokens: drift.csv.", "note")
    yield _table(["system", *(layer.name for layer in layers)], system_rows(layers))


def _method(evaluation: Evaluation) -> Iterable[str]:
    settings = ", ".join(f"{name} {value}" for name, value in evaluation.settings.items() if value is not None)
    yield _text(
        "Output error: norm of the error of all outputs over the norm of the float64 recurrence's outputs. State "
        "error: likewise, of the states; of a system with windows, as of its last flush. Retained: 1 less the error's "
        "energy over the energy of the reads of the state between flushes, mean over heads; for a sketch, what it "
        "keeps. Traffic: bytes of state, sketch and map per token, by the paper's byte model; the ring of raw inputs "
        "is not counted."
    )
    yield _text(f"sketchssm {sketchssm.__version__}; {settings}.")
    yield "<ul>"
    for layer in evaluation.layers:
        told = f"{layer.name}: {layer.facts['provenance'] or 'of unknown origin'}; digest of traces and settings "
        yield f"<li>{escape(told)}<code>{layer.facts['digest']}</code></li>"
    yield "</ul>"


def _section(title: str, *parts: str) -> list[str]:
    shown = [part for part in parts if part]
    return [f"<h2>{escape(title)}</h2>", *shown] if shown else []


def _text(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text; an empty row is a rule."""
    lines = [f"<tr>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr>"]
    body, rule = [], ""
    for row in rows:
        if row:
            body.append(f"<tr{rule}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
        rule = "" if row else ' class="rule"'
    return f'<div class="wide"><table><thead>{lines[0]}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _figure(pictures: dict[str, bytes], name: str) -> str:
    if name not in pictures:
        return ""
    data, caption = base64.b64encode(pictures[name]).decode(), escape(CAPTIONS[name])
    source = f"data:image/svg+xml;base64,{data}"
    return f'<figure><img src="{source}" alt="{name.replace("-", " ")}"><figcaption>{caption}</figcaption></figure>'


def _lives(layer: LayerResults) -> str:
    lives = layer.half_life
    return " / ".join("never" if math.isinf(x) else f"{x:.0f}" for x in (min(lives), np.median(lives), max(lives)))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
