"""The byte model against the paper's numbers."""

import itertools

import numpy as np
import pytest
from samples import refused

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS, CoefficientMap
from sketchssm.plans import traffic

NANO, SUPER, QWEN, GLM = ("mamba2", 128, 80), ("mamba2", 128, 64), ("gdn", 128, 128), ("kda", 128, 128)

# All traffic figures of the accuracy and recall tables, as printed with two decimals.
SKETCH = [
    *((NANO, rank, ratio) for rank, ratio in [(21, 6.15), (10, 9.08), (6, 10.98), (4, 12.26), (2, 13.88)]),
    *((SUPER, rank, ratio) for rank, ratio in [(20, 5.80), (9, 8.93), (5, 11.12), (3, 12.66), (2, 13.61)]),
    *((QWEN, rank, ratio) for rank, ratio in [(26, 6.11), (11, 9.50), (7, 11.14), (4, 12.81), (3, 13.48)]),
    *((GLM, rank, ratio) for rank, ratio in [(28, 5.83), (12, 9.16), (7, 11.14), (4, 12.81), (3, 13.48)]),
]
QUANTISED = [
    *((NANO, bits, ratio) for bits, ratio in [(10, 3.10), (8, 3.84), (6, 5.06), (4, 7.40)]),
    *((SUPER, bits, ratio) for bits, ratio in [(10, 3.08), (8, 3.82), (6, 5.02), (4, 7.31)]),
    *((QWEN, bits, ratio) for bits, ratio in [(10, 3.12), (8, 3.88), (6, 5.12), (4, 7.53)]),
    *((GLM, bits, ratio) for bits, ratio in [(10, 3.12), (8, 3.88), (6, 5.12), (4, 7.53)]),
]


def test_figures_of_the_paper():
    for model, rank, ratio in SKETCH:
        assert round(traffic.reduction(*model, rank), 2) == ratio
    for (_, *size), bits, ratio in QUANTISED:
        assert round(traffic.standard(*size) / traffic.compressed(*size, bits=bits), 2) == ratio
    for _, *size in (NANO, SUPER, QWEN, GLM):
        assert round(traffic.standard(*size) / traffic.replay(*size), 2) == 1.88
        for sparsity, ratio in ((0.375, 1.60), (0.5, 2.00), (0.625, 2.67), (0.75, 4.00)):
            assert round(traffic.standard(*size) / traffic.compressed(*size, sparsity=sparsity), 2) == ratio
    for bits, ratio in ((4, 7.95), (2, 10.36)):
        assert round(traffic.standard(*NANO[1:]) / traffic.read_only_copy(*NANO[1:], bits), 2) == ratio


def test_states_of_16_bits():
    """Every state byte counts half; sketches and maps stay as they are."""
    size = QWEN[1:]
    for narrow in ("bfloat16", "float16"):
        assert traffic.state_bytes(*size, narrow) == 2 * 128 * 128 == traffic.state_bytes(*size) / 2
        assert traffic.standard(*size, narrow) == traffic.standard(*size) / 2
        assert traffic.replay(*size, 16, narrow) == traffic.replay(*size) / 2
        ranks = [7, ss.FULL_STATE]
        wide, less = (traffic.sketch(*QWEN, ranks, state_dtype=name) for name in ("float32", narrow))
        flush = traffic.standard(*size) / 16  # a read moves the shadow, which is as small
        assert np.allclose(wide - less, flush / 2)
        wide, less = (
            traffic.reduction(*QWEN, ss.FULL_STATE, state_dtype=name, sketch_dtype="float32")
            for name in ("float32", narrow)
        )
        assert less == 2 * wide
    refused("state_dtype: expected one of float32, bfloat16, float16, got 'int8'", traffic.standard, *size, "int8")


def test_read_by_definition():
    """Bytes of what a read touches, counted as the elements of arrays; each case is an exact integer."""
    key_dim, value_dim, window, pivots = 128, 64, 16, 4
    for rank in (1, 3, 4, 9):
        u, c = rank * value_dim, rank * key_dim
        assert traffic.sketch_read("mamba2", key_dim, value_dim, rank, window) == 2 * (u + c)
        assert traffic.sketch_read("kda", key_dim, value_dim, rank, window) == 2 * (u + c + rank * window)
        p = min(rank, pivots)
        b, f, w = p * key_dim, rank * p, rank
        map = CoefficientMap("lowrank", pivots)
        assert traffic.sketch_read("gdn", key_dim, value_dim, rank, window, map) == 2 * (u + b + f + w)
    for name, (form, bytes) in itertools.product(MAPS, (("float32", 4), ("bfloat16", 2), ("int8", 2))):
        read = traffic.sketch_read("gdn", key_dim, value_dim, ss.FULL_STATE, window, name, sketch_dtype=form)
        assert read == bytes * key_dim * value_dim


def test_full_state_head_without_shadow_costs_what_replay_does():
    # the same few additions of integers, divided by W = 16: exact in float64
    assert traffic.sketch("gdn", 128, 64, ss.FULL_STATE, 16, sketch_dtype="float32") == traffic.replay(128, 64, 16)


def test_ranks_of_heads_add_up_in_bytes():
    ranks = np.array([1, 20, ss.FULL_STATE])
    used = [float(traffic.sketch("kda", 128, 128, rank)) for rank in ranks]
    # one rounding per operation in either order of the sum
    assert traffic.reduction("kda", 128, 128, ranks) == pytest.approx(
        3 * traffic.standard(128, 128) / sum(used), rel=1e-14
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traffic.sketch_read("rwkv", 8, 8, 1), "kind"),
        (lambda: traffic.sketch_read("gdn", 8, 8, 1, map="sparse"), "map: expected one of"),
        (lambda: traffic.sketch_read("gdn", 8, 8, -2), "rank"),
        (lambda: traffic.compressed(8, 8), "bits or sparsity"),
        (lambda: traffic.compressed(8, 8, bits=4, sparsity=0.5), "bits or sparsity"),
        (lambda: traffic.compressed(8, 8, sparsity=1.0), "sparsity"),
        (lambda: traffic.sketch("gdn", 8, 8, 1, 0), "window"),
        (lambda: traffic.sketch("mamba2", 8, 8, 1, 0), "window"),
        (lambda: traffic.sketch("mamba2", 8, 8, 1, 2.5), "window: expected an integer"),
        (lambda: traffic.sketch_read("gdn", 8, 8, np.inf), "rank"),
        (lambda: traffic.sketch("gdn", 8, 8, 1, map="subspace", residual_bits=4), "residual_bits: expected numbers"),
        (lambda: traffic.sketch("gdn", 8, 8, [1, 2], map="subspace", residual_bits=[1, 2, 3]), "each of 2 ranks, got"),
        (lambda: traffic.reduction("gdn", 8, 8, 1, residual_bits=2), "residual_bits: expected 0 with the map 'ridge'"),
        (lambda: traffic.compressed(8, 8, sparsity="x"), "sparsity: expected a number"),
        (lambda: traffic.sketch_read("gdn", 10**400, 8, 1), "key_dim: expected an integer from 1 to 1099511627776"),
        (lambda: traffic.sketch_read("gdn", 8, 2**70, 1), "value_dim"),
        (lambda: traffic.sketch_read("gdn", 8, 8, 10**400), "rank"),
        (lambda: traffic.replay(8, 8, 10**400), "window"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
