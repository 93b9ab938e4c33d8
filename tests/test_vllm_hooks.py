"""vLLM's own layers and metadata builders with heads, on the CPU. The environment variable `SKETCHSSM_VLLM_SITE` names
a folder with vLLM, if Python does not find it; without vLLM the tests are skipped. vLLM's kernels are replaced by
plain PyTorch, heads compute in float64, and outputs are compared with each request's own recurrence. What surrounds
the kernels (metadata, slices, forward passes of the layers) is vLLM's.
"""

import importlib.util
import inspect
import os
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from samples import refused, relative

torch = pytest.importorskip("torch")
SITE = os.environ.get("SKETCHSSM_VLLM_SITE")
if SITE:
    sys.path.append(SITE)
elif importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM: SKETCHSSM_VLLM_SITE is not set", allow_module_level=True)
from vllm_layers import CLASSES, DRAFTS, TOLERANCE, forward_context, patched, with_heads  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import prometheus_client
    from vllm.config import ParallelConfig
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.attention.backends import gdn_attn
    from vllm.v1.kv_cache_interface import MambaSpec

    from sketchssm.vllm import head_layer, layers, metadata, plugin, selfcheck

from sketchssm import Calibration, JointScores, Moments, RankScores, fit_basis  # noqa: E402
from sketchssm.serving.following import STEPS  # noqa: E402
from sketchssm.serving.recording import Recording  # noqa: E402


@pytest.fixture
def fixture(monkeypatch):
    return patched(monkeypatch)


def check(layer, steps):
    for rows in steps:
        meta, outputs = layer.step([(request[0], *place) for request, *place in rows])
        assert isinstance(meta, metadata.BatchMetadata)
        for (request, _, first, count, _), out in zip(rows, outputs, strict=True):
            assert relative(out, request[1][first : first + count]) < TOLERANCE, (first, count)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("system", ("standard", "replay"))
def test_layers_serve_requests(fixture, kind, system):
    """Prefill in chunks, mixed batches, a prompt of one token, a request that leaves, reuse of its block."""
    layer = fixture(kind, system)
    requests = [layer.inputs(24) for _ in range(4)]
    a, b, c, d = ((given, layer.oracle(given)) for given in requests)
    steps = [
        [(a, 3, 0, 4, 7)],
        [(a, 3, 4, 3, 7), (b, 5, 0, 6, 6)],
        [(a, 3, 7, 1, 7), (b, 5, 6, 1, 6)],
        [(b, 5, 7, 1, 6), (a, 3, 8, 1, 7), (c, 2, 0, 5, 8)],
        [(a, 3, 9, 1, 7), (c, 2, 5, 1, 8), (b, 5, 8, 9, 20)],  # a chunk of one token; known tokens behind decoded ones
        [(a, 3, 10, 1, 7), (c, 2, 6, 2, 8)],  # the chunk behind it begins from the exact state
        [(d, 5, 0, 1, 1), (a, 3, 11, 1, 7)],  # b has left; a prompt of one token in its block
        [(d, 5, 1, 1, 1), (a, 3, 12, 1, 7), (c, 2, 8, 1, 8)],
    ]
    check(layer, steps)


