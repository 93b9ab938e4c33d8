"""Calls of every decode system on every backend: arrays, refusals, threads and constructors."""

import copy
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from decode_systems import SLOTS, WINDOW, head_of
from samples import LAYERS, plan_of, refused, same, states_of, tokens_of
from test_heads import make, system

import sketchssm as ss
from sketchssm.layer.recurrence import Tokens

__all__ = ["make", "system"]  # fixtures


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_outputs_have_the_type_of_v(self, make, layer, dtype, rng):
        tokens = tokens_of(rng, layer, 2, 3)
        head, twin = make(), make()
        output = head.step(*tokens._replace(v=tokens.v.astype(np.float16).astype(dtype)))
        assert output.dtype == dtype
        plain = twin.step(*tokens._replace(v=tokens.v.astype(np.float16).astype(np.float64)))
        np.testing.assert_array_equal(output, plain.astype(dtype))

    def test_strided_inputs(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW)
        strided = Tokens(*(None if x is None else np.asfortranarray(x) for x in tokens))
        backwards = Tokens(*(None if x is None else x[:, ::-1].copy()[:, ::-1] for x in tokens))
        heads = [make() for _ in range(3)]
        first, *others = [head.step(*each) for head, each in zip(heads, (tokens, strided, backwards), strict=True)]
        for other in others:
            np.testing.assert_array_equal(other, first)
        same(heads[0], heads[1])

    @pytest.mark.parametrize("several", [False, True])
    def test_inputs_stay_as_they_were(self, make, backend, layer, several, rng):
        # the engine's type, so that the head makes no copy
        dtype = {"reference": np.float64, "cpu": np.float32}[backend]
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW, dtype).at(np.s_[:, :] if several else np.s_[:, 0])
        kept = [None if x is None else x.copy() for x in tokens]
        head, twin = make(), make()
        for x in tokens:
            if x is not None:
                x.flags.writeable = False
        output = head.step(*tokens)
        for x, was in zip(tokens, kept, strict=True):
            np.testing.assert_array_equal(x, was)
        # the head must not keep a reference, as callers reuse their buffers
        np.testing.assert_array_equal(twin.step(*kept), output)
        for x in kept:
            if x is not None:
                x[...] = -1e3
        same(head, twin)

    def test_outputs_are_the_caller_s_own(self, make, layer, rng):
        head, twin = make(), make()
        first, second = (tokens_of(rng, layer, 2, WINDOW - 1) for _ in range(2))
        output = head.step(*first)
        kept = output.copy()
        twin.step(*first)
        after = head.step(*second)
        np.testing.assert_array_equal(output, kept)
        output[...] = np.nan
        np.testing.assert_array_equal(after, twin.step(*second))
        same(head, twin)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("several", [False, True])
    def test_out_is_filled_and_returned(self, make, layer, dtype, several, rng):
        tokens = tokens_of(rng, layer, 2, 3).at(np.s_[:, :] if several else np.s_[:, 0])
        head, twin = make(), make()
        out = np.full((*tokens.v.shape, 2), np.nan, dtype)[..., 0]  # strided
        assert head.step(*tokens, out=out) is out
        np.testing.assert_array_equal(out, twin.step(*tokens._replace(v=tokens.v.astype(np.float64))).astype(dtype))
        same(head, twin)

    @pytest.mark.parametrize("several", [False, True])
    def test_a_fitting_out_is_written_itself(self, make, backend, layer, several, rng):
        """For a contiguous `out` of the engine's type, also a view; other rows of the viewed array do not change."""
        tokens = tokens_of(rng, layer, 2, WINDOW + 1).at(np.s_[:, :] if several else np.s_[:, 0])
        head, twin = make(), make()
        whole = np.full((4, *tokens.v.shape[1:]), 7.0, np.float64 if backend == "reference" else np.float32)
        assert np.may_share_memory(head.step(*tokens, out=whole[1:3]), whole)
        np.testing.assert_array_equal(whole[1:3], twin.step(*tokens._replace(v=tokens.v.astype(np.float64))))
        np.testing.assert_array_equal(whole[[0, 3]], 7)
        same(head, twin)

    @pytest.mark.parametrize("first", [0, 1])
    def test_out_may_overlap_an_input(self, make, layer, first, rng):
        """It may be v, or rows of it may overlap later rows of v."""
        tokens = tokens_of(rng, layer, 3, WINDOW + 1)
        memory = np.zeros((4, *tokens.v.shape[1:]), np.float32)
        memory[:3] = tokens.v
        head, twin = make(), make()
        want = twin.step(*tokens)
        np.testing.assert_array_equal(head.step(*tokens._replace(v=memory[:3]), out=memory[first : first + 3]), want)
        same(head, twin)


