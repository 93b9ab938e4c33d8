"""Cursor words (`sketchssm.layer.slots`): which rows flush, and how the words and the clock advance after a task."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import COMMIT, DRAFT, FLUSH, STEP, Record
from sketchssm.cpu.simd import integers, short_integers
from sketchssm.layer.slots import DRAFTED_SHIFT, DUE, EXACT, POSITION, drafted

_drafted = njit(drafted)


@njit
def _word(m: Record, slot: int) -> Any:
    """Cursor word of a slot."""
    return np.int64(short_integers(m.cursor)[slot * m.cursor_stride])


@njit
def is_exact(m: Record, slot: int) -> bool:
    """Whether every plain token flushes a slot."""
    return (_word(m, slot) & EXACT) != 0


@njit
def make_exact(m: Record, slot: int) -> None:
    """Let every plain token flush a slot from now on."""
    short_integers(m.cursor)[slot * m.cursor_stride] = _word(m, slot) | EXACT


@njit
def position(m: Record, slot: int) -> int:
    """Tokens that a slot has buffered. The bound is for the caller's memory in which no window has begun."""
    return min(_word(m, slot) & POSITION, m.window - 1)


@njit
def flushes(m: Record, row: int) -> bool:
    """Whether a row flushes in this step with its token, or in this draft call before its drafts."""
    slot = integers(m.rows)[row]
    if slot < 0:
        return False
    if m.task == STEP:
        return _flushes(m, _word(m, slot), 1)
    clock = np.int64(short_integers(m.clock)[0])
    # if the clock has no room for the draft, all rows of the call flush with the clock
    stroke = DUE if m.clocked and _flushes(m, clock, m.length) else 0
    return _flushes(m, _word(m, slot) | stroke, integers(m.counts)[row])


@njit
def _flushes(m: Record, word: int, tokens: int) -> bool:
    """Whether a word is due, or `tokens` more tokens fill its ring."""
    return (word & (DUE | EXACT)) != 0 or (word & POSITION) + tokens >= m.window


@njit
def accepted(m: Record, row: int) -> int:
    """Drafts that a row keeps."""
    slot = integers(m.rows)[row]
    most = min(_drafted(_word(m, slot)), m.window - 1 - position(m, slot))
    return min(max(integers(m.counts)[row], 0), most)


@njit
def advance(m: Record) -> None:
    """Advance the clock and the words of all rows after a task."""
    words, clock = short_integers(m.cursor), short_integers(m.clock)
    word = np.int64(clock[0])
    if m.clocked:
        word = _clock(m, word)
    # a commit without drafts of the clock's is no stroke
    still = m.task == DRAFT or (m.task == COMMIT and _drafted(np.int64(clock[0])) == 0)
    stroke = 0 if still else word & DUE
    for row in range(m.batch):
        slot = integers(m.rows)[row]
        if slot < 0:
            continue
        own = _word(m, slot)
        if m.task == COMMIT:
            own = (own & (POSITION | DUE | EXACT)) + accepted(m, row)
        elif m.task == FLUSH or flushes(m, row):
            own = own & EXACT
        else:
            own = (own & POSITION) + (1 if m.task == STEP else 0)
        if m.task == DRAFT:
            own |= integers(m.counts)[row] << DRAFTED_SHIFT
        words[slot * m.cursor_stride] = own | stroke
    clock[0] = word


@njit
def _clock(m: Record, word: int) -> int:
    """Return the clock's word after a task."""
    if m.task == STEP:
        word = 0 if _flushes(m, word, 1) else (word & POSITION) + 1
        return word | (DUE if _flushes(m, word, 1) else 0)
    if m.task == DRAFT:
        return (0 if _flushes(m, word, m.length) else word & POSITION) | m.length << DRAFTED_SHIFT
    if m.task == COMMIT:
        count = _drafted(word)
        word = (word & (POSITION | DUE)) + count
        return word | (DUE if _flushes(m, word, count) else 0)
    return word