@pytest.mark.parametrize("kind", list(CLASSES)[:3])
def test_errors_of_requests_that_decode_are_logged(fixture, kind):
    """Once a minute: of rows with tokens, not of blocks that no request has, which may hold anything. Prometheus has
    the numbers of the last line.
    """
    layer = fixture(kind, "sketch")
    lines, log = [], layer.builder._errors
    log._tell, given = lines.append, layer.inputs(40)
    for first, count in ((0, 5), *((t, 1) for t in range(5, 40))):
        log._last = log._last if first % 25 else -np.inf
        layer.step([(given, 3, first, count, 5)])
    assert len(lines) == 1  # at token 25: before, nothing was flushed
    assert layer.module.decoder.head.errors([3]).samples == [2]
    assert lines[0].startswith("sketchssm: relative squared errors of sketches in 1 request, 1 samples a layer;")
    name = "model.layers.0.mixer"
    assert f"{name} " in lines[0]
    value = prometheus_client.REGISTRY.get_sample_value("sketchssm_relative_squared_error", {"layer": name})
    assert f"{name} {value:.1e}" in lines[0]
    log._last = -np.inf
    layer.builder.build(0, batch_of([1, 1], [1, 1], [0, 0], [False, False]))  # of no requests
    assert len(lines) == 1


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("system", ("standard", "replay"))
def test_layers_serve_cached_prefixes(fixture, kind, system):
    """States move from block to block as their requests grow. Requests resume from blocks that a prefill filled, and
    that decoding filled in the midst of a window; two at once, and while the owner goes on.
    """
    layer = fixture(kind, system, 0, "align")
    given = layer.inputs(40)
    others = [{name: x.clone() for name, x in given.items()} for _ in range(2)]
    for i, other in enumerate(others):
        for name, x in layer.inputs(40).items():
            at = 1 if x.shape[0] == 1 and x.ndim > 2 else 0
            keep = 16 + 8 * i
            other[name].narrow(at, keep, 40 - keep).copy_(x.narrow(at, keep, 40 - keep))
    a, b, c = ((x, layer.oracle(x)) for x in (given, *others))
    own = [1, 2, 3, 4, 5]
    steps = [[(a, own, 0, 11, 11)], *([(a, own, i, 1, 11)] for i in range(11, 16))]
    steps += [
        [(a, own, 16, 1, 11), (b, [0, 2, 6, 0, 0], 16, 3, 19)],  # the owner moves on, another resumes from its block
        [(b, [0, 2, 6, 0, 0], 19, 1, 19), (a, own, 17, 1, 11), (c, [0, 2, 7, 8, 0], 16, 5, 29)],
        *([(b, [0, 2, 6, 0, 0], 3 + i, 1, 19), (a, own, 1 + i, 1, 11)] for i in range(17, 21)),
        [(b, [0, 2, 6, 8, 0], 24, 1, 19), (a, own, 22, 1, 11)],
        [(a, own, 23, 1, 11)],
        # one token of two requests, which resume at once from a block of a request that has ended
        [(a, [0, 0, 3, 6, 0], 24, 1, 26), (c, [0, 0, 3, 7, 0], 24, 1, 29)],
        [(a, [0, 0, 3, 6, 0], 25, 1, 26), (c, [0, 0, 3, 7, 0], 25, 4, 29)],
    ]
    check(layer, steps)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("system", ("standard", "replay"))
@pytest.mark.parametrize("late", (0, DRAFTS))
def test_layers_serve_drafts(fixture, kind, system, late):
    """Drafts of n-grams, or late ones of a model (MTP), of which some are accepted, rows without drafts, known tokens,
    mixed batches in vLLM's order.
    """
    layer = fixture(kind, system, DRAFTS)
    a, b, c = ((given, layer.oracle(given)) for given in [layer.inputs(32) for _ in range(3)])
    bad = layer.inputs(32)

    def wrong(request, first, kept, count):
        """The request, with other tokens from the first rejected draft to the last."""
        mixed = {name: x.clone() for name, x in request[0].items()}
        for name, x in mixed.items():
            x[first + kept : first + count] = bad[name][first + kept : first + count]
        return mixed, request[1]

    # row, tokens that are kept; counts of the last step; drafts
    steps = [
        ([((a, 3, 0, 5, 5), 5)], [1], [-1]),
        ([((a, 3, 5, 4, 5), 3), ((b, 5, 0, 6, 6), 6)], [1, 1], [3, -1]),
        ([((a, 3, 8, 4, 5), 4), ((b, 5, 6, 4, 6), 1)], [3, 1], [3, 3]),
        ([((a, 3, 12, 1, 5), 1), ((b, 5, 7, 3, 6), 2)], [4, 1], [-1, 2]),
        ([((a, 3, 13, 2, 5), 1), ((b, 5, 9, 1, 6), 1), ((c, 2, 0, 7, 9), 7)], [1, 2, 1], [1, -1, -1]),
        ([((b, 5, 10, 3, 6), 3), ((a, 3, 14, 4, 5), 2), ((c, 2, 7, 2, 9), 2)], [1, 1, 1], [-1, 3, -1]),
        ([((b, 5, 13, 4, 6), 4), ((a, 3, 16, 1, 5), 1), ((c, 2, 9, 4, 9), 1)], [1, 2, 1], [3, -1, 3]),
        ([((b, 5, 17, 1, 6), 1), ((a, 3, 17, 4, 5), 4), ((c, 2, 10, 1, 9), 1)], [4, 1, 1], [-1, 3, -1]),
    ]
    for rows, accepted, drafted in steps:
        given = [
            (wrong(r, first, kept, n)[0], *place, first, n, prompt) for (r, *place, first, n, prompt), kept in rows
        ]
        _, outputs = layer.step(given, accepted, drafted, late)
        for ((request, _, first, _, _), kept), out in zip(rows, outputs, strict=True):
            assert relative(out[:kept], request[1][first : first + kept]) < TOLERANCE


