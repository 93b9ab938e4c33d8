"""Recall tasks: facts hidden in text, and questions about them after a chosen number of tokens.

A fact is a sentence that gives a key a number of seven digits. The tasks are those of long-context benchmarks such as
RULER (arXiv 2404.06654): one fact; one of several; all numbers of one key; several keys, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Encode = Callable[[str], Sequence[int]]

TASKS = ("needle", "keys", "values", "queries")
"""One fact; one of several facts with different keys; all numbers of one key; all of several keys, one by one."""


class Form(NamedTuple):
    """Sentences about the number ``{value}`` of a ``{key}``."""

    statement: str
    question: str  # with the answer's beginning, up to the number
    series: str  # the same for all numbers of the key, in the order of the text


class Wording(NamedTuple):
    """Wording of prompts: what stands before the text, sentences to choose from, and keys."""

    preamble: str
    forms: tuple[Form, ...]
    keys: tuple[str, ...]


FIRST = "Adele Bruno Clara David Elena Felix Grace Henri Irene Jonas Karin Louis Marta Nils Olga Peter Rosa Simon"
LAST = "Abbott Becker Castle Dalton Ekman Forster Garner Holm Ivers Jansen Keller Larsen Moreau Norris Palmer Quist"

WORDING = Wording(
    "The following text mentions some people and their numbers. Remember the numbers: questions follow at the end.\n",
    (
        Form(
            "\nThe parcel for {key} carries the number {value}.\n",
            "\nWhich number does the parcel for {key} carry? The parcel for {key} carries the number",
            "\nWhich numbers do the parcels for {key} carry, in the order of the text? "
            "The parcels for {key} carry the numbers",
        ),
        Form(
            "\nAt the desk {key} wrote down the number {value}.\n",
            "\nWhich number did {key} write down at the desk? At the desk {key} wrote down the number",
            "\nWhich numbers did {key} write down at the desk, from the first to the last? "
            "At the desk {key} wrote down the numbers",
        ),
        Form(
            "\nA ticket of {key} has the number {value}.\n",
            "\nWhich number has the ticket of {key}? The ticket of {key} has the number",
            "\nWhich numbers have the tickets of {key}, in the order of the text? "
            "The tickets of {key} have the numbers",
        ),
    ),
    tuple(f"{first} {last}" for first in FIRST.split() for last in LAST.split()),
)
"""Default wording."""


class Score(NamedTuple):
    """Recall of prompts.

    Parameters
    ----------
    share : float
        Mean over prompts of the share of right answers.
    error : float
        Its standard error; NaN for one prompt.
    """

    share: float
    error: float


@dataclass(frozen=True)
class Prompts:
    """Prompts of one task, whose questions begin at the same column; made by `make_prompts`.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    distance : int or None
        Tokens from the first fact that is asked to the questions, if that was chosen.
    ids : ndarray of int64, (prompts, columns)
        Text with facts, questions with the right answers, and padding with token 0.
    question : int
        First column after the text.
    spans : list of list of (int, int)
        For each prompt, the first column of every answer and the first after it.
    facts : ndarray of int64, (prompts,)
        Number of facts in each text.
    """

    task: str
    distance: int | None
    ids: Ids
    question: int
    spans: list[list[tuple[int, int]]]
    facts: Ids

    @property
    def answers(self) -> npt.NDArray[np.bool_]:
        """Where the tokens of answers are, ``(prompts, columns)``."""
        mask = np.zeros(self.ids.shape, bool)
        for row, spans in zip(mask, self.spans, strict=True):
            for start, stop in spans:
                row[start:stop] = True
        return mask

    def right(self, predicted: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Share of right answers of each prompt, ``(prompts,)``.

        An answer is right if greedy decoding would give all its tokens after the right answers before it: if each is
        the likeliest next token.

        Parameters
        ----------
        predicted : ndarray of int, (prompts, n)
            Likeliest next tokens after each of the last n columns.
        """
        before = self.ids.shape[1] - predicted.shape[1]
        hits = predicted[:, :-1] == self.ids[:, before + 1 :]
        shares = [
            np.mean([row[start - before - 1 : stop - before - 1].all() for start, stop in spans])
            for row, spans in zip(hits, self.spans, strict=True)
        ]
        return np.array(shares)

    def score(self, predicted: npt.NDArray[Any]) -> Score:
        """Mean of `right` and its standard error."""
        right = self.right(predicted)
        error = right.std(ddof=1) / math.sqrt(right.size) if right.size > 1 else math.nan
        return Score(float(right.mean()), float(error))


