"""What the scripts share: a tokenizer, and what a result file says of its run."""

import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

FOLDERS = {"tokens": "TOKENS", "texts": "TEXTS", "out": "RESULTS", "models": "MODELS/*.safetensors"}
"""How commands name the folders of options."""


def encoder(folder):
    """Tokens of a string, by the folder's tokenizer."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("needle prompts need a tokenizer: pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def commit():
    """The checkout's commit, marked if files differ; empty outside a checkout of this repository."""
    root = Path(__file__).resolve().parents[2]
    top = _git(root, "rev-parse", "--show-toplevel")
    return _git(root, "describe", "--always", "--dirty", "--exclude=*") if top and Path(top) == root else ""


def _git(folder, *words):
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def devices(backends, model):
    """Devices of heads on some backends, and of a model."""
    heads = dict.fromkeys(sorted(set(backends)), "CPU")
    if "cuda" in heads:
        from sketchssm.study.bench import device_name

        heads["cuda"] = device_name()
    on_gpu = model.device.type == "cuda"
    return {"heads": heads, "model": torch.cuda.get_device_name(model.device) if on_gpu else "CPU"}


def command(script, options):
    """The command line that repeats a run, without the folders of the data."""
    words = []
    for name, value in vars(options).items():
        if value is None or value is False or value == () or name == "commit":
            continue
        value = f"MODELS/{value.name}" if name == "model" else FOLDERS.get(name, value)
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [f"--{name.replace('_', '-')}", *(f"{x:g}" if isinstance(x, float) else str(x) for x in values)]
    return f"python examples/lm/{script} {shlex.join(words)}"


def origin(script, options, backends, model):
    """First fields of a report: what ran, when and where."""
    return {
        "commit": options.commit or commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "devices": devices(backends, model),
        "command": command(script, options),
        "model": options.model.stem,
    }
