"""Heads as PyTorch operators: in eager mode, under ``torch.compile``, and by the rules that PyTorch checks itself."""

import gc

import numpy as np
import pytest
from samples import LAYERS, plan_of, refused, same, states_of, tokens_of

import sketchssm as ss

torch = pytest.importorskip("torch")

DecodeLayer = ss.torch.DecodeLayer

SLOTS, BATCH, WINDOW, COUNT = 6, 3, 4, 10
ROWS = np.array([4, 0, 2])


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.compiler.reset()  # else a test's graphs count towards the limit of recompilations of the next
    with torch.no_grad():
        yield


@pytest.fixture
def make(rng):
    """Makes equal sketch heads of one layer."""
    plans = {}

    def head(layer, backend="reference"):
        if layer not in plans:
            plans[layer] = plan_of(rng, layer, window=WINDOW)
        return ss.SketchHead(plans[layer], SLOTS, backend)

    return head


def tensors_of(tokens):
    """The same memory as tensors."""
    return [None if x is None else torch.from_numpy(x) for x in tokens]


def keeping(made):
    """A compiler that keeps the graphs in a list, and runs what PyTorch's own passes make of them."""

    def keep(graph, examples):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    return keep


def compiled(function):
    """The function in one graph, and a list of one entry a compilation."""
    made = []
    return torch.compile(function, fullgraph=True, backend=keeping(made)), made


def test_eager(make, layer, backend, rng):
    """The module does what the head's own methods do."""
    layered, twin = DecodeLayer(make(layer, backend)), make(layer, backend)
    tokens, states = tokens_of(rng, layer, BATCH, COUNT), states_of(rng, layer, BATCH)
    layered.load_state(torch.from_numpy(states), torch.from_numpy(ROWS))
    twin.load_state(states, ROWS)
    for t in range(COUNT):
        given = tokens.at(np.s_[:, t])
        want = twin.step(*given, slots=ROWS)
        out = torch.empty(want.shape) if t % 2 else None
        got = layered(*tensors_of(given), torch.from_numpy(ROWS), out=out)
        np.testing.assert_array_equal(got, want)
        assert out is None or got is out
    layered.flush(torch.tensor([4]))
    twin.flush([4])
    layered.reset(torch.tensor([0]))
    twin.reset([0])
    same(layered.head, twin)
    several = layered(*tensors_of(tokens))  # a tokens axis, and no slots
    np.testing.assert_array_equal(several, twin.step(*tokens))


def test_gradients(make, rng):
    """Under enabled gradients, calls refuse tensors that require them: eager ones, and compiled ones when traced."""
    layer = LAYERS["gdn"]
    layered, twin = DecodeLayer(make(layer)), make(layer)
    tokens = tensors_of(tokens_of(rng, layer, BATCH, 1).at(np.s_[:, 0]))
    state, out = torch.zeros(1, *layer.state_shape, requires_grad=True), torch.zeros_like(tokens[2])
    tokens[0].requires_grad_()
    calls = [(lambda: layered(*tokens), "q"), (lambda: layered(*tokens, out=out), "q")]
    calls.append((lambda: layered.load_state(state), "state"))
    for call, name in calls:
        message = f"{name}: expected a tensor without gradients"
        with torch.enable_grad():
            with pytest.raises(ValueError, match=f"^{message}"):
                call()
            with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
                compiled(call)[0]()
    given = [x.detach() for x in tokens]
    np.testing.assert_array_equal(compiled(layered)[0](*tokens), twin.step(*given))
    with torch.enable_grad():
        np.testing.assert_array_equal(compiled(layered)[0](*given), twin.step(*given))


def test_compiled_calls_stay_in_order(make, layer, backend, rng):
    """Calls in one graph see each other's states, also those without outputs, and those whose outputs nobody uses."""
    layered, twin = DecodeLayer(make(layer, backend)), make(layer, backend)
    tokens, states = tokens_of(rng, layer, BATCH, 3 * COUNT), states_of(rng, layer, BATCH)
    rows = torch.from_numpy(ROWS)

    def model(one, two, three, states, rows, out):
        layered.load_state(2 * states, rows)
        a = layered(*one, rows)
        layered(*two, rows)
        layered.flush(rows[:1])
        layered(*three, rows, out=out)
        out += a
        return layered(*three, rows) * 2

    run, made = compiled(model)
    for t in range(0, 3 * COUNT, 3):
        given = [tokens.at(np.s_[:, t + i]) for i in range(3)]
        out = torch.full(given[0].v.shape, torch.nan)
        got = run(*map(tensors_of, given), torch.from_numpy(states), rows, out)
        twin.load_state(2 * states, ROWS)
        a = twin.step(*given[0], slots=ROWS)
        twin.step(*given[1], slots=ROWS)
        twin.flush(ROWS[:1])
        np.testing.assert_array_equal(out, twin.step(*given[2], slots=ROWS) + a)
        np.testing.assert_array_equal(got, 2 * twin.step(*given[2], slots=ROWS))
    assert len(made) == 1
    same(layered.head, twin)