def test_the_first_replica_records():
    """vLLM gives replicas of dense models the rank 0."""
    config = ParallelConfig()
    assert head_layer.is_first_replica(config)
    config.data_parallel_index = 1
    config.reconfigure_for_independent_dp_rank()
    assert config.data_parallel_rank == 0
    assert not head_layer.is_first_replica(config)


@pytest.mark.parametrize("kind", CLASSES)
def test_chunks_of_as_many_tokens_as_a_draft(fixture, kind):
    """All rows decode, as in a graph of a decode step; then prefills continue them."""
    layer = fixture(kind, "replay", DRAFTS)
    a, b = ((given, layer.oracle(given)) for given in [layer.inputs(16) for _ in range(2)])
    steps = [
        [(a, 3, 0, 4, 13), (b, 5, 0, 4, 12)],
        [(a, 3, 4, 4, 13), (b, 5, 4, 4, 12)],
        [(a, 3, 8, 5, 13), (b, 5, 8, 4, 12)],
        [(a, 3, 13, 1, 13), (b, 5, 12, 1, 12)],
    ]
    for i, rows in enumerate(steps):
        meta, outputs = layer.step([(r[0], *place) for r, *place in rows], [1, 1], [(0, -1)[i < 3]] * 2)
        assert meta.split.decodes == (2, 2, 0, 2)[i]
        for (request, _, first, count, _), out in zip(rows, outputs, strict=True):
            assert relative(out, request[1][first : first + count]) < TOLERANCE


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("mode", ("none", "align"))
def test_layers_record_a_calibration(fixture, tmp_path, kind, mode):
    """Chunks of prefills and decoded tokens give the bases and scores of the requests' own tokens. Recorded sums are
    products in float32, of vectors of 6 numbers, which rounds energies at 1e-6.
    """
    layer = fixture(kind, "standard", 0, mode)
    path, lines = tmp_path / "c.safetensors", []
    recording = Recording(str(path), "Model", 8, 64 + 24 + 2 * STEPS, 1.0, lines.append)
    module = layer.module
    module.record = recording.layer(module.prefix, "Mixer", module.layer, module.gate)
    module._allocate(torch.device("cpu"))
    a, b, c = ({name: x for name, x in layer.inputs(88 + STEPS).items()} for _ in range(3))
    blocks = (3, 5, 2) if mode == "none" else (range(1, 44), range(44, 87), range(87, 103))
    steps = [[(a, 0, 40)], [(a, 40, 24), (b, 0, 24)]]
    steps += [[(b, 24 + i, 1), (a, 64 + i, 1)] for i in range(STEPS + 2)]
    for rows in steps:
        layer.step([(x, blocks[0] if x is a else blocks[1], first, n, 64 if x is a else 24) for x, first, n in rows])
    recording._task.result()

    parts = [[x if x is None else x[None, :stop] for x in selfcheck.tokens_of(module, given)[:5]]
             for given, stop in ((a, 64 + STEPS), (b, 24 + STEPS))]  # fmt: skip
    moments = Moments(module.layer, window=8)
    for part in parts:
        moments.update(*part)
    basis = fit_basis(moments)
    layer.step([(c, blocks[2], 0, 104, 104)])
    layer.step([(c, blocks[2], 104, 1, 104)])
    recording._task.result()
    assert lines[-1].startswith(f"wrote {path}: ")
    ranks, joint = RankScores(basis), JointScores(basis)
    for scores in (ranks, joint):
        scores.update(*(x if x is None else x[None, :104] for x in selfcheck.tokens_of(module, c)[:5]))
    found = Calibration.load(path).layers[module.prefix]
    assert (found.ranks.samples == ranks.samples).all()
    assert np.allclose(found.ranks.retained, ranks.retained, atol=1e-4)
    assert (found.joint.samples == joint.samples).all()
    for name in ("error", "isotropic"):
        own, want = getattr(found.joint, name), getattr(joint, name)
        assert np.abs(own - want).max() < 5e-3 * want.max()  # numbers at the edge of two codes get either one


