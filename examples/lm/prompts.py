"""Test text cut into rows, and needle-in-a-haystack prompts whose answers are 7-digit numbers."""

from dataclasses import dataclass

import numpy as np

ROOM = 64
"""Tokens kept free at the end of a prompt for its question and answer."""

PREAMBLE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)

FORMS = (
    (
        "\nOne of the special magic numbers for {key} is: {value}.\n",
        "\nWhat is the special magic number for {key} mentioned in the provided text? "
        "The special magic number for {key} mentioned in the provided text is",
    ),
    (
        "\nThe special magic number for {key} is {value}.\n",
        "\nQuestion: What is the special magic number for {key}? Answer:",
    ),
    ("\nRemember that the code of {key} is {value}.\n", "\nWhat is the code of {key}? The code of {key} is"),
)
"""Statements and questions in the wording of retrieval benchmarks; a prompt uses one form."""

FIRST = "bright calm cold deep dry early empty fast fresh green heavy high kind late long new old plain quiet small"
SECOND = "apple bridge cloud door engine field garden harbor island letter market night ocean paper river stone table"


@dataclass(frozen=True)
class Prompts:
    """Needle prompts of equal length, whose questions begin at the same column.

    Attributes
    ----------
    ids : ndarray of int64, (prompts, length)
        Haystack with needles, question, answer and, after it, padding.
    question : int
        Column of the first token after the haystack.
    start : ndarray of int64, (prompts,)
        Column of each answer's first token.
    answers : list of list of int
        Tokens of each answer.
    needles : ndarray of int64, (prompts,)
        Needles in each haystack.
    """

    ids: np.ndarray
    question: int
    start: np.ndarray
    answers: list
    needles: np.ndarray

    def recalled(self, predicted):
        """Which prompts the likeliest next tokens, ``predicted (prompts, length)``, answer correctly.

        The answers stand in the prompts, so that one pass tells what greedy decoding would say: it goes wrong where
        the first prediction does.
        """
        spans = zip(predicted, self.start, self.answers, strict=True)
        return np.array([row[at - 1 : at - 1 + len(answer)].tolist() == answer for row, at, answer in spans])


def text_rows(text, rows, length, rng):
    """Disjoint rows ``(rows, length)`` of a long text, in random order."""
    blocks = len(text) // length
    if rows > blocks:
        raise ValueError(f"rows: expected at most {blocks} rows of {length} tokens in this text, got {rows}")
    chosen = rng.permutation(blocks)[:rows]
    return text[: blocks * length].reshape(blocks, length)[chosen].astype(np.int64)


def needle_prompts(text, encode, prompts, length, rng, most=8):
    """Make prompts with 1 to `most` needles and a question about one of them.

    Parameters
    ----------
    text : ndarray of int
        Tokens that haystacks are cut from.
    encode : callable
        Tokens of a string, as a list.
    prompts, length : int
        Number of prompts, and tokens of each.
    rng : numpy Generator
        Source of randomness.
    most : int
        Most needles in one prompt.
    """
    question = length - ROOM
    head = encode(PREAMBLE)
    ids = np.zeros((prompts, length), dtype=np.int64)
    starts, answers, counts = [], [], []
    for row in ids:
        statement, asked = FORMS[rng.integers(len(FORMS))]
        count = int(rng.integers(1, most + 1))
        keys = _names(rng, count)
        values = rng.integers(10**6, 10**7, count)
        needles = [encode(statement.format(key=key, value=value)) for key, value in zip(keys, values, strict=True)]
        fill = question - len(head) - sum(map(len, needles))
        if fill < count:
            raise ValueError(f"length: expected room for {count} needles, got prompts of {length} tokens")
        place = int(rng.integers(len(text) - fill + 1))
        pieces = np.split(text[place : place + fill], np.sort(rng.integers(0, fill + 1, count)))
        haystack = head + pieces[0].tolist()
        for needle, piece in zip(needles, pieces[1:], strict=True):
            haystack += needle + piece.tolist()
        wanted = int(rng.integers(count))
        tail, answer = encode(asked.format(key=keys[wanted])), encode(f" {values[wanted]}")
        whole = haystack + tail + answer
        if len(whole) > length:
            raise ValueError(f"encode: expected a question and its answer in {ROOM} tokens, got {len(tail + answer)}")
        row[: len(whole)] = whole
        starts.append(len(whole) - len(answer))
        answers.append(answer)
        counts.append(count)
    return Prompts(ids, question, np.array(starts), answers, np.array(counts))


def mixed_rows(rows, text, encode, rng):
    """Begin every other row, from the second on, with a needle prompt and its answer, made from `text`."""
    rows, (count, length) = rows.copy(), rows[1::2].shape
    prompts = needle_prompts(text, encode, count, length, rng)
    ends = prompts.start + [len(answer) for answer in prompts.answers]
    rows[1::2] = np.where(np.arange(length) < ends[:, None], prompts.ids, rows[1::2])
    return rows


def _names(rng, count):
    """Different names of two words each."""
    first, second = FIRST.split(), SECOND.split()
    chosen = rng.choice(len(first) * len(second), count, replace=False)
    return [f"{first[i // len(second)]}-{second[i % len(second)]}" for i in chosen]
