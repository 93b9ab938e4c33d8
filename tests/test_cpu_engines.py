"""The engines of the CPU backend against those of the reference, call by call, and in the caller's memory."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import REPEATED, one_block, plan_of, reflections, relative, states_of, tokens_of

import sketchssm.cpu.replay as cpu_replay
import sketchssm.cpu.sketch as cpu_sketch
import sketchssm.cpu.standard as cpu_standard
import sketchssm.reference.engines as reference
from sketchssm.arrays.options import EngineOptions
from sketchssm.cpu import workers
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Layer, Tokens
from sketchssm.layer.slots import drafted
from sketchssm.reference.recurrence import run

SLOTS = 4
SYSTEMS = ("standard", "replay", "sketch", "codes", "residual")
RANKS = [FULL_STATE, 1, 4, 3, FULL_STATE, 2]
BITS = [0, 3, 1, 2, 0, 2]
SHAPES = {
    "odd": {"heads": 6, "key_dim": 33, "value_dim": 20, "key_heads": 2},
    "aligned": {"heads": 6, "key_dim": 32, "value_dim": 16, "key_heads": 3},
}
# Float32 rounding: values of size one pass through at most some fifty operations of 2^-24 each.
CLOSE = 2e-5
# The same through a coefficient map (here a ridge of 1e-2), which amplifies the roundings by at most 1 / sqrt(ridge).
SKETCHED = 10 * CLOSE
# Where float32 and float64 round numbers to different codes: a few codes of the largest element.
# tests/test_head_codes.py compares codes that are not halfway.
CODED = 4 / 127
# The same for residuals: the neighbouring code of one bit is off by 1.6 of its row's rms. Most measured: 0.19; 99% of
# the outputs are off by less than 4e-6.
RESIDUAL = 0.4
CODES = {"codes": CODED, "residual": RESIDUAL}


def engines(system, layer, window, phase=None, **options):
    """Return a CPU engine and its twin of the reference; each takes further options of its own."""
    modules = (cpu_standard, cpu_replay, cpu_sketch), (reference,) * 3
    memory = options.pop("memory", None)
    for each, own in zip(modules, ({"memory": memory}, {}), strict=True):
        if system == "standard":
            yield each[0].StandardEngine(layer, SLOTS, EngineOptions(drafts=5, **options, **own))
            continue
        own_options = EngineOptions(phase=phase, **options, **own)
        if system == "replay":
            yield each[1].ReplayEngine(layer, SLOTS, window, own_options)
        else:
            plan = sketch_plan(system, layer, window)
            dtype = plan.sketch_dtype if system in CODES else "float32"
            yield each[2].SketchEngine(plan, SLOTS, dtype, own_options)


def sketch_plan(system, layer, window):
    """Plan of a sketch, of `CODES` in int8."""
    form = {"window": window, "ridge": 1e-2, "sketch_dtype": "int8" if system in CODES else "bfloat16"}
    if system == "residual":
        form |= {"map": "subspace", "residual_bits": BITS}
    return plan_of(np.random.default_rng(7), layer, RANKS, **form)


class Pair:
    """A CPU engine and its twin, which get the same calls."""

    def __init__(self, system, layer, window, **options):
        self.layer = layer
        self.mine, self.twin = engines(system, layer, window, **options)
        self.tolerance = SKETCHED if system == "sketch" else CLOSE
        self.outputs = CODES.get(system, self.tolerance)

    def call(self, name, *arguments):
        for engine in (self.mine, self.twin):
            getattr(engine, name)(*arguments)
        self.check()

    def decode(self, name, tokens, *arguments):
        """Step or draft; compare outputs."""
        got = np.full(tokens.v.shape, np.nan, np.float32)
        want = np.full(tokens.v.shape, np.nan)
        wide = Tokens(*(None if x is None else x.astype(np.float64) for x in tokens))
        getattr(self.mine, name)(tokens, *arguments, got)
        getattr(self.twin, name)(wide, *arguments, want)
        self.close(got, want, self.outputs)
        self.check()

    def close(self, got, want, tolerance):
        got = got.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))

    def check(self):
        np.testing.assert_array_equal(self.mine.position, self.twin.position)
        np.testing.assert_array_equal(self.mine.memory["cursor"], self.twin.memory["cursor"])
        self.close(self.mine.state, self.twin.state, self.tolerance)


some_slots = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)
ACTIONS = ("step", "step", "load_state", "adopt", "reset", "flush", "copy", "rejoin", "draft", "draft", "commit")


def sequence(data, pair, rng):
    """Draw some calls and make them."""
    layer, most = pair.layer, pair.mine.drafts
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=16), "calls"):
        slots = np.array(data.draw(some_slots, "slots"))
        if action == "step":
            pair.decode("step", tokens_of(rng, layer, len(slots), data.draw(st.integers(1, 5), "tokens")), slots)
        elif action == "draft":
            count = data.draw(st.integers(1, most), "drafts")
            lengths = np.array([data.draw(st.integers(0, count), "length") if s >= 0 else 0 for s in slots])
            tokens = tokens_of(rng, layer, len(slots), count)
            tokens.v[np.arange(count) >= lengths[:, None]] = np.nan  # which nothing may read
            pair.decode("draft", tokens, lengths, slots)
            if data.draw(st.booleans(), "commit"):
                pair.call("commit", np.array([data.draw(st.integers(0, n), "accepted") for n in lengths]), slots)
        elif action == "commit":
            counts = np.where(slots >= 0, drafted(pair.twin.memory["cursor"][slots]), 0).astype(np.int64)
            pair.call("commit", counts, slots)
        elif action == "load_state":
            pair.call("load_state", states_of(rng, layer, len(slots)), slots)
        elif action == "copy":
            pair.call("copy", slots, np.array(data.draw(st.permutations(range(SLOTS)), "dst"))[: len(slots)])
        else:
            pair.call(action, slots)
    pair.call("flush", np.arange(SLOTS))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_sequence_of_calls(system, kind, shape):
    """In the engine's memory, and in one block of the caller's memory with random contents."""
    layer = Layer(kind, **SHAPES[shape])

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        window = data.draw(st.sampled_from([2, 3, 5, 12, 16, 20]), "window")
        phase = None if system == "standard" else data.draw(st.none() | st.integers(0, window - 1), "phase")
        if data.draw(st.booleans(), "own memory"):
            pair = Pair(system, layer, window, phase=phase)
        else:
            mine, _ = engines(system, layer, window, phase=phase)
            block, memory = one_block(mine.parts, SLOTS)
            block[...] = rng.integers(0, 256, block.shape)
            pair = Pair(system, layer, window, phase=phase, memory=memory)
            pair.call("load_state", states_of(rng, layer, SLOTS), np.arange(SLOTS))
        sequence(data, pair, rng)

    run()


@pytest.fixture(params=SYSTEMS)
def system(request):
    return request.param


@pytest.fixture(params=SHAPES)
def layer(request, kind):
    return Layer(kind, **SHAPES[request.param])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def outputs(engine, method, tokens, *arguments):
    out = np.full(tokens.v.shape, np.nan, np.float32)
    getattr(engine, method)(tokens, *arguments, out)
    return out


@pytest.mark.parametrize(
    ("before", "accepted", "state_dtype"),
    [*((before, accepted, "float32") for before in (0, 3, 7, 9) for accepted in (0, 2, 5)), (9, 5, "float16")],
)
def test_drafts_are_steps_bit_for_bit(system, layer, before, accepted, state_dtype, rng):
    """Draft outputs are those of steps, and rejected drafts leave no trace, whether or not the row flushes first."""
    window, slots, n = 12, np.array([2, 0]), 5
    (engine, _), (twin, _) = (engines(system, layer, window, state_dtype=state_dtype) for _ in range(2))
    first, drafts, last = (tokens_of(rng, layer, 2, count) for count in (before, n, window))
    for each in (engine, twin):
        each.load_state(states_of(np.random.default_rng(1), layer, 2), slots)
        outputs(each, "step", first, slots)
    got = outputs(engine, "draft", drafts, np.array([n, n]), slots)
    engine.commit(np.array([accepted, accepted]), slots)
    if before + n > window - 1:
        twin.flush(slots)
    if accepted:
        want = outputs(twin, "step", drafts.at(np.s_[:, :accepted]), slots)
        np.testing.assert_array_equal(got[:, :accepted], want)
    np.testing.assert_array_equal(outputs(engine, "step", last, slots), outputs(twin, "step", last, slots))
    np.testing.assert_array_equal(engine.state, twin.state)


def test_threads_share_drafts(system, layer, monkeypatch, rng):
    """Results are the same bits whether one thread or several do the work."""
    results = []
    first, drafts = tokens_of(rng, layer, 3, 8), tokens_of(rng, layer, 3, 5)
    slots, lengths = np.array([2, -1, 0]), np.array([5, 0, 3])
    for small in (workers.SMALL, 0):
        monkeypatch.setattr(workers, "SMALL", small)
        engine, _ = engines(system, layer, 12)
        outputs(engine, "step", first, slots)
        got = outputs(engine, "draft", drafts, lengths, slots)
        engine.commit(np.array([4, 0, 1]), slots)
        results.append((got, outputs(engine, "step", first, slots), engine.state.copy()))
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


@pytest.mark.parametrize("keys", REPEATED)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_windows_of_reflections_are_as_exact_as_single_tokens(kind, keys, rng):
    """Folds by matrices erred by up to 30 times as much as standard decode, which errs by single roundings."""
    layer, slot = Layer(kind, 1, 128, 128, 1), np.zeros(1, np.int64)
    tokens = reflections(rng, layer, keys, 1024)
    want = run(layer, *(x.astype(np.float64) for x in tokens))[1]
    errors = []
    for window in (0, 4, 16, 64):
        make = cpu_replay.ReplayEngine if window else cpu_standard.StandardEngine
        engine = make(layer, 1, *((window,) if window else ()))
        engine.step(tokens, slot, np.empty_like(tokens.v))
        engine.flush(slot)
        errors.append(relative(engine.state, want))
    assert max(errors) < 2 * errors[0]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_sketches_after_windows_with_betas_above_one(kind, rng):
    """A flush that folds token by token stores the sketch of the state that it leaves."""
    layer, slots = Layer(kind, 2, 16, 16, 2), np.arange(2)
    plan = plan_of(rng, layer, [4, 3], window=4)
    tokens = tokens_of(rng, layer, 2, 18)
    tokens = tokens._replace(beta=2 * tokens.beta)
    out, want = np.empty_like(tokens.v), np.empty(tokens.v.shape)
    cpu_sketch.SketchEngine(plan, 2, "float32").step(tokens, slots, out)
    reference.SketchEngine(plan, 2).step(tokens, slots, want)
    assert relative(out, want) < 1e-5  # float32 sketches of well-conditioned states


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_a_window_have_no_bias(kind, rng):
    """Decays near 1 lose digits when they are multiplied. States that remember for thousands of tokens would drift."""
    layer = Layer(kind, 2, 128, 64)
    engine = cpu_replay.ReplayEngine(layer, 16, 16)
    slots, shape, start = np.arange(16), (16, 16), states_of(rng, layer, 16)
    engine.load_state(start, slots)
    zeros = {name: np.zeros((*shape, *tail), np.float32) for name, tail in layer.token_shapes().items()}
    tokens = Tokens(**({"beta": None} | zeros | {"g": -1e-4 * rng.random(zeros["g"].shape, np.float32)}))
    engine.step(tokens, slots, np.empty_like(tokens.v))
    decay = np.exp(tokens.g.astype(np.float64).sum(1))
    decay = decay[:, :, None] if layer.channel_decays else decay[..., None, None]
    bias = float((engine.state / (start * decay) - 1).mean())
    assert abs(bias) < 2e-8  # roundings of either sign cancel, as of 32 decays at least; those of 16 factors have 7e-8
