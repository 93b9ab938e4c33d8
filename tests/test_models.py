"""Converters against the layers' formulas, written out directly in float64."""

import math

import ml_dtypes
import numpy as np
import pytest
from samples import refused

from sketchssm.layer.calls import check_gates, check_tokens
from sketchssm.layer.recurrence import Layer
from sketchssm.models import gdn_inputs, kda_inputs, mamba2_inputs, mamba2_output, prefill_state

# A converter computes in float64 and rounds once to float32: half a unit in each element's last place, and a
# hundredth for the arithmetic before it.
ONCE_ROUNDED = 1.01 * 2.0**-24
# A float64 gate is the exponential of a sum of logarithms, below 10 here and each known to its last place.
FLOAT64 = 32 * np.finfo(np.float64).eps
RTOL = {np.float32: ONCE_ROUNDED, np.float64: FLOAT64}
EXTREME = np.array([-1000.0, -100.0, -37.5, -36.5, -30.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1000.0])


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def each(function, x):
    return np.vectorize(function, otypes=[np.float64])(np.asarray(x, np.float64))


K, V = 16, 80


def mamba2(rng, lead=(2, 3), heads=8, groups=2, dtype=np.float32):
    shapes = {
        "x": (*lead, heads, V), "dt": (*lead, heads), "A_log": (heads,),
        "B": (*lead, groups, K), "C": (*lead, groups, K), "dt_bias": (heads,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def delta(rng, kind, lead=(2, 3), heads=4, key_heads=2, dtype=np.float32):
    channels = (K,) if kind == "kda" else ()
    shapes = {
        "q": (*lead, key_heads, K), "k": (*lead, key_heads, K), "v": (*lead, heads, V),
        "a": (*lead, heads, *channels), "b": (*lead, heads), "A_log": (heads,), "dt_bias": (heads, *channels),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


CONVERTERS = {"mamba2": mamba2_inputs, "gdn": gdn_inputs, "kda": kda_inputs}


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_bf16_tensors_and_parameters(kind, rng, torch):
    """PyTorch parameters give bitwise the results of float32 arrays of the same values."""
    given = mamba2(rng) if kind == "mamba2" else delta(rng, kind)
    tensors = {name: torch.from_numpy(x).bfloat16() for name, x in given.items()}
    parameters = {name: torch.nn.Parameter(tensors[name]) for name in ("A_log", "dt_bias")}
    got = CONVERTERS[kind](**tensors | parameters)
    want = CONVERTERS[kind](**{name: x.float().numpy() for name, x in tensors.items()})
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (type(x), x.dtype, x.requires_grad) == (torch.Tensor, torch.float32, False)
            np.testing.assert_array_equal(x, y)


def test_skip_of_bf16_tensors(rng, torch):
    o, x = (torch.from_numpy(rng.standard_normal((2, 8, 80))).bfloat16() for _ in range(2))
    D = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(8)).bfloat16())
    want = mamba2_output(*(y.detach().float().numpy() for y in (o, x, D)))
    got = mamba2_output(o, x, D)
    assert (type(got), got.dtype) == (torch.Tensor, torch.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_results_are_the_kind_of_the_values(kind, rng):
    jax = pytest.importorskip("jax")
    given = mamba2(rng) if kind == "mamba2" else delta(rng, kind)
    name = "x" if kind == "mamba2" else "v"
    got = CONVERTERS[kind](**given | {name: jax.numpy.asarray(given[name])})
    for x, y in zip(got, CONVERTERS[kind](**given), strict=True):
        assert y is None or isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [*RTOL, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_finished_gates_pass_through(rng, kind, dtype):
    """As the functions of transformers get them: g in float32, beta in the activations' type."""
    given = delta(rng, kind, dtype=dtype)
    plain = CONVERTERS[kind](**given)
    values = {name: given[name] for name in "qkv"}
    beta = plain.beta.astype(dtype)
    got = CONVERTERS[kind](**values, g=plain.g, beta=beta)
    np.testing.assert_array_equal(got.g, plain.g)
    np.testing.assert_array_equal(got.beta, beta.astype(plain.beta.dtype))
    np.testing.assert_array_equal(got.q, plain.q)
    check_tokens(Layer(kind, heads=4, key_dim=16, value_dim=80, key_heads=2), *got)
    mixed = CONVERTERS[kind](**values, g=plain.g, b=given["b"])
    np.testing.assert_array_equal(mixed.beta, plain.beta)


def test_mamba2_rates_instead_of_their_logarithms(rng):
    given = mamba2(rng)
    rate = -np.exp(given["A_log"].astype(np.float64))
    rate[0] = 0  # decays nothing
    got = mamba2_inputs(**given | {"A_log": None}, A=rate)
    want = mamba2_inputs(**given)
    # The logarithm of a rate, and the exponential of the sum, each to float64's last digit.
    np.testing.assert_allclose(got.g[..., 1:], want.g[..., 1:], rtol=ONCE_ROUNDED * 2)
    assert not got.g[..., 0].any()
    np.testing.assert_array_equal(got.v, want.v)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_prefill_states(rng, framework):
    """The layout is named, as a shape with K == V does not tell a state from its transpose."""
    module = pytest.importorskip(framework)
    states = rng.standard_normal((2, 4, 8, 8)).astype(np.float32)
    given = {
        "numpy": np.asarray,
        "torch": getattr(module, "from_numpy", None),
        "jax": getattr(module, "device_put", None),
    }[framework](states)
    square, oblong = Layer("gdn", 4, 8, 8), Layer("gdn", 4, 8, 12)
    for layout, want in (("vk", states), ("kv", states.transpose(0, 1, 3, 2))):
        got = prefill_state(given, layout, square)
        assert type(got) is type(given)
        np.testing.assert_array_equal(got, want)
    assert prefill_state(np.zeros((3, 4, 8, 12)), "kv", oblong).shape == (3, 4, 12, 8)
    message = r"state: expected shape \(batch, 4, 12, 8\) with layout='vk', got \(3, 4, 8, 12\)"
    with pytest.raises(ValueError, match=message):
        prefill_state(np.zeros((3, 4, 8, 12)), "vk", oblong)
    refused(r"state: expected shape .* got \(4, 8, 12\)", prefill_state, np.zeros((4, 8, 12)), "kv", oblong)
    for other in (None, states):
        refused("layout: expected one of kv, vk, got ", prefill_state, given, other, square)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("lead", [(2, 3), (2,)])
def test_mamba2_formulas(rng, lead, dtype):
    given = mamba2(rng, lead, dtype=dtype)
    tokens = mamba2_inputs(**given)
    dt = each(softplus, given["dt"].astype(np.float64) + given["dt_bias"])
    np.testing.assert_array_equal(tokens.q, given["C"])
    np.testing.assert_array_equal(tokens.k, given["B"])
    np.testing.assert_allclose(tokens.v, dt[..., None] * given["x"], rtol=RTOL[dtype])
    np.testing.assert_allclose(tokens.g, -each(math.exp, given["A_log"]) * dt, rtol=RTOL[dtype])
    assert tokens.beta is None
    check_tokens(Layer("mamba2", heads=8, key_dim=16, value_dim=80, key_heads=2), *tokens)


def test_mamba2_step_limits_apply_last(rng):
    given = mamba2(rng)
    given["x"] = np.ones_like(given["x"])
    step = mamba2_inputs(**given, dt_limit=(0.5, 1.0)).v
    free = mamba2_inputs(**given).v
    np.testing.assert_allclose(step, np.clip(free, 0.5, 1.0), rtol=ONCE_ROUNDED * 2)
    assert (free < 0.5).any()
    assert (free > 1.0).any()


def test_mamba2_without_softplus_takes_dt_as_it_is(rng):
    given = mamba2(rng)
    given["dt"], given["dt_bias"] = np.abs(given["dt"]), None
    given["dt"][0, 0, 0] = 0  # no step: nothing decays, nothing is written
    tokens = mamba2_inputs(**given, dt_softplus=False)
    np.testing.assert_allclose(tokens.v, given["dt"][..., None] * given["x"], rtol=ONCE_ROUNDED * 2)
    assert tokens.g[0, 0, 0] == 0
    refused("dt: expected steps >= 0 .* got -", mamba2_inputs, **given | {"dt": -given["dt"]}, dt_softplus=False)


@pytest.mark.parametrize("per_channel", [False, True])
def test_mamba2_skip_completes_the_layer(rng, per_channel):
    x, o = rng.standard_normal((2, 2, 3, 8, 80)).astype(np.float32)
    D = rng.standard_normal((8, 80) if per_channel else 8).astype(np.float32)
    y = mamba2_output(o, x, D)
    exact = o.astype(np.float64) + (D if per_channel else D[:, None]).astype(np.float64) * x
    assert y.dtype == np.float32
    # One product and one sum, each rounded: two half units of the larger magnitude.
    assert np.abs(y - exact).max() <= 2 * ONCE_ROUNDED * (np.abs(o) + np.abs(exact - o)).max()


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("lead", [(2, 3), (2,)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_delta_rule_formulas(rng, kind, lead, dtype):
    given = delta(rng, kind, lead, dtype=dtype)
    tokens = CONVERTERS[kind](**given)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    rate = np.exp(wide["A_log"])[:, None] if kind == "kda" else np.exp(wide["A_log"])
    q, k = (wide[name] / np.sqrt((wide[name] ** 2).sum(-1, keepdims=True) + 1e-6) for name in "qk")
    rtol = RTOL[dtype]
    np.testing.assert_allclose(tokens.q, q / 4, rtol=rtol)  # K ** -0.5
    np.testing.assert_allclose(tokens.k, k, rtol=rtol)
    np.testing.assert_array_equal(tokens.v, given["v"])
    np.testing.assert_allclose(tokens.g, -rate * each(softplus, wide["a"] + wide["dt_bias"]), rtol=rtol)
    np.testing.assert_allclose(tokens.beta, each(sigmoid, wide["b"]), rtol=rtol)
    assert {array.dtype for array in tokens} == {np.dtype(dtype)}
    check_tokens(Layer(kind, heads=4, key_dim=16, value_dim=80, key_heads=2), *tokens)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_delta_rule_options(rng, kind):
    given = delta(rng, kind)
    plain = CONVERTERS[kind](**given)
    np.testing.assert_array_equal(CONVERTERS[kind](**given, allow_neg_eigval=True).beta, 2 * plain.beta)
    np.testing.assert_array_equal(CONVERTERS[kind](**given, scale=1.0).q, 4 * plain.q)
    ready = CONVERTERS[kind](**given | {"q": plain.q, "k": plain.k}, l2norm=False, scale=1.0)
    np.testing.assert_array_equal(ready.q, plain.q)
    np.testing.assert_array_equal(ready.k, plain.k)
    doubled = CONVERTERS[kind](**given | {"q": plain.q}, l2norm=False, scale=2.0)
    np.testing.assert_array_equal(doubled.q, 2 * plain.q)


def test_kda_parameters_in_the_shapes_of_checkpoints(rng):
    given = delta(rng, "kda")
    plain = kda_inputs(**given)
    flat = given | {"A_log": given["A_log"].reshape(1, 1, -1, 1), "dt_bias": given["dt_bias"].ravel()}
    np.testing.assert_array_equal(kda_inputs(**flat).g, plain.g)


def test_kda_bounds(rng):
    given = delta(rng, "kda")
    given["a"] *= 10
    plain = kda_inputs(**given).g
    np.testing.assert_array_equal(kda_inputs(**given, clamp_min=-5.0).g, np.maximum(plain, -5.0))
    assert (plain < -5.0).any()

    raw = given["a"].astype(np.float64) + given["dt_bias"]
    bounded = -5.0 * each(sigmoid, np.exp(given["A_log"].astype(np.float64))[:, None] * raw)
    np.testing.assert_allclose(kda_inputs(**given, lower_bound=-5.0).g, bounded, rtol=ONCE_ROUNDED)
    without_rate = kda_inputs(**given | {"A_log": None}, lower_bound=-5.0).g
    np.testing.assert_allclose(without_rate, -5.0 * each(sigmoid, raw), rtol=ONCE_ROUNDED)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("bias", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("A_log", [-100.0, -8.0, 0.0, 8.0, 100.0])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_extreme_gates(rng, kind, A_log, bias, dtype):
    """No overflow, no NaN, and correct wherever the dtype can represent the result."""
    heads, raw = len(EXTREME), EXTREME.astype(dtype)
    if kind == "mamba2":
        given = mamba2(rng, (1,), heads, groups=1, dtype=dtype) | {"dt": raw[None]}
        given["x"][:] = 1
    else:
        given = delta(rng, kind, (1,), heads, key_heads=1, dtype=dtype)
        given["a"][:] = raw[:, None] if kind == "kda" else raw
    given["A_log"][:], given["dt_bias"][:] = A_log, bias
    tokens = CONVERTERS[kind](**given)
    check_gates(tokens.g, tokens.beta)

    step = each(softplus, EXTREME + bias)
    checked = [(tokens.g[0, :, 0] if kind == "kda" else tokens.g[0], -math.exp(A_log) * step)]
    if kind == "mamba2":
        checked.append((tokens.v[0, :, 0], step))
    # Sums of logarithms now reach 1100, both sides are rounded, and subnormal results are spaced evenly.
    rtol, atol = 2 * RTOL[dtype] + 1100 * FLOAT64, float(np.finfo(dtype).smallest_subnormal)
    held = EXTREME + bias > -700  # below, the formula written out here underflows
    for got, exact in checked:
        with np.errstate(over="ignore", under="ignore"):
            expected = exact.astype(dtype)
        np.testing.assert_allclose(got[held].astype(float), expected[held].astype(float), rtol=rtol, atol=atol)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_is_widened_first(rng, dtype, l2norm):
    given = delta(rng, "gdn", dtype=dtype)
    tokens = gdn_inputs(**given, scale=0.3, l2norm=l2norm)
    assert {array.dtype for array in tokens} == {np.dtype(np.float32)}
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    wide = gdn_inputs(**wide, scale=0.3, l2norm=l2norm)
    for got, exact in zip(tokens, wide, strict=True):
        np.testing.assert_allclose(got, exact, rtol=ONCE_ROUNDED)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_inputs_are_left_alone(rng, kind):
    given = mamba2(rng) if kind == "mamba2" else delta(rng, kind)
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    tokens = CONVERTERS[kind](**given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])
        assert not any(np.shares_memory(array, out) for out in tokens if out is not None)


def bad(kind, message, **changes):
    return pytest.param(kind, changes, message, id=message.partition(" got")[0].replace(": expected", "") + "-" + kind)


FINISHED = {"a": None, "A_log": None, "dt_bias": None}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        bad("mamba2", r"x: expected shape \(batch, \[tokens,\] heads, V\), got \(4,\)", x=np.ones(4)),
        bad("mamba2", r"A_log: expected shape \(8,\), got \(2,\)", A_log=np.ones(2)),
        bad("mamba2", r"B: expected shape \(2, 3, key heads, K\), got \(2, 3, 16\)", B=np.ones((2, 3, 16))),
        bad("mamba2", r"B: expected a number of key heads that divides 8 heads, got 3", B=np.ones((2, 3, 3, 16))),
        bad("mamba2", r"dt_bias: expected shape \(8,\), got \(1, 8\)", dt_bias=np.ones((1, 8))),
        bad("mamba2", r"dt_limit: expected 0 <= low <= high, got \(1.0, 0.5\)", dt_limit=(1.0, 0.5)),
        bad("mamba2", r"x: expected real numbers of at most 64 bits, got dtype complex128", x=np.ones(4, complex)),
        bad("gdn", r"q: expected shape \(2, 3, 2, 16\), got \(2, 3, 2, 8\)", q=np.ones((2, 3, 2, 8))),
        bad("gdn", r"b: expected shape \(2, 3, 4\), got \(2, 3, 2\)", b=np.ones((2, 3, 2))),
        bad("gdn", r"v: expected an array that NumPy can read, got list", v=[[1.0], [1.0, 2.0]]),
        bad("kda", r"a: expected shape \(2, 3, 4, 16\), got \(2, 3, 4\)", a=np.ones((2, 3, 4))),
        bad("kda", r"dt_bias: expected shape \(4, 16\), got \(4,\)", dt_bias=np.ones(4)),
        bad("kda", r"lower_bound: expected a negative number, got '-5'", lower_bound="-5"),
        bad("kda", r"clamp_min: expected a negative number, got -inf", clamp_min=-np.inf),
        bad("kda", r"clamp_min: expected None with a lower_bound", clamp_min=-5, lower_bound=-5),
        bad("mamba2", r"A_log: expected A_log or A, got both", A=-np.ones(8)),
        bad("mamba2", r"A_log: expected A_log or A, got none", A_log=None),
        bad("mamba2", r"A: expected numbers <= 0, got 1.0", A_log=None, A=np.ones(8)),
        bad("gdn", r"a: expected a or g, got both", g=-np.ones((2, 3, 4))),
        bad("gdn", r"a: expected a or g, got none", a=None),
        bad("gdn", r"b: expected b or beta, got both", beta=np.ones((2, 3, 4))),
        bad("gdn", r"A_log: expected the decay rate for a, got None", A_log=None),
        bad("kda", r"A_log: expected the decay rate for a, got None", A_log=None, clamp_min=-5),
        # parameters of 8 stored heads, 4 of them active
        bad("gdn", r"A_log: expected shape \(4,\), got \(8,\)", A_log=np.ones(8), dt_bias=np.ones(8)),
        bad("mamba2", r"A_log: expected shape \(8,\), got \(9,\)", A_log=np.ones(9), dt_bias=np.ones(9)),
        bad("gdn", r"A_log: expected None with g", a=None, g=-np.ones((2, 3, 4))),
        bad("gdn", r"g: expected shape \(2, 3, 4\), got \(2, 3\)", **FINISHED, g=-np.ones((2, 3))),
        bad("gdn", r"g: expected log-decays <= 0, got a larger", **FINISHED, g=np.ones((2, 3, 4))),
        bad("kda", r"clamp_min: expected None with g", **FINISHED, g=-np.ones((2, 3, 4, 16)), clamp_min=-5),
        bad(
            "kda",
            r"allow_neg_eigval: expected False with beta",
            b=None,
            beta=np.ones((2, 3, 4)),
            allow_neg_eigval=True,
        ),
    ],
)
def test_bad_input_is_named(rng, kind, changes, message):
    given = mamba2(rng) if kind == "mamba2" else delta(rng, kind)
    with pytest.raises(ValueError, match=f"^{message}"):
        CONVERTERS[kind](**given | changes)


def test_bad_skip_is_named(rng):
    o = rng.standard_normal((2, 8, 80))
    D = rng.standard_normal((8, 80))
    np.testing.assert_array_equal(mamba2_output(o, o, D.ravel()), mamba2_output(o, o, D))
    refused(r"x: expected shape \(2, 8, 80\), got \(2, 8, 64\)", mamba2_output, o, o[..., :64], np.ones(8))
    refused(r"D: expected shape \(8,\) or \(8, 80\), got \(80,\)", mamba2_output, o, o, np.ones(80))
