"""Settings and calls of heads with exact states for servers: memory, padding, types of states, arguments."""

import re

import numpy as np
import pytest
from samples import LAYERS, gate_of, one_block, plan_of, raw_of, refused, relative, same, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference.recurrence import run

WINDOW = 4
SLOTS = 5
RANKS = np.array([FULL_STATE, 2, 3, 1])
SYSTEMS = {
    "standard": (ss.StandardHead, {"drafts": 3}),
    "replay": (ss.ReplayHead, {"window": WINDOW}),
    "sketch": (ss.SketchHead, {}),
}
EXACT = {"reference": 1e-12, "cpu": 2e-6}


@pytest.fixture(params=SYSTEMS)
def system(request):
    return request.param


@pytest.fixture
def source(system, layer):
    return plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW) if system == "sketch" else layer


@pytest.fixture
def make(system, source, backend):
    """A function that makes equal heads."""
    kind, options = SYSTEMS[system]
    return lambda slots=SLOTS, **more: kind(source, slots, backend, **(options | more))


@pytest.fixture
def parts_of(system, source, backend):
    kind, options = SYSTEMS[system]
    return lambda **more: kind.parts_of(source, backend, **(options | more))


class Copied:
    """An array whose view on the host is a copy, as a file's data set is."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array.copy()


def decode(head, rng, slots, count=WINDOW + 2):
    """Decode some tokens and drafts of some slots; return all outputs."""
    tokens = tokens_of(rng, head.layer, len(slots), count, np.float64)
    outputs = [head.step(*tokens, slots=slots)]
    outputs.append(head.step(*tokens.at(np.s_[:, :3]), slots=slots, draft=True, lengths=[3] * len(slots)))
    head.commit([2] * len(slots), slots)
    return np.concatenate([*outputs, head.step(*tokens.at(np.s_[:, :2]), slots=slots)], axis=1)


class TestParts:
    def test_names(self, make, layer, system, backend):
        names = [part.name for part in make().parts]
        ring = ["keys", "values", "gates"] + ["betas"] * layer.erases
        sketch = ["sketch"] * (system == "sketch" and backend != "reference")
        assert sorted(names) == sorted(["state", *ring, *sketch, "cursor"])
        for parts in ss.StandardHead.parts_of(layer, backend), ss.StandardHead(layer, 1, backend).parts:  # no drafts
            assert [part.name for part in parts] == ["state"]

    @pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
    def test_before_and_after_construction(self, make, parts_of, state_dtype):
        parts = parts_of(state_dtype=state_dtype)
        assert parts == make(state_dtype=state_dtype).parts
        for part in parts:
            item = 2 if part.dtype == "bfloat16" else np.dtype(part.dtype).itemsize
            assert part.bytes == item * np.prod(part.shape, dtype=int)
            assert part.alignment % item == 0


class TestMemory:
    @pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
    def test_one_block_for_all_parts(self, make, parts_of, layer, state_dtype, rng):
        """Parts side by side in a pool with gaps: the same bits, and no gap is written."""
        block, memory = one_block(parts_of(state_dtype=state_dtype), SLOTS)
        used, used_memory = one_block(parts_of(state_dtype=state_dtype), SLOTS)
        for array in used_memory.values():
            array.view(np.uint8 if array.ndim > 1 else array.dtype)[...] = -1 if array.ndim == 1 else 255
        block[used == 0] = 77
        head, twin = make(memory=memory, state_dtype=state_dtype), make(state_dtype=state_dtype)
        start = states_of(rng, layer, SLOTS)
        for each in (head, twin):
            each.load_state(start)
        for _ in range(3):
            seed = int(rng.integers(1000))
            first, second = (decode(each, np.random.default_rng(seed), [3, 0, 4]) for each in (head, twin))
            np.testing.assert_array_equal(first, second)
        same(head, twin)
        assert (block[used == 0] == 77).all()

    def test_bytes_are_the_slot(self, make, parts_of, layer, rng):
        """A copy of the bytes of a slot's parts is a copy of the slot."""
        block, memory = one_block(parts_of(), SLOTS)
        head = make(memory=memory)
        head.load_state(states_of(rng, layer, SLOTS))
        decode(head, rng, [1], WINDOW + 1)
        kept = block[1].copy()
        head.step(*tokens_of(rng, layer, 2, 3), slots=[1, 4])
        block[[1, 4]] = kept
        assert head.position[1] == head.position[4]
        tokens = tokens_of(rng, layer, 1, WINDOW + 1)
        np.testing.assert_array_equal(head.step(*tokens, slots=[1]), head.step(*tokens, slots=[4]))
        np.testing.assert_array_equal(head.state[1], head.state[4])

    def test_tensors(self, make, parts_of, layer, torch, rng):
        tensors = {
            part.name: torch.zeros((SLOTS, *part.shape), dtype=getattr(torch, part.dtype)) for part in parts_of()
        }
        head, twin = make(memory=tensors), make()
        state = torch.from_numpy(states_of(rng, layer, 2))
        for each in (head, twin):
            each.load_state(state, torch.tensor([4, 0]))
            each.copy(torch.tensor([4]), torch.tensor([2], dtype=torch.int32))
        first, second = (
            decode(each, np.random.default_rng(1), torch.tensor([2, 0]).tolist()) for each in (head, twin)
        )
        np.testing.assert_array_equal(first, second)
        assert tensors["state"].numpy().any()

    def test_refusals(self, make, parts_of):
        parts = {part.name: part for part in parts_of()}
        state = parts["state"]
        shape = SLOTS, *state.shape
        whole = np.zeros(shape, state.dtype)
        wide = np.zeros((*shape[:-1], 2 * shape[-1]), state.dtype)
        bytes_ = np.zeros(whole.nbytes + state.alignment, np.uint8)
        start = next(i for i in range(1, state.alignment + 1) if (bytes_.ctypes.data + i) % state.alignment)
        shifted = bytes_[start : start + whole.nbytes].view(state.dtype).reshape(shape)
        frozen = np.zeros(shape, state.dtype)
        frozen.flags.writeable = False
        swapped = whole.astype(whole.dtype.newbyteorder())
        ring = parts["values"]
        overlapping = np.zeros(SLOTS * max(state.bytes, ring.bytes), np.uint8)
        both = {
            name: overlapping[: SLOTS * part.bytes].view(part.dtype).reshape(SLOTS, *part.shape)
            for name, part in (("state", state), ("values", ring))
        }
        for memory, error, message in (
            (np.zeros(3), TypeError, "memory: expected a mapping from names of parts to arrays, got ndarray"),
            ({"states": whole}, ValueError, "memory: expected names of state, "),
            ({"state": whole.tolist()}, TypeError, "memory['state']: expected an array on the host, got list"),
            ({"state": whole[1:]}, ValueError, f"memory['state']: expected shape {shape}, got"),
            ({"state": whole.astype(np.int64)}, TypeError, f"memory['state']: expected {state.dtype}, got int64"),
            ({"state": wide[..., ::2]}, ValueError, "memory['state']: expected slots of"),
            ({"state": np.broadcast_to(whole[0], shape)}, ValueError, "memory['state']: expected slots of"),
            ({"state": shifted}, ValueError, "memory['state']: expected slots aligned to"),
            ({"state": frozen}, ValueError, "memory['state']: expected writable memory, got a read-only array"),
            (both, ValueError, "memory: expected separate memory for every part, but 'state' and 'values' overlap"),
            ({"state": swapped}, TypeError, f"memory['state']: expected {state.dtype}, got {swapped.dtype.str}"),
            ({"state": Copied(whole)}, TypeError, "memory['state']: expected memory that NumPy can view, got test_"),
        ):
            with pytest.raises(error, match="^" + re.escape(message)):
                make(memory=memory)

    def test_arguments_that_overlap_it(self, make, parts_of, layer, backend, rng):
        """`load_state` and inputs of the head's own memory are right, an `out` in it is refused."""
        part = next(part for part in parts_of() if part.name == "state")
        memory = {"state": np.zeros((SLOTS, *part.shape), part.dtype)}
        head, twin = make(memory=memory), make()
        start = states_of(rng, layer, SLOTS)
        for each in (head, twin):
            each.load_state(start)
        head.load_state(head.state[:2], slots=[1, 0])
        np.testing.assert_array_equal(head.state[:3], start[[1, 0, 2]])
        twin.load_state(start[[1, 0]])
        tokens = tokens_of(rng, layer, 3, WINDOW + 1, head.state.dtype)
        shape = 3, layer.heads, layer.value_dim
        own = memory["state"].reshape(-1)[: np.prod(shape)].reshape(shape)  # what the first row's flush overwrites
        if own.dtype == head.state.dtype:
            for t in range(WINDOW + 1):
                one = tokens.at(np.s_[:, t])
                want = twin.step(*one._replace(v=own.copy()))
                np.testing.assert_array_equal(head.step(*one._replace(v=own)), want)
        refused("out: expected memory apart from the head's", head.step, *tokens.at(np.s_[:, 0]), out=own)
        same(head, twin)


