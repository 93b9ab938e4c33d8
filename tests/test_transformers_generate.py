"""`generate` of a patched model gives what the model gives without heads, in all nine classes."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from samples import refused
from tiny_models import (
    TOLERANCE,
    assert_same,
    case,
    forward,
    generate,
    model,
    plain,
    prompt,
    qwen,
    st,
    torch,
    unpatched,
)

__all__ = ["case", "model", "qwen"]  # fixtures


@pytest.fixture(params=("standard", "replay"))
def patched(request, model):
    # Numba compiles for half a minute for replay
    settings = {"standard": {"backend": "cpu"}, "replay": {"backend": "reference", "window": 4}}[request.param]
    with st.patch(model, request.param, slots=8, **settings) as patch:
        yield patch


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


def test_slots_are_freed(model, patched):
    """At once, not at the next garbage collection."""
    result = generate(model, prompt(3))
    assert patched.free == 5
    del result
    assert patched.free == 8


def test_copied_caches(model):
    """A copy of a cache goes on by itself: a prompt's cache can begin several answers."""
    ids, more = prompt(1, 6), prompt(1, 3, seed=3)
    with st.patch(model, "replay", slots=3, window=4, backend="reference") as patch:
        first = generate(model, ids)
        beginning = torch.cat([first.sequences, more], 1)
        copies = [copy.deepcopy(first.past_key_values) for _ in range(2)]
        assert patch.free == 0
        refused("slots: expected room for 1 sequences, got 0 free slots of 3", copy.deepcopy, first.past_key_values)
        answers = [SimpleNamespace(**generate(model, beginning, past_key_values=x)) for x in copies]
        steps = [forward(model, more[:, :1], x)[0] for x in (first.past_key_values, copies[0])]
        for answer in answers:
            delattr(answer, "cache" if hasattr(answer, "cache") else "past_key_values")  # the latter before 5.24
        del copies
        gc.collect()  # the copy that failed
        assert patch.free == 2
    want = generate(model, ids)
    step = copy.deepcopy(want.past_key_values)
    torch.testing.assert_close(steps[0], forward(model, more[:, :1], step)[0], **TOLERANCE)
    want = generate(model, beginning, past_key_values=want.past_key_values)
    for answer in answers:
        assert_same(answer, want)
    torch.testing.assert_close(steps[1], forward(model, more[:, :1], want.past_key_values)[0], **TOLERANCE)


def test_copies_outlive_the_patch(qwen):
    """Also of a cache whose patch is gone."""
    patch = st.patch(qwen, "standard", backend="reference").start()
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
    with st.patch(model, "standard", backend="reference"):
        assert_same(generate(model, ids, past_key_values=cache, tokens=6), want)


def test_going_on_after_an_exception(model, patched):
    """Ctrl-C within the last recurrent layer: new sequences are right, and the cache goes on as without heads."""

    def answers(model, _):
        fails = mock.Mock(side_effect=[None] * 6 + [KeyboardInterrupt])
        mixer = list(st.layers(model).values())[-1].module
        projection = [x for x in mixer.modules() if isinstance(x, torch.nn.Linear)][-1]
        hook = projection.register_forward_pre_hook(lambda *_: fails())
        _, cache = forward(model, prompt())
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                forward(model, prompt(2, 1), cache)
        hook.remove()
        return generate(model, prompt(seed=4)), forward(model, prompt(2, 1), cache)[0]

    (got, after), (want, expected) = answers(model, None), unpatched(model, prompt(), answers)
    assert_same(got, want)
    torch.testing.assert_close(after, expected, **TOLERANCE)


def test_reset_caches(model, patched):
    """A cache that is reset begins from zero, with slots in use or not."""

    def answers(model, _):
        cache = generate(model, prompt()).past_key_values
        cache.reset()
        return forward(model, prompt(seed=2), cache)[0], forward(model, prompt(2, 1), cache)[0]

    torch.testing.assert_close(answers(model, None), unpatched(model, prompt(), answers), **TOLERANCE)


def test_prompts_in_chunks(model, patched):
    settings = {"prefill_chunk_size": 3}
    if type(model).__name__ == "Mamba2ForCausalLM":
        with pytest.raises(ValueError, match=r"prefill chunking without a cache|get_seq_length"):
            generate(model, prompt(2, 7), **settings)
    else:
        assert_same(generate(model, prompt(2, 7), **settings), unpatched(model, prompt(2, 7), **settings))


def test_threads(qwen):
    """Each thread decodes its own sequences."""
    seeds = range(4)
    want = [unpatched(qwen, prompt(seed=seed)) for seed in seeds]
    with st.patch(qwen, "replay", slots=8, window=4, backend="reference"), ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda seed: generate(qwen, prompt(seed=seed)), seeds), want, strict=True):
            assert_same(got, expected)


def test_inference_mode(qwen):
    """Outside of it, a patch can be undone whose caches were made in inference mode."""

    def steps(model, patch):
        with patch, torch.inference_mode():
            cache = forward(model, prompt())[1]
            forward(model, prompt(2, 1), cache)
        with torch.inference_mode():
            return forward(model, prompt(2, 1, seed=2), cache)[0]

    got = steps(qwen, st.patch(qwen, "standard", backend="reference"))
    torch.testing.assert_close(got, steps(plain(qwen), nullcontext()), **TOLERANCE)
