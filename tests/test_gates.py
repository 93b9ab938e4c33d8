"""Heads that take raw gate inputs, against heads that take log-decays."""

import re

import numpy as np
import pytest
from decode_systems import head_of
from samples import LAYERS, gate_of, plan_of, raw_of, refused, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.models import kda_inputs

LAYER = LAYERS["kda"]
SLOTS, WINDOW = 4, 3
SYSTEMS = ("standard", "replay", "sketch")
WIDE = {"reference": np.float64, "cpu": np.float32}


def make(system, backend, layer=LAYER, **options):
    plan = plan_of(np.random.default_rng(7), layer, [2, FULL_STATE, 3, 1], window=WINDOW)
    return head_of(system, plan, SLOTS, backend, **options)


class TestFormulas:
    @pytest.mark.parametrize("bound", [None, -5.0])
    def test_as_a_layer_computes_them(self, bound, rng):
        """Bitwise the log-decays of `models.kda_inputs`."""
        gate, a = gate_of(rng, LAYER, bound), raw_of(rng, LAYER, 2, 3)
        q, k, v, _, beta = tokens_of(rng, LAYER, 2, 3)
        flat = {"A_log": gate.A_log[None, None, :, None], "dt_bias": gate.dt_bias.reshape(-1)}
        want = kda_inputs(q, k, v, a.astype(np.float64), beta, **flat, lower_bound=bound).g
        np.testing.assert_array_equal(gate.log_decays(a), want)
        np.testing.assert_array_equal(ss.GateInput(**flat, lower_bound=bound).log_decays(a), want)

    @pytest.mark.parametrize("bound", [None, -5.0])
    def test_extremes(self, bound):
        gate = ss.GateInput([0.0], [[0.0] * 5], bound)
        least, half = (-np.inf, -np.log(2)) if bound is None else (bound, bound / 2)
        with np.errstate(invalid="ignore"):
            got = gate.log_decays([[-np.inf, -1e30, 0.0, np.inf, np.nan]])
        np.testing.assert_allclose(got, [[0, 0, half, least, np.nan]], rtol=1e-15)
        if bound is not None:  # without a rate
            np.testing.assert_array_equal(
                ss.GateInput(None, gate.dt_bias, bound).log_decays([[1.0] * 5]), gate.log_decays([[1.0] * 5])
            )

    def test_parameters_of_any_framework(self, torch, rng):
        gate = gate_of(rng, LAYER)
        rate_log, bias = gate.A_log.astype(np.float32), gate.dt_bias.astype(np.float32)
        other = ss.GateInput(torch.nn.Parameter(torch.from_numpy(rate_log)), torch.from_numpy(bias))
        np.testing.assert_array_equal(other.A_log, rate_log)
        np.testing.assert_array_equal(other.dt_bias, bias)

    def test_shards(self, rng):
        gate, a = gate_of(rng, LAYER, -5.0), raw_of(rng, LAYER, 2, 3)
        parts = [gate.shard(rank, 2) for rank in range(2)]
        got = [part.log_decays(a[:, :, heads]) for part, heads in zip(parts, (slice(0, 2), slice(2, 4)), strict=True)]
        np.testing.assert_array_equal(np.concatenate(got, axis=2), gate.log_decays(a))
        refused("world: expected a divisor of heads=4, got 3", gate.shard, 0, 3)

    def test_ends_of_the_ranges(self):
        """A rate of 40, a bias and a bound at float32's largest number, one head, one channel."""
        largest = np.finfo(np.float32).max
        gate = ss.GateInput(np.float64(-40), [[-largest]], np.float32(-largest))
        assert (gate.A_log.tolist(), gate.dt_bias.tolist()) == ([-40], [[-largest]])
        assert type(gate.lower_bound) is float
        assert gate.lower_bound == -largest

    def test_nobody_changes_them(self, rng):
        rate_log = np.zeros(4)
        gate = ss.GateInput(rate_log, np.zeros((4, 6)))
        rate_log[0] = 1
        assert gate.A_log[0] == 0
        with pytest.raises(ValueError, match="read-only"):
            gate.dt_bias[0] = 1
        with pytest.raises(AttributeError):
            gate.lower_bound = -1.0


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "kind", "message"),
        [
            ({"A_log": np.zeros((2, 2))}, ValueError, "A_log: expected shape (heads,), got (2, 2)"),
            ({"A_log": [0, 0, np.nan, 0.0]}, ValueError, "A_log: expected numbers from -40 to 40, got nan"),
            ({"A_log": [0, 0, 41.0, 0]}, ValueError, "A_log: expected numbers from -40 to 40, got 41"),
            ({"A_log": np.zeros(4, int)}, TypeError, "A_log: expected a real floating-point array, got dtype int64"),
            ({"dt_bias": np.zeros((4, 0))}, ValueError, "dt_bias: expected shape (4, K), got (4, 0)"),
            ({"dt_bias": np.zeros(6)}, ValueError, "dt_bias: expected shape (4, K), got (6,)"),
            ({"dt_bias": np.full((4, 6), 1e39)}, ValueError, "dt_bias: expected finite float32 numbers"),
            (
                {"dt_bias": np.zeros((3, 6))},
                ValueError,
                "dt_bias: expected shape (4, K), got (3, 6); A_log has 4 heads",
            ),
            ({"A_log": None}, ValueError, "A_log: expected the decay rate of each head, or a lower_bound and"),
            ({"A_log": None, "lower_bound": -5.0, "dt_bias": np.zeros(24)}, ValueError, "A_log: expected the decay"),
            ({"lower_bound": 0.0}, ValueError, "lower_bound: expected a negative number, got 0.0"),
        ],
    )
    def test_parameters(self, change, kind, message):
        with pytest.raises(kind, match=r"^" + re.escape(message)):
            ss.GateInput(**({"A_log": np.zeros(4), "dt_bias": np.zeros((4, 6))} | change))

    @pytest.mark.parametrize("system", SYSTEMS)
    @pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
    def test_layers(self, system, backend, rng):
        for kind in ("mamba2", "gdn"):
            refused(f"gate: expected None for {kind};", make, system, backend, LAYERS[kind], gate=gate_of(rng, LAYER))
        refused("gate: expected A_log and dt_bias of", make, system, backend, gate=gate_of(rng, Layer("kda", 4, 7, 5)))
        refused("gate: expected a GateInput or None, got", make, system, backend, gate=(np.zeros(4), np.zeros((4, 6))))


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
class TestHeads:
    def test_log_decays_made_before(self, backend, system, bound, rng):
        """Outputs, states and cursors are bitwise equal."""
        gate = gate_of(rng, LAYER, bound)
        head, twin = make(system, backend, gate=gate), make(system, backend)
        tokens, a = tokens_of(rng, LAYER, 3, 3 * WINDOW + 1, np.float64), raw_of(rng, LAYER, 3, 3 * WINDOW + 1)
        a[0, 1], a[1, 2, 0] = np.inf, -1e4  # all forgotten, or kept
        start, slots = states_of(rng, LAYER, 3), [2, -1, 0]
        for each, g in ((head, a), (twin, gate.log_decays(a).astype(WIDE[backend]))):
            each.load_state(start, slots=slots)
            each.step(*tokens.at(np.s_[:, :-1])._replace(g=g[:, :-1]), slots=slots)
        for each, g in ((head, a), (twin, gate.log_decays(a).astype(WIDE[backend]))):
            each.last = each.step(*tokens.at(np.s_[:, -1])._replace(g=g[:, -1]), slots=slots)
        np.testing.assert_array_equal(head.last, twin.last)
        np.testing.assert_array_equal(head.position, twin.position)
        for each in (head, twin):
            each.flush()
        np.testing.assert_array_equal(head.state, twin.state)

    def test_nan(self, backend, system, bound, rng):
        """It is ignored in a padding row. Elsewhere outputs are NaN until the reset, as for NaN in v."""
        head = make(system, backend, gate=gate_of(rng, LAYER, bound))
        tokens, a = tokens_of(rng, LAYER, 2, WINDOW), raw_of(rng, LAYER, 2, WINDOW)
        a[1] = np.nan
        output = head.step(*tokens._replace(g=a), slots=[1, -1])
        assert np.isfinite(output).all()
        assert np.isnan(head.step(*tokens._replace(g=a), slots=[1, 2])[1]).any()
        head.reset([2])
        assert np.isfinite(head.step(*tokens._replace(g=a), slots=[2, -1])).all()
