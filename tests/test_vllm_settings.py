"""How the plugin is switched on, what it refuses, plans by layer, rows of batches, memory of blocks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import LAYERS, plan_of, refused, tokens_of

torch = pytest.importorskip("torch")

import sketchssm as ss  # noqa: E402
from sketchssm.plans.model_plans import LayerFingerprint, ModelFingerprint  # noqa: E402
from sketchssm.serving import plans  # noqa: E402
from sketchssm.serving.batches import RowBuffers, moved_rows, split_rows  # noqa: E402
from sketchssm.serving.blocks import BlockLayout  # noqa: E402
from sketchssm.serving.decoder import Recipe  # noqa: E402
from sketchssm.study import bench  # noqa: E402
from sketchssm.vllm.registry import CLASSES  # noqa: E402
from sketchssm.vllm.settings import EngineFacts, Settings, check_engine, plans_at  # noqa: E402

FACTS = EngineFacts("cuda", "align", "gdn", 0, 16)
DRAFTS = {"drafts": 3, "cache_mode": "none"}


def test_a_word_that_is_neither_a_system_nor_a_path():
    words = "plans: expected a path, 'standard', 'replay' or 'record:FILE', got 'Replay', which does not exist"
    with pytest.raises(FileNotFoundError, match=words):
        plans_at("Replay", None, None)


def test_off_by_default():
    assert Settings.find({}, None) is None
    assert Settings.find({"SKETCHSSM_VLLM": ""}, {"other": 1}) is None


def test_switched_on():
    assert Settings.find({"SKETCHSSM_VLLM": "replay"}, {}).system == "replay"
    found = Settings.find({"SKETCHSSM_VLLM": "replay"}, {"sketchssm": {"plans": "/plans", "phases": False}})
    assert found == Settings("/plans", phases=False)
    assert found.system == "sketch"
    assert Settings.find({}, {"sketchssm": "standard"}).system == "standard"
    found = Settings.find({"SKETCHSSM_VLLM": '{"plans": "c.safetensors", "mean_rank": 8}'}, None)
    assert found == Settings("c.safetensors", mean_rank=8)
    found = Settings.find({"SKETCHSSM_VLLM": "record:c.safetensors"}, None)
    assert (found.system, found.record) == ("standard", "c.safetensors")


@pytest.mark.parametrize(
    "given, kind, words",
    [
        ({"plans": "standard", "window": 8}, ValueError, "window: expected none"),
        ({"plans": "replay", "window": "8"}, ValueError, "window: expected an integer"),
        ({"plans": "/plans", "window": 8}, ValueError, "window: expected none with plans='/plans', got 8"),
        ({"plans": "standard", "phases": False}, ValueError, "phases: expected none with plans='standard', got False"),
        ({"plans": "replay", "mean_rank": 8}, ValueError, "mean_rank: expected none"),
        ({"plans": "replay", "monitor": 2}, ValueError, "monitor: expected none with plans='replay', got 2"),
        ({"plans": "/plans", "monitor": True}, ValueError, "monitor: expected an integer from 0"),
        ({"plans": "/plans", "tolerance": 0.1}, ValueError, "tolerance: expected None without a monitor"),
        ({"plans": "/plans", "monitor": 1, "tolerance": 0}, ValueError, "tolerance: expected a finite number above 0"),
        ({"plans": "record:x", "reduction": 8}, ValueError, "reduction: expected none"),
        ({"plans": "/plans", "mean_rank": 8, "reduction": 8}, ValueError, "mean_rank: expected none beside"),
        ({"plans": "/plans", "mean_rank": 0}, ValueError, "mean_rank: expected a finite number of at least 1"),
        ({"plans": "/plans", "tokens": 2048}, ValueError, "tokens: expected none"),
        ({"plans": "record:x", "tokens": 10}, ValueError, "tokens: expected an integer from 1024"),
        ({"plans": "record:x", "share": 2}, ValueError, "share: expected a number from 0.001 to 1"),
        ({"plans": "record:"}, ValueError, "plans: expected a path"),
        ({"plans": "replay", "phases": 1}, TypeError, "phases: expected True or False"),
        (
            {"plan": "replay"},
            ValueError,
            "expected fields among plans, window, phases, mean_rank, .*, share, got 'plan'",
        ),
        ({}, ValueError, "expected a field 'plans'"),
        ("", ValueError, "got ''"),
        (3, TypeError, "plans: expected a path"),
    ],
)
def test_wrong_settings(given, kind, words):
    with pytest.raises(kind, match=words):
        Settings.find({}, {"sketchssm": given})


def test_wrong_json():
    refused("SKETCHSSM_VLLM: expected .* or JSON, got", Settings.find, {"SKETCHSSM_VLLM": "{plans: replay}"}, None)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"platform": "cpu"}, "platform: expected CUDA, or a CPU for mamba2, got cpu for gdn"),
        ({"platform": "xpu", "kind": "mamba2"}, "platform: expected CUDA"),
        ({"cache_mode": "all"}, "mamba_cache_mode: expected 'none' or 'align'"),
        ({"transfers": True}, "kv_transfer_config: expected None"),
        ({"microbatches": True}, "enable_dbo: expected False, and ubatch_size at most 1"),
        ({"random_rounding": True}, "enable_stochastic_rounding: expected False"),
        ({"decode_backend": "latency_specialized"}, "decode_backend: expected 'auto', .*, got 'latency_specialized'"),
        ({"own_replay": True}, "use_replayssm: expected False"),
        ({"recording": 5}, "window: expected one of 4, 8, 16, 32, which the kernels take, got 5"),
        (DRAFTS | {"platform": "cpu", "kind": "mamba2"}, "speculative_config: expected None"),
        (DRAFTS | {"recording": 16}, "speculative_config: expected None while a calibration is recorded"),
        (DRAFTS | {"monitor": 1}, "monitor: expected 0 with speculative decoding"),
        (DRAFTS | {"cache_mode": "align"}, "enable_prefix_caching: expected False with drafts"),
        (DRAFTS | {"drafts": 8}, "num_speculative_tokens: expected at most 7"),
        (DRAFTS | {"window": 4}, "num_speculative_tokens: expected at most 2"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(ValueError, match=words):
        check_engine(replace(FACTS, **change))


def test_engines_that_are_taken():
    check_engine(FACTS)
    check_engine(replace(FACTS, platform="cpu", kind="mamba2", recording=5))
    check_engine(replace(FACTS, kind="kda", cache_mode="none", drafts=7))
    check_engine(replace(FACTS, cache_mode="none", drafts=7, window=1))


def test_plan_of_a_layer(rng):
    one, other = (plan_of(rng, LAYERS["gdn"]) for _ in range(2))
    named = {"model.layers.3.mixer": one, "model.layers.13.mixer": other}
    assert plans.plan_of(named, "model.layers.3.mixer") is one
    assert plans.plan_of(named, "backbone.layers.13.mixer") is other
    with pytest.raises(ValueError, match=r"expected one plan for layer backbone.layers.4.mixer, got none of 2"):
        plans.plan_of(named, "backbone.layers.4.mixer")
    with pytest.raises(ValueError, match="expected one plan for layer lm_head, got none"):
        plans.plan_of(named, "lm_head")
    with pytest.raises(ValueError, match=r"got model.layers.3.mixer, draft.layers.3.mixer of 3"):
        plans.plan_of(named | {"draft.layers.3.mixer": other}, "other.layers.3.mixer")


def test_plans_of_a_calibration(rng, tmp_path):
    """Plans of any budget are made at load; a budget for plans that are made is refused."""
    layer = LAYERS["gdn"]
    moments = ss.Moments(layer, window=8)
    tokens = tokens_of(rng, layer, 1, 80)
    moments.update(*tokens)
    scores = ss.RankScores(basis := ss.fit_basis(moments))
    scores.update(*tokens)
    model = ModelFingerprint("Model", {"layers.0": LayerFingerprint("Mixer", layer, "")})
    made = ss.Calibration({"layers.0": ss.LayerCalibration(basis, scores)}, model)
    made.save(path := str(tmp_path / "c.safetensors"))
    for budget in (2, 4):
        found = plans.load_plans(path, mean_rank=budget)
        assert found["layers.0"].fingerprint == made.plans(budget)["layers.0"].fingerprint
    with pytest.raises(ValueError, match="scores of residuals"):
        plans.load_plans(path, reduction=8)
    with pytest.raises(
        FileNotFoundError, match=r"^plans: expected a file or folder of plans, got .*none, which does not"
    ):
        plans.load_plans(str(tmp_path / "none"), reduction=8)
    made.plans(2).save(path)
    refused("mean_rank: expected none, as .* holds no calibration, got 2", plans.load_plans, path, mean_rank=2)


def test_shares_of_a_plan(rng):
    plan = plan_of(rng, LAYERS["gdn"])
    shares = plans.sharded(plan, plan.layer.shard(0, 2), "model.layers.0", 2)
    assert [share.fingerprint for share in shares] == [plan.shard(r, 2).fingerprint for r in range(2)]
    with pytest.raises(ValueError, match=r"expected a plan of .* for model.layers.0"):
        plans.sharded(plan, plan.layer, "model.layers.0", 2)


def test_rows_without_drafts():
    split = split_rows(np.array([1, 1, 1, 5, 1]), np.array([4, 0, 9, 3, 0]))
    assert (split.decodes, split.decode_tokens, split.prefills, split.continued.tolist()) == (3, 3, 2, [3])
    assert split.fresh.tolist() == [1]
    assert split.whole.size == 0
    assert not split_rows(np.array([1, 5]), np.array([4, 0])).continued.size
    assert split_rows(np.array([1, 1, 0]), np.array([4, 2, 0])).decodes == 3


def test_rows_that_move():
    """In blocks of 4 tokens: a new request, one within its block, one that begins another, prefills of more blocks."""
    lengths, computed = np.array([1, 1, 1, 5, 9, 0]), np.array([0, 3, 4, 3, 12, 8])
    rows, places = moved_rows(lengths, computed, 4)
    assert (rows.tolist(), places.tolist()) == ([2, 3, 4], [0, 0, 2])


def test_rows_with_drafts():
    lengths, computed = np.array([3, 1, 2, 2, 4]), np.array([8, 9, 7, 5, 0])
    prefilling, drafted = np.array([0, 0, 0, 1, 1], bool), np.array([2, -1, 1, -1, -1])
    split = split_rows(lengths, computed, prefilling, 3, drafted)
    assert (split.decodes, split.decode_tokens, split.prefills, split.continued.tolist()) == (3, 6, 2, [3])
    assert split.whole.size == 0
    # one token of a prompt, which vLLM will not sample after
    assert split_rows(np.array([1]), np.array([3]), np.array([True]), 3).prefills == 1
    # known tokens, as after a preemption: vLLM places them among the rows that decode
    known = split_rows(np.array([3, 2]), np.array([9, 9]), np.array([False, False]), 3, np.array([-1, 1]))
    assert (known.decodes, known.whole.tolist()) == (2, [0])


def test_rows_of_a_graph_of_drafts():
    """vLLM replays a graph for any batch of rows of 1 + drafts tokens: heads must decode all of them."""
    split = split_rows(np.array([4, 4, 0]), np.array([8, 8, 0]), np.array([0, 1, 0], bool), 3, np.array([3, -1, -1]))
    assert (split.decodes, split.prefills) == (3, 0)
    assert split.whole.tolist() == [1]


def test_buffers_stay_where_they_are():
    buffers = RowBuffers(4, 2, torch.device("cpu"))
    slots, accepted = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    full = buffers.fill(slots, np.array([3, 3]), accepted)
    assert full.gather is None
    assert (full.width, full.tokens) == (3, 6)
    assert full.accepted.tolist() == [1, 3]  # at least a row's first token, which is never on trial
    ragged = buffers.fill(slots.flip(0), np.array([1, 2]), accepted)
    assert (ragged.width, ragged.tokens) == (2, 3)
    assert ragged.gather.tolist() == [0, 1, 1, 2]
    assert ragged.places.tolist() == [0, 2, 3]
    short = buffers.fill(slots, np.array([2, 2]), accepted)  # no row has all drafts
    assert short.gather is None
    assert (short.width, short.tokens) == (2, 4)
    for name in ("slots", "lengths", "accepted"):
        assert getattr(full, name).data_ptr() == getattr(ragged, name).data_ptr()
    assert buffers.fill(slots, np.array([1, 1])).lengths is None


def recipe_of(shape, map, state_dtype="float32", **form):
    layer = bench.SHAPES[shape]
    ranks = bench.spread_ranks(layer.heads, bench.MEAN_RANKS[shape])
    gate = None
    if layer.channel_decays:
        gate = ss.GateInput(np.zeros(layer.heads), np.zeros((layer.heads, layer.key_dim)))
    plan = bench.random_plan(layer, ranks, 16, map, **form)
    return Recipe("sketch", plan, gate=gate, state_dtype=state_dtype)


@pytest.mark.parametrize("map", ("lowrank", "ridge"))
@pytest.mark.parametrize("shape", bench.COMMON)
def test_memory_beside_the_states(shape, map):
    """At most a quarter of the states', with windows of 16 tokens, the mean ranks of the benchmarks, bf16 rings."""
    parts = recipe_of(shape, map).parts()
    assert BlockLayout.behind(0, parts).share <= 0.25


