"""Files of the library: whole, checksummed, the same bytes every time, and refused by their own error if damaged."""

import errno
import json
import os
import re
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
from samples import parts_of, plan_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import model_plans
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.files import KEY, FileFormatError, save_file, write_whole

LAYER = Layer("gdn", 1, 2, 2)  # tiny, so that a test can damage every bit of a file
CLASSES = {
    "plan": ss.SketchPlan, "moments": ss.Moments, "basis": SketchBasis, "model-plans": model_plans.ModelPlans,
    "snapshot": ss.Snapshot,
}  # fmt: skip
FORMS = {kind: each.FORMAT for kind, each in CLASSES.items()}


def make(kind):
    """An object that can be saved."""
    rng = np.random.default_rng(5)
    if kind == "snapshot":
        return ss.ReplayHead(LAYER, 1, "reference", window=2).snapshot()
    plan = plan_of(rng, LAYER, 1, window=8)
    if kind == "model-plans":
        made = model_plans.AllocationSummary(3.0, "error", 0.1, {"a": 0.9}, 10)
        layers = {"a": model_plans.LayerFingerprint("X", LAYER, "ff")}
        return model_plans.ModelPlans({"a": plan}, model_plans.ModelFingerprint("M", layers), made)
    if kind == "plan":
        return plan
    sums = ss.Moments("gdn", 1, 2, 2, window=3)
    sums.update(*tokens_of(rng, LAYER, 2, 12))
    return sums if kind == "moments" else ss.fit_basis(sums)


@pytest.fixture(params=FORMS)
def kind(request):
    return request.param


@pytest.fixture
def saved(kind, tmp_path):
    path = tmp_path / f"{kind}.safetensors"
    make(kind).save(path)
    return path


def refused(kind, path, content, whole):
    """Whether damaged content is refused, by the format's error. Content that loads must hold what `whole` held."""
    with open(path, "r+b") as file:  # in place: on some file systems a new file takes milliseconds
        file.write(content)
        file.truncate()
    try:
        loaded = CLASSES[kind].load(path)
    except FORMS[kind].error as error:
        assert type(error) is FORMS[kind].error
        assert str(path) in str(error)
        return True
    loaded.save(path)
    assert path.read_bytes() == whole  # the same contents give the same bytes
    return False


class TestBytes:
    def test_same_every_time(self, kind, saved):
        for _ in range(8):  # a hash map of several keys would be written in a random order each time
            again = saved.with_suffix(".again")
            make(kind).save(again)
            assert again.read_bytes() == saved.read_bytes()

    def test_a_loaded_object_saves_the_same(self, kind, saved):
        again = saved.with_suffix(".again")
        CLASSES[kind].load(saved).save(again)
        assert again.read_bytes() == saved.read_bytes()

    def test_the_document_names_format_version_and_checksum(self, kind, saved):
        with safe_open(saved, "np") as file:
            document = json.loads(file.metadata()[KEY])
        assert (document["format"], document["version"]) == (f"sketchssm-{kind}", FORMS[kind].version)
        assert re.fullmatch("[0-9a-f]{64}", document["sha256"])


class TestDamage:
    def test_a_bit_of_every_byte(self, kind, saved):
        """If it is flipped, the file is refused, or nothing that is read has changed."""
        whole = saved.read_bytes()
        count = 0
        for place, bit in enumerate(np.random.default_rng(0).integers(8, size=len(whole)).tolist()):
            flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            count += refused(kind, saved, flipped, whole)
        assert count > 0.99 * len(whole)  # the rest are spaces of the padding that become other white space

    def test_every_truncation(self, kind, saved):
        whole = saved.read_bytes()
        for size in range(len(whole)):
            assert refused(kind, saved, whole[:size], whole)
        assert refused(kind, saved, whole + b"\0", whole)

    @given(data=st.data())
    def test_any_splice(self, data, tmp_path_factory):
        kind = data.draw(st.sampled_from(list(FORMS)))
        path = tmp_path_factory.mktemp("splice") / "file"
        make(kind).save(path)
        whole = path.read_bytes()
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, min(start + 64, len(whole))))
        refused(kind, path, whole[:start] + data.draw(st.binary(max_size=64)) + whole[stop:], whole)

    def test_a_file_that_may_not_be_read(self, kind, saved, monkeypatch):
        """The system's errors are not the file's."""

        def refuse(*_):
            raise PermissionError("not yours")

        monkeypatch.setattr("safetensors.safe_open", refuse)
        with pytest.raises(PermissionError):
            CLASSES[kind].load(saved)

    def test_missing(self, kind, tmp_path):
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
                CLASSES[kind].load(path)


