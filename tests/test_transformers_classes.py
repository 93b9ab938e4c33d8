"""Every class of transformers that has one of the recurrences is covered, or has a reason why not."""

import copy
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from tiny_models import (
    MORE,
    SETTINGS,
    TOLERANCE,
    assert_same,
    forward,
    generate,
    make,
    prompt,
    st,
    torch,
    transformers,
)

from sketchssm.study import bench

FUNCTIONS = re.compile(
    r"gated_delta_(rule|product)|kimi_delta|[a-z]_kda\b|delta_rule\b|mamba2?_chunk_scan|selective_state_update"
    r"|LightningAttention|(chunk|recurrent)_(simple_)?(gla|linear_attn|lightning_attn|retention|rwkv\d?)\b"
)
"""Names of functions and classes of linear recurrences with matrices as states."""
MAMBA1 = "Mamba-1: a decay for every element of the state"
EXCEPTIONS = dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), MAMBA1)
"""Folders of modeling files that have no heads, with the reason."""


def folder(name):
    """Of a class's modeling file, such as ``qwen3_5``; None if this version of transformers has no such class."""
    config = getattr(transformers, f"{name}Config", None)
    return config and config.__module__.split(".")[-2]


@pytest.mark.skipif(transformers.__version__ < "5.24", reason="the list is that of 5.24")
def test_modeling_files_are_covered_or_excepted():
    root = Path(import_module("transformers.models").__file__).parent
    found = {path.parent.name for path in root.glob("*/modeling_*.py") if FUNCTIONS.search(path.read_text())}
    covered = {folder(name) for name in SETTINGS | MORE}
    assert found - covered == set(EXCEPTIONS)
    assert covered <= found


@pytest.mark.skipif(transformers.__version__ < "5.24", reason="the defaults are those of 5.24")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "qwen3-next") for name in ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "Qwen4ExpText")),
        *((name, "kimi-linear") for name in ("KimiLinear", "BailingHybrid")),
        *((name, "nemotron-3-super") for name in ("Mamba2", "NemotronH")),
        *(("LaraMini", "lara-mini"), ("OlmoHybrid", "olmo-hybrid-7b"), ("Glm5NextText", "glm-5-flash")),
    ],
)
def test_defaults_have_shipped_shapes(name, shape):
    """Of a model without memory, of the default configuration."""
    needed = MORE["Qwen4Exp"].items() if name == "Qwen4ExpText" else ()  # no defaults of its attention
    config = getattr(transformers, f"{name}Config")(
        **{x: y for x, y in needed if x.startswith(("indexer", "head_dim"))}
    )
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert {found.layer for found in st.layers(model).values()} == {bench.SHAPES[shape]}


@pytest.mark.parametrize("name", MORE)
def test_class(name):
    """Patched with exact heads it generates what it generates without, and its plans decode."""
    if folder(name) is None:
        pytest.skip(f"{name} is in no transformers of version {transformers.__version__}")
    model = make(name)
    want = generate(model, prompt())
    with st.patch(model, "replay", slots=2, window=4, backend="reference"):
        assert_same(generate(model, prompt()), want)
    plans = st.calibrate(model, prompt(3, 24), mean_rank=3, window=4)
    assert list(plans) == list(st.layers(model))
    found = st.evaluate(model, prompt(2, 12, seed=8), plans, backend="cpu")
    assert -1e-6 < found.divergence < np.log(64)  # in float32 the likeliest may be equal


@pytest.mark.parametrize(("name", "bound"), (("BailingHybrid", -5.0), ("Glm5Next", -5.0)))
def test_bounded_gates_reach_the_heads(name, bound):
    if folder(name) is None:
        pytest.skip(f"{name} is in no transformers of version {transformers.__version__}")
    with st.record(model := make(name)) as recording, torch.no_grad():
        model(prompt(3, 24), use_cache=False)
    decays = [tokens.g for layer in st.layers(model) for tokens in recording.tokens(layer)]
    assert all((bound <= g).all() and (g <= 0).all() for g in decays)
    assert min(g.min() for g in decays) < bound / 2


def test_write_gates_of_up_to_two_reach_the_heads():
    with st.record(model := make("OlmoHybrid")) as recording, torch.no_grad():
        model(prompt(3, 24), use_cache=False)
    betas = np.concatenate([tokens.beta for layer in st.layers(model) for tokens in recording.tokens(layer)])
    assert 1.2 < betas.max() <= 2


def test_caches_of_minimax():
    """A cache from before the patch, prompts in chunks, a deep copy, and the states after `stop`."""
    types = ["full_attention", "linear_attention", "linear_attention"]  # positions are counted by the first layer
    model, ids = make("MiniMax", layer_types=types), prompt(2, 14)
    parts, cache = [], forward(model, ids[:, :5])[1]
    with st.patch(model, "replay", slots=4, window=4, backend="cpu") as patch:
        parts += [forward(model, x, cache)[0] for x in (ids[:, 5:6], ids[:, 6:9], ids[:, 9:10])]
        other = copy.deepcopy(cache)
        parts.append(forward(model, ids[:, 10:11], other)[0])
        forward(model, prompt(2, 1, seed=3), cache)
        patch.stop()
        parts.append(forward(model, ids[:, 11:], other)[0])
    torch.testing.assert_close(torch.cat(parts, 1), forward(model, ids)[0][:, 5:], **TOLERANCE)
