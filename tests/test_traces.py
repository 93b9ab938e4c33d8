"""Trace files: reading, and the errors of refused files."""

import contextlib
import io
import tracemalloc
import zipfile
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sketchssm.calibrate.traces import SHIPPED, TraceFileError, Traces
from sketchssm.layer.recurrence import KINDS, PROPERTIES, Layer
from sketchssm.study.bench import random_tokens

SHAPES = {kind: Layer(kind, 2 if own.channel_decays else 4, 16, 8, 2) for kind, own in PROPERTIES.items()}


def trace_entries(kind, *, calib=3, test=1, tokens=40, grads=1, seed=0, layer=None):
    """Entries of a small trace file with random inputs; gradients for the last `grads` calibration sequences."""
    layer = layer or SHAPES[kind]
    entries = {}
    for part, rows in (("calib", calib), ("test", test)):
        for name, x in random_tokens(layer, rows, tokens, seed + (part == "test"))._asdict().items():
            if x is not None:
                entries[f"{part}_{name}"] = x
    if grads:
        rng = np.random.default_rng(seed)
        entries["calib_grad"] = rng.standard_normal((grads, tokens, layer.heads, layer.value_dim), dtype=np.float32)
    return entries


def write_traces(path, kind, **settings):
    np.savez(path, **trace_entries(kind, **settings))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_inferred(kind, tmp_path):
    traces = Traces.load(write_traces(tmp_path / "layer3.npz", kind))
    assert traces.layer == SHAPES[kind]
    assert traces.name == "layer3"
    assert traces.calib.v.shape == (3, 40, traces.layer.heads, 8)
    assert (traces.calib.beta is None) == (not traces.layer.erases)
    assert all(x is None or x.dtype == np.float32 for x in (*traces.calib, *traces.test, traces.grad))


@pytest.mark.parametrize("kind", SHIPPED)
def test_shipped_traces(kind):
    traces = Traces.shipped(kind)
    assert traces.layer.kind == kind
    assert traces.layer.key_dim == 128
    assert "Debian" in traces.provenance
    tokens, grad = traces.score_part()
    assert grad is not None
    assert grad.shape == tokens.v.shape


@pytest.mark.parametrize(("kind", "with_grad"), [("mamba2", True), ("gdn", False), ("kda", True)])
def test_saved_traces(kind, with_grad, tmp_path):
    small = Traces.load(write_traces(tmp_path / "small.npz", kind, grads=int(with_grad)))
    traces = replace(small, provenance="a text")
    traces.save(tmp_path / "layer3")
    read = Traces.load(tmp_path / "layer3")
    assert (read.name, read.layer, read.provenance) == ("layer3", traces.layer, traces.provenance)
    for want, got in ((traces.calib, read.calib), (traces.test, read.test), ([traces.grad], [read.grad])):
        for x, y in zip(want, got, strict=True):
            assert (x is None) == (y is None)
            assert x is None or np.array_equal(x, y)


def test_shipped_traces_are_small():
    from importlib import resources

    folder = resources.files("sketchssm") / "calibrate" / "data"
    assert sum(len((folder / f"{kind}.npz").read_bytes()) for kind in SHIPPED) < 6e6


def test_fit_and_score_parts_are_disjoint(tmp_path):
    traces = Traces.load(write_traces(tmp_path / "a.npz", "gdn", calib=5))
    tokens, grad = traces.score_part()
    joined = np.concatenate([traces.fit_part().q, tokens.q])
    np.testing.assert_array_equal(joined, traces.calib.q)
    np.testing.assert_array_equal(grad, traces.grad[-1:])


def test_scored_tokens_are_those_with_gradients(tmp_path):
    entries = trace_entries("kda", grads=2)
    entries["calib_grad"] = entries["calib_grad"][:, :24]
    np.savez(tmp_path / "a.npz", **entries)
    tokens, grad = Traces.load(tmp_path / "a.npz").score_part()
    assert tokens.v.shape[:2] == grad.shape[:2] == (1, 24)
    np.testing.assert_array_equal(grad, entries["calib_grad"][-1:])


def test_gradients_that_miss_a_scored_sequence_are_left_out(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"^a: gradients of 1 sequences are not used: .* the last 2 calibration"):
        traces = Traces.load(write_traces(tmp_path / "a.npz", "gdn", calib=6, grads=1))
    tokens, grad = traces.score_part()
    assert tokens.v.shape[0] == 2
    assert grad is None


def test_one_calibration_sequence_is_not_enough(tmp_path):
    traces = Traces.load(write_traces(tmp_path / "a.npz", "gdn", calib=1))
    with pytest.raises(TraceFileError, match="at least 2 calibration sequences"):
        traces.fit_part()


def test_kind_of_the_file(tmp_path):
    for kind in ("gdn", "kda"):
        np.savez(tmp_path / f"{kind}.npz", **trace_entries("gdn"), kind=kind)
    assert Traces.load(tmp_path / "gdn.npz").layer.kind == "gdn"
    with pytest.raises(TraceFileError, match="calib_g: expected shape"):
        Traces.load(tmp_path / "kda.npz")


