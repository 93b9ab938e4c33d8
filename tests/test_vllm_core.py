"""The plugin's logic without vLLM: a small engine with vLLM's pool and batches, against each request's recurrence."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import LAYERS, plan_of, relative, tokens_of

torch = pytest.importorskip("torch")

from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens  # noqa: E402
from sketchssm.reference.recurrence import run  # noqa: E402
from sketchssm.serving.batches import KnownTokens, PrefillRows, RowBuffers, split_rows  # noqa: E402
from sketchssm.serving.blocks import BlockLayout  # noqa: E402
from sketchssm.serving.decoder import LayerDecoder, Recipe  # noqa: E402

WINDOW = 5
RANKS = np.array([2, FULL_STATE, 3, FULL_STATE])
BLOCKS = 12
LENGTH = 40
GROUPS = 2
# The reference computes in float64. A request has 40 tokens, each of some ten roundings of 1e-16.
TOLERANCE = 1e-11


def recipe_of(system, kind, drafts, phase):
    source = LAYERS[kind]
    if system == "sketch":
        source = plan_of(np.random.default_rng(7), source, RANKS, window=WINDOW)
    return Recipe(system, source, "reference", WINDOW, drafts, phase, activation_dtype=None)


def oracle(layer, tokens, state=None):
    """Outputs ``(tokens, heads, V)`` and last state ``(heads, V, K)`` of one request by the plain recurrence."""
    rows = (None if x is None else x[None] for x in tokens)
    out, final = run(layer, *rows, state=None if state is None else state[None])
    return out[0], final[0]


@dataclass(eq=False)
class Request:
    """A request: its inputs in each group's layer, and how far it is."""

    tokens: list
    prompt: int
    blocks: list = field(default_factory=list)
    computed: int = 0
    accepted: int = 1  # of its last draft


