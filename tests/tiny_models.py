"""Tiny random models of classes of transformers, and ways to run them with and without heads. Models are in
float32, with large random weights: outputs then depend on the states.
"""

import inspect

import pytest

import sketchssm as ss
from sketchssm.layer.recurrence import Layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
st = ss.transformers

# Heads sum float32 products in another order. Layers of large weights amplify the rounding: logits of up to 4 differed
# by at most 8e-5, most of them by 2e-5. A wrong state changes them by more than 0.1.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 16,
    "num_local_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
MAMBA = {"mamba_d_state": 24, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_chunk_size": 8}
SETTINGS = {
    "Qwen3Next": BASE | ATTENTION | DELTA | EXPERTS | HYBRID | {"head_dim": 16},
    "Qwen3_5": BASE | ATTENTION | DELTA | HYBRID | {"head_dim": 16},
    "OlmoHybrid": BASE | ATTENTION | DELTA | HYBRID | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "KimiLinear": BASE | ATTENTION | HYBRID | LATENT | {"linear_num_heads": 4, "linear_head_dim": 16},
    "Mamba2": {x: y for x, y in BASE.items() if x != "intermediate_size"} | {
        "num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 2,
    },
    "Bamba": BASE | ATTENTION | MAMBA | {"mamba_n_groups": 1, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "NemotronH": BASE | ATTENTION | {
        "head_dim": 16, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "ssm_state_size": 24,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
    },
    "Zamba2": BASE | ATTENTION | {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 24,
        "mamba_ngroups": 2, "n_mamba_heads": 4, "chunk_size": 8, "num_mem_blocks": 1,
    },
    "FalconH1": BASE | ATTENTION | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 16},
}  # fmt: skip
# Classes whose mixers are those of another class: tests/test_transformers_classes.py alone takes them.
MORE = {
    "MiniMax": BASE | ATTENTION | HYBRID | {
        "head_dim": 16, "block_size": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "Qwen3_5Moe": BASE | ATTENTION | DELTA | EXPERTS | HYBRID | {"head_dim": 16},
    "Qwen4Exp": BASE | ATTENTION | DELTA | EXPERTS | HYBRID | {
        "head_dim": 16, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 1,
    },
    "LaraMini": BASE | ATTENTION | DELTA | EXPERTS | HYBRID | {"head_dim": 16},
    "BailingHybrid": BASE | LATENT | HYBRID | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "n_group": 1, "topk_group": 1,
    },
    "Glm5Next": BASE | ATTENTION | HYBRID | LATENT | {
        "n_routed_experts": 2, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": 16, "qk_rope_head_dim": 0,
        "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2,
    },
    "GraniteMoeHybrid": BASE | ATTENTION | MAMBA | HYBRID | {
        "mamba_n_groups": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
}  # fmt: skip
DELTA_LAYER = Layer("gdn", 4, 8, 12, 2)
MAMBA_LAYER = Layer("mamba2", 4, 24, 16, 2)
# The recurrent layers of each model: how modules are named, and their kind and shape.
LAYERS = {
    "Qwen3Next": ("model.layers.{}.linear_attn", [0, 1], DELTA_LAYER),
    "Qwen3_5": ("model.layers.{}.linear_attn", [0, 1], DELTA_LAYER),
    "OlmoHybrid": ("model.layers.{}.linear_attn", [0, 1], Layer("gdn", 4, 8, 12, 4)),
    "KimiLinear": ("model.layers.{}.self_attn", [0, 1], Layer("kda", 4, 16, 16, 4)),
    "Mamba2": ("backbone.layers.{}.mixer", [0, 1], MAMBA_LAYER),
    "Bamba": ("model.layers.{}.mamba", [0, 2], Layer("mamba2", 4, 24, 16, 1)),
    "NemotronH": ("model.layers.{}.mixer", [0, 2], MAMBA_LAYER),
    "Zamba2": ("model.layers.{}.mamba", [0, 2], MAMBA_LAYER),
    "FalconH1": ("model.layers.{}.mamba", [0, 1], MAMBA_LAYER),
}


def make(name, **settings):
    torch.manual_seed(0)
    text = getattr(transformers, f"{name}TextConfig", None)
    config = (text or getattr(transformers, f"{name}Config"))(**(SETTINGS | MORE)[name] | settings)
    if hasattr(transformers, f"{name}ForCausalLM"):
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()
    config = getattr(transformers, f"{name}Config")(text_config=config.to_dict(), vision_config=VISION)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def prompt(rows=2, length=5, seed=1):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def cache_argument(model):
    """How forward and generate of a model call the cache; transformers from 5.24 on has one name."""
    model = getattr(model, "_orig_mod", model)
    if "cache" in inspect.signature(model.forward).parameters:
        return "cache"
    return "cache_params" if "Mamba2" in type(model).__name__ else "past_key_values"


def forward(model, ids, cache=None):
    """Logits and cache of one call."""
    with torch.no_grad():
        result = model(ids, use_cache=True, **{cache_argument(model): cache})
    return result.logits, result[cache_argument(model)]


def call(model, ids, cache, start):
    """Logits of some tokens after `start` others; Bamba has wrong positions unless it is told them, as by generate."""
    told = {"position_ids": torch.arange(start, start + ids.shape[1])[None]} if "Bamba" in type(model).__name__ else {}
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_argument(model): cache}, **told).logits


def generate(model, ids, tokens=8, past_key_values=None, **settings):
    if past_key_values is not None:
        settings[cache_argument(model)] = past_key_values
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True} | settings
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=tokens, pad_token_id=0, **settings)


_plain, _results = {}, {}


def plain(model):
    """The same model, never patched."""
    key = type(model).__name__
    if key not in _plain:
        _plain[key] = make(key.removesuffix("ForCausalLM"))
    return _plain[key]


def unpatched(model, ids, run=generate, **settings):
    """Results of a model that is never patched. Both systems are compared with the same run."""
    key = type(model).__name__, run.__qualname__, repr(ids), repr(settings)
    if key not in _results:
        _results[key] = run(plain(model), ids, **settings)
    return _results[key]


def assert_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **TOLERANCE)


@pytest.fixture(scope="module", params=SETTINGS)
def case(request):
    """A class's name and a model of it."""
    return request.param, make(request.param)


@pytest.fixture
def model(case):
    return case[1]


@pytest.fixture(scope="module")
def qwen():
    return make("Qwen3Next")