def test_documented_memory():
    """Rows of the table in docs/vllm.md."""
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()
    for shape in bench.COMMON:
        recipes = [recipe_of(shape, map) for map in ("lowrank", "ridge")]
        layer = bench.SHAPES[shape]
        form = {"sketch_dtype": "int8", "residual_bits": 2}
        plan = bench.random_plan(layer, bench.spread_ranks(layer.heads, 4), 16, "subspace", **form)
        recipes += [replace(recipes[0], source=plan), replace(recipes[0], system="replay", source=layer)]
        layouts = [BlockLayout.behind(0, recipe.parts()) for recipe in recipes]
        cells = " | ".join(f"{layout.bytes} ({layout.share:.1%})" for layout in layouts)
        assert f"| {shape} | {layouts[0].state_bytes} | {cells} |" in page


def test_documented_capacity():
    """Rows of the second table: bytes of a layer and request, and requests of a GiB for each layer."""
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()
    for shape in bench.COMMON:
        state = BlockLayout.behind(0, recipe_of(shape, "lowrank").parts()).state_bytes
        sizes = [state, state // 2]
        for kind in ("float32", "bfloat16"):
            layout = BlockLayout.behind(0, recipe_of(shape, "lowrank", kind, sketch_dtype="int8").parts())
            sizes.append(layout.state_bytes + layout.bytes)
        assert f"| {shape} | {' | '.join(f'{size / state:.0%}, {2**30 // size}' for size in sizes)} |" in page


def test_documented_requests():
    """Rows of the third table are of the results: each request takes the same number of blocks."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "vllm.md").read_text()
    rows = page.partition("| system | MB a request |")[2].partition("\n\n")[0].splitlines()[2:]
    known = set()
    for run in json.loads((root / "benchmarks" / "results" / "end-to-end-033.json").read_text())["results"]:
        if (run["model"], run["part"]) == ("nemotron-nano-9b-v2", "decode") and run["state_page"]:
            blocks = (run["blocks_needed"] - 1) // run["batch"]
            size, fit = run["state_page"] * blocks / 1e6, (run["blocks"] - 1) // blocks
            known.add(f"{size:.1f} | {fit} | {run['tokens_per_s']:.0f}")
    assert len(rows) >= 7
    assert {row.strip("| ").partition(" | ")[2] for row in rows} <= known


def test_documented_classes():
    """Rows of the table in docs/vllm.md."""
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()
    for name, one in CLASSES.items():
        assert f"| `{name}` | {one.kind} | {one.models} |" in page
