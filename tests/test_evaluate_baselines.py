"""Entries of the baselines: names, costs, and runs on real traces."""

import numpy as np
import pytest
from samples import at

from sketchssm.calibrate.plans import Settings
from sketchssm.calibrate.traces import SHIPPED, Traces
from sketchssm.plans import traffic
from sketchssm.study.evaluate import Entry, Study, baselines, measure

LISTS = (
    baselines.quantised_systems, baselines.pruned_systems, baselines.key_reduced_systems, baselines.read_only_systems,
)  # fmt: skip


@pytest.fixture(scope="module", params=SHIPPED)
def traces(request):
    whole = Traces.shipped(request.param)
    return Traces(whole.layer, at(whole.calib, np.s_[:2, :64]), at(whole.test, np.s_[:1, :64]))


def listed(traces, window=8, **keywords):
    return {make: make(traces.layer, traces.calib, window, **keywords) for make in LISTS}


def measured(traces, systems):
    study = Study(traces, Settings(8))
    return [measure(Entry("own", system.name, 8, lambda system=system: system), study) for system in systems]


def test_kinds_that_a_method_excludes_list_nothing(traces):
    counts = {make.__name__: len(systems) for make, systems in listed(traces).items()}
    gdn = traces.layer.kind == "gdn"
    assert counts == {
        "quantised_systems": 4,
        "pruned_systems": 0 if gdn else 4,
        "key_reduced_systems": 4 if gdn else 0,
        "read_only_systems": 7,
    }


def test_reductions_are_the_byte_model_s(traces):
    size = (traces.layer.key_dim, traces.layer.value_dim)
    whole = traffic.standard(*size)
    by_name = {system.name: system.reduction for systems in listed(traces).values() for system in systems}
    assert by_name["DSQ 8 bits"] == whole / traffic.compressed(*size, bits=8)
    assert by_name["4-bit copy"] == whole / traffic.read_only_copy(*size, 4, 8)
    assert by_name["low-rank read 8"] == 8 * whole / (7 * 2 * 8 * size[1] + whole)
    pruned = "DRRQR" if traces.layer.kind == "gdn" else "GHOST"
    # all shares of K = 128 are integers, so that no count is rounded
    assert [by_name[f"{pruned} {share:.1%}"] for share in baselines.SPARSITIES] == [1.6, 2, 1 / 0.375, 4]


def test_all_run_side_by_side(traces):
    """Every entry decodes real traces. Exact states are exact at flushes, the others are close."""
    together = listed(traces)
    exact = {system.name for system in together[baselines.read_only_systems]}
    systems = [system for each in together.values() for system in each]
    assert len({system.name for system in systems}) == len(systems)
    for result in measured(traces, systems):
        assert 0 < result.output_error < 1
        assert (result.state_error < 1e-5) == (result.setting in exact)


def test_less_traffic_costs_accuracy(traces):
    """On real traces, settings of one method with fewer bytes have larger errors."""
    for make, systems in listed(traces).items():
        groups = [systems[:4], systems[4:]] if make is baselines.read_only_systems else [systems]
        for group in groups:
            results = measured(traces, group)
            order = sorted(results, key=lambda result: result.reduction)
            errors = [result.output_error for result in order]
            assert errors == sorted(errors)