class TestCrafted:
    """Files whose checksum is right, or that never come as far as their checksum."""

    @pytest.mark.parametrize("meta", [None, {"format": "pt"}])
    def test_another_program_s_safetensors(self, meta, kind, saved):
        saved.write_bytes(save({"weight": np.zeros(3, np.float32)}, metadata=meta))
        with pytest.raises(FORMS[kind].error, match=f"expected format 'sketchssm-{kind}', got"):
            CLASSES[kind].load(saved)

    @pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"gdn"', "[" * 10**5, '{"a":' * 10**5])
    def test_a_document_that_is_no_object(self, text, kind, saved):
        assert refused(kind, saved, save(parts_of(saved)[1], metadata={KEY: text}), b"")

    @pytest.mark.parametrize("version", [1, 99, 0, "2", None, 2.5, [[]]])
    def test_another_version(self, version, kind, saved):
        fields, tensors = parts_of(saved)
        save_file(saved, FORMS[kind]._replace(version=version), tensors, fields)
        own = FORMS[kind].version
        with pytest.raises(FORMS[kind].error, match=rf"expected version {own} of .*, got .*: {FORMS[kind].remedy}"):
            CLASSES[kind].load(saved)

    def test_tensors_that_are_missing_or_too_many(self, kind, saved):
        fields, tensors = parts_of(saved)
        names = [*tensors]
        for wrong in (names[1:], (*names, "more")):
            form = FORMS[kind]._replace(tensors=tuple(sorted(wrong)))
            save_file(saved, form, tensors | {"more": np.zeros(1)}, fields)
            with pytest.raises(FORMS[kind].error, match="expected the tensors "):
                CLASSES[kind].load(saved)

    def test_fields_that_are_missing_or_too_many(self, kind, saved):
        fields, tensors = parts_of(saved)
        for wrong in (*({k: x for k, x in fields.items() if k != name} for name in fields), fields | {"colour": 1}):
            save_file(saved, FORMS[kind], tensors, wrong)
            with pytest.raises(FORMS[kind].error, match=re.escape(str(saved))):
                CLASSES[kind].load(saved)

    @pytest.mark.parametrize(
        "value", [None, [], {}, "gdn", 3, -1, 10**9, 10**12, 10**30, 10**400, 1e308, float("nan"), [[[]]], True]
    )
    def test_a_field_of_any_kind(self, value, kind, saved):
        """At every place of the document; a refusal is the format's error, quickly and without a large allocation."""
        fields, tensors = parts_of(saved)
        places = [(name,) for name in fields] + [
            (name, key) for name in fields if isinstance(fields[name], dict) for key in fields[name]
        ]
        for place in places:
            wrong = json.loads(json.dumps(fields))
            target = wrong
            for name in place[:-1]:
                target = target[name]
            target[place[-1]] = value
            save_file(saved, FORMS[kind], tensors, wrong)
            try:
                CLASSES[kind].load(saved)
            except FORMS[kind].error as error:
                assert not isinstance(error.__cause__, MemoryError)

    @pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "I64", "F64", "C64", "BOOL"])
    def test_a_tensor_of_any_type(self, dtype, kind, saved):
        """Types that NumPy lacks are refused as any other wrong type."""
        whole = saved.read_bytes()
        for own in (b'"F32"', b'"F64"', b'"I64"'):
            content = whole.replace(b'"dtype":' + own, f'"dtype":"{dtype}"'.encode())
            size = int.from_bytes(whole[:8], "little") + len(content) - len(whole)
            refused(kind, saved, size.to_bytes(8, "little") + content[8:], whole)

    @pytest.mark.parametrize("wrong", [np.zeros(0), np.zeros((0, 2, 2)), np.zeros((1, 2, 0))])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
    def test_a_tensor_of_any_shape(self, wrong, dtype, kind, saved):
        fields, tensors = parts_of(saved)
        names = "|".join(name.rpartition(".")[2] for name in tensors)
        for name in tensors:
            save_file(saved, FORMS[kind], tensors | {name: wrong.astype(dtype)}, fields)
            with pytest.raises(FORMS[kind].error, match=rf": ({names}): expected "):
                CLASSES[kind].load(saved)

    def test_the_error_is_a_value_error(self):
        assert issubclass(ss.PlanFileError, FileFormatError)
        assert issubclass(FileFormatError, ValueError)