def bad_steps(layer, tokens):
    """Calls that are refused: changed arguments, the error, the start of its message."""
    q, k, v, g, beta = tokens
    batch = v.shape[0]
    yield {"q": q[:, :1]}, ValueError, "q: expected shape"
    yield {"k": k[..., :-1]}, ValueError, "k: expected shape"
    yield {"v": v.swapaxes(-1, -2)}, ValueError, "v: expected shape"
    yield {"g": g[:1]}, ValueError, "g: expected shape"
    yield {"k": k.tolist()}, ValueError, "k: expected an array"
    yield {"q": None}, ValueError, "q: "
    yield {"q": q.astype(np.int32)}, TypeError, "q: expected a real floating-point array, got dtype int32"
    for bad in (1e-3, np.nan, np.inf):
        wrong = g.copy()
        wrong[-1, -1] = bad
        yield {"g": wrong}, ValueError, "g: expected log-decays <= 0"
    if beta is None:
        yield {"beta": np.ones(v.shape[:-1], np.float32)}, ValueError, f"beta: {layer.kind} has no write gate"
    else:
        yield {"beta": None}, ValueError, f"beta: {layer.kind} needs an array"
        for bad in (np.nan, np.inf):
            yield {"beta": np.full_like(beta, bad)}, ValueError, "beta: expected finite numbers, got NaN or infinity"
        yield {"beta": beta > 0}, TypeError, "beta: expected a real floating-point array, got dtype bool"
    yield {"slots": [0]}, ValueError, f"slots: expected shape ({batch},)"
    yield {"slots": [0, SLOTS]}, ValueError, "slots: expected -1 (padding) or 0 to"
    yield {"slots": [-2, 0]}, ValueError, "slots: expected -1 (padding) or 0 to"
    yield {"slots": np.array([0, 2**64 - 1], np.uint64)}, ValueError, "slots: expected -1 (padding) or 0 to"
    yield {"slots": [1, 1]}, ValueError, "slots: expected each slot at most once, got slot 1 twice"
    yield {"slots": [0.0, 1.0]}, TypeError, "slots: expected an array, got list (only integers may come in a list)"
    yield {"slots": np.array([0.0, 1.0])}, ValueError, "slots: expected integers, got dtype float64"
    yield {"out": np.zeros((*v.shape, 1), v.dtype)}, ValueError, "out: expected shape"
    yield {"out": np.zeros(v.shape, np.int64)}, TypeError, "out: expected a real floating-point array"
    yield {"out": np.broadcast_to(np.float32(0), v.shape)}, ValueError, "out: expected a writable array"
    yield {"out": v.tolist()}, TypeError, "out: expected a NumPy, PyTorch or CuPy array, got list"


def bad_loads(state):
    yield (state.swapaxes(-1, -2),), ValueError, "state: expected shape"
    yield (state[0],), ValueError, "state: expected shape"
    yield (state.tolist(),), ValueError, "state: expected shape"
    yield (state.astype(np.int32),), TypeError, "state: expected a real floating-point array"
    yield (state * np.nan,), ValueError, "state: expected finite numbers"
    yield (np.where(state == state.max(), np.inf, state),), ValueError, "state: expected finite numbers"
    yield (state, [0]), ValueError, "slots: expected shape"
    yield (state, [0, SLOTS]), ValueError, "slots: expected -1 (padding) or 0 to"
    yield (state, [2, 2]), ValueError, "slots: expected each slot at most once"