class Engine:
    """A pool of blocks that two groups of layers share, with vLLM's order of rows; blocks nobody has hold NaN."""

    def __init__(self, system, kind, drafts, phases):
        self.layer, self.drafts = LAYERS[kind], drafts
        self.sketched = system == "sketch"
        recipes = [recipe_of(system, kind, drafts, 3 * g if phases else None) for g in range(GROUPS)]
        start = int(np.prod(self.layer.state_shape)) * 8
        layout = BlockLayout.behind(start, recipes[0].parts())
        page = -(-(start + layout.bytes) // 64) * 64
        self.raw = torch.zeros(BLOCKS, page, dtype=torch.uint8)
        self.states = self.raw[:, :start].view(torch.float64).unflatten(1, self.layer.state_shape)
        side = self.raw[:, start : start + layout.bytes] if layout.bytes else None
        self.decoders = [LayerDecoder(recipe, self.states, side, layout) for recipe in recipes]
        self.buffers = [RowBuffers(BLOCKS, drafts, torch.device("cpu")) for _ in recipes]
        self.raw[1:] = 255  # all floats are NaN, all cursors wrong
        self.free = list(range(1, BLOCKS))
        self.running = []
        self.known = [KnownTokens() for _ in recipes]

    def release(self, request):
        self.free += request.blocks
        for block in request.blocks:
            self.raw[block] = 255
        request.blocks, request.computed, request.accepted = [], 0, 1

    def step(self, rows):
        """Run rows (request, tokens, drafts or -1, correct drafts), in vLLM's order, and check what comes out."""
        order = sorted(range(len(rows)), key=lambda i: self._region(*rows[i][:2]))
        rows = [rows[i] for i in order]
        lengths = np.array([count for _, count, *_ in rows])
        computed = np.array([request.computed for request, *_ in rows])
        prefilling = np.array([request.computed < request.prompt for request, *_ in rows])
        drafted = np.array([draft for *_, draft, _ in rows])
        split = split_rows(lengths, computed, prefilling, self.drafts, drafted)
        for group in range(GROUPS):
            self._run(group, rows, split, lengths)
        for request, count, draft, correct in rows:
            kept = 1 + correct if draft >= 0 else count
            request.computed += kept
            request.accepted = kept if draft >= 0 else 1  # vLLM counts what it has sampled
        if split.whole.size:
            for group, known in enumerate(self.known):
                blocks = torch.tensor([rows[i][0].blocks[group] for i in split.whole])
                known.note(blocks, torch.from_numpy(lengths[split.whole]), BLOCKS)

    def _region(self, request, count):
        if request.computed == 0:
            return 3
        if count > 1 + self.drafts:
            return 2
        return 1 if request.computed < request.prompt else 0

    def _run(self, group, rows, split, lengths):
        decoder, n = self.decoders[group], split.decodes
        slots = torch.tensor([request.blocks[group] for request, *_ in rows], dtype=torch.int32)
        accepted = torch.tensor([request.accepted for request, *_ in rows], dtype=torch.int32)
        accepted = self.known[group].kept(accepted, slots)
        wrong = np.random.default_rng(5)
        if split.fresh.size:
            decoder.restart(slots[torch.from_numpy(split.fresh)])
        if n:
            parts = []
            for request, count, draft, correct in rows[:n]:
                own = request.tokens[group].at(np.s_[0, request.computed : request.computed + count])
                if draft > correct:
                    bad = tokens_of(wrong, self.layer, 1, draft - correct, np.float64).at(np.s_[0])
                    own = Tokens(*(None if x is None else np.concatenate([x[: 1 + correct], y])
                                   for x, y in zip(own, bad, strict=True)))  # fmt: skip
                parts.append(own)
            joined = Tokens(*(None if x[0] is None else torch.from_numpy(np.concatenate(x)) for x in zip(*parts)))  # noqa: B905
            out = torch.full(tuple(joined.v.shape), torch.nan, dtype=torch.float64)
            decode = self.buffers[group].fill(slots[:n], lengths[:n], accepted[:n] if self.drafts else None)
            assert decode.tokens == split.decode_tokens
            decoder.decode(*joined, decode, out)
            first = 0
            for request, count, draft, correct in rows[:n]:
                kept = 1 + correct if draft >= 0 else count
                self._compare(group, request, out[first : first + kept].numpy(), kept)
                first += count
        if split.prefills:
            prefill = PrefillRows.behind(split, slots, accepted if self.drafts else None)
            decoder.settle(prefill)
            for request, count, *_ in rows[n:]:
                place = self.states[request.blocks[group]].numpy()
                chunk = request.tokens[group].at(np.s_[0, request.computed : request.computed + count])
                out, place[:] = oracle(self.layer, chunk, place if request.computed else None)
                self._compare(group, request, out, count, exact=True)
            decoder.adopt(prefill)

    def _compare(self, group, request, out, count, exact=False):
        want, _ = oracle(self.layer, request.tokens[group].at(np.s_[0, : request.computed + count]))
        heads = slice(None) if exact or not self.sketched else RANKS == FULL_STATE
        assert relative(out[:, heads], want[request.computed :][:, heads]) < TOLERANCE

    def check_states(self):
        """Flush everything and compare the states with the recurrence's."""
        for group in range(GROUPS):
            for request in self.running:
                if not request.computed:
                    continue
                slots = torch.tensor([request.blocks[group]], dtype=torch.int32)
                accepted = torch.tensor([request.accepted], dtype=torch.int32) if self.drafts else None
                if accepted is not None:
                    accepted = self.known[group].kept(accepted, slots)
                self.decoders[group].settle(PrefillRows(slots, slots, accepted))
                _, want = oracle(self.layer, request.tokens[group].at(np.s_[0, : request.computed]))
                assert relative(self.states[slots[0]].numpy(), want) < TOLERANCE


def serve(data, system, kind, drafts, phases):
    engine = Engine(system, kind, drafts, phases)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    waiting = []
    for _ in range(data.draw(st.integers(1, 14), "steps")):
        if len(engine.free) >= GROUPS and data.draw(st.booleans(), "join"):
            tokens = [tokens_of(rng, engine.layer, 1, LENGTH, np.float64) for _ in range(GROUPS)]
            request = waiting.pop() if waiting else Request(tokens, data.draw(st.integers(1, 12), "prompt"))
            request.blocks = [engine.free.pop(0) for _ in range(GROUPS)]
            engine.running.append(request)
        rows = []
        for request in list(engine.running):
            event = data.draw(st.sampled_from(["run", "run", "run", "run", "wait", "preempt", "leave"]), "event")
            if request.computed >= LENGTH - 1 - drafts:
                event = "leave"
            if event in ("preempt", "leave"):
                engine.running.remove(request)
                if event == "preempt":  # vLLM computes prompt and outputs again
                    waiting.append(request)
                engine.release(request)
            elif event == "run":
                left = request.prompt - request.computed
                if left > 0:
                    rows.append((request, data.draw(st.integers(1, left), "chunk"), -1, 0))
                elif drafts and data.draw(st.booleans(), "draft"):
                    draft = data.draw(st.integers(1, drafts), "drafts")
                    rows.append((request, 1 + draft, draft, data.draw(st.integers(0, draft), "correct")))
                elif data.draw(st.integers(0, 9), "again") == 0:  # known tokens, as after a preemption
                    rows.append((request, data.draw(st.integers(1, 1 + drafts), "chunk"), -1, 0))
                else:
                    rows.append((request, 1, -1, 0))
        if rows:
            engine.step(rows)
    engine.check_states()


MANY = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("system", ("standard", "replay", "sketch"))
@MANY
@given(data=st.data())
def test_serves_requests_like_their_own_recurrence(system, kind, data):
    """Requests join, are prefilled in chunks, decode, are preempted and leave; blocks are used again."""
    serve(data, system, kind, 0, data.draw(st.booleans(), "phases") and system != "standard")


@pytest.mark.parametrize("kind", ("mamba2", "gdn"))
@pytest.mark.parametrize("system", ("standard", "replay", "sketch"))
@MANY
@given(data=st.data())
def test_serves_drafts_like_their_own_recurrence(system, kind, data):
    """The same with drafts, of which some are accepted, in batches with rows of any number of tokens."""
    serve(data, system, kind, 3, data.draw(st.booleans(), "phases") and system != "standard")


@pytest.mark.parametrize("form", ({"sketch_dtype": "int8"}, {"map": "subspace", "residual_bits": 2}, {}))
def test_plans_of_all_forms(rng, form):
    """A head on the blocks of a pool gives what a head on memory of its own gives."""
    layer = Layer("gdn", 4, 16, 32, 2)
    plan = plan_of(rng, layer, np.resize([4, 2, FULL_STATE], layer.heads), window=WINDOW, **form)
    recipe = Recipe("sketch", plan, "cpu", activation_dtype=None)
    layout = BlockLayout.behind(0, recipe.parts())
    pool = torch.zeros(3, layout.state_bytes + layout.bytes + 64, dtype=torch.uint8)
    states = pool[:, : layout.state_bytes].view(torch.float32).view(3, *layer.state_shape)
    decoder = LayerDecoder(recipe, states, pool[:, layout.state_bytes :], layout)
    own = recipe.head(3)
    for head in (decoder.head, own):
        head.reset(np.array([1, 2]))
    tokens = tokens_of(rng, layer, 2, 2 * WINDOW)
    for i in range(2 * WINDOW):
        step = [None if x is None else np.ascontiguousarray(x[:, i], np.float32) for x in tokens]
        found, wanted = (head.step(*step, slots=np.array([1, 2])) for head in (decoder.head, own))
        assert np.array_equal(found, wanted)