def test_drafts_in_a_graph(make, layer, backend, rng):
    """A draft with lengths, a commit of what a comparison in the graph accepts, and copies of slots."""
    layered, twin = DecodeLayer(make(layer, backend)), make(layer, backend)
    rows, length = torch.from_numpy(ROWS), 2

    def verify(draft, lengths, chosen, rows, src, dst):
        o = layered(*draft, rows, draft=True, lengths=lengths)
        accepted = torch.minimum((o.sum((2, 3)) > chosen).int().cumprod(1).sum(1), lengths)
        layered.commit(accepted, rows)
        layered.copy(src, dst)
        return o, accepted

    run, made = compiled(verify)
    src, dst = torch.tensor([4, 2]), torch.tensor([1, -1])
    kept = set()
    for _ in range(COUNT):
        draft, chosen = tokens_of(rng, layer, BATCH, length), torch.zeros(BATCH, length)
        lengths = torch.from_numpy(rng.integers(0, length + 1, BATCH))
        o, accepted = run(tensors_of(draft), lengths, chosen, rows, src, dst)
        np.testing.assert_array_equal(o, twin.step(*draft, slots=ROWS, draft=True, lengths=lengths))
        twin.commit(accepted, ROWS)
        twin.copy([4], [1])
        kept |= set(accepted.tolist())
        token = tokens_of(rng, layer, BATCH, 1).at(np.s_[:, 0])
        np.testing.assert_array_equal(layered(*tensors_of(token), rows), twin.step(*token, slots=ROWS))
    assert kept == {0, 1, 2}
    assert len(made) == 1
    same(layered.head, twin)


def test_several_layers_in_one_graph(make, rng):
    """Each has a name and a head of its own; slots may be computed in the graph."""
    layers = [LAYERS["gdn"], LAYERS["kda"]]
    model = torch.nn.ModuleDict({str(i): DecodeLayer(make(layer), f"layers.{i}") for i, layer in enumerate(layers)})
    twins = [make(layer) for layer in layers]
    tokens = [tokens_of(rng, layer, BATCH, COUNT) for layer in layers]

    def both(one, two, rows):
        return model["0"](*one, rows + 1), model["1"](*two, rows.to(torch.int32))

    run, _ = compiled(both)
    for t in range(COUNT):
        given = [x.at(np.s_[:, t]) for x in tokens]
        got = run(*map(tensors_of, given), torch.from_numpy(ROWS))
        for i in range(2):
            np.testing.assert_array_equal(got[i], twins[i].step(*given[i], slots=ROWS + 1 - i))
    for i in range(2):
        same(model[str(i)].head, twins[i])
    assert not model.state_dict()


def test_batches_of_any_size_share_a_graph(make, backend, rng):
    layer = LAYERS["mamba2"]
    layered, twin = DecodeLayer(make(layer, backend)), make(layer, backend)
    run, made = compiled(lambda given, rows: layered(*given, rows))
    for batch in (2, 3, 5, 1, SLOTS):
        given = tokens_of(rng, layer, batch, 1)
        tensors, rows = tensors_of(given.at(np.s_[:, 0])), torch.arange(batch)
        for x in (*tensors, rows):
            if x is not None and batch > 1:
                torch._dynamo.mark_dynamic(x, 0)
        want = twin.step(*given.at(np.s_[:, 0]), slots=np.arange(batch))
        np.testing.assert_array_equal(run(tensors, rows), want)
    assert len(made) <= 2  # one for all sizes, and one for a single row, which PyTorch specialises
    same(layered.head, twin)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of PyTorch's own modules, at their import
def test_generated_code_copies_nothing(make, rng):
    """Inductor calls the operators on the memory they are given: neither `order` nor `out` is copied."""
    from torch._inductor.utils import run_and_get_code

    layer = LAYERS["gdn"]
    layered, twin = DecodeLayer(make(layer)), make(layer)
    tokens = tokens_of(rng, layer, BATCH, 2)
    given = [tensors_of(tokens.at(np.s_[:, t])) for t in range(2)]
    out = torch.empty(given[0][2].shape)

    @torch.compile(fullgraph=True)
    def model(one, two, out):
        layered(*one, out=out)
        return layered(*two) + 1

    got, (code, *_) = run_and_get_code(model, *given, out)
    np.testing.assert_array_equal(out, twin.step(*tokens.at(np.s_[:, 0])))
    np.testing.assert_array_equal(got, twin.step(*tokens.at(np.s_[:, 1])) + 1)
    assert code.count("torch.ops.sketchssm.step_out.default(") == 1
    assert code.count("= torch.ops.sketchssm.step.default(") == 1
    assert "clone" not in code
    assert "copy_(" not in code