class TestPadding:
    @pytest.mark.parametrize("pad", [0, 77, -5, 2**31 - 1])
    def test_other_numbers(self, make, layer, pad, rng):
        """Rows of the number are padding in every call, and a slot of that number stays as it was."""
        head, twin = make(pad_slot=pad), make()
        start, tokens = states_of(rng, layer, 3), tokens_of(rng, layer, 3, 3)
        for each, none in ((head, pad), (twin, -1)):
            slots = [4, none, 1]
            each.load_state(start, slots)
            output = each.step(*tokens, slots=np.array(slots, np.int32))
            np.testing.assert_array_equal(output[1], 0)
            each.step(*tokens, slots=slots, draft=True, lengths=[1, 99, 2])
            each.commit([1, 99, 0], slots)
            each.copy([4, none, 1, none], [2, 3, none, none])
            each.adopt([none])
            each.flush([none, 4])
            each.restore(each.snapshot([1, 4, 2]), [none, 3, none])
        same(head, twin)
        assert not np.any(head.state[0])

    def test_zero(self, make, layer, rng):
        """Calls must name their slots, and calls for all slots leave slot 0 out."""
        head = make(pad_slot=0)
        tokens = tokens_of(rng, layer, 2, 1)
        for call in (lambda: head.step(*tokens), lambda: head.load_state(states_of(rng, layer, 2))):
            refused("slots: expected an array, as slot 0 means padding", call)
        head.step(*tokens, slots=[1, 2])
        head.flush()
        np.testing.assert_array_equal(head.position, 0)
        assert len(head.snapshot()) == SLOTS - 1
        head.reset()
        assert not np.any(head.state)
        refused(r"slots: expected 0 \(padding\) or 0 to 4, got -1", head.step, *tokens, slots=[1, -1])