@pytest.mark.parametrize("updated", (False, True))
def test_groups_follow_the_same_rows(fixture, tmp_path, monkeypatch, updated):
    """The first group's blocks tell the rows of all. Steps without such rows write nothing, but captured ones do."""
    groups = [fixture("mamba2", "standard") for _ in range(2)]
    recording = Recording(str(tmp_path / "x"), "Model", 8, 10**6, 1.0, str)
    for name, group in zip("ab", groups, strict=True):
        group.module.record = recording.layer(name, "Mixer", group.module.layer, group.module.gate)
        group.module._allocate(torch.device("cpu"))
    requests = [[group.inputs(40 + STEPS) for _ in range(2)] for group in groups]
    metas = []

    def update(common_prefix_len, batch, *others):
        return groups[1].builder.update_block_table(metas[-1], batch.block_table_tensor, batch.slot_mapping)

    if updated:
        monkeypatch.setattr(groups[1].builder, "build", update)
    for step in range(STEPS + 2):
        for group, own, blocks in zip(groups, requests, ((3, 5), (5, 3)), strict=True):
            span = (15 + step, 1) if step else (0, 16)
            rows = [(own[i], blocks[i], *span, 16) for i in (0, 1)]
            metas.append(group.step(rows[:: 1 if step % 3 else -1])[0])
            assert metas[-1].followed == (step > 0)
    for group, own in zip(groups, requests, strict=True):
        moments = Moments(group.module.layer, window=8)
        for given in own:
            parts = selfcheck.tokens_of(group.module, given)[:5]
            moments.update(*(x if x is None else x[None, : 16 + STEPS] for x in parts))
        found = group.module.record.sums["moments"]
        assert group.module.record.tokens == 2 * (16 + STEPS)
        assert np.allclose(found.query_gram, moments.query_gram, rtol=1e-4, atol=1e-4)
    taken = recording._taken.copy()
    metas.append(groups[0].builder.build_for_cudagraph_capture(batch_of([1, 1], [30, 30], [0, 0], [False, False])))
    assert metas[-1].followed
    assert groups[1].builder.update_block_table(metas[-1], torch.zeros(2, 1).int(), torch.zeros(2).long()).followed
    assert (recording._taken == taken).all()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "drafts, mode, first", [(0, "none", "pool"), (DRAFTS, "none", "builder"), (0, "align", "builder")]
)
def test_a_version_that_was_not_tested(fixture, monkeypatch, kind, drafts, mode, first):
    """A layer is checked as soon as it has a pool, or else at the first batch; a layer whose convolution or queries
    are others is refused.
    """
    monkeypatch.setattr(selfcheck, "set_forward_context", forward_context)
    monkeypatch.setattr(metadata, "tested", lambda version: False)
    update, inputs = head_layer.causal_conv1d_update, layers.HeadLightning.inputs
    for wrong in (False, True):
        layer = fixture(kind, "replay", drafts, mode)
        if wrong:
            monkeypatch.setattr(head_layer, "causal_conv1d_update", lambda *x, **y: 1.1 * update(*x, **y))
            monkeypatch.setattr(layers.HeadLightning, "inputs", lambda *x: (1.1 * (y := inputs(*x))[0], *y[1:]))
        blocks = 3 if mode == "none" else [3]
        request, counts = (layer.inputs(4), blocks, 0, 4, 7), ([1], [-1]) if drafts else ()

        def begin(layer=layer, request=request, counts=counts):
            if first == "builder":
                layer._bind(layer.builder.kv_cache_spec)
                assert layer.builder._checked
            return layer.step([request], *counts)[1]

        if wrong:
            with pytest.raises(RuntimeError, match="expected outputs of the recurrence, got a difference of"):
                begin()
        else:
            (out,) = begin()
            assert relative(out, layer.oracle(request[0])) < TOLERANCE


