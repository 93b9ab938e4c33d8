"""Slots, strides and overlaps of a call's arrays, snapshots and shards, on the host build of the CUDA kernels."""

import numpy as np
import pytest
from gpu.cuda_support import make_tokens
from host import fixtures, standin
from host.heads import BFLOAT16, LAYER, head_with, narrow, sketch, tokens_of
from samples import plan_of, refused, states_of

import sketchssm as ss
from sketchssm.cuda import frameworks, workspaces
from sketchssm.layer.recurrence import Layer

cupy, pytestmark = fixtures.of_heads, fixtures.cold  # drafts are not warm


def sliced(tokens):
    """The same tokens as slices of one buffer for each type, as a projection leaves them; beta with any alignment."""
    rows, length = tokens.v.shape[:2]

    def pack(arrays, dtype, extra):
        flat = [np.asarray(x, dtype).reshape(rows, length, -1) for x in arrays]
        wide = standin.asarray(np.concatenate([*flat, np.zeros((rows, length, extra), dtype)], axis=-1))
        ends = np.cumsum([0, *(x.shape[-1] for x in flat)])
        views = zip(arrays, ends[:-1], ends[1:], strict=True)
        return [wide[..., start:end].reshape(x.shape, copy=False) for x, start, end in views]

    return tokens._replace(
        **dict(zip("qkv", pack(tokens[:3], BFLOAT16, 8), strict=True)),
        **dict(zip(("g", "beta"), pack(tokens[3:], np.float32, 1), strict=True)),
    )