def repeatable(layered, layer, rng):
    """Arguments of each operator with which it can be called again and again with the same outcome."""
    head = layered.order, layered.name
    token = tensors_of(tokens_of(rng, layer, BATCH, 1).at(np.s_[:, 0]))
    rows, none, draft = torch.from_numpy(ROWS), torch.zeros(BATCH, dtype=torch.int64), {"draft": True}
    token = [None if x is None else x[:, None] for x in token]
    return {
        "step": ((*head, *token, rows), draft),
        "step_out": ((*head, *token, rows, torch.zeros(token[2].shape)), draft), "adopt": ((*head, rows), {}),
        "commit": ((*head, none, rows), {}), "copy": ((*head, rows, rows[[0, 2, 1]]), {}),
        "load_state": ((*head, torch.from_numpy(states_of(rng, layer, BATCH)), rows), {}),
        "flush": ((*head, rows), {}), "reset": ((*head, rows), {}),
    }  # fmt: skip


def test_pytorch_accepts_the_operators(make, layer, rng):
    """Schemas list the written arguments, fakes have the shapes of results, and graphs compute the same as calls."""
    layered = DecodeLayer(make(layer))
    calls = repeatable(layered, layer, rng)
    ours = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("sketchssm::")}
    assert ours == set(calls)
    for name, (given, named) in calls.items():
        torch.library.opcheck(getattr(torch.ops.sketchssm, name).default, given, named)


def test_names(make):
    head = make(LAYERS["gdn"])
    layered = DecodeLayer(head, "mixer of this test")
    assert repr(layered) == f"DecodeLayer('mixer of this test', {head!r})"
    refused("name: expected a name that no other layer has,", DecodeLayer, make(LAYERS["gdn"]), "mixer of this test")
    refused("head: expected a DecodeHead, got str", DecodeLayer, "mixer of this test")
    refused("name: expected a string, got int", DecodeLayer, make(LAYERS["gdn"]), 3)
    refused("head: expected a head that no other layer has, got that of 'mixer of", DecodeLayer, head, "another name")
    order = layered.order
    del layered
    gc.collect()
    with pytest.raises(RuntimeError, match="name: expected the name of a DecodeLayer that is in use"):
        torch.ops.sketchssm.flush(order, "mixer of this test")
    other = DecodeLayer(head, "mixer of this test")  # the name and the head are free again
    assert other.name == "mixer of this test"
    assert DecodeLayer(make(LAYERS["gdn"])).name != DecodeLayer(make(LAYERS["gdn"])).name


def test_errors_reach_the_caller(make, rng):
    """The head's error names the argument, also from a compiled graph, and nothing has been written."""
    layer = LAYERS["gdn"]
    layered, twin = DecodeLayer(make(layer)), make(layer)
    given = tensors_of(tokens_of(rng, layer, BATCH, 1).at(np.s_[:, 0]))
    run, _ = compiled(lambda given, rows: layered(*given, rows))
    for call in (layered, lambda *x: run(x[:-1], x[-1])):
        refused("slots: expected .* got 6", call, *given, torch.tensor([0, 1, SLOTS]))
    same(layered.head, twin)


@pytest.mark.parametrize("modes", ["inference_mode no_grad", "no_grad inference_mode"])
def test_inference_mode(make, modes, rng):
    """A layer that is made in one mode works in the other."""
    made, used = (getattr(torch, mode) for mode in modes.split())
    token = tensors_of(tokens_of(rng, LAYERS["gdn"], BATCH, 1).at(np.s_[:, 0]))
    with made():
        layer, twin = DecodeLayer(make(LAYERS["gdn"])), make(LAYERS["gdn"])
    function, _ = compiled(layer)
    with used():
        for _ in range(2):
            torch.testing.assert_close(function(*token), twin.step(*token), rtol=0, atol=0)


def test_a_moved_layer_computes_nothing(make, rng):
    """A layer that was moved to "meta" with its model refuses tensors that have values."""
    layer = LAYERS["gdn"]
    given = tensors_of(tokens_of(rng, layer, BATCH, 1).at(np.s_[:, 0]))
    rows = torch.from_numpy(ROWS)
    layered = DecodeLayer(make(layer), "moved").to("meta")
    with pytest.raises(RuntimeError, match=r"order: expected a tensor with memory, got one on 'meta'; .* 'moved'"):
        layered(*given, rows)
    assert layered(*(x.to("meta") for x in given), rows.to("meta")).is_meta