def batch_of(lengths, seen, blocks, prefilling):
    """A batch of two requests, each in one block."""
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(seen).int(), num_reqs=2,
        num_actual_tokens=sum(lengths), max_query_len=max(lengths), max_seq_len=64,
        block_table_tensor=torch.tensor(blocks).int()[:, None],
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64), is_prefilling=torch.tensor(prefilling),
        seq_lens_cpu_upper_bound=torch.tensor(seen).int(),
    )  # fmt: skip


def test_groups_of_mamba2(fixture):
    """Another cache group has the same batch in other blocks."""
    layer = fixture("mamba2", "replay")
    batch = batch_of([1, 3], [5, 3], [3, 4], [False, True])
    meta = layer.builder.build(0, batch)
    assert (meta.decode.slots.tolist(), meta.prefill.slots.tolist()) == ([3], [4])
    assert meta.inner.state_indices_tensor_p.tolist() == [4]
    assert (meta.inner.num_decodes, meta.inner.num_prefills) == (0, 1)
    other = layer.builder.update_block_table(meta, torch.tensor([[7], [8]]).int(), batch.slot_mapping)
    assert (other.decode.slots.tolist(), other.prefill.slots.tolist()) == ([7], [8])
    assert other.inner.state_indices_tensor_p.tolist() == [8]


def test_another_group_takes_its_own_aligned_blocks(fixture):
    """The V2 runner gives the blocks of all rows; a prefill's are those of the rows behind."""
    layer = fixture("gdn", "replay", 0, "align")
    batch = batch_of([1, 3], [5, 3], [3, 4], [False, True])
    layer.builder.mamba_aligned_state_indices = torch.tensor([[3], [4]]).int()
    meta = layer.builder.build(0, batch)
    assert meta.inner.prefill_state_indices.tolist() == [4]
    if not hasattr(gdn_attn.GDNAttentionMetadataBuilder, "update_block_table"):  # 0.32
        return
    layer.builder.mamba_aligned_state_indices = table = torch.tensor([[7], [8]]).int()
    other = layer.builder.update_block_table(meta, table, batch.slot_mapping)
    assert (other.decode.slots.tolist(), other.prefill.slots.tolist()) == ([7], [8])
    assert other.inner.prefill_state_indices.tolist() == [8]


def test_states_that_a_prefill_leaves_on_its_way(fixture):
    """A prefill that passes the end of a block leaves the state there. The head takes it over, in any group's."""
    layer = fixture("mamba2", "replay", 0, "align")
    layer.module.cache_config.hash_block_size = layer.module.cache_config.cache_hit_alignment_tokens = 8
    batch = batch_of([1, 20], [5, 20], [0, 0], [False, True])
    tables = [torch.tensor([[1, 0, 0], [0, at, at + 1]]).int() for at in (3, 5)]
    meta = layer.builder.build(0, batch.replace(block_table_tensor=tables[0]))
    other = layer.builder.update_block_table(meta, tables[1], batch.slot_mapping)
    states = layer.module.kv_cache[-1]
    for found, at in ((meta, 3), (other, 5)):
        assert (found.prefill.slots.tolist(), found.prefill.passed.tolist()) == ([at + 1], [at])
        states[at : at + 2] = left = layer.random(2, *states.shape[1:]).double()
        layer.module.decoder.adopt(found.prefill)
        layer.module.decoder.head.flush(found.prefill.passed)
        assert torch.equal(states[at : at + 2], left)


@pytest.mark.parametrize("kind", CLASSES)
def test_what_heads_tell_vllm_of_batches(fixture, kind):
    """Graphs hold decode steps only; drafts are counted, and the host's numbers of tokens are the device's."""
    layer = fixture(kind, "replay", DRAFTS)
    assert layer.builder._cudagraph_support.value <= AttentionCGSupport.UNIFORM_BATCH.value
    assert not layer.module.get_attn_backend().supports_device_cpu_query_lens_mismatch()
    assert not layer.builder.supports_update_block_table
    refused(
        "speculative_config: expected None, as vLLM's runner gives a .* no counts of kept drafts, got 3 draft tokens",
        layer.builder.build, 0, batch_of([4, 4], [9, 9], [3, 4], [False, False]),
    )  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_drafts_without_counts_are_refused_at_start(fixture, kind):
    """The V2 runner gives counts to all builders but that of lightning attention."""
    layer = fixture(kind, "replay", DRAFTS)
    counts = kind != "mamba2-bailing"
    assert metadata.counted(layer.builder) is counts
    layer.config.use_v2_model_runner = True
    given = layer.builder.kv_cache_spec, [layer.module.prefix], layer.config, torch.device("cpu")
    if counts:
        type(layer.builder)(*given)
    else:
        words = "speculative_config: expected None, as vLLM's runner gives a Bailing.* no counts of kept drafts, got 3"
        refused(words, type(layer.builder), *given)


