"""The cache of compiled CPU kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import sketchssm as ss
from sketchssm import files
from sketchssm.cpu import decode, jit
from sketchssm.files import source_digest
from sketchssm.recurrence import Layer


def test_kernels_are_cached_under_the_whole_package() -> None:
    assert decode.window_kernel.dispatcher._cache._cache_file._source_stamp == source_digest(*jit.SOURCES)


@pytest.mark.parametrize("module", ["cpu/tiles.py", "reference/maps.py"])
def test_an_edit_of_any_kernel_invalidates_all(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(files.PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", "data", "*.so"))
    fresh = source_digest.__wrapped__
    before = source_digest(*jit.SOURCES)
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "package")
    assert fresh(*jit.SOURCES) == before
    edited = tmp_path / "package" / module
    edited.write_text(edited.read_text() + "\n")
    assert fresh(*jit.SOURCES) != before


def test_read_only_inputs_need_no_other_kernel() -> None:
    head = ss.ReplayHead(Layer("mamba2", 2, 6, 5), 1, "cpu", window=4)
    head.warmup()
    compiled = len(decode.window_kernel.dispatcher.signatures)
    tokens = [np.zeros(shape, np.float32) for shape in ((1, 2, 6), (1, 2, 6), (1, 2, 5), (1, 2))]
    for array in tokens:
        array.flags.writeable = False
    head.step(*tokens)
    assert len(decode.window_kernel.dispatcher.signatures) == compiled