class TestStateTypes:
    @pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
    def test_a_state_is_rounded_when_it_is_written(self, make, system, backend, layer, state_dtype, rng):
        """Once a window (standard: at every token); outputs of a flush are read before the rounding."""
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16 if state_dtype == "bfloat16" else np.float16)
        head = make(state_dtype=state_dtype)
        state = states_of(rng, layer, SLOTS)
        head.load_state(state)
        state = state.astype(kind).astype(np.float64)
        np.testing.assert_array_equal(head.state.astype(np.float64), state)
        tokens = tokens_of(rng, layer, SLOTS, 3 * WINDOW, np.float64)
        length = 1 if system == "standard" else WINDOW
        unit = float(np.finfo(np.float16).eps) if state_dtype == "float16" else 2.0**-7
        for t in range(0, 3 * WINDOW, length):
            part = tokens.at(np.s_[:, t : t + length])
            output = head.step(*part)
            want, new = run(layer, *part, state=state)
            assert relative(output[:, -1], want[:, -1]) < EXACT[backend]
            state = head.state.astype(np.float64)
            np.testing.assert_array_equal(state, state.astype(kind))
            # rounded to the nearest: at most half a unit in the last place away
            assert (np.abs(state - new) <= 0.5001 * unit * np.abs(new) + 1e-6).all()


