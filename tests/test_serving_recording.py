"""Calibration from served tokens: which rows are followed and added, how much, files of several processes."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
from samples import LAYERS, gate_of, raw_of, refused, tokens_of

torch = pytest.importorskip("torch")

import sketchssm as ss  # noqa: E402
from sketchssm.calibrate.sums import LARGEST_SUM  # noqa: E402
from sketchssm.serving import layer_record, recording  # noqa: E402
from sketchssm.serving.following import ROWS, STEPS, Followed  # noqa: E402
from sketchssm.serving.inputs import convolved, log_decays  # noqa: E402
from sketchssm.serving.recording import FINISH, Chunk, Recording  # noqa: E402
from sketchssm.serving.updates import Update  # noqa: E402

BLOCK = 8


def simulate(moving, seed):
    """Steps in which requests join, pause, leave, and leave their blocks to others; the tape of followed rows.

    A token is its request's number and its place there. With `moving`, states are in another block every 8 tokens, and
    requests may begin from the block of another.
    """
    rng, followed = np.random.default_rng(seed), Followed(torch.device("cpu"))
    tape = torch.zeros(ROWS * STEPS + 1, 2, dtype=torch.int64)
    free, begun, names = list(range(1, 300)), [], itertools.count()
    requests = {next(names): [int(rng.integers(1, 30)), [free.pop(0)]] for _ in range(8)}
    for step in range(STEPS):
        rows = [name for name in requests if rng.random() < 0.97]
        rng.shuffle(rows)
        new = [next(names) for _ in range(8 - len(requests))]
        for name in new:
            parents = [state for state in requests.values() if state[0] % BLOCK == 0]
            resumed = moving and parents and rng.random() < 0.5
            requests[name] = [parents[0][0], parents[0][1][-1:]] if resumed else [0, [0]]
        rows += new
        computed = np.array([requests[name][0] for name in rows])
        before = torch.tensor([requests[name][1][-1] for name in rows], dtype=torch.int32)
        for name in rows:
            if requests[name][0] == 0 or (moving and requests[name][0] % BLOCK == 0):
                requests[name][1].append(free.pop(0))
        after = torch.tensor([requests[name][1][-1] for name in rows], dtype=torch.int32)
        before = before if moving else after
        single = np.arange(len(rows)) < len(rows) - len(new)
        if step == 0:
            begun = [(rows[i], computed[i]) for i in range(ROWS)]
            followed.begin(after[:ROWS], torch.from_numpy(computed[:ROWS]))
            before = after
        followed.step(before, after, torch.from_numpy(np.where(single, computed, -1)))
        x = torch.tensor([[name, requests[name][0]] for name in rows])
        followed.write([tape], [x])
        for name, alone in zip(rows, single, strict=True):
            requests[name][0] += 1 if alone else int(rng.integers(1, 50))
            if rng.random() < 0.02 and name != begun[0][0]:
                free.insert(0, requests.pop(name)[1][-1])  # used again at once
    counts = enumerate(followed.end())
    return [(*begun[i], count, tape[i * STEPS : i * STEPS + count]) for i, count in counts]


@pytest.mark.parametrize("moving", (False, True))
def test_followed_rows_are_one_request_s(moving):
    """In forty runs, with rows that pause, end, and whose blocks are used again."""
    found = [row for seed in range(40) for row in simulate(moving, seed)]
    for name, start, count, tape in found:
        assert tape[:, 0].tolist() == [name] * count
        assert tape[:, 1].tolist() == list(range(start, start + count))
    counts = [count for _, _, count, _ in found]
    assert max(counts) > STEPS - 10
    assert min(counts) < STEPS // 2


def recorder(path, layers=LAYERS, tokens=320, share=1.0, whole=None, **others):
    lines = []
    made = Recording(str(path), "Model", 8, tokens, share, lines.append, **others)
    records = {
        name: made.layer(name, "Mixer", layer, lambda: None, (whole or layers)[name]) for name, layer in layers.items()
    }
    return made, records, lines


def serve(made, records, tokens, first, rows, group="g"):
    """One step in which rows are prefilled; chunks that are chosen are added."""
    lengths, computed = np.array([n for _, n in rows]), np.array([begun for begun, _ in rows])
    choice = made.choose(group, lengths, computed, 0)
    with made.working():
        for chunk in choice.chunks:
            for name, record in records.items():
                own = tokens[name].at(np.s_[0, first : first + chunk.tokens])
                record.add([torch.from_numpy(x) for x in own if x is not None], None)
    return choice


@pytest.mark.parametrize("kind", ("mamba2", "kda"))
def test_followed_rows_are_added_as_one_by_one(rng, tmp_path, kind):
    """Sums in float32 of other blocks of rows round energies at 1e-6."""
    counts, tokens = [STEPS, 9, STEPS, 0], tokens_of(rng, LAYERS[kind], ROWS, STEPS)
    states = torch.from_numpy(rng.standard_normal((ROWS, *LAYERS[kind].state_shape), dtype=np.float32))
    records = [recorder(tmp_path / name, {kind: LAYERS[kind]})[1][kind] for name in "xy"]
    together, alone = records
    together.allocate(torch.float32, torch.device("cpu"))
    given = [torch.from_numpy(x) for x in tokens if x is not None]
    for tape, x in zip(together._tape, given, strict=True):
        tape[:-1] = x.flatten(0, 1)
    together.begin(states[:3])
    together.end(counts)
    for i in range(3):
        alone.add([x[i, : counts[i]] for x in given], states[i : i + 1])
    assert together.tokens == alone.tokens == sum(counts)
    for name in ("state_gram", "query_gram", "samples"):
        found, want = (getattr(record.sums["moments"], name) for record in records)
        assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


def test_rows_behind_the_convolution_are_contiguous(rng):
    """As the kernels of the inputs take them."""
    x, before, weight = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((5, 8), (3, 8), (8, 4)))
    assert convolved(x, before, weight, None)[0].is_contiguous()


def test_shares_of_processes_are_joined(rng, tmp_path):
    """Two processes with half of the heads each write what one process with all heads writes. Both hold a key head of
    all heads.
    """
    layers = {kind: LAYERS[kind] for kind in ("mamba2", "gdn", "kda")}
    layers["one key"] = replace(LAYERS["mamba2"], key_heads=1)
    tokens = {name: tokens_of(rng, layer, 1, 400) for name, layer in layers.items()}

    def record(path, **process):
        rank, world = process.get("rank", 0), process.get("world", 1)
        own = {name: layer.shard(rank, world) for name, layer in layers.items()}
        made, records, lines = recorder(path, own, whole=layers, **process)
        mine = {}
        for name, layer in layers.items():
            heads, keys = layer.shard_heads(rank, world)
            own = tokens[name]
            parts = (own.q[:, :, keys], own.k[:, :, keys], *(None if x is None else x[:, :, heads] for x in own[2:]))
            mine[name] = type(own)(*(None if x is None else np.ascontiguousarray(x) for x in parts))
        for first in (0, 320, 360):  # the last step has enough tokens
            serve(made, records, mine, first, [(0, 320 if not first else 40)])
            made._task.result()
        serve(made, records, mine, 0, [(0, 8)])
        made._task.result()
        return lines

    record(tmp_path / "whole")
    paths = [tmp_path / f"half.{rank}-of-2" for rank in range(2)]
    told = "bases of 320 tokens (320 asked), scores of 40 (40), 0 chunks skipped"
    last = record(tmp_path / "half", rank=0, world=2)[-1]
    assert last == f"wrote {paths[0]}: {told}; the last process puts the parts together"
    assert paths[0].exists()
    assert record(tmp_path / "half", rank=1, world=2)[-1] == f"wrote {tmp_path / 'half'}: {told}"
    assert not any(path.exists() for path in paths)
    whole, half = (ss.Calibration.load(tmp_path / name) for name in ("whole", "half"))
    assert half.fingerprint == whole.fingerprint
    assert half.tokens == whole.tokens == 360
    one, other = (calibration.plans(mean_rank=2) for calibration in (whole, half))
    assert one.allocation.method == "error"
    for name, plan in one.items():
        assert np.array_equal(plan.ranks, other[name].ranks)
        # float32 sums of blocks of other sizes, of some hundred tokens
        assert np.allclose(half.layers[name].ranks.retained, whole.layers[name].ranks.retained, atol=1e-4)
        for own in ("error", "isotropic"):
            found, want = (getattr(each.layers[name].joint, own) for each in (half, whole))
            assert np.abs(found - want).max() < 2e-3 * want.max()  # numbers at the edge of two codes get either one
    assert half.plans(reduction=2).allocation.method == "joint-error"


def test_a_share_of_the_time(rng, tmp_path, monkeypatch):
    """The clock of a test: steps take 0.03 s, adding a chunk 0.4 s, and adding followed rows 1 s. Tokens that decode
    and tokens of prefills are recorded in the proportion in which they are served.
    """
    now = 0.0
    monkeypatch.setattr(recording, "perf_counter", lambda: now)
    made, _, _ = recorder(tmp_path / "x", tokens=10**6, share=0.1)
    lengths, computed = np.array([1] * 300 + [3000, 20]), np.array([9, 4] * 150 + [0, 10])
    chunks, follows, followed = 0, 0, 0
    for step in range(12000):
        now += 0.03 if step != 6000 else 1e6  # an idle night
        choice = made.choose("g", lengths, computed, 300)
        assert made.choose("other", np.zeros(0), np.zeros(0), 0) is choice
        assert choice.begin is None or (len(choice.begin) == ROWS and not any(choice.begin % 2))
        with made.working():
            now += 0.4 * len(choice.chunks) + (choice.end is not None)
        assert set(choice.chunks) <= {Chunk(300, recording.CHUNK, False), Chunk(301, 20, True)}
        chunks, follows = chunks + len(choice.chunks), follows + (choice.end is not None)
        followed += choice.lead == "g"
    spent = 0.4 * chunks + follows
    assert 0.09 < spent / (360 + spent) < 0.11
    assert 0 <= followed - STEPS * follows < STEPS
    taken = made._taken / made._served
    assert 0.8 < taken[0] / taken[1] < 1.25


def test_a_share_that_was_not_spent_is_not_spent_at_once(tmp_path, monkeypatch):
    """The same clock. Nothing can be added for 200 s, then a prompt at each step, and no row can be followed."""
    now = 0.0
    monkeypatch.setattr(recording, "perf_counter", lambda: now)
    made, _, _ = recorder(tmp_path / "x", tokens=10**6, share=0.1)
    chunks = 0
    for step in range(2100):
        now += 0.1
        choice = made.choose("g", np.array([1] + [20] * (step >= 2000)), np.array([0] * (1 + (step >= 2000))), 1)
        with made.working():
            now += 0.4 * len(choice.chunks)
        chunks += len(choice.chunks)
    assert 0 < 0.4 * chunks <= 0.1 * (recording.SAVED + 10 + 0.4 * chunks) + 0.4


def test_a_stage_waits_for_the_sums(rng, tmp_path, monkeypatch):
    """Updates are known three steps later; each takes the device 0.5 s more than the host. A stage has all tokens."""
    steps, run = 0, Recording._run

    class Late(Update):
        def end(self, good):
            super().end(good)
            self._at = steps + 3

        known = property(lambda self: steps >= self._at)
        beyond_host = 0.5

    def ran(self, stage):
        assert not self._updates
        run(self, stage)

    monkeypatch.setattr(recording, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(layer_record, "Update", Late)
    monkeypatch.setattr(Recording, "_run", ran)
    made, records, lines = recorder(tmp_path / "x", {"gdn": LAYERS["gdn"]})
    tokens, chosen = {"gdn": tokens_of(rng, LAYERS["gdn"], 1, 200)}, []
    for steps in range(20):  # noqa: B007
        chosen.append(len(serve(made, records, tokens, 0, [(0, 80)]).chunks))
        made._task.result()
    # four updates are enough for bases, and one for scores; two more are on their way when that is known
    assert chosen == [1] * 6 + [0] * 3 + [1] * 3 + [0] * 8
    assert made._credit == -4.5
    told = "bases of 480 tokens (320 asked), scores of 240 (40), 0 chunks skipped"
    assert lines[-1] == f"wrote {tmp_path / 'x'}: {told}"


def test_bases_have_no_more_columns_than_kernels_take(rng, tmp_path):
    layers = {"gdn": ss.Layer("gdn", 1, 32, 32)}
    made, records, _ = recorder(tmp_path / "x", layers)
    tokens = {"gdn": tokens_of(rng, layers["gdn"], 1, 328)}
    for first, count in ((0, 320), (320, 8)):
        serve(made, records, tokens, first, [(0, count)])
        made._task.result()
    assert records["gdn"].basis.rank_max == 16


def test_tokens_that_sums_refuse_are_skipped(rng, tmp_path):
    """NaN of the second layer of three reach the third. The others' sums are as without the chunk."""
    layers = {name: LAYERS["gdn"] for name in "abc"}
    made, records, lines = recorder(tmp_path / "x", layers)
    twin = recorder(tmp_path / "y", layers)[1]
    tokens = {name: tokens_of(rng, LAYERS["gdn"], 1, 448) for name in layers}
    for name in "bc":
        tokens[name].v[0, 10, 1] = np.nan
    for first, count in ((0, 40), (0, 40), (0, 40), (40, 320), (0, 8), (360, 40), (0, 8)):
        serve(made, records, tokens, first, [(0, count)])
        made._task.result()
        if count == 320:
            twin["b"].add([torch.from_numpy(x[0, 40:360]) for x in tokens["b"]], None)
            assert np.array_equal(records["b"].sums["moments"].query_gram, twin["b"].sums["moments"].query_gram)
            assert (records["a"].tokens, records["b"].tokens) == (440, 320)
    assert lines.pop(0) == "0 of 320 tokens for bases"
    assert [line.partition(":")[0] for line in lines[:2]] == [
        f"skipped tokens that can't be added, {n} times so far" for n in (1, 2)
    ]
    assert all(": b: expected finite queries" in line for line in lines[:2])
    assert lines[-1] == (
        f"wrote {tmp_path / 'x'}: bases of 320 tokens (320 asked), scores of 40 (40), 3 chunks skipped"
    )


