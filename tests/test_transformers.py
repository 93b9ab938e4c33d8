"""Recurrent layers of transformers: found, patched, unpatched, and beside other models."""

import copy
import inspect
import sys
import tomllib
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from samples import refused
from tiny_models import (
    LAYERS,
    TOLERANCE,
    assert_same,
    cache_argument,
    case,
    forward,
    generate,
    make,
    model,
    plain,
    prompt,
    qwen,
    st,
    torch,
    transformers,
    unpatched,
)

ROOT = Path(__file__).parents[1]


__all__ = ["case", "model", "qwen"]  # fixtures


def test_layers(case):
    name, model = case
    pattern, indices, layer = LAYERS[name]
    found = st.layers(model)
    if name == "Zamba2":
        hybrid = found.pop("model.layers.1.mamba_decoder.mamba")
        assert (hybrid.index, hybrid.layer) == (1, layer)
    assert [(x.name, x.index, x.layer) for x in found.values()] == [(pattern.format(i), i, layer) for i in indices]
    assert all(model.get_submodule(name) is x.module for name, x in found.items())


def test_patches_for_good(qwen):
    patch = st.patch(qwen, "standard", backend="reference").start()
    with pytest.raises(RuntimeError, match=r"start: the model is patched already"):
        patch.start()
    with pytest.raises(RuntimeError, match=r"start: the model is patched already"):
        st.patch(qwen, "standard", backend="reference").start()
    assert_same(generate(qwen, prompt()), unpatched(qwen, prompt()))
    patch.stop()
    patch.stop()
    with patch:
        assert_same(generate(qwen, prompt()), unpatched(qwen, prompt()))


def test_two_patched_models(model):
    """Models of a class share its functions: each decodes with its own heads, and others with none."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    want = [generate(x, prompt()) for x in (model, other)]
    one, two = (st.patch(x, "standard", slots=4, backend="reference") for x in (model, other))
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


def test_wrapped_forwards(qwen):
    """As of accelerate's hooks, which set a forward on the module."""
    import functools

    layer = next(iter(st.layers(qwen).values())).module
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    try:
        with st.patch(qwen, "standard", slots=2, backend="reference") as patch:
            result = generate(qwen, prompt())
            assert patch.free == 0
        assert_same(result, unpatched(qwen, prompt()))
    finally:
        del layer.forward


def test_forwards_wrapped_while_patched(qwen):
    """Undone in any order, with a recording of the patched model between."""
    layer = next(iter(st.layers(qwen).values())).module
    patch = st.patch(qwen, "standard", backend="reference").start()
    with st.record(qwen) as recording:
        qwen(prompt(), use_cache=False)
        patch.stop()
        qwen(prompt(), use_cache=False)
    assert len(recording) == 4
    assert "forward" not in vars(layer)
    with st.patch(qwen, "standard", backend="reference"):
        announced = layer.forward
        layer.forward = outer = lambda *args, **kwargs: announced(*args, **kwargs)
    assert layer.forward is outer
    assert_same(generate(qwen, prompt()), unpatched(qwen, prompt()))
    del layer.forward


def test_training_beside_the_patch(qwen):
    """Without a cache all is left to transformers, gradients too; steps with one carry no gradients."""
    with st.patch(qwen, "standard", slots=2, backend="reference"):
        qwen(prompt(), labels=prompt(), use_cache=False).loss.backward()
        cache = qwen(prompt()).past_key_values
        qwen(prompt(2, 1), **{cache_argument(qwen): cache})
    module = next(iter(st.layers(qwen).values())).module
    assert module.in_proj_qkvz.weight.grad.abs().max() > 0
    qwen.zero_grad(set_to_none=True)


def test_deep_copies_of_a_patched_model_use_their_own_parameters(qwen):
    """A copy of the replaced forward would run the parameters of the original, for good."""
    want = unpatched(qwen, prompt())
    with st.patch(qwen, "standard", backend="reference"), torch.no_grad():
        twin = copy.deepcopy(qwen)
        for parameter in twin.model.layers[0].linear_attn.parameters():
            parameter.zero_()
        hidden = torch.ones(1, 3, twin.config.hidden_size)
        assert not twin.model.layers[0].linear_attn(hidden).any()
        assert qwen.model.layers[0].linear_attn(hidden).any()
        assert_same(generate(qwen, prompt()), want)
    with torch.no_grad():
        assert not twin.model.layers[0].linear_attn(hidden).any()


def test_a_prompt_that_ends_in_an_error(qwen):
    """Leaving the patch must not hide the error."""
    broken = copy.deepcopy(qwen)
    with torch.no_grad():
        broken.model.layers[0].linear_attn.conv1d.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^state: expected finite numbers"), st.patch(broken, "replay"):
        generate(broken, prompt())


def test_recorded_sequences_are_named(qwen):
    """A negative number would put one sequence into the calibration and into the test."""
    with st.record(qwen) as recording, torch.no_grad():
        qwen(prompt(4, 9), use_cache=False)
    name = "model.layers.0.linear_attn"
    for test in ([-1], [4], [1, 1], [0.5]):
        refused(r"test: expected different numbers from 0 to 3, got \[", recording.traces, name, test)
    for call in (recording.tokens, lambda name: recording.traces(name, [0])):
        refused(r"name: expected one of model\.layers\.0\.linear_attn, .* got 'x'", call, "x")


