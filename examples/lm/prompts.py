"""Test text cut into rows, and the wording of the needle prompts that the small models were trained with."""

import numpy as np

from sketchssm.study.tasks import Form, Wording, make_prompts

ROOM = 64
"""Tokens of a row kept free for the question and the answer."""

NEEDLES = range(1, 9)
"""Numbers of needles in a prompt."""

FIRST = "bright calm cold deep dry early empty fast fresh green heavy high kind late long new old plain quiet small"
SECOND = "apple bridge cloud door engine field garden harbor island letter market night ocean paper river stone table"

WORDING = Wording(
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    (
        Form(
            "\nOne of the special magic numbers for {key} is: {value}.\n",
            "\nWhat is the special magic number for {key} mentioned in the provided text? "
            "The special magic number for {key} mentioned in the provided text is",
            "\nWhat are all the special magic numbers for {key} mentioned in the provided text? "
            "The special magic numbers for {key} mentioned in the provided text are",
        ),
        Form(
            "\nThe special magic number for {key} is {value}.\n",
            "\nQuestion: What is the special magic number for {key}? Answer:",
            "\nQuestion: What are the special magic numbers for {key}? Answer:",
        ),
        Form(
            "\nRemember that the code of {key} is {value}.\n",
            "\nWhat is the code of {key}? The code of {key} is",
            "\nWhat are the codes of {key}? The codes of {key} are",
        ),
    ),
    tuple(f"{first}-{second}" for first in FIRST.split() for second in SECOND.split()),
)


def text_rows(text, rows, length, rng):
    """Disjoint rows ``(rows, length)`` of a long text, in random order."""
    blocks = len(text) // length
    if rows > blocks:
        raise ValueError(f"rows: expected at most {blocks} rows of {length} tokens in this text, got {rows}")
    chosen = rng.permutation(blocks)[:rows]
    return text[: blocks * length].reshape(blocks, length)[chosen].astype(np.int64)


def needle_prompts(text, encode, prompts, length, rng, facts=NEEDLES):
    """Prompts that ask for one of several needles anywhere in `length` tokens."""
    settings = {"length": length - ROOM, "facts": facts, "wording": WORDING}
    return make_prompts("keys", text, encode, prompts, rng, **settings)


def questions(options, text, encode, rng):
    """Needle prompts that score joint plans, one by one."""
    return [needle_prompts(text, encode, 1, options.length, rng) for _ in range(options.questions)]


def mixed_rows(rows, text, encode, rng):
    """Begin every other row, from the second on, with a needle prompt and its answer, made from `text`."""
    rows, (count, length) = rows.copy(), rows[1::2].shape
    prompts = needle_prompts(text, encode, count, length, rng)
    for row, ids, spans in zip(rows[1::2], prompts.ids, prompts.spans, strict=True):
        row[: spans[-1][1]] = ids[: spans[-1][1]]
    return rows