def make_prompts(
    task: str,
    text: npt.ArrayLike,
    encode: Encode,
    prompts: int,
    rng: np.random.Generator,
    *,
    length: int = 0,
    distance: int | None = None,
    facts: Sequence[int] | None = None,
    wording: Wording = WORDING,
) -> Prompts:
    """Make prompts of a recall task.

    Parameters
    ----------
    task : {"needle", "keys", "values", "queries"}
        See `TASKS`.
    text : array of int, (tokens,)
        Tokens that the facts are hidden in; each prompt takes a part at a random place.
    encode : callable
        Token ids of a string, without special tokens.
    prompts : int
        Number of prompts.
    rng : numpy.random.Generator
        Source of randomness.
    length : int
        Tokens before the question; at least one and a half times `distance` are taken.
    distance : int, optional
        Tokens between the first fact that is asked and the questions. Other facts with questions come after it, others
        without question anywhere. By default, all facts are anywhere.
    facts : sequence of int, optional
        Numbers of facts to choose from, one for each prompt; not for "needle". Default ``[4]``.
    wording : Wording
        Sentences and keys.

    Returns
    -------
    Prompts
        Token ids with the columns of the answers.

    Raises
    ------
    ValueError
        If an argument is out of its range, the text is too short, or the facts do not fit.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if prompts < 1:
        raise ValueError(f"prompts: expected at least 1, got {prompts}")
    if task == "needle" and facts is not None:
        raise ValueError(f"facts: expected None for one needle, got {facts}")
    counts = [1] if task == "needle" else [4] if facts is None else list(facts)
    if not counts or min(counts) < 1 or max(counts) > len(wording.keys):
        raise ValueError(f"facts: expected numbers from 1 to {len(wording.keys)}, got {counts}")
    ids, length = np.asarray(text), max(length, 3 * (distance or 0) // 2)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size < length:
        raise ValueError(f"text: expected at least {length} token ids, got {ids.dtype} of shape {ids.shape}")
    head, rows, spans, chosen = encode(wording.preamble), [], [], []
    for _ in range(prompts):
        form, count = wording.forms[rng.integers(len(wording.forms))], counts[rng.integers(len(counts))]
        different = 1 if task == "values" else count
        keys = [wording.keys[i] for i in rng.choice(len(wording.keys), different, replace=False)] * (
            count // different
        )
        numbers = [f" {10**6 + i}" for i in rng.choice(9 * 10**6, count, replace=False)]
        asked = {"keys": [int(rng.integers(count))], "queries": list(rng.permutation(count))}.get(task, range(count))
        stated = [
            encode(form.statement.format(key=key, value=number[1:])) for key, number in zip(keys, numbers, strict=True)
        ]
        before = _hidden(ids, head, stated, min(asked), length, distance, rng)
        if task == "values" and count > 1:
            joined = [form.series.format(key=keys[0]), *[","] * (count - 2), " and"]
        else:
            joined = [("." if i else "") + form.question.format(key=keys[fact]) for i, fact in enumerate(asked)]
        after, columns = _answered(joined, [numbers[fact] for fact in asked], encode)
        rows.append([*before, *after])
        spans.append([(length + start, length + stop) for start, stop in columns])
        chosen.append(count)
    whole = np.zeros((prompts, max(map(len, rows))), np.int64)
    for to, row in zip(whole, rows, strict=True):
        to[: len(row)] = row
    return Prompts(task, distance, whole, length, spans, np.array(chosen))


def _hidden(
    text: npt.NDArray[Any],
    head: Sequence[int],
    facts: list[Sequence[int]],
    first: int,
    length: int,
    distance: int | None,
    rng: np.random.Generator,
) -> list[int]:
    """Make `length` tokens of text with facts, in which the fact `first` ends `distance` tokens before the end."""
    room, after = length - len(head) - sum(map(len, facts)), sum(map(len, facts[first + 1 :]))
    if distance is not None and distance < after:
        raise ValueError(
            f"distance: expected at least {after} tokens for the facts after the first asked, got {distance}"
        )
    start = room + after - (after if distance is None else distance)  # tokens of text before the fact at `distance`
    if start < 0:
        raise ValueError(f"length: expected at least {length - start} tokens for {len(facts)} facts, got {length}")
    if distance is None:
        cuts = rng.integers(0, room + 1, len(facts))
    else:
        later = rng.integers(start, room + 1, len(facts) - first - 1)
        cuts = np.concatenate([rng.integers(0, start + 1, first), [start], later])
    place = int(rng.integers(text.size - room + 1))
    pieces = np.split(text[place : place + room], np.sort(cuts))
    found = [*head, *pieces[0].tolist()]
    for fact, piece in zip(facts, pieces[1:], strict=True):
        found += [*fact, *piece.tolist()]
    return found


def _answered(questions: list[str], answers: list[str], encode: Encode) -> tuple[Sequence[int], list[tuple[int, int]]]:
    """Tokens of questions, each with its answer, as one text, and the columns of the answers.

    A token of two parts belongs to the later one.
    """
    whole, text, spans = encode("".join(map("".join, zip(questions, answers, strict=True)))), "", []
    for question, answer in zip(questions, answers, strict=True):
        start, stop = (_common(encode(part), whole) for part in (text + question, text + question + answer))
        if stop == start:
            raise ValueError(f"encode: expected tokens of the number{answer}, got none of its own")
        spans.append((start, stop))
        text += question + answer
    return whole, spans


def _common(part: Sequence[int], whole: Sequence[int]) -> int:
    """Number of equal tokens at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(part, whole, strict=False)) if x != y), min(len(part), len(whole)))
