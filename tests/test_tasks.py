"""Recall tasks: where facts and answers are, and how answers are scored."""

import re

import numpy as np
import pytest
from samples import refused

from sketchssm.study.tasks import TASKS, WORDING, Score, make_prompts

TEXT = np.full(9000, 1)


class Words:
    """A stand-in for a tokenizer: words, digits and marks are tokens from 2 on."""

    def __init__(self):
        self.known = {}

    def __call__(self, text):
        return [self.known.setdefault(x, len(self.known) + 2) for x in re.findall(r"\d|[^\W\d]+|[^\w ]", text)]


def made(task, prompts=30, seed=0, words=None, **settings):
    settings = {"length": 600} | settings
    return make_prompts(task, TEXT, words or Words(), prompts, np.random.default_rng(seed), **settings)


def characters(ids):
    """A character for each token, to search in."""
    return "".join(map(chr, ids))


def facts_of(words, ids):
    """Key, number and end of every fact in a text, in order."""
    found, text = [], characters(ids)
    for form in WORDING.forms:
        for key in WORDING.keys:
            start, end = form.statement.format(key=key, value="|").split("|")
            pattern = f"{re.escape(characters(words(start)))}(.{{7}}){re.escape(characters(words(end)))}"
            for match in re.finditer(pattern, text, re.DOTALL):
                found.append((match.end(), key, [*map(ord, match[1])]))
    return sorted(found)


@pytest.mark.parametrize("task", TASKS)
def test_facts_questions_and_answers(task):
    """Every answer stands in the text with the asked key, at the chosen distance."""
    words, distance = Words(), 300
    prompts = made(task, 4, words=words, distance=distance)
    assert prompts.question == 600
    for ids, spans, count in zip(prompts.ids, prompts.spans, prompts.facts, strict=True):
        facts = facts_of(words, ids[:600])
        assert len(facts) == count == (1 if task == "needle" else 4)
        assert len({key for _, key, _ in facts}) == (1 if task == "values" else count)
        by_number = {tuple(number): (end, key) for end, key, number in facts}
        answers = [ids[start:stop].tolist() for start, stop in spans]
        assert len(answers) == (4 if task in ("values", "queries") else 1)
        asked = [by_number[tuple(answer)] for answer in answers]
        assert 600 - min(asked)[0] == distance
        if task == "values":
            assert asked == sorted(asked)  # in the order of the text
        for (start, _), (_, key), before in zip(spans, asked, [600, *[stop for _, stop in spans]], strict=False):
            assert task == "values" or characters(words(key)) in characters(ids[before:start])
        last = spans[-1][1]
        assert not ids[last:].any()
        assert ids[:600].all() and len(set(ids[:600])) > 2


def test_prompts_differ_and_repeat():
    """Places, keys, numbers and wordings come from the generator alone."""
    one, same, other = made("keys"), made("keys"), made("keys", seed=1)
    assert np.array_equal(one.ids, same.ids) and one.spans == same.spans
    assert one.ids.shape != other.ids.shape or not np.array_equal(one.ids, other.ids)
    assert len({tuple(row) for row in one.ids.tolist()}) == 30


def test_order_of_questions_and_place_of_the_asked_fact():
    """Queries are not always in the text's order; the asked key may be before, between or after the others."""
    words = Words()
    orders, places = set(), set()
    for seed in range(12):
        (queries, keys) = (made(task, 1, seed, words, facts=[3]) for task in ("queries", "keys"))
        for prompts, found in ((queries, orders), (keys, places)):
            numbers = [number for _, _, number in facts_of(words, prompts.ids[0, : prompts.question])]
            found.add(tuple(numbers.index(prompts.ids[0, start:stop].tolist()) for start, stop in prompts.spans[0]))
    assert len(orders) > 2 and places == {(0,), (1,), (2,)}


def test_numbers_of_facts_and_lengths():
    prompts = made("keys", 60, facts=range(1, 5), length=400)
    assert set(prompts.facts) == {1, 2, 3, 4}
    assert made("needle", 1, length=0, distance=201).question == 301
    assert made("needle", 1, length=500, distance=201).question == 500
    assert made("values", 2, facts=[1]).facts.tolist() == [1, 1]  # one number: asked as one


@pytest.mark.parametrize("task", TASKS)
def test_scores(task):
    """A wrong token costs its answer; tokens beside answers cost nothing."""
    prompts = made(task, 8)
    assert np.array_equal(prompts.answers.sum(1), [7 * len(spans) for spans in prompts.spans])
    perfect = np.roll(prompts.ids, -1, axis=1)
    assert prompts.score(perfect) == Score(1, 0)
    assert prompts.right(perfect[:, prompts.question - 1 :]).tolist() == [1] * 8
    wrong = np.where(np.roll(prompts.answers, -1, axis=1), perfect, -1)
    assert prompts.score(wrong) == Score(1, 0)
    for row, column in ((2, prompts.spans[2][-1][1] - 2), (5, prompts.spans[5][0][0] - 1)):
        wrong[row, column] += 1
    share = 1 - 1 / len(prompts.spans[0])
    want = np.ones(8)
    want[[2, 5]] = share
    assert prompts.right(wrong).tolist() == want.tolist()
    assert prompts.score(wrong) == pytest.approx((want.mean(), want.std(ddof=1) / 8**0.5))
    alone = made(task, 1)
    assert np.isnan(alone.score(alone.ids).error)


def test_tokens_of_two_parts():
    """A tokenizer may join the end of a question with its number: the token belongs to the answer."""
    words = Words()

    def joined(text):
        return words(text.replace("number 1", "numberone"))

    prompts = make_prompts("needle", TEXT, joined, 20, np.random.default_rng(0), length=200)
    lengths = {stop - start for ((start, stop),) in prompts.spans}
    assert lengths == {7}
    one = words("numberone")[0]
    assert any(row[start] == one for row, ((start, _),) in zip(prompts.ids, prompts.spans, strict=True))
    refused("encode:", make_prompts, "needle", TEXT, lambda text: [2] * 5, 1, np.random.default_rng(0), length=200)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    (
        ("needles", {}, "task: expected one of needle, keys, values, queries, got 'needles'"),
        ("keys", {"prompts": 0}, "prompts: expected at least 1, got 0"),
        ("needle", {"facts": [1]}, r"facts: expected None for one needle, got \[1\]"),
        ("keys", {"facts": []}, r"facts: expected numbers from 1 to 288, got \[\]"),
        ("keys", {"facts": [0, 2]}, r"facts: expected numbers from 1 to 288, got \[0, 2\]"),
        ("keys", {"length": 9001}, r"text: expected at least 9001 token ids, got int64 of shape \(9000,\)"),
        ("keys", {"length": 70}, r"length: expected at least \d+ tokens for 4 facts, got 70"),
        (
            "values",
            {"distance": 20},
            r"distance: expected at least \d+ tokens for the facts after the first asked, got 20",
        ),
        ("needle", {"length": 0, "distance": 30}, r"length: expected at least \d+ tokens for 1 facts, got 45"),
    ),
)
def test_bad_arguments(task, settings, message):
    with pytest.raises(ValueError, match=message):
        made(task, **settings)