def test_a_captured_batch(fixture):
    """Slots of decode steps stay at one address."""
    layer = fixture("gdn", "replay")
    batch = batch_of([1, 1], [1, 1], [0, 0], [False, False])
    captured = layer.builder.build_for_cudagraph_capture(batch)
    assert captured.decode.slots.tolist() == [0, 0]
    later = layer.builder.build(0, batch.replace(block_table_tensor=torch.tensor([[3], [2]]).int()))
    assert captured.decode.slots.tolist() == [3, 2]
    assert later.decode.slots.data_ptr() == captured.decode.slots.data_ptr()


def test_specs_have_room(fixture):
    layer = fixture("gdn", "replay")
    own = MambaSpec(shapes=layer.module.get_state_shape(), dtypes=layer.module.get_state_dtype(), block_size=64)
    config = SimpleNamespace(
        cache_config=layer.module.cache_config, speculative_config=None, num_speculative_tokens=0,
        compilation_config=SimpleNamespace(static_forward_context={"x": layer.module}),
    )  # fmt: skip
    spec = type(layer.module).get_kv_cache_spec(layer.module, config)
    assert spec.page_size_bytes - own.page_size_bytes == head_layer.side_bytes(config)
    assert head_layer.side_bytes(config) >= layer.module.layout.bytes


