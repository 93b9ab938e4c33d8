"""Slots, strides and overlaps of a call's arrays on the CUDA backend, on the host build of the kernels."""

import numpy as np
import pytest
from host import compiler, standin
from host.heads import BFLOAT16, LAYER, install, narrow, sketch, tokens_of

import sketchssm as ss
from sketchssm.cuda import frameworks

if missing := compiler.missing():
    pytest.skip(missing, allow_module_level=True)

cupy = pytest.fixture(autouse=True)(install)


def head_of(system):
    if system == "sketch":
        return sketch()
    head = ss.StandardHead(LAYER, 4, "cuda")
    head.warmup()
    return head


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
    """Gaps between rows and tokens, int32 slots, gaps between rows of outputs: the bits of plain arrays."""
    head, twin = head_of(system), head_of(system)
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
    head, twin = head_of("sketch"), head_of("sketch")
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