@pytest.mark.parametrize("system", ["standard", "sketch"])
@pytest.mark.parametrize("length", [1, 3])
def test_slices_and_narrow_slots_in_place(system, length, rng, monkeypatch):
    """Gaps between rows and tokens, int32 slots, gaps between rows of outputs: bitwise the results of plain arrays."""
    head, twin = head_with(system), head_with(system)
    memory = standin.full((3, length + 1, *LAYER.state_shape[:2]), np.nan, BFLOAT16)
    out, slots = memory[:, :length], standin.asarray(np.array([3, -1, 0], np.int32))
    for _ in range(6):
        tokens = tokens_of(rng, length=length)
        want = twin.step(*narrow(tokens, standin.asarray), slots=[3, -1, 0])
        given = sliced(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(frameworks.CupyArrays, "converted", None)
            patch.setattr(frameworks.CupyArrays, "fill", None)
            assert head.step(*given, slots=slots, out=out) is out
        np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(head.position, twin.position)
    np.testing.assert_array_equal(head.state, twin.state)
    assert np.isnan(memory[:, length].astype(np.float32)).all()


def test_views_that_need_a_copy(rng, monkeypatch):
    """Channels with gaps, rows off 16 bytes, rows from the last to the first, outputs with gaps between tokens."""
    head, twin = head_with("sketch"), head_with("sketch")
    made = []
    convert = frameworks.CupyArrays.converted
    monkeypatch.setattr(
        frameworks.CupyArrays, "converted", lambda self, x, dtype: made.append(x) or convert(self, x, dtype)
    )
    tokens = narrow(tokens_of(rng), standin.asarray)
    want = twin.step(*tokens)
    gaps = np.repeat(tokens.q, 2, axis=-1)[..., ::2]
    memory = standin.empty((*tokens.k.shape[:2], tokens.k[0, 0].size + 1), BFLOAT16)
    memory[..., :-1] = tokens.k.reshape(*memory.shape[:2], -1)
    off = memory[..., :-1].reshape(tokens.k.shape, copy=False)
    reverse = tokens.v[::-1].copy()[::-1]
    out = standin.empty((*tokens.v.shape[:2], 2, *tokens.v.shape[2:]), BFLOAT16)[:, :, 0]
    head.step(gaps, off, reverse, tokens.g, tokens.beta, out=out)
    np.testing.assert_array_equal(out, want)
    assert len(made) == 3


def same(head, twin):
    for name, array in head._engine.memory.items():
        np.testing.assert_array_equal(array.view(np.uint8), twin._engine.memory[name].view(np.uint8), err_msg=name)
    np.testing.assert_array_equal(head._engine.slots.cursor, twin._engine.slots.cursor)


BAD, GOOD, LEFT = [3, 1, 1, 9, -1, 0, -7], [3, -1, -1, -1, -1, 0, -1], 4
"""Slots with repeated ones and such that do not exist, the same with padding for them, and their rows."""


@pytest.mark.parametrize("system", ["standard", "replay", "sketch"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("rows", [512, 3])  # of a launch
def test_bad_slots_on_the_device_are_left_out(system, dtype, rows, rng, monkeypatch):
    """The other rows, and all memory, are as if they were padding; each call counts its own."""
    monkeypatch.setattr(workspaces, "MAX_ROWS", rows)
    head, twin = head_with(system), head_with(system)
    bad = standin.asarray(np.array(BAD, dtype))
    if dtype == np.int64:
        bad[3] += 2**32  # of which four bytes name slot 1
    start = rng.standard_normal((len(BAD), *LAYER.state_shape)).astype(np.float32)
    head.load_state(standin.asarray(start), slots=bad)
    twin.load_state(standin.asarray(start), slots=GOOD)
    assert head.left_out() == LEFT
    for length in (1, 1, 1, 1, 2, 3):
        tokens = narrow(tokens_of(rng, len(BAD), length), standin.asarray)
        got = head.step(*tokens, slots=bad)
        np.testing.assert_array_equal(got, twin.step(*tokens, slots=GOOD))
        assert not got[[1, 2, 3, 4, 6]].any()
        same(head, twin)
        assert head.left_out() == LEFT
    assert head.left_out() == 0
    head.flush(bad)
    twin.flush(GOOD)
    head.reset(bad[:3])
    twin.reset(GOOD[:3])
    same(head, twin)
    assert head.left_out() == (2 if system == "standard" else LEFT + 2)  # it has nothing to flush
    assert twin.left_out() == 0


@pytest.mark.parametrize("system", ["standard", "replay", "sketch"])
def test_copies(system, rng):
    """All sources are read before any destination is written; windows continue in the copies, without drafts."""
    head = head_with(system)
    head.step(*narrow(tokens_of(rng, 4, 6), standin.asarray))
    head.step(*narrow(tokens_of(rng, 2, 1), standin.asarray), slots=[1, 2])
    if system != "standard":
        head.step(*narrow(tokens_of(rng, 1, 1), standin.asarray), slots=[0], draft=True)
    before = {name: array.get() for name, array in head._engine.memory.items()}
    if system != "standard":
        before["cursor"] &= 127
    sources, targets = np.array([2, 0, 3, 1, 7, -1, 2]), np.array([0, 2, 1, -1, 3, -1, 9])
    head.copy(standin.asarray(sources), standin.asarray(targets.astype(np.int32)))
    assert head.left_out() == 2  # slots 7 and 9
    for name, array in head._engine.memory.items():
        want = before[name].copy()
        want[[0, 2, 1]] = before[name][[2, 0, 3]]
        np.testing.assert_array_equal(array.view(np.uint8), want.view(np.uint8), err_msg=name)
    token = narrow(tokens_of(rng, 1, 1), standin.asarray)
    head.copy([0], [3])
    np.testing.assert_array_equal(head.step(*token, slots=[0]), head.step(*token, slots=[3]))
    refused("dst: expected each slot at most once", head.copy, [0, 1], [2, 2])


def test_workspaces(rng, monkeypatch):
    """Each stream and each graph has one; a graph without one left is an error, and nothing is launched."""
    monkeypatch.setattr(workspaces, "READY", 3)
    monkeypatch.setattr(workspaces, "LEAST", 1)
    head = head_with("sketch")
    tokens = narrow(tokens_of(rng, 4, 1), standin.asarray)
    out = standin.empty(tokens.v.shape, BFLOAT16)
    head.step(*tokens, out=out)
    used = head._engine.slots._workspaces._used
    stream = standin.Stream()
    for graphs in (1, 2):
        stream.begin_capture()
        head.step(*tokens, out=out)
        head.step(*tokens, out=out)
        stream.end_capture()
        assert len(used) == 1 + graphs
        assert len({id(x) for x in used.values()}) == len(used)
    stream.begin_capture()
    with pytest.raises(RuntimeError, match=r"^no workspace is left for this graph: 3 streams and graphs"):
        head.step(*tokens, out=out)
    assert not standin.Stream.recorded
    stream.end_capture()
    head.step(*tokens, out=out)
    stream.begin_capture()
    head.step(*tokens, out=out)
    stream.end_capture()
    monkeypatch.setattr(standin.Stream, "ptr", 7)
    head.step(*tokens, out=out)
    assert len(used) == 5


@fixtures.cold
@pytest.mark.parametrize("types", [{}, {"state_dtype": "bfloat16"}, {"sketch_dtype": "int8"}], ids=str)
def test_a_half_full_window_survives_in_a_file(types, tmp_path, rng):
    """Another head decodes the restored slots bitwise as the first one does, at positions 3 and 0."""
    head, other = (sketch(**types) for _ in range(2))
    for each in (head, other):
        each.step(*narrow(tokens_of(rng, 4, 5)))
    head.step(*narrow(tokens_of(rng, 2, 2)), slots=[1, 3])
    head.step(*narrow(tokens_of(rng, 1, 1)), slots=[2])
    head.flush([2])
    head.step(*narrow(tokens_of(rng, 1, 2)), slots=[2], draft=True)  # drafts are left out
    head.snapshot([3, 2]).save(tmp_path / "slots")
    other.restore(ss.Snapshot.load(tmp_path / "slots"), [0, 1])
    np.testing.assert_array_equal(np.asarray(other.position)[:2], [3, 0])
    tokens = narrow(tokens_of(rng, 2, 6))
    got, want = other.step(*tokens, slots=[0, 1]), head.step(*tokens, slots=[3, 2])
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(other.state)[:2], np.asarray(head.state)[[3, 2]])


def test_another_backend(rng):
    with pytest.raises(ValueError, match=r'^snapshot: expected backend "cuda", got "reference"'):
        sketch().restore(sketch("reference").snapshot())


SHARDED = Layer("gdn", 4, 64, 80, 2)
WINDOW = 4


RESIDUALS = {"map": "subspace", "sketch_dtype": "int8", "residual_bits": [1, 2, 0, 3]}


@pytest.mark.parametrize("form", [{"map": "lowrank"}, {"map": "ridge"}, RESIDUALS], ids=lambda form: form["map"])
def test_shards(form, rng):
    """States and outputs are equal to the last bit."""
    plan = plan_of(rng, SHARDED, [16, 3, 5, 9], window=WINDOW, **form)
    tokens, start = narrow(make_tokens(SHARDED, 3, 3 * WINDOW + 1, "bfloat16", rng)), states_of(rng, SHARDED, 3)
    whole = ss.SketchHead(plan, 3, "cuda")
    whole.warmup()
    whole.load_state(start)
    outputs = whole.step(*tokens)
    whole.flush()
    for rank in range(2):
        values, keys = SHARDED.shard_heads(rank, 2)
        own = [np.ascontiguousarray(x[:, :, i]) for x, i in zip(tokens, (keys, keys, *[values] * 3), strict=True)]
        head = ss.SketchHead(plan.shard(rank, 2), 3, "cuda")
        head.warmup()
        head.load_state(np.ascontiguousarray(start[:, values]))
        np.testing.assert_array_equal(head.step(*own), outputs[:, :, values])
        head.flush()
        np.testing.assert_array_equal(head.state.get(), whole.state.get()[:, values])