class TestRefusals:
    """The error of a refused call names the argument, and the head is unchanged."""

    @pytest.fixture
    def heads(self, make, layer, rng):
        pair = make(), make()
        before = tokens_of(rng, layer, SLOTS, WINDOW + 2)
        for each in pair:
            each.step(*before)
        return pair

    def still_alike(self, heads, layer, rng):
        head, twin = heads
        np.testing.assert_array_equal(head.position, twin.position)
        np.testing.assert_array_equal(head.state, twin.state)
        tokens = tokens_of(rng, layer, SLOTS, WINDOW + 1)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
        same(head, twin)

    @pytest.mark.parametrize("several", [False, True])
    def test_step(self, heads, layer, several, rng):
        tokens = tokens_of(rng, layer, 2, WINDOW).at(np.s_[:, :] if several else np.s_[:, 0])
        for change, error, message in bad_steps(layer, tokens):
            with pytest.raises(error, match="^" + re.escape(message)):
                heads[0].step(**(tokens._asdict() | change))
        self.still_alike(heads, layer, rng)

    def test_too_large_a_batch_without_slots(self, heads, layer, rng):
        refused("slots: expected an array, as a batch of 6", heads[0].step, *tokens_of(rng, layer, SLOTS + 1, 1))
        self.still_alike(heads, layer, rng)

    def test_load_state(self, heads, layer, rng):
        for arguments, error, message in bad_loads(states_of(rng, layer, 2)):
            with pytest.raises(error, match="^" + re.escape(message)):
                heads[0].load_state(*arguments)
        self.still_alike(heads, layer, rng)

    @pytest.mark.parametrize("slots", [[0, SLOTS], [-2], [1, 1], [[0, 1]]])
    def test_flush_and_reset(self, heads, layer, slots, rng):
        for call in (heads[0].flush, heads[0].reset):
            refused("slots: expected", call, slots)
        self.still_alike(heads, layer, rng)


class TestSharing:
    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_head_is_not_copied(self, make, duplicate):
        head = make()
        name = type(head).__name__
        refused(f"{name}: a head can't be copied or pickled; make a new {name} .*load_s", duplicate, head)

    @pytest.mark.parametrize("backend", ["reference"], indirect=True)
    def test_threads_take_turns(self, make, layer, rng):
        """No call enters the engine while another is in it, and each row's result is that of calls in turn."""
        head, twin = make(), make()
        engine, inside, overlaps = head._engine, [], []
        for name in ("step", "load_state", "flush", "reset"):
            method = getattr(engine, name)

            def watched(*args, method=method):
                inside.append(threading.get_ident())  # an engine may call itself
                time.sleep(1e-4)  # so that another thread may come in, were it let
                overlaps.append(len(set(inside)))
                method(*args)
                inside.pop()

            setattr(engine, name, watched)
        tokens, start = tokens_of(rng, layer, SLOTS, 12), states_of(rng, layer, SLOTS)

        def work(head, slot):
            rows = np.s_[slot : slot + 1]
            head.reset([slot])
            head.load_state(start[rows], slots=[slot])
            outputs = [head.step(*tokens.at((rows, t)), slots=[slot]) for t in range(12)]
            head.flush([slot])
            return np.stack(outputs)

        with ThreadPoolExecutor(SLOTS) as pool:
            got = list(pool.map(lambda slot: work(head, slot), range(SLOTS)))
        assert set(overlaps) == {1}
        np.testing.assert_array_equal(got, [work(twin, slot) for slot in range(SLOTS)])
        same(head, twin)


class TestConstructors:
    @pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
    @pytest.mark.parametrize("name", ["activation_dtype", "output_dtype"])
    def test_settings_of_cuda_are_refused_elsewhere(self, name, backend, rng, monkeypatch):
        monkeypatch.setattr("sketchssm.cuda.missing", lambda: "CuPy is not installed")
        where = "cpu" if backend == "auto" else backend
        why = "CuPy is not installed" if backend == "auto" else f"the head was made with backend='{backend}'"
        message = f"{name}: expected None on backend '{where}', as only 'cuda' has it ({why})"
        for each in ("standard", "replay", "sketch"):
            with pytest.raises(ValueError, match="^" + re.escape(message)):
                head_of(each, plan_of(rng, LAYERS["gdn"]), 2, backend, **{name: "float32"})

    def test_auto_is_a_compiled_backend(self):
        assert ss.StandardHead(LAYERS["gdn"], 2).backend == "cpu"
