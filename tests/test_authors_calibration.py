"""Calibrations that the paper's authors' own code makes, of tiny models. `SKETCHSSM_AUTHORS` names a folder with their
package (`pip download sketchssm==0.1.15 --no-deps`, unpacked); elsewhere the tests are skipped.
"""

import json
import os
import sys
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path

import numpy as np
import pytest

import sketchssm as ss
from sketchssm.layer.recurrence import Tokens
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

if "SKETCHSSM_AUTHORS" not in os.environ:
    pytest.skip("SKETCHSSM_AUTHORS is not set", allow_module_level=True)
yaml = pytest.importorskip("yaml")
from tiny_models import make, prompt, st, torch  # noqa: E402

W, RANK = 16, 6


@pytest.fixture(scope="module")
def authors():
    """Their package under another name."""
    home = Path(os.environ["SKETCHSSM_AUTHORS"], "sketchssm", "calibration")
    spec = util.spec_from_file_location("authors", home / "__init__.py", submodule_search_locations=[str(home)])
    sys.modules["authors"] = util.module_from_spec(spec)
    return [import_module(f"authors.{name}") for name in ("core.basis", "core.scoring", "calibration")]


def trace_of(layer, tokens, grad):
    """States at the starts of windows, effective queries and gradients of the tokens that read through a sketch."""
    heads, parts = Tokens(*(None if x is None else x.swapaxes(1, 2) for x in per_head(layer, tokens))), ([], [], [])
    for start in range(W, tokens.v.shape[1] - W + 1, W):
        parts[0].append(run(layer, *tokens.at(np.s_[:, :start]))[1])
        each = [
            effective_query(heads.q[:, :, t], Ring(*heads.at(np.s_[:, :, start : t + 1])[1:]))
            for t in range(start, start + W - 1)
        ]
        parts[1].append(np.stack(each, axis=-1))
        parts[2].append(grad[:, start : start + W - 1].transpose(0, 2, 3, 1))
    return [np.stack(part, axis=1) for part in parts]


def retained(moments, omega):
    """Share of the energy of reads that columns ``(heads, K, rank)`` keep, by the moments."""
    kept = []
    for energy, queries, columns in zip(moments.state_gram, moments.query_gram, omega, strict=True):
        values, vectors = np.linalg.eigh(energy)
        root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
        frame, whole = np.linalg.qr(root @ columns)[0], root @ queries @ root
        kept.append(np.trace(frame.T @ whole @ frame) / np.trace(whole))
    return np.array(kept)


@pytest.mark.parametrize("name", ["OlmoHybrid", "KimiLinear", "NemotronH"])
def test_of_the_same_statistics(authors, name, tmp_path):
    """Without their ridge their bases span the subspaces of `fit_basis`, where a group is a head. Curves are those of
    `RankScores` with their bases, and plans at once those of their file.
    """
    basis_of, scoring, packaging = authors
    model, rng = make(name), np.random.default_rng(0)
    with st.record(model) as recording, torch.no_grad():
        for row in prompt(6, 96):
            model(row[None], use_cache=False)
    layers = {each: own.layer for each, own in recording.layers.items()}
    moments, traces, given = {}, [], {}
    for each, layer in layers.items():
        rows = recording.tokens(each)
        tokens = Tokens(*(None if x[0] is None else np.stack(x).astype(float) for x in zip(*rows, strict=True)))
        moments[each] = ss.Moments(layer, window=W)
        moments[each].update(*tokens)
        given[each] = tokens, rng.standard_normal(tokens.v.shape)
        traces.append(trace_of(layer, *given[each]))
    groups, numbers = layer.key_heads, [int(each.split(".")[2]) for each in layers]
    count = torch.tensor([int(own.samples[0]) for own in moments.values()])
    covariance = {"head_cov_windows": count, "head_cov_queries": count, "layer_ids": numbers}
    for key, own in (("head_scov", "state_gram"), ("head_qcov", "query_gram")):
        covariance[key] = torch.from_numpy(np.stack([getattr(x, own) for x in moments.values()]))
    basis = basis_of.fit(covariance, groups, RANK, ridge=1e-9)
    whole = zip(("state", "effective_query", "gradient"), zip(*traces, strict=True), strict=True)
    curves = scoring.score({key: torch.from_numpy(np.stack(part)) for key, part in whole}, basis)
    torch.save(basis, tmp_path / "basis.pt")
    torch.save(curves, tmp_path / "curves.pt")
    sizes = {"groups": groups, "erase": layer.erases}
    manifest = {
        "K": layer.key_dim, "V": layer.value_dim, "W": W, "files": {}, "model": name, "family": layer.kind,
        "basis": "basis.pt", "curves": "curves.pt", "basis_fingerprint": basis_of.fingerprint(basis["omega"]),
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | sizes))
    geometry = {"key_dim": layer.key_dim, "value_dim": layer.value_dim, "window": W}
    config = {"geometry": geometry | sizes, "allocation": {"max_rank": None, "mean_ranks": []}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "calibration.pt"
    torch.save(packaging.package(tmp_path), path)

    found = st.import_calibration(path, model)
    assert list(found.layers) == list(layers)
    for each, own in found.layers.items():
        omega, fitted = own.basis.omega.astype(float), ss.fit_basis(moments[each], RANK)
        theirs, ours = retained(moments[each], omega), retained(moments[each], fitted.omega)
        assert (theirs < ours + 1e-6).all()
        if groups == layer.heads:
            assert np.abs(theirs - ours).max() < 1e-4
        scores = ss.RankScores(replace(fitted, omega=omega))
        scores.update(*given[each][0], grad=given[each][1])
        assert np.array_equal(scores.samples, own.ranks.samples)
        assert np.allclose(scores.paired, own.ranks.paired, rtol=2e-3, atol=1e-6 * scores.paired.max())
    assert found.plans(mean_rank=2).reduction > 1
