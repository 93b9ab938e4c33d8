"""Models of transformers that decode with heads give what they give without.

Models are tiny, in float32, with large random weights: outputs then depend on the states.
"""

import copy
import gc
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import sketchssm as ss
from sketchssm.recurrence import Layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

st = ss.transformers
ROOT = Path(__file__).parents[1]

# Heads sum float32 products in another order. Layers of large weights amplify the rounding: logits of up to 4 differed
# by at most 2e-5. A wrong state changes them by more than 0.1.
TOLERANCE = {"atol": 5e-5, "rtol": 1e-5}

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
MAMBA = {"mamba_d_state": 24, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_chunk_size": 8}
SETTINGS = {
    "Qwen3Next": BASE | ATTENTION | DELTA | EXPERTS | HYBRID | {"head_dim": 16},
    "Qwen3_5": BASE | ATTENTION | DELTA | HYBRID | {"head_dim": 16},
    "OlmoHybrid": BASE | ATTENTION | DELTA | HYBRID | {"linear_num_key_heads": 4},
    "KimiLinear": BASE
    | ATTENTION
    | HYBRID
    | {
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
    },
    "Mamba2": {x: y for x, y in BASE.items() if x != "intermediate_size"}
    | {"num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 2},
    "Bamba": BASE | ATTENTION | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "NemotronH": BASE
    | ATTENTION
    | {
        "head_dim": 16,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "ssm_state_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "Zamba2": BASE
    | ATTENTION
    | {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 24,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
    "FalconH1": BASE | ATTENTION | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 16},
}
DELTA_LAYER = Layer("gdn", 4, 8, 12, 2)
MAMBA_LAYER = Layer("mamba2", 4, 24, 16, 2)
# The recurrent layers of each model: how modules are named, and their kind and shape.
LAYERS = {
    "Qwen3Next": ("model.layers.{}.linear_attn", [0, 1], DELTA_LAYER),
    "Qwen3_5": ("model.layers.{}.linear_attn", [0, 1], DELTA_LAYER),
    "OlmoHybrid": ("model.layers.{}.linear_attn", [0, 1], Layer("gdn", 4, 8, 12, 4)),
    "KimiLinear": ("model.layers.{}.self_attn", [0, 1], Layer("kda", 4, 16, 16, 4)),
    "Mamba2": ("backbone.layers.{}.mixer", [0, 1], MAMBA_LAYER),
    "Bamba": ("model.layers.{}.mamba", [0, 2], MAMBA_LAYER),
    "NemotronH": ("model.layers.{}.mixer", [0, 2], MAMBA_LAYER),
    "Zamba2": ("model.layers.{}.mamba", [0, 2], MAMBA_LAYER),
    "FalconH1": ("model.layers.{}.mamba", [0, 1], MAMBA_LAYER),
}


def make(name, **settings):
    torch.manual_seed(0)
    config = "Qwen3_5Text" if name == "Qwen3_5" else name
    config = getattr(transformers, f"{config}Config")(**SETTINGS[name] | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module", params=SETTINGS)
def case(request):
    return request.param, make(request.param)


@pytest.fixture
def model(case):
    return case[1]


@pytest.fixture(scope="module")
def qwen():
    return make("Qwen3Next")


@pytest.fixture(params=("standard", "replay"))
def patched(request, model):
    with st.patch(model, request.param, slots=8, window=4, backend="cpu") as patch:
        yield patch


def prompt(rows=2, length=5, seed=1):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def cache_argument(model):
    """How forward and generate of a model call the cache."""
    return "cache_params" if "Mamba2" in type(model).__name__ else "past_key_values"


def forward(model, ids, cache=None):
    """Logits and cache of one call."""
    with torch.no_grad():
        result = model(ids, use_cache=True, **{cache_argument(model): cache})
    return result.logits, result[cache_argument(model)]


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
    key = type(model).__name__, run.__name__, repr(ids), repr(settings)
    if key not in _results:
        _results[key] = run(plain(model), ids, **settings)
    return _results[key]


def assert_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **TOLERANCE)


def test_layers(case):
    name, model = case
    pattern, indices, layer = LAYERS[name]
    found = st.layers(model)
    if name == "Zamba2":
        hybrid = found.pop("model.layers.1.mamba_decoder.mamba")
        assert (hybrid.index, hybrid.layer) == (1, layer)
    assert [(x.name, x.index, x.layer) for x in found.values()] == [(pattern.format(i), i, layer) for i in indices]
    assert all(model.get_submodule(name) is x.module for name, x in found.items())


def test_greedy_with_padding(model, patched):
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, :2] = ids[0, :2] = 0
    steps = {name: mock.Mock(wraps=head.step) for name, head in patched.heads.items()}
    for name, step in steps.items():
        patched.heads[name].step = step
    got = generate(model, ids, attention_mask=mask)
    assert_same(got, unpatched(model, ids, attention_mask=mask))
    # The prompt's last token gives the first of 8 new tokens.
    assert all(step.call_count == 7 for step in steps.values())


def test_states_return_to_the_cache(model, patched):
    """States of the heads are the states of transformers; afterwards the cache goes on without heads."""
    ids = prompt()
    got = generate(model, ids).past_key_values
    patched.stop()
    want = generate(plain(model), ids).past_key_values
    for layer in st.layers(model).values():
        states = [cache.layers[layer.index].recurrent_states[0] for cache in (got, want)]
        assert states[1].abs().max() > 0.05
        torch.testing.assert_close(*states, **TOLERANCE)
    logits = [forward(model, ids[:, :1], cache)[0] for cache in (got, want)]
    torch.testing.assert_close(*logits, **TOLERANCE)


def test_sampling(model, patched):
    plain(model)  # random weights, made before the seed is set
    torch.manual_seed(5)
    got = generate(model, prompt(), do_sample=True, num_return_sequences=2)
    torch.manual_seed(5)
    assert_same(got, unpatched(model, prompt(), do_sample=True, num_return_sequences=2))


def test_beams(model, patched):
    got, want = (run(model, prompt(), num_beams=3) for run in (generate, unpatched))
    assert torch.equal(got.sequences, want.sequences)


def two_turns(model, ids):
    """A second prompt, and a second answer, on the cache of the first."""
    first = generate(model, ids)
    ids = torch.cat([first.sequences, prompt(seed=2)], 1)
    return generate(model, ids, past_key_values=first.past_key_values)


def test_two_turns(model, patched):
    assert_same(two_turns(model, prompt()), unpatched(model, prompt(), two_turns))


def test_static_cache(model, patched):
    settings = {"cache_implementation": "static", "disable_compile": True}
    try:
        want = unpatched(model, prompt(), **settings)
    except ValueError as error:
        pytest.skip(str(error))
    assert_same(generate(model, prompt(), **settings), want)


def test_slots_are_freed(model, patched):
    result = generate(model, prompt(3))
    gc.collect()
    assert patched.free == 5
    del result
    gc.collect()
    assert patched.free == 8


def test_slots_run_out(qwen):
    with st.patch(qwen, "standard", slots=2, backend="cpu") as patch:
        with pytest.raises(ValueError, match=r"slots: expected room for 3 sequences, got 2 free slots of 2"):
            generate(qwen, prompt(3))
        gc.collect()
        assert patch.free == 2
        assert_same(generate(qwen, prompt(2)), unpatched(qwen, prompt(2)))


def test_copied_caches(model):
    """A copy of a cache goes on by itself: a prompt's cache can begin several answers."""
    ids, more = prompt(1, 6), prompt(1, 3, seed=3)
    with st.patch(model, "replay", slots=3, window=4, backend="cpu") as patch:
        first = generate(model, ids)
        beginning = torch.cat([first.sequences, more], 1)
        copies = [copy.deepcopy(first.past_key_values) for _ in range(2)]
        assert patch.free == 0
        with pytest.raises(ValueError, match=r"slots: expected room for 1 sequences, got 0 free slots of 3"):
            copy.deepcopy(first.past_key_values)
        answers = [SimpleNamespace(**generate(model, beginning, past_key_values=x)) for x in copies]
        steps = [forward(model, more[:, :1], x)[0] for x in (first.past_key_values, copies[0])]
        for answer in answers:
            del answer.past_key_values
        del copies
        gc.collect()
        assert patch.free == 2
    want = generate(model, ids)
    step = copy.deepcopy(want.past_key_values)
    torch.testing.assert_close(steps[0], forward(model, more[:, :1], step)[0], **TOLERANCE)
    want = generate(model, beginning, past_key_values=want.past_key_values)
    for answer in answers:
        assert_same(answer, want)
    torch.testing.assert_close(steps[1], forward(model, more[:, :1], want.past_key_values)[0], **TOLERANCE)


def test_copies_reorder_their_own_slots(qwen):
    ids = prompt(2)
    order = torch.tensor([1, 1])

    def steps(model):
        cache = generate(model, ids).past_key_values
        other = copy.deepcopy(cache)
        other.reorder_cache(order)
        return [forward(model, prompt(2, 1), x)[0] for x in (cache, other)]

    with st.patch(qwen, "standard", backend="cpu"):
        got = steps(qwen)
    want = steps(qwen)
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert not torch.allclose(*want, **TOLERANCE)


def test_copies_outlive_the_patch(qwen):
    """Also of a cache whose patch is gone."""
    patch = st.patch(qwen, "standard", backend="cpu").start()
    cache = generate(qwen, prompt()).past_key_values
    patch.stop()
    del patch
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    layer = next(iter(st.layers(qwen).values())).index
    states = [x.layers[layer].recurrent_states[0] for x in (cache, other)]
    assert torch.equal(states[0].flip(0), states[1])


def test_caches_from_before_the_patch(model):
    """The patch goes on from the states of transformers."""

    def answer(model, **settings):
        return generate(model, ids, past_key_values=generate(model, prompt()).past_key_values, tokens=6)

    ids = torch.cat([generate(model, prompt()).sequences, prompt(2, 1)], 1)
    want = answer(model)
    cache = generate(model, prompt()).past_key_values
    with st.patch(model, "standard", backend="cpu"):
        assert_same(generate(model, ids, past_key_values=cache, tokens=6), want)


def test_two_patched_models(model):
    """Models of a class share its functions: each decodes with its own heads, and others with none."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    want = [generate(x, prompt()) for x in (model, other)]
    one, two = (st.patch(x, "standard", slots=4, backend="cpu") for x in (model, other))
    with one:
        with two:
            for x, y in zip((model, other), want, strict=True):
                assert_same(generate(x, prompt()), y)
        first = generate(model, prompt())
        beside = generate(other, prompt())
        assert_same(first, want[0])
        assert_same(beside, want[1])
        assert (one.free, two.free) == (2, 4)
    function = next(iter(st.layers(model).values())).rule.decode
    module = __import__(type(model).__module__, fromlist=["x"])
    assert "dispatch" not in vars(module)[function].__name__


def test_patches_for_good(qwen):
    patch = st.patch(qwen, "standard", backend="cpu").start()
    with pytest.raises(RuntimeError, match=r"start: the model is patched already"):
        patch.start()
    with pytest.raises(RuntimeError, match=r"start: the model is patched already"):
        st.patch(qwen, "standard", backend="cpu").start()
    assert_same(generate(qwen, prompt()), unpatched(qwen, prompt()))
    patch.stop()
    patch.stop()
    with patch:
        assert_same(generate(qwen, prompt()), unpatched(qwen, prompt()))


def test_wrapped_forwards(qwen):
    """As of accelerate's hooks, which set a forward on the module."""
    import functools

    layer = next(iter(st.layers(qwen).values())).module
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    try:
        with st.patch(qwen, "standard", slots=2, backend="cpu") as patch:
            result = generate(qwen, prompt())
            assert patch.free == 0
        assert_same(result, unpatched(qwen, prompt()))
    finally:
        del layer.forward


def test_errors_leave_no_layer_active(qwen):
    """A call that fails within a layer does not mislead the next call."""
    with st.patch(qwen, "standard", slots=2, backend="cpu"):
        with pytest.raises(ValueError, match=r"slots: "):
            generate(qwen, prompt(3))
        assert_same(generate(plain(qwen), prompt()), unpatched(qwen, prompt()))


def test_training_beside_the_patch(qwen):
    """Without a cache all is left to transformers, gradients too; steps with one carry no gradients."""
    with st.patch(qwen, "standard", slots=2, backend="cpu"):
        qwen(prompt(), labels=prompt(), use_cache=False).loss.backward()
        cache = qwen(prompt()).past_key_values
        qwen(prompt(2, 1), past_key_values=cache)
    module = next(iter(st.layers(qwen).values())).module
    assert module.in_proj_qkvz.weight.grad.abs().max() > 0
    qwen.zero_grad(set_to_none=True)


def test_bfloat16(case):
    """Activations in bfloat16: one step from the same states, as tokens may differ after a rounding."""
    name, _ = case
    model = make(name).to(torch.bfloat16)
    logits = []
    for system in (None, "standard"):
        _, cache = forward(model, prompt())
        with st.patch(model, system, backend="cpu") if system else nullcontext():
            logits.append(forward(model, prompt(2, 1), cache)[0])
    assert logits[0].dtype == logits[1].dtype
    # Two layers with a few roundings each, of 2^-8: 7 of them were the largest difference.
    scale = logits[0].abs().max()
    assert (logits[0] - logits[1]).abs().max() < 16 * 2**-8 * scale


def test_no_known_layers():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=8
    )
    with pytest.raises(ValueError, match=r"model: expected layers of .* found none in LlamaForCausalLM"):
        st.layers(transformers.LlamaForCausalLM(config))


def test_bad_plans(qwen):
    with pytest.raises(FileNotFoundError, match=r"plans: expected plans, their file, 'standard' or .*, got 'sketch'"):
        st.patch(qwen, "sketch")
    with pytest.raises(ValueError, match=r"plans: expected names among model\.layers\.0\.linear_attn, .* got 'x'"):
        st.patch(qwen, {"x": None})


@pytest.mark.parametrize("version", ("5.19.2", "4.57.0.dev0", "6.0.0"))
def test_other_versions(qwen, version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # may not be the one imported above
    with pytest.raises(ValueError, match=r"transformers: expected a version >=5\.20,<6, got " + version):
        st.layers(qwen)


def test_the_extra_names_the_versions():
    from sketchssm.transformers.modeling import LEAST_VERSION, NEXT_VERSION

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    least, after = (".".join(map(str, x)) for x in (LEAST_VERSION, NEXT_VERSION))
    assert extras["transformers"] == ["torch", f"transformers>={least},<{after}"]


def test_repeated_key_heads(qwen, monkeypatch):
    """Versions before 5.23 repeat queries and keys for all value heads."""
    want = unpatched(qwen, prompt())
    rule = next(iter(st.layers(qwen).values())).rule
    module = sys.modules[type(qwen).__module__]
    with st.patch(qwen, "standard", slots=2, backend="cpu"), monkeypatch.context() as repeated:
        for name in (rule.prefill, rule.decode):
            run = getattr(module, name)

            def repeat(query, key, *given, run=run, **named):
                return run(query.repeat_interleave(2, 2), key.repeat_interleave(2, 2), *given, **named)

            repeated.setattr(module, name, repeat)
        assert_same(generate(qwen, prompt()), want)
