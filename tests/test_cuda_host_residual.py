"""Adapted bases and residuals in few bits on the CUDA backend: what is stored, and reads."""

import ml_dtypes
import numpy as np
import pytest
from host import fixtures
from samples import plan_of, relative, states_of, tokens_of
from test_residual import check_size

import sketchssm as ss
from sketchssm.cuda.layout import pack_plan
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.reference import maps
from sketchssm.reference.residual import encode_residual

cupy = fixtures.of_kernels
pytestmark = pytest.mark.usefixtures("cupy")

LAYERS = {
    "mamba2": Layer("mamba2", 4, 128, 64, 2), "gdn": Layer("gdn", 4, 128, 80, 2), "kda": Layer("kda", 4, 64, 96, 4),
    "gdn-96": Layer("gdn", 4, 96, 48, 4), "mamba2-256": Layer("mamba2", 4, 256, 32, 1),
}  # fmt: skip
RANKS, BITS = [2, 3, FULL_STATE, 11], [1, 2, 0, 3]
SKETCHED = 0, 1, 3
FORMS = "int8", "bfloat16", "float32"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def residual_plan(rng, kind, **settings):
    settings = {"map": "subspace", "window": 8, "residual_bits": BITS} | settings
    return plan_of(rng, LAYERS[kind], RANKS, **settings)


def rounded(tokens):
    """Tokens whose activations bf16 holds."""
    return tokens._replace(**{name: getattr(tokens, name).astype(BFLOAT16).astype(np.float32) for name in "qkv"})


def narrow(tokens):
    return tokens._replace(**{name: getattr(tokens, name).astype(BFLOAT16) for name in "qkv"})


def head_on_cuda(plan, activation="float32", **options):
    return ss.SketchHead(plan, 4, "cuda", activation_dtype=activation, output_dtype="float32", **options)