def test_tokens_that_one_of_the_sums_refuses_are_added_to_none(rng, tmp_path):
    made, records, lines = recorder(tmp_path / "x", {"gdn": LAYERS["gdn"]})
    record, tokens = records["gdn"], {"gdn": tokens_of(rng, LAYERS["gdn"], 1, 400)}
    for first, count in ((0, 320), (0, 8), (320, 24)):
        serve(made, records, tokens, first, [(0, count)])
        made._task.result()
    ranks, joint = record.sums["ranks"], record.sums["joint"]
    samples, error = ranks.samples.copy(), ranks.error.copy()
    assert samples.any()

    joint.energy = np.full_like(joint.energy, 2 * LARGEST_SUM)
    serve(made, records, tokens, 344, [(0, 16)])
    assert record.skipped == 1
    assert "1 times so far: gdn: " in lines[-1]
    assert np.array_equal(ranks.samples, samples)
    assert np.array_equal(ranks.error, error)
    assert ranks.samples.tolist() == joint.samples.tolist()


@pytest.mark.parametrize("stage", ("moments", "scores"))
def test_a_recording_goes_on_when_its_file_is_touched(rng, tmp_path, monkeypatch, stage):
    """With the tokens that it has, or the fewest. A file from before the recording does not count."""
    now = 0.0
    monkeypatch.setattr(recording, "perf_counter", lambda: now)
    monkeypatch.setattr(recording, "LEAST", 24)
    trigger = tmp_path / f"x{FINISH}"
    trigger.touch()
    asked = {"moments": 3200, "scores": 320}[stage]
    made, records, lines = recorder(tmp_path / "x", {"gdn": LAYERS["gdn"]}, asked)
    tokens = {"gdn": tokens_of(rng, LAYERS["gdn"], 1, 320)}

    def serve_some(*counts):
        nonlocal now
        for count in counts:
            now += recording.LOOK
            serve(made, records, tokens, 0, [(0, count)])
            made._task.result()

    def touch():
        os.utime(trigger, ns=(0, trigger.stat().st_mtime_ns + 1))

    if stage == "moments":
        serve_some(16)
        touch()
        serve_some(16)  # still added: 16 are too few
        serve_some(8, 16, 8)
        told = "bases of 32 tokens (3200 asked), scores of 16 (400)"
    else:
        serve_some(320, 8, 32)
        touch()
        serve_some(8)
        told = "bases of 320 tokens (320 asked), scores of 32 (40)"
    assert lines[-1] == f"wrote {tmp_path / 'x'}: {told}, 0 chunks skipped"
    assert not trigger.exists()


def test_a_file_that_can_not_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "x"):
        refused("plans: expected 'record:FILE', a file in a folder that can be written", recorder, path)


@pytest.mark.parametrize("bound", (None, -5.0))
def test_log_decays_of_raw_gates(rng, bound):
    gate, raw = gate_of(rng, LAYERS["kda"], bound), raw_of(rng, LAYERS["kda"], 1, 20)[0]
    found = log_decays(torch.from_numpy(raw), gate)
    assert np.allclose(found, gate.log_decays(raw), rtol=1e-8)  # softplus of PyTorch: exact to 2e-9
