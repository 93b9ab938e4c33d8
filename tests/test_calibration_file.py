"""Calibrations: plans of any budget from one file."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from samples import fingerprints, parts_of, refused, tokens_of

import sketchssm as ss
from sketchssm.calibrate.calibration import FORMAT, LayerCalibration, StoredBasis, make_plans
from sketchssm.calibrate.plans import joint_plans, plan_layers
from sketchssm.plans.files import FileFormatError, save_file
from sketchssm.plans.model_plans import LayerFingerprint, ModelFingerprint

LAYERS = {"layers.0": ss.Layer("gdn", 4, 32, 24, 2), "layers.2": ss.Layer("mamba2", 3, 16, 24)}
MODEL = ModelFingerprint("Model", {name: LayerFingerprint("Mixer", layer, "00") for name, layer in LAYERS.items()})


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    bases, ranks, joint, answers = [], [], [], []
    for layer in LAYERS.values():
        tokens = tokens_of(rng, layer, 2, 80)
        grad = rng.standard_normal(tokens.v.shape)
        moments = ss.Moments(layer, window=8)
        moments.update(*tokens)
        bases.append(ss.fit_basis(moments, 8))
        ranks.append(ss.RankScores(bases[-1]))
        ranks[-1].update(*tokens, grad=grad)
        for scores, slope in ((joint, grad), (answers, grad**3)):
            scores.append(ss.JointScores(bases[-1]))
            scores[-1].update(*tokens, grad=slope)
    return bases, ranks, joint, answers


@pytest.fixture
def calibration(made):
    bases, *scores = made
    layers = zip(LAYERS, bases, *scores, strict=True)
    return ss.Calibration({name: ss.LayerCalibration(b, *own) for name, b, *own in layers}, MODEL, 160)


def same(one, other):
    assert list(one) == list(other)
    assert fingerprints(one) == fingerprints(other)


def test_plans_are_those_of_the_scores(made, calibration):
    bases, ranks, joint, answers = made
    for mean, how in (
        (2, {}),
        (4, {"map": "lowrank", "sketch_dtype": "int8", "method": "error"}),
        (3.5, {"rank_max": 4}),
    ):
        planned, _ = plan_layers(bases, ranks, mean, **how)
        same(calibration.plans(mean_rank=mean, **how), dict(zip(LAYERS, planned, strict=True)))
    planned, allocation = joint_plans(bases, joint, 3.0, answers)
    plans = calibration.plans(reduction=3)
    same(plans, dict(zip(LAYERS, planned, strict=True)))
    assert any((plan.ranks > 2).any() for plan in plans.values())
    assert all((plan.ranks <= 2).all() for plan in calibration.plans(reduction=3, rank_max=2).values())
    assert {0, 3} <= {bits for plan in plans.values() for bits in plan.residual_bits}
    assert plans.fingerprint == MODEL
    assert (plans.allocation.method, plans.allocation.gap) == ("joint", allocation.gap)
    assert plans.allocation.tokens == 160
    blind = calibration.plans(reduction=3, method="error")
    assert blind.allocation.method == "joint-error"
    two = calibration.plans(mean_rank=2, residual_bits=2)
    assert {bits for plan in two.values() for bits in plan.residual_bits[plan.ranks != ss.FULL_STATE]} == {2}
    uniform = calibration.plans(mean_rank=2, residual_bits=2, method="uniform")
    assert all((plan.ranks == 2).all() for plan in uniform.values())
    assert two.reduction >= uniform.reduction * (1 - 1e-9)  # the budget of a mean rank
    whole = calibration.plans(reduction=1.0)
    assert all((plan.ranks == ss.FULL_STATE).all() for plan in whole.values())
    assert (whole.allocation.mean_rank, set(whole.allocation.retained.values())) == (0, {1.0})
    for method, default in ((None, 10), ("error", 9)):  # too much for so small heads; errors have no answers
        refused(f"reduction: expected at most .*, got {default}$", calibration.plans, method=method)


def test_a_file_gives_the_same_plans(calibration, tmp_path):
    calibration.save(tmp_path / "c.safetensors")
    loaded = ss.Calibration.load(tmp_path / "c.safetensors")
    assert repr(loaded) == repr(calibration) == "Calibration(Model, layers=2, scores=ranks, joint, answers)"
    assert (loaded.fingerprint, loaded.tokens) == (MODEL, 160)
    for how in (
        {"mean_rank": 3},
        {"mean_rank": 2, "map": "lowrank"},
        {"reduction": 3},
        {"mean_rank": 2, "residual_bits": 1},
    ):
        same(loaded.plans(**how), calibration.plans(**how))
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def share_of(whole, names, heads=slice(None), **changed):
    """A process's part: some layers, and of their heads a share."""
    layers, identities = {}, {}
    for name in names:
        own, basis = whole.layers[name], whole.layers[name].basis
        groups = basis.layer.heads // basis.layer.key_heads
        count = len(range(basis.layer.heads)[heads])
        layer = replace(basis.layer, heads=count, key_heads=count // groups)
        scores = {}
        for kind in ("ranks", "joint", "answers"):
            scores[kind] = copy.copy(getattr(own, kind))
            vars(scores[kind]).update(layer=layer, **changed)
            for each in scores[kind].sums:
                setattr(scores[kind], each, getattr(scores[kind], each)[heads])
        layers[name] = LayerCalibration(StoredBasis(layer, basis.window, basis.omega[heads]), **scores)
        identities[name] = MODEL.layers[name]._replace(layer=layer)
    return ss.Calibration(layers, ModelFingerprint("Model", identities), whole.tokens)


def test_shares_of_processes(calibration):
    """Two have shares of the heads of one layer, a third has the other layer."""
    first, second = (share_of(calibration, ["layers.0"], own) for own in (np.s_[:2], np.s_[2:]))
    parts = [first, second, share_of(calibration, ["layers.2"])]
    join = ss.distributed.join_shards
    for budget in ({"mean_rank": 3}, {"reduction": 3}):
        same(join(parts).plans(**budget), calibration.plans(**budget))
    refused("parts: expected at least one Calibration, got none", join, [])
    refused(r"parts\[1\]: expected a calibration with a model's fing", join, [first, ss.Calibration(second.layers)])
    other = share_of(calibration, ["layers.0"], np.s_[2:], weighting="error")
    refused("parts: expected shares of layers.0 with .*'gradient'.*, got .*'error'", join, [first, other])
    fewer = share_of(calibration, ["layers.0"], np.s_[2:], every=2)  # a recording that was ended early
    same(join([first, fewer, parts[2]]).plans(3), calibration.plans(3))
    for part in (first, second):
        identity = part.fingerprint.layers["layers.0"]
        part.fingerprint.layers["layers.0"] = identity._replace(layer=calibration.layers["layers.0"].basis.layer)
    same(join([first, second, parts[2]]).plans(3), calibration.plans(3))
    refused("parts: expected all shares of layers.0, .*, got 1 as ", join, [second, parts[2]])
    refused("parts: expected all shares of layers.0, .*, got 3 as ", join, [first, second, second, parts[2]])
    for wrong, message in ((5, "parts: expected a sequence of Calibrations"), ([5], r"parts\[0\]: expected a Calib")):
        with pytest.raises(TypeError, match=message):
            join(wrong)


def test_budgets_of_a_time(calibration):
    """Budgets that no plans meet are left out: the bases have 8 columns, and uniform plans at most as many."""
    uniform = ss.plans_within(calibration, 1.0, lambda plans: 0.5, method="uniform")
    assert uniform.allocation.mean_rank == 8
    within = partial(ss.plans_within, calibration, 1.0, lambda plans: 2.0)
    refused(r"seconds: expected at least 2 \(2e\+06 microseconds\), the least", within, budgets=(3, 99))
    refused("reduction: expected at most", within, budgets=(98, 99))
    refused("budgets: expected at least one number, got none", within, budgets=())
    refused("budgets: expected finite numbers above 0, got 'a'", within, budgets=("a",))


def test_without_a_model(calibration, made):
    own = ss.Calibration(calibration.layers)
    refused("calibration: expected one of a model", own.plans)
    how = {"map": None, "sketch_dtype": None, "residual_bits": 0, "method": None, "rank_max": None}
    same(make_plans(own, 3, None, **how)[0], calibration.plans(3))


def test_refusals(calibration, made, tmp_path):
    refused("layers: expected at least one", ss.Calibration, {})
    refused("layers: expected layers.0, layers.2", ss.Calibration, {"layers.0": calibration.layers["layers.0"]}, MODEL)
    bare = {name: LayerCalibration(own.basis, own.ranks) for name, own in calibration.layers.items()}
    with pytest.raises(TypeError, match="joint: expected a JointScores, got RankScores"):
        ss.LayerCalibration(bare["layers.0"].basis, joint=bare["layers.0"].ranks)
    refused("calibration: expected scores of residuals, or a", ss.Calibration(bare, MODEL).plans, reduction=3)
    refused("sketch_dtype: expected 'int8' of the joint", calibration.plans, reduction=3, sketch_dtype="float32")
    refused("rank_max: expected at most the largest scored rank, 8, got 9", calibration.plans, reduction=3, rank_max=9)
    refused("mean_rank: expected none beside a reduction, got 2", calibration.plans, 2, 3)
    refused("method: expected one of gradient, .* got", calibration.plans, reduction=3, method="sensitivity")
    for bits in (True, 2.0, None, 4):
        refused("residual_bits: expected an integer from 0 to 3, got", calibration.plans, 2, residual_bits=bits)
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    fields, tensors = parts_of(path)
    tensors["layers.0.ranks.error"] = tensors["layers.0.ranks.error"][:, :-1].copy()
    save_file(path, FORMAT, tensors, fields)
    with pytest.raises(FileFormatError, match=r"layers.0.ranks.error: expected float64 of shape \(4, 9\)"):
        ss.Calibration.load(path)