def stored(head, plan, form, slot, which):
    """Columns U (G, V), rows B (G, K), codes (V, K), scales of rows and columns of one head, as a slot stores them."""
    layer, packed = plan.layer, pack_plan(plan, form, "float32")
    rank, offset = packed.heads[which, :2]
    key, value, bits = layer.key_dim, layer.value_dim, BITS[which]
    memory = head._engine.memory["sketch"][slot]
    memory = np.ascontiguousarray(memory.get() if hasattr(memory, "get") else memory)
    raw = memory[offset:].view(np.uint8)
    if form == "int8":
        codes = raw[: rank * (value + key)]
        numbers = np.where(codes > 127, -1.0, 1.0) * (codes & 127) / 64
        u, b = numbers[: rank * value].reshape(rank, value), numbers[rank * value :].reshape(rank, key)
        b = b.reshape(rank, -1, 4)[:, :, [0, 2, 1, 3]].reshape(rank, key)
        sizes = np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-30)
        u, b = sizes * u * raw[codes.size : codes.size + 4 * rank].view(np.float32)[:, None], b / sizes
        size = codes.size + 4 * rank
    else:
        kind = BFLOAT16 if form == "bfloat16" else np.dtype(np.float32)
        size = rank * (value + key) * kind.itemsize
        numbers = raw[:size].view(kind).astype(np.float64)
        u, b = numbers[: rank * value].reshape(rank, value), numbers[rank * value :].reshape(rank, key)
    raw = raw[-(-size // 16) * 16 :]
    codes, first = np.zeros((value, key), int), 0
    for shift, width in ((0, 1),) if bits == 1 else ((0, 2),) if bits == 2 else ((0, 2), (2, 1)):
        words = -(-key * width // 64)  # whole words
        plane = raw[first : first + value // 16 * 128 * words].reshape(value // 16, 8, 4, words, 4)  # block r c p byte
        first += plane.size
        for register in range(key // 8):
            bytes_of = plane[..., register * width // 8, :] >> (width * (register % (8 // width)))
            half, q = divmod(register, key // 16)
            for r in range(8):
                for c in range(4):
                    columns = slice(16 * q + 4 * c, 16 * q + 4 * c + 4)
                    codes[8 * half + r :: 16, columns] |= (bytes_of[:, r, c] & (2**width - 1)).astype(int) << shift
    scales = raw[first : first + 2 * (value + key)].view(BFLOAT16).astype(np.float64)
    return u, b, codes - 2 ** (bits - 1), scales[:value], scales[value:]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_stored_and_that_reads_are_products_with_it(kind, form):
    rng = np.random.default_rng(2)
    layer, plan = LAYERS[kind], residual_plan(rng, kind)
    head = head_on_cuda(plan, sketch_dtype=form)
    state, tokens = states_of(rng, layer, 2), rounded(tokens_of(rng, layer, 2, 1))
    head.load_state(state, slots=[3, 0])
    output = np.asarray(head.step(*tokens, slots=[3, 0]))
    for row, slot in enumerate((3, 0)):
        for which in SKETCHED:
            s = state[row, which].astype(np.float64)  # (V, K)
            omega = plan.omega[which, :, : RANKS[which]]
            u, b, codes, rows, columns = stored(head, plan, form, slot, which)
            # The singular values of these states span six decades: rows of S S^T Omega are almost parallel, and their
            # Gram matrix in float32 leaves up to 0.06 of their products; a row may count as dependent.
            gram = b @ b.T
            assert abs(gram - np.diag(np.diag(gram).round())).max() < 0.08
            left = [np.linalg.norm(s - s @ x.T @ x) for x in (b, maps.subspace(s.T, omega).T)]
            assert left[0] < 1.2 * left[1]
            # U in two slices, and as rounded: int8 by 1/254 of the largest, bf16 by 2^-9
            assert relative(u.T, s @ b.T) < {"int8": 1e-2, "bfloat16": 2.0**-8, "float32": 1e-4}[form]
            # Kernels take what is left of a state in bf16, and square it in bf16.
            want = encode_residual(s.astype(BFLOAT16) - u.T @ b, BITS[which])
            assert (codes != want.codes).mean() < 2e-2  # numbers at the edge of two levels; most measured: 1.5e-2
            np.testing.assert_allclose(rows, want.rows, rtol=2.0**-7)  # float32's errors tip a rounding to bf16
            np.testing.assert_allclose(columns, want.columns, rtol=2.0**-6)  # and sums of squares in bf16
            matrix = u.T @ b + (codes + 0.5) * rows[:, None] * columns
            # most measured: 1.09, where rank 11 leaves 1% of a state, of which bf16 has 7 bits
            best = encode_residual(s - u.T @ b, BITS[which]).matrix + u.T @ b
            assert np.linalg.norm(s - matrix) < 1.15 * np.linalg.norm(s - best)
            q, k, v = (
                np.float64(x[row, 0, i])
                for x, i in ((tokens.q, which // layer.group), (tokens.k, which // layer.group), (tokens.v, which))
            )
            weight = (k @ q) * (np.float64(tokens.beta[row, 0, which]) if layer.erases else 1)
            x = np.exp(np.float64(tokens.g[row, 0, which])) * (q - weight * k if layer.erases else q)
            # the query in two slices of 8 bits, or of bf16: 2^-16 of its largest channel
            assert relative(output[row, 0, which], matrix @ x + weight * v) < 3e-4


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("kind", LAYERS)
def test_reads_of_bf16_activations_and_of_float32_ones_agree(kind, form):
    rng = np.random.default_rng(3)
    layer, plan = LAYERS[kind], residual_plan(rng, kind)
    wide, tight = head_on_cuda(plan, sketch_dtype=form), head_on_cuda(plan, "bfloat16", sketch_dtype=form)
    state, tokens = states_of(rng, layer, 2), rounded(tokens_of(rng, layer, 2, 3))
    outputs = []
    for head, given in ((wide, tokens), (tight, narrow(tokens))):
        head.load_state(state, slots=[1, 2])
        outputs.append(head.step(*given, slots=[1, 2], out=np.zeros(tokens.v.shape, np.float32)))
    assert relative(outputs[1], outputs[0]) < 1e-4  # the same stored numbers; queries and weights to 2^-16


@pytest.mark.parametrize("scale", [2.0**-70, 2.0**60])
def test_states_of_any_size(scale):
    rng = np.random.default_rng(7)
    layer, plan = LAYERS["mamba2"], residual_plan(rng, "mamba2", sketch_dtype="int8")
    check_size(lambda: head_on_cuda(plan), layer, rounded(tokens_of(rng, layer, 1, 1)), scale)


@pytest.mark.parametrize("form", FORMS)
def test_states_near_the_smallest_number(form):
    rng = np.random.default_rng(7)
    layer, plan = LAYERS["mamba2"], residual_plan(rng, "mamba2", sketch_dtype=form)
    head, tokens = head_on_cuda(plan), tokens_of(rng, layer, 1, 1)
    head.load_state((2.0**-122 * states_of(rng, layer, 1)).astype(np.float32), slots=[0])
    assert np.isfinite(head.step(*tokens, slots=[0])).all()


@pytest.mark.parametrize("kind", LAYERS)
def test_decays_to_the_end_of_the_range_of_float32(kind):
    rng = np.random.default_rng(9)
    layer, plan = LAYERS[kind], residual_plan(rng, kind, sketch_dtype="int8")
    head, exact = head_on_cuda(plan, "bfloat16"), ss.StandardHead(layer, 1, "reference")
    tokens = rounded(tokens_of(rng, layer, 1, 9))
    tokens = tokens._replace(g=np.full_like(tokens.g, -28))  # three tokens leave 3e-37
    for each in (head, exact):
        each.load_state(states_of(np.random.default_rng(6), layer, 1), slots=[0])
    output = head.step(*narrow(tokens), slots=[0], out=np.zeros(tokens.v.shape, np.float32))
    assert relative(output, exact.step(*tokens)) < 1e-4  # of a sketch's error e^-28 is left


def test_a_state_that_is_not_finite_stays_in_its_slot():
    rng = np.random.default_rng(8)
    layer, plan = LAYERS["gdn"], residual_plan(rng, "gdn", sketch_dtype="int8")
    head, twin = head_on_cuda(plan, "bfloat16"), head_on_cuda(plan, "bfloat16")
    tokens, state = narrow(tokens_of(rng, layer, 2, 11)), states_of(rng, layer, 2)
    bad = tokens.v.copy()
    bad[0, 1, 3, 5] = np.inf
    outputs = []
    for each, values in ((head, bad), (twin, tokens.v)):
        each.load_state(state, slots=[0, 1])
        outputs.append(np.asarray(each.step(*tokens._replace(v=values), slots=[0, 1])))
    np.testing.assert_array_equal(outputs[0][1], outputs[1][1])
    np.testing.assert_array_equal(outputs[0][0, :, :2], outputs[1][0, :, :2])
    assert not np.isfinite(outputs[0][0, 8:, 3, 5]).any()


@pytest.mark.parametrize("activation", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", LAYERS)
def test_drafts_read_residuals(kind, activation):
    rng = np.random.default_rng(10)
    layer, plan = LAYERS[kind], residual_plan(rng, kind, sketch_dtype="int8")
    head, twin = head_on_cuda(plan, activation), head_on_cuda(plan, activation)
    state, tokens = states_of(rng, layer, 2), rounded(tokens_of(rng, layer, 2, 9))
    tokens = narrow(tokens) if activation == "bfloat16" else tokens

    def step(which, first, end, **options):
        given = tokens.at(np.s_[:, first:end])
        return which.step(*given, slots=[1, 3], out=np.zeros(given.v.shape, np.float32), **options)

    for each in (head, twin):
        each.warmup(drafts=True)
        each.load_state(state, slots=[1, 3])
    step(head, 0, 1), step(twin, 0, 1)
    drafted = step(head, 1, 7, draft=True)  # two groups, the second not full
    assert relative(drafted, step(twin, 1, 7)) < 1e-4  # queries and weights to 2^-16, in another order
    head.commit([6, 6], slots=[1, 3])
    drafted = step(head, 7, 9, draft=True)  # no room: folds 7 tokens, and sketches anew
    twin.flush([1, 3])
    assert relative(drafted, step(twin, 7, 9)) < 1e-4
