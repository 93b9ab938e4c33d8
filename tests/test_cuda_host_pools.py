"""Memory of slots in the caller's arrays on the CUDA backend, on the host build of the kernels."""

import numpy as np
import pytest
from gpu.cuda_support import make_plan
from host import fixtures, standin
from host.heads import LAYER, head_with, narrow, tokens_of
from samples import one_block

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE

cupy = fixtures.of_heads


def filled(shape, dtype):
    """Bytes of NaN."""
    return standin.full(shape, 255, dtype)


def parts_of(system):
    if system == "sketch":
        plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)
        return ss.SketchHead.parts_of(plan, backend="cuda", activation_dtype="bfloat16")
    return ss.ReplayHead.parts_of(LAYER, backend="cuda", window=4, activation_dtype="bfloat16")


@pytest.mark.parametrize("system", ["replay", "sketch"])
def test_a_block_holds_all_of_a_slot(system, rng):
    """Results are bitwise those of a head with its own memory; only the parts are written; bytes can be moved."""
    parts = parts_of(system)
    block, views = one_block(parts, 4, filled)
    options = {"activation_dtype": "bfloat16"}
    head, twin = head_with(system, memory=dict(views), **options), head_with(system, **options)
    assert head.parts == twin.parts == parts
    for each in (head, twin):
        each.reset()
    for length in (1, 4, 1, 2):
        tokens = narrow(tokens_of(rng, 4, length), standin.asarray)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
    np.testing.assert_array_equal(head.state, twin.state)
    assert head.state.ctypes.data == views["state"].ctypes.data
    block[3] = block[1]  # a slot as bytes
    token = narrow(tokens_of(rng, 1, 1), standin.asarray)
    np.testing.assert_array_equal(head.step(*token, slots=[3]), head.step(*token, slots=[1]))
    for view in views.values():
        view[...] = np.zeros((), view.dtype)
    used = sum(part.bytes for part in parts)
    assert (block == 255).sum() == block.size - 4 * used


def test_refusals():
    parts = {part.name: part for part in parts_of("sketch")}
    good = one_block(parts.values(), 4, filled)[1]
    plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)

    def refused(kind, message, activation="bfloat16", **memory):
        with pytest.raises(kind, match=message):
            ss.SketchHead(plan, 4, "cuda", activation_dtype=activation, memory=memory)

    refused(TypeError, r"^memory\['values'\]: expected bfloat16, got float32", values=standin.zeros(3, np.float32))
    refused(ValueError, r"^activation_dtype: expected a type with memory for 'keys'", None, keys=good["keys"])
    refused(ValueError, r"^memory", nothing=good["keys"])
    shared = good["sketch"].view(np.uint8)[:, : parts["keys"].bytes].view(np.uint16).reshape(good["keys"].shape)
    refused(ValueError, r"^memory: expected separate .* 'keys' and 'sketch' overlap", **good | {"keys": shared})
    swapped = standin.zeros(good["state"].shape, good["state"].dtype.newbyteorder())
    refused(TypeError, r"^memory\['state'\]: expected float32, got >f4", state=swapped)


@pytest.mark.parametrize("word", [100, 127 << 8 | 100, -1, 3 << 8 | 128])
@pytest.mark.parametrize("system", ["replay", "sketch", "standard"])
def test_any_word_in_the_cursor_of_an_empty_slot(system, word, rng):
    """No request stands in slot 3, whose memory the caller has overwritten: no call on it changes other rows."""
    options = {"drafts": 3} if system == "standard" else {}
    head, twin = (head_with(system, activation_dtype="bfloat16", **options) for _ in range(2))
    for each in (head, twin):
        each.warmup(drafts=True)
    tokens, drafts = narrow(tokens_of(rng, 4, 8)), narrow(tokens_of(rng, 4, 3), standin.asarray)
    kept = standin.asarray(np.array([2, 3, 0, 3]))
    calls = ["step", "step", "flush", "step", "draft", "commit", "commit", *["step"] * 2, "draft", *["step"] * 3]

    def run(head, spoil):
        at = iter(range(8))
        for call in calls:
            if spoil and head.state.any():
                head._engine.memory["cursor"][3] = word
            if call == "step":
                t = next(at)
                yield head.step(*(standin.asarray(x[:, t]) for x in tokens))
            elif call == "draft":
                yield head.step(*drafts, draft=True)
            elif call == "commit":
                head.commit(kept)
            else:
                head.flush()

    for got, want in zip(run(head, True), run(twin, False), strict=True):
        np.testing.assert_array_equal(got[:3], want[:3])
    np.testing.assert_array_equal(head.state[:3], twin.state[:3])


def test_a_plan_without_sketches_is_replay(rng):
    """Whatever the format of its sketches."""
    plan = make_plan(LAYER, [FULL_STATE, FULL_STATE], np.random.default_rng(1), window=4)
    options = {"activation_dtype": "bfloat16"}
    head, twin = ss.SketchHead(plan, 4, "cuda", sketch_dtype="float32", **options), head_with("replay", **options)
    head.warmup()
    tokens = narrow(tokens_of(rng, 4, 9), standin.asarray)
    np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
