"""Memory of slots: parts that share bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sketchssm.layer.slots import check_separate

blocks = st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(0, 30))  # address, bytes, gap between slots


@given(st.lists(blocks, min_size=2, max_size=4), st.integers(1, 6))
def test_no_two_parts_share_a_byte(parts, slots):
    places = {f"part {i}": (first, size + gap, size) for i, (first, size, gap) in enumerate(parts)}
    taken = {
        name: {first + stride * slot + i for slot in range(slots) for i in range(size)}
        for name, (first, stride, size) in places.items()
    }
    shared = {
        f"{one!r} and {other!r}"
        for i, one in enumerate(taken)
        for other in list(taken)[i + 1 :]
        if taken[one] & taken[other]
    }
    if not shared:
        check_separate(places, slots)
        return
    with pytest.raises(ValueError, match=r"^memory: expected separate memory for every part, but ") as caught:
        check_separate(places, slots)
    assert str(caught.value).split("but ")[1].removesuffix(" overlap") in shared


def test_a_part_of_one_slot_may_be_anywhere():
    """Its stride means nothing, and may be 0."""
    check_separate({"state": (0, 0, 64), "keys": (64, 0, 8)}, 1)
