"""`torch.compile` takes a patched model as one graph, in one class of each kind."""

import gc

import pytest
from samples import fingerprints
from test_torch_ops import keeping
from tiny_models import TOLERANCE, assert_same, forward, generate, make, prompt, st, torch, transformers


@pytest.fixture(autouse=True)
def _no_graphs():
    torch.compiler.reset()  # else a test's graphs count towards the limit of recompilations of the next


@pytest.fixture(params=("Qwen3Next", "KimiLinear", "Bamba"))
def model(request):
    return make(request.param)


def operators(graph):
    return [node.target for node in graph.graph.nodes if str(node.target).startswith("sketchssm")]


def test_generate(model):
    """Decoding with a static cache is one graph, without breaks, which other prompts use too."""
    settings = {"cache_implementation": "static"}
    prompts = [prompt(seed=seed) for seed in (1, 2)]
    want = [generate(model, ids, disable_compile=True, **settings) for ids in prompts]
    made = []
    compiled = transformers.CompileConfig(backend=keeping(made), mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # transformers compiles on accelerators only
    with st.patch(model, "replay", slots=4, window=4, backend="reference") as patch:
        for ids, expected in zip(prompts, want, strict=True):
            assert_same(generate(model, ids, compile_config=compiled, **settings), expected)
        gc.collect()  # compiled code keeps the caches in cycles
        assert patch.free == 4
        assert [len(operators(graph)) for graph in made] == [len(patch.heads)]


@pytest.fixture
def static():
    """Makes empty static caches."""
    return lambda model: transformers.StaticCache(config=model.config, max_cache_len=16)


@pytest.mark.parametrize("name", ("Qwen3_5", "Mamba2"))
def test_caches_share_graphs(name, static):
    """Steps of a compiled forward, on caches of which each has slots of its own, and rows that are exchanged."""
    model = make(name)

    def logits(step, cache):
        rows = [forward(step, prompt(2, 1, seed=seed), cache)[0] for seed in (2, 3)]
        cache.reorder_cache(torch.tensor([1, 1]))
        return [*rows, forward(step, prompt(2, 1, seed=4), cache)[0]]

    want = logits(model, forward(model, prompt(), static(model))[1])
    made = []
    with st.patch(model, "standard", backend="reference"):
        step = torch.compile(model, fullgraph=True, backend=keeping(made))
        caches = [forward(model, prompt(), static(model))[1] for _ in range(2)]
        for cache in caches:
            torch.testing.assert_close(logits(step, cache), want, **TOLERANCE)
    assert len(made) == 1


@pytest.mark.slow
def test_prompts_and_unpatched_steps(static):
    """Prompts compile with a break at each layer; without the patch the model compiles anew, and goes on."""
    model = make("Bamba")

    def answer(step, ids, cache, count):
        for _ in range(count):
            given = ids if ids.shape[1] == 5 else ids[:, -1:]
            ids = torch.cat([ids, forward(step, given, cache)[0][:, -1:].argmax(-1)], 1)
        return ids

    want = answer(model, prompt(), static(model), 8)
    step, cache = torch.compile(model, backend="eager"), static(model)
    with st.patch(model, "replay", window=4, backend="reference"):
        ids = answer(step, prompt(), cache, 6)
    assert torch.equal(answer(step, ids, cache, 2), want)


@pytest.mark.parametrize("inner", (False, True))
def test_compiled_models(inner):
    """`torch.compile` wraps a model or a part of it: names and fingerprints stay, and so do results."""
    model, text = make("Qwen3_5"), prompt(3, 12)
    compiled = make("Qwen3_5")
    if inner:
        compiled.model = torch.compile(compiled.model, backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    assert list(st.layers(compiled)) == list(st.layers(model))
    assert st.fingerprint(compiled) == st.fingerprint(model)
    plans, recordings = [], []
    for each in (model, compiled):
        plans.append(st.calibrate(each, text, mean_rank=3, window=4))
        with st.record(each) as recording, torch.no_grad():
            each(text, use_cache=False)
        recordings.append([row.v for name in recording.layers for row in recording.tokens(name)])
    assert fingerprints(plans[0]) == fingerprints(plans[1])
    assert all((x == y).all() for x, y in zip(*recordings, strict=True))
    assert st.evaluate(compiled, text, "standard", backend="reference").divergence < 1e-6  # rounding of float32
    want = generate(model, prompt())
    with st.patch(compiled, "replay", slots=2, window=4, backend="reference"):
        assert_same(generate(compiled, prompt()), want)