def changed(name, change):
    def apply(entries):
        entries[name] = change(entries[name])

    return apply


def hole(value):
    def put(x):
        x = x.copy()
        x.flat[3] = value
        return x

    return put


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("test_v"), "test_v: expected an array, got no such entry"),
        (changed("test_k", lambda x: x[..., :-1]), r"test_k: expected shape \(1, 40, 2, 16\), got \(1, 40, 2, 15\)"),
        (changed("calib_v", lambda x: x[0]), "calib_v: expected shape .sequences, tokens, heads, dim."),
        (
            changed("calib_q", lambda x: x.astype(complex)),
            "calib_q: expected floating-point numbers, got dtype complex",
        ),
        (changed("calib_q", lambda x: x.astype(ml_dtypes.bfloat16)), "calib_q: expected float.*can't hold bfloat16"),
        (changed("calib_g", hole(0.5)), "calib_g: expected log-decays <= 0"),
        (changed("test_beta", hole(np.nan)), "test_beta: expected finite numbers, got NaN"),
        (changed("test_v", hole(np.inf)), "test_v: expected finite numbers"),
        (changed("calib_grad", hole(np.nan)), "calib_grad: expected finite numbers"),
        (changed("calib_v", lambda x: np.full(x.shape, 1e300)), "calib_v: expected finite numbers"),
        (changed("test_v", lambda x: x[:0]), r"test_\w: expected"),
        (changed("calib_grad", lambda x: x[:, :0]), "calib_grad: expected shape"),
        (lambda e: e.update(kind="rwkv"), "kind: expected one of mamba2, gdn, kda, gla, got 'rwkv'"),
        (lambda e: e.update(kind=["gdn"]), "kind: expected one string, got"),
        (lambda e: e.update(kind=3), "kind: expected one string, got int64"),
    ],
)
def test_bad_entries_are_named(change, message, tmp_path):
    entries = trace_entries("gdn")
    change(entries)
    np.savez(tmp_path / "a.npz", **entries)
    with pytest.raises(TraceFileError, match=message):
        Traces.load(tmp_path / "a.npz")


def test_full_forget_is_allowed(tmp_path):
    entries = trace_entries("gdn")
    entries["calib_g"][0, 5] = -np.inf
    np.savez(tmp_path / "a.npz", **entries)
    assert np.isneginf(Traces.load(tmp_path / "a.npz").calib.g).any()


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut off", b"\x93NUMPY"])
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(TraceFileError, match=r"expected an npz archive of plain arrays \(File is not a zip file\)"):
        Traces.load(tmp_path / "a.npz")


def rezipped(path, change):
    """An archive again, with the bytes of its entries changed by name."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_what_is_not_needed_is_not_read(tmp_path):
    """A small file of a large array: an entry of another name takes no memory."""
    path = write_traces(tmp_path / "a.npz", "gdn")
    large = np.zeros(2**22, dtype=np.float32)  # 16 MiB
    rezipped(path, lambda entries: entries.update({"unused.npy": npy(large)}))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    try:
        Traces.load(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**22  # all arrays of the file are some 200 KiB


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x07\x00" + b"\0" * 64,
        npy(np.zeros((3, 40, 2, 16)))[:-8],
        npy(np.zeros(3)).replace(b"(3,)", b"(-3,)"),
        npy(np.zeros(3)).replace(b"(3,)", b"(10**9,)"),
        npy(np.zeros(3)).replace(b"(3,)", b"(" + b"9" * 20 + b",)"),
    ],
    ids=["empty", "version", "short", "negative", "expression", "huge"],
)
def test_headers_that_lie(content, tmp_path):
    path = write_traces(tmp_path / "a.npz", "gdn")
    rezipped(path, lambda entries: entries.update({"calib_q.npy": content}))
    with pytest.raises(TraceFileError, match="expected"):
        Traces.load(path)


@given(data=st.data())
def test_damage(data, tmp_path_factory):
    """A damaged file is refused by the one kind of error, or loads."""
    path = tmp_path_factory.mktemp("damage") / "a.npz"
    np.savez_compressed(path, **trace_entries("gdn", calib=2, tokens=1, grads=0), kind="gdn")
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(start + 16, len(whole))))
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=16)) + whole[stop:])
    with contextlib.suppress(TraceFileError):
        Traces.load(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    traces = Traces.load(write_traces(tmp_path / "layer.npz", "gdn"))
    before = (tmp_path / "layer.npz").read_bytes()

    def full(file, **entries):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space left"):
        traces.save(tmp_path / "layer.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["layer.npz"]
    assert (tmp_path / "layer.npz").read_bytes() == before


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"no trace file at nowhere\.npz"):
        Traces.load("nowhere.npz")