def test_off_by_default(monkeypatch):
    """Without settings a layer does what vLLM's own does."""
    monkeypatch.delenv("SKETCHSSM_VLLM", raising=False)
    monkeypatch.setattr(head_layer, "get_current_vllm_config", lambda: SimpleNamespace(additional_config={}))
    calls = ("get_kv_cache_spec", "get_attn_backend", "conv_ssm_forward", "_forward_core", "_forward")
    for parent in CLASSES.values():
        own = with_heads(parent)
        monkeypatch.setattr(parent, "__init__", lambda self, *given: torch.nn.Module.__init__(self))
        made = torch.nn.Module.__new__(own)
        made.__init__(1, 2)
        monkeypatch.setattr(parent, "bind_kv_cache", lambda self, pool: setattr(self, "kv_cache", (pool, pool)))
        made.bind_kv_cache(pool := torch.zeros(3))
        assert made.kv_cache == (pool, pool)
        assert made.decoder is None
        for name in calls:
            if hasattr(parent, name):
                given = tuple(inspect.signature(getattr(own, name)).parameters)[1:]
                monkeypatch.setattr(parent, name, lambda self, *got, name=name: (name, got), raising=False)
                got = getattr(made, name)(*given)
                assert got in ((name, given), None)
        assert head_layer.side_bytes(SimpleNamespace(compilation_config=SimpleNamespace(
            static_forward_context={"x": made}))) == 0  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_shapes_without_kernels_are_refused_before_the_weights_are_loaded(fixture, monkeypatch, kind):
    """The error names the layer. ROCm, whose devices have the type "cuda" too, is refused."""
    module = fixture(kind, "replay").module
    config = SimpleNamespace(
        additional_config={"sketchssm": "replay"}, num_speculative_tokens=0, kv_transfer_config=None,
        cache_config=module.cache_config, parallel_config=SimpleNamespace(use_ubatching=False),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        compilation_config=SimpleNamespace(static_forward_context={"x": module}),
    )  # fmt: skip
    monkeypatch.setattr(head_layer, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(head_layer, "current_platform", SimpleNamespace(device_name="cuda"))
    monkeypatch.setattr(CLASSES[kind], "__init__", lambda self: None)
    module.get_state_dtype = lambda: (torch.float32,)
    with pytest.raises(ValueError, match=rf"^{module.prefix}: key_dim: the CUDA kernels don't support [56]; they"):
        type(module).__init__(module)
    rocm = SimpleNamespace(device_name="rocm", device_type="cuda")
    monkeypatch.setattr(head_layer, "current_platform", rocm)
    refused("platform: expected CUDA, or a CPU for mamba2, got rocm for ", type(module).__init__, module)


def test_registers_once(monkeypatch):
    """Each class when the first of its layers is made; a class without heads is told once."""
    monkeypatch.setattr(plugin, "op_registry_oot", custom_op.op_registry_oot)
    monkeypatch.setattr(plugin, "widen", lambda: None)
    told = []
    monkeypatch.setattr(plugin.logger, "warning", lambda *words: told.append(words))
    mixer, other = mamba_mixer2.MambaMixer2, type("ShortConv", (), {})
    for layer in (mixer, other, mixer, other):
        plugin.take(layer)
    own = custom_op.op_registry_oot.pop("MambaMixer2")
    assert own.__bases__ == (layers.HeadMamba2, mixer)
    assert not custom_op.op_registry_oot
    assert [name for _, name in told] == ["ShortConv"]


def test_blocks_are_aligned_with_the_parts_behind_the_states(fixture, monkeypatch):
    """vLLM asks the model's class for the states' shapes when it aligns blocks of attention with them."""

    class Model:
        @classmethod
        def get_mamba_state_shape_from_config(cls, config):
            return ((3, 8), (4, 5, 6))

        @classmethod
        def get_mamba_state_dtype_from_config(cls, config):
            return (torch.bfloat16, torch.float32)

    class Other(Model):
        pass

    layer = fixture("gdn", "replay")
    config = SimpleNamespace(
        additional_config={"sketchssm": "replay"}, model_config=SimpleNamespace(architecture="x"),
        compilation_config=SimpleNamespace(static_forward_context={"x": layer.module}),
    )  # fmt: skip
    extra = head_layer.side_bytes(config)

    class Layouts(Model):
        @classmethod
        def get_mamba_specs_from_config(cls, config):
            return [MambaSpec(shapes=((3, 8), (4, 5, 6)), dtypes=(torch.bfloat16, torch.float32), block_size=8)] * 2

    class Convolution(mamba_mixer2.MambaBase):  # Qwen4-Exp's is no layer that the registry of vLLM's replaces
        get_state_dtype = get_state_shape = mamba_type = None

    config.compilation_config.static_forward_context["y"] = Convolution()
    told = []
    monkeypatch.setattr(plugin.logger, "warning", lambda *words: told.append(words))
    for model in (Model, Other, Layouts):
        monkeypatch.setattr(plugin.ModelRegistry, "resolve_model_cls", lambda *_, model=model, **others: (model, "x"))
        with plugin.wider_states(config):
            assert model.get_mamba_state_shape_from_config(config) == ((3, 8), (4, 5, 6), (extra,))
            assert model.get_mamba_state_dtype_from_config(config) == (torch.bfloat16, torch.float32, torch.uint8)
            specs = model.get_mamba_specs_from_config(config) if model is Layouts else []
            assert [spec.shapes[2:] for spec in specs] == [((extra,),)] * len(specs)
            assert [spec.dtypes[2:] for spec in specs] == [(torch.uint8,)] * len(specs)
        assert len(model.get_mamba_state_shape_from_config(config)) == 2
        assert len(model.get_mamba_state_dtype_from_config(config)) == 2
    assert "get_mamba_state_shape_from_config" not in vars(Other)
    assert [name for _, name in told] == ["Convolution"]


def test_names_that_the_plugin_needs():
    """What is called of vLLM has the arguments that the plugin gives."""
    parameters = inspect.signature(causal_conv1d.causal_conv1d_update).parameters
    for name in ("conv_state_indices", "num_accepted_tokens", "query_start_loc", "max_query_len", "out"):
        assert name in parameters or "kwargs" in parameters  # vLLM's convolution on a CPU
    for kind, names in (
        (mamba_mixer2.MambaMixer2.conv_ssm_forward, ["self", "projected_states", "output"]),
        (
            qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core,
            ["self", "mixed_qkv", "b", "a", "core_attn_out"],
        ),
        (
            kimi_gdn_linear_attn.KimiGatedDeltaNetAttention._forward,
            ["self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out"],
        ),
        (plugin.Platform._align_hybrid_block_size, ["vllm_config", "backend_cls"]),
    ):
        assert list(inspect.signature(kind).parameters) == names