def test_recorded_gradients(qwen):
    """Those of the last sequences without a gap. None at all is an error, and no plan by errors alone."""
    with st.record(qwen, gradients=True) as recording:
        calls = [qwen(ids, labels=ids, use_cache=False).loss for ids in prompt(5, 9).split(1)]
    name = "model.layers.0.linear_attn"
    refused(r"gradients: expected loss\.backward\(\) for the last calibration sequence", recording.traces, name, [0])
    for number, test, count in ((3, [4], 1), (4, [0], 2), (1, [0], 2), (2, [0], 4)):
        calls[number].backward()
        found = recording.traces(name, test)
        assert found.grad.shape[0] == count
        last = [i for i in range(5) if i not in test][-count]
        np.testing.assert_array_equal(found.grad[0], recording._handlers[name].gradients[last])


def test_nothing_recorded(qwen):
    with st.record(qwen) as recording:
        pass
    name = "model.layers.0.linear_attn"
    refused("recording: expected a call of the model while it is recorded, got none", recording.traces, name, [0])
    with st.record(qwen) as recording, torch.no_grad():
        qwen(prompt(3, 9), use_cache=False)
    refused("test: expected a sequence of numbers of sequences, got 2", recording.traces, name, 2)


def test_slots_run_out(qwen):
    with st.patch(qwen, "standard", slots=2, backend="reference") as patch:
        refused("slots: expected room for 3 sequences, got 2 free slots of 2", generate, qwen, prompt(3))
        assert patch.free == 2
        for model in (qwen, plain(qwen)):  # no layer is still active
            assert_same(generate(model, prompt(2)), unpatched(qwen, prompt(2)))


@pytest.mark.parametrize("positional", (False, True))
@pytest.mark.parametrize("name", ("cache", "cache_params"))
def test_names_of_the_cache(qwen, name, positional):
    """Code of others calls mixers by the name of its own version of transformers, or without a name."""
    mixer = next(iter(st.layers(qwen).values())).module
    if name not in inspect.signature(inspect.unwrap(type(mixer).forward)).parameters and name == "cache":
        pytest.skip("transformers before 5.24 knows cache_params only")
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1))

    def step(model):
        cache = forward(model, prompt())[1]
        mixer = next(iter(st.layers(model).values())).module
        with torch.no_grad(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            return mixer(x, cache) if positional else mixer(x, **{name: cache})

    with st.patch(qwen, "replay", window=4, backend="reference") as patch:
        head = next(iter(patch.heads.values()))
        head.step = mock.Mock(wraps=head.step)
        got = step(qwen)
        assert head.step.call_count == 1
    torch.testing.assert_close(got, step(plain(qwen)), **TOLERANCE)


def test_no_known_layers():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=8
    )
    refused("model: expected layers of .* found none in", st.layers, transformers.LlamaForCausalLM(config))


def test_bad_plans(qwen):
    with pytest.raises(FileNotFoundError, match=r"plans: expected plans, their file, 'standard' or .*, got 'sketch'"):
        st.patch(qwen, "sketch")
    refused(r"plans: expected names among model\.layers\.0\.linear_attn, .* got 'x'", st.patch, qwen, {"x": None})
    for plans, came in (({}, "none"), (None, "NoneType"), (3, "int")):
        refused(f"plans: expected plans by the names of layers, got {came}$", st.patch, qwen, plans)
    refused("plans: expected a SketchPlan for", st.patch, qwen, {"model.layers.0.linear_attn": "replay"})
    refused("slots: expected an integer from 1 to 2147483647, got 0", st.patch, qwen, "replay", slots=0)


def test_a_window_is_for_replay(qwen):
    refused("window: expected None, as only 'replay' takes a window, got 8", st.patch, qwen, "standard", window=8)
    refused("window: expected an integer from 1 to 64, got 0", st.patch, qwen, "replay", window=0)
    assert all(head.window == 8 for head in st.patch(qwen, "replay", window=8).heads.values())


def test_recording_mamba2_needs_evaluation_mode():
    """In training mode, transformers may run a fused kernel in place of the recurrence: nothing would be recorded."""
    model = make("Mamba2").train()
    message = r"model: expected evaluation mode, .* got layer backbone\.layers\.0\.mixer"
    with pytest.raises(ValueError, match=message), st.record(model):
        pass


@pytest.mark.parametrize("version", ("5.18.2", "4.57.0.dev0", "6.0.0"))
def test_other_versions(qwen, version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # may not be the one imported above
    with pytest.raises(ValueError, match=r"transformers: expected a version >=5\.19,<6, got " + version):
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
    with st.patch(qwen, "standard", slots=2, backend="reference"), monkeypatch.context() as repeated:
        for name in (rule.prefill, rule.decode):
            run = getattr(module, name)

            def repeat(query, key, value, *given, run=run, **named):
                times = value.shape[2] // query.shape[2]
                return run(query.repeat_interleave(times, 2), key.repeat_interleave(times, 2), value, *given, **named)

            repeated.setattr(module, name, repeat)
        assert_same(generate(qwen, prompt()), want)
