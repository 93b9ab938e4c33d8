"""Snapshots of heads on the CUDA backend, whose kernels run on the host."""

import numpy as np
import pytest
from host import fixtures
from host.heads import narrow, sketch, tokens_of

import sketchssm as ss

cupy = fixtures.of_heads


@fixtures.cold
@pytest.mark.parametrize("types", [{}, {"state_dtype": "bfloat16"}, {"sketch_dtype": "int8"}], ids=str)
def test_a_half_full_window_survives_in_a_file(types, tmp_path, rng):
    """Another head decodes the restored slots bitwise as the first one does, at positions 3 and 0."""
    head, other = (sketch(**types) for _ in range(2))
    for each in (head, other):
        each.step(*narrow(tokens_of(rng, 4, 5)))
    head.step(*narrow(tokens_of(rng, 2, 2)), slots=[1, 3])
    head.step(*narrow(tokens_of(rng, 1, 1)), slots=[2])
    head.flush([2])
    head.step(*narrow(tokens_of(rng, 1, 2)), slots=[2], draft=True)  # drafts are left out
    head.snapshot([3, 2]).save(tmp_path / "slots")
    other.restore(ss.Snapshot.load(tmp_path / "slots"), [0, 1])
    np.testing.assert_array_equal(np.asarray(other.position)[:2], [3, 0])
    tokens = narrow(tokens_of(rng, 2, 6))
    got, want = other.step(*tokens, slots=[0, 1]), head.step(*tokens, slots=[3, 2])
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(other.state)[:2], np.asarray(head.state)[[3, 2]])


def test_another_backend(rng):
    with pytest.raises(ValueError, match=r'^snapshot: expected backend "cuda", got "reference"'):
        sketch().restore(sketch("reference").snapshot())
