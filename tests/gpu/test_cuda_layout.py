"""Arrays that the CUDA backend prepares on the host; needs no device."""

import re

import numpy as np
import pytest
from gpu.cuda_support import make_plan

from sketchssm.cuda.constants import ALIGN
from sketchssm.cuda.layout import basis_fragments, pack_plan
from sketchssm.cuda.modules import Variant, source_text
from sketchssm.layer.recurrence import FULL_STATE, Layer


def bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("rank", [1, 8, 13])
@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("slices", [1, 2])
def test_fragments_hold_the_basis(rank, key_dim, slices, rng):
    phi = rng.standard_normal((key_dim, rank)).astype(np.float32)
    parts = bf16(basis_fragments(phi, slices)).sum(axis=2)  # tiles, steps, lanes, 4
    tiles, steps = parts.shape[:2]
    columns = parts.reshape(tiles, steps, 8, 4, 4).transpose(0, 2, 1, 3, 4).reshape(tiles * 8, key_dim)
    assert np.allclose(columns[:rank].T, phi, rtol=2.0 ** (1 - 8 * slices), atol=0)  # slices of 8 bits
    assert not columns[rank:].any()


# scales of columns and pivots, and the factors F and w, are float32 where the rest are codes
PER_MAP = {
    "lowrank": (lambda g: min(g, 4) * (64 + g) + g, lambda g: min(g, 4) * (64 + 4 * g + 4) + 8 * g),
    "ridge": (lambda g: g * 64, lambda g: g * 64 + 4 * g),
    "offline": (lambda g: 0, lambda g: 4 * g),
}


@pytest.mark.parametrize("kind", PER_MAP)
@pytest.mark.parametrize(("stored", "size"), [("bfloat16", 2), ("float32", 4), ("int8", 1)])
def test_packed_heads_do_not_overlap(kind, stored, size, rng):
    layer = Layer("gdn", 5, 64, 80)
    ranks = np.array([3, FULL_STATE, 15, 1, 8])
    plan = make_plan(layer, ranks, rng, map=kind)
    packed = pack_plan(plan, stored)
    assert packed.order.tolist() == [1, 0, 2, 3, 4]
    assert packed.full_state == 1
    end = 0
    for head in (0, 2, 3, 4):
        rank, offset, rows, _ = packed.heads[head]
        assert rank == ranks[head]
        assert offset >= end
        assert offset * size % ALIGN == 0
        assert np.array_equal(packed.projection[rows : rows + 64], plan.projection[head, :, 0])
        end = offset + rank * 80 + PER_MAP[kind][size == 1](int(rank))
    assert packed.slot_elements >= end
    assert packed.slot_elements * size % ALIGN == 0  # so that every slot's heads do


@pytest.mark.parametrize("operation", ["standard", "read", "flush"])
def test_sources_carry_their_headers_once(operation):
    text = source_text(operation)
    assert not re.search(r"^\s*#include", text, flags=re.MULTILINE)
    assert text.count("struct Packed {") == 1
    assert "#pragma once" not in text


def test_variants_are_told_apart_by_their_constants():
    one, same, other = (Variant("read", {"K": k, "V": 64}) for k in (64, 64, 128))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert "-DK=64" in one.options