class TestReplacement:
    @pytest.mark.parametrize("fails", ["fsync", "replace"])
    def test_a_failed_save_leaves_the_old_file_and_no_other(self, fails, saved, kind, monkeypatch):
        def fail(*_):
            raise OSError("disk full")

        before = saved.read_bytes()
        monkeypatch.setattr(os, fails, fail)
        with pytest.raises(OSError, match="disk full"):
            make(kind).save(saved)
        assert saved.read_bytes() == before
        assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]

    def test_a_reader_of_the_old_file_keeps_it(self, saved, kind):
        with open(saved, "rb") as reader:
            before = saved.read_bytes()
            make("moments" if kind == "plan" else "plan").save(saved)
            assert reader.read() == before != saved.read_bytes()

    def test_a_missing_folder_is_the_system_s_error(self, kind, tmp_path):
        """It names the caller's path, not that of a file beside it."""
        (tmp_path / "file").touch()
        for below, error in (("nowhere", FileNotFoundError), ("file", NotADirectoryError)):
            path = tmp_path / below / "plan"
            with pytest.raises(error) as caught:
                make(kind).save(path)
            assert str(caught.value).endswith(f": '{path}'")


def test_errors_name_the_file(tmp_path, monkeypatch):
    """Of a device, too, whose buffer is written when it is closed."""
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        write_whole("/dev/full", b"contents")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/file'$"):
        write_whole(tmp_path / "file", b"contents")
    assert not list(tmp_path.iterdir())


def test_a_name_of_any_length(tmp_path):
    longest = tmp_path / ("x" * 255)
    write_whole(longest, b"contents")
    assert longest.read_bytes() == b"contents"
    with pytest.raises(OSError, match=r"File name too long: '.*x{256}'"):
        write_whole(tmp_path / ("x" * 256), b"contents")


def test_a_path_of_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_whole(b"file", b"contents")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_device_is_written_in_place(tmp_path):
    """A new file in its place would destroy the device for the whole machine, if root saves there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"contents")
        assert os.read(reader, 100) == b"contents"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_stay(tmp_path):
    """A snapshot that only its owner may read stays so."""
    path = tmp_path / "file"
    for mode in (0o600, 0o640):
        write_whole(path, b"contents")
        path.chmod(mode)
        write_whole(path, b"others")
        assert path.stat().st_mode & 0o777 == mode and path.read_bytes() == b"others"


def test_a_link_stays_a_link(tmp_path):
    whole, link = tmp_path / "whole", tmp_path / "link"
    link.symlink_to(whole)
    for content in (b"new", b"old"):  # the target is missing at first
        write_whole(link, content)
        assert link.is_symlink() and whole.read_bytes() == content


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        *((("allocation", name), value, name) for name, value in (("mean_rank", "3"), ("mean_rank", [7]))),
        *((("allocation", name), value, name) for name, value in (("gap", None), ("tokens", {}), ("method", 3))),
        (("allocation", "retained"), {"a": "all"}, "a"),
        (("allocation", "retained"), {}, "allocation"),
        (("layers", "a", "plan", "window"), 1, "a: window"),
    ],
)
def test_crafted_plans_of_a_model(place, value, named, tmp_path):
    """They are refused at once, and not when they are printed."""
    path = tmp_path / "plans"
    make("model-plans").save(path)
    fields, tensors = parts_of(path)
    *outer, last = place
    reduce(dict.get, outer, fields)[last] = value
    save_file(path, model_plans.FORMAT, tensors, fields)
    with pytest.raises(ss.PlanFileError, match=f"{path}: {named}: expected "):
        model_plans.ModelPlans.load(path)


def test_a_layer_that_needs_all_memory(tmp_path):
    """No tensor bounds V."""
    path = tmp_path / "plan"
    make("plan").save(path)
    fields, tensors = parts_of(path)
    save_file(path, FORMS["plan"], tensors, fields | {"layer": fields["layer"] | {"value_dim": 2**40}})
    with pytest.raises(ss.PlanFileError, match="value_dim: expected "):
        ss.SketchPlan.load(path)