class TestDrafts:
    def test_single_tokens_have_no_axis(self, make, layer, rng):
        head, twin = make(), make()
        tokens = tokens_of(rng, layer, 3, 1).at(np.s_[:, 0])
        output = head.step(*tokens, draft=True, lengths=[1, 0, 1])
        want = twin.step(*tokens)
        np.testing.assert_array_equal(output[[0, 2]], want[[0, 2]])
        np.testing.assert_array_equal(output[1], 0)

    def test_raw_gates(self, backend, rng):
        """Raw gate inputs behind a row's drafts may be anything, too."""
        layer = LAYERS["kda"]
        gate = gate_of(rng, layer)
        head, twin = (ss.ReplayHead(layer, 2, backend, window=WINDOW, gate=each) for each in (gate, None))
        tokens, a = tokens_of(rng, layer, 2, 3, np.float64), raw_of(rng, layer, 2, 3)
        exact = tokens._replace(g=gate.log_decays(a))
        a[1, 1:] = np.nan
        for each, given in ((head, tokens._replace(g=a)), (twin, exact)):
            output = each.step(*given, draft=True, lengths=[3, 1])
            each.commit([2, 1])
            each.flush()
            if each is head:
                got = output
        assert relative(got, output) < EXACT[backend]
        assert relative(head.state, twin.state) < EXACT[backend]

    def test_refusals(self, make, system, layer, rng):
        head, twin = make(), make()
        tokens = tokens_of(rng, layer, 2, 3)
        for each in (head, twin):
            each.step(*tokens)
            each.step(*tokens, draft=True, lengths=[2, 1])
        for call, message in (
            (lambda: head.step(*tokens_of(rng, layer, 2, 4), draft=True), "draft: expected 1 to 3 tokens"),
            (lambda: head.step(*tokens.at(np.s_[:, :0]), draft=True), "draft: expected 1 to 3 tokens"),
            (lambda: head.step(*tokens, lengths=[1, 1]), "lengths: expected None without draft=True"),
            (lambda: head.step(*tokens, draft="no"), "draft: expected a bool, got 'no'"),
            (lambda: head.step(*tokens, draft=np.array([1, 0])), "draft: expected a bool, got array([1, 0])"),
            (lambda: head.warmup(drafts=1), "drafts: expected a bool, got 1"),
            (lambda: head.step(*tokens, draft=True, lengths=[1]), "lengths: expected shape (2,), got"),
            (lambda: head.step(*tokens, draft=True, lengths=[4, 1]), "lengths: expected 0 to 3, got 4"),
            (lambda: head.step(*tokens, draft=True, lengths=[-1, 1]), "lengths: expected 0 to 3, got -1"),
            (lambda: head.step(*tokens, draft=True, lengths=np.ones(2)), "lengths: expected integers"),
            (lambda: head.step(*tokens, draft=True, slots=[0, 9]), "slots: expected -1 (padding) or 0 to"),
            (lambda: head.commit([2, 2]), "accepted: expected 0 to 1, the drafted tokens of slot 1"),
            (lambda: head.commit([-1, 0]), "accepted: expected 0 to 2, the drafted tokens of slot 0, got"),
            (lambda: head.commit([1, 1], [0]), "slots: expected shape (2,), got (1,)"),
            (lambda: head.commit([[1], [1]]), "accepted: expected one integer for each row, got shape (2, 1)"),
            (lambda: head.commit(1), "accepted: expected one integer for each row, got shape ()"),
            (lambda: head.commit(np.ones(2)), "accepted: expected integers, got dtype float64"),
            (lambda: head.copy([0], [5]), "dst: expected -1 (padding) or 0 to 4, got 5"),
            (lambda: head.copy([5], [0]), "src: expected -1 (padding) or 0 to 4, got 5"),
            (lambda: head.copy([0, 1], [2, 2]), "dst: expected each slot at most once, got slot 2 twice"),
            (lambda: head.copy([0, 1], [2]), "dst: expected shape (2,), got (1,)"),
            (lambda: head.adopt([1, 1]), "slots: expected each slot at most once"),
        ):
            with pytest.raises(ValueError, match="^" + re.escape(message)):
                call()
        for each in (head, twin):
            each.commit([2, 1])
        same(head, twin)
        assert head.left_out() == 0

    def test_heads_without_drafts(self, layer, backend, rng):
        tokens = tokens_of(rng, layer, 2, 1)
        for head in (
            ss.StandardHead(layer, 2, backend),
            ss.ReplayHead(layer, 2, backend, window=1),
            ss.QuantisedHead(layer, 2, backend),
            ss.CopyReadHead(layer, 2, backend),
        ):
            why = "this head takes no drafts"
            if isinstance(head, ss.StandardHead):
                why = "this StandardHead was made without drafts="
            refused(f"draft: expected False, as {why}", head.step, *tokens, draft=True)
            refused(f"drafts: expected False, as {why}", head.warmup, drafts=True)
            assert head.drafts == 0
        refused("accepted: expected no call, as this StandardHead", ss.StandardHead(layer, 2, backend).commit, [0, 0])
