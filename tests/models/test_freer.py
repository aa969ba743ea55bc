"""The questions in freer wording: each has one right answer, in one sentence of one document."""

from __future__ import annotations

import re
from functools import cache

import pytest
from slotcache.models.demo.freer import LONGEST, FreerCorpus, FreerQuestion

CORPUS = FreerCorpus.load()


@cache
def sentences(name: str) -> list[str]:
    return re.split(r"(?<=\.) ", CORPUS.documents[name].text)


def test_three_questions_are_asked_of_each_document() -> None:
    asked = [one.document for one in CORPUS.questions]
    assert len(CORPUS.documents) == 20 and sorted(asked) == sorted([*CORPUS.documents] * 3)
    assert max(len(one.split()) for name in CORPUS.documents for one in sentences(name)) <= LONGEST


@pytest.mark.parametrize("one", CORPUS.questions, ids=lambda one: one.question)
def test_one_sentence_of_the_five_documents_answers(one: FreerQuestion) -> None:
    right = [text for name in one.shown for text in sentences(name) if one.is_answered_by(text)]
    assert len(set(one.shown)) == 5 and one.document in one.shown
    assert len(right) == 1 and right[0] in sentences(one.document)
    assert not one.is_answered_by(CORPUS.documents[one.document].text), "a whole document is no answer"
