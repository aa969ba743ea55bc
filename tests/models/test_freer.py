"""The questions in freer wording: each has one right answer, and training knows neither their wording nor their names."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random

import pytest
from slotcache.models.demo.freer import LONGEST, FreerCorpus, FreerQuestion
from slotcache.models.training.encoder import Encoder
from slotcache.models.training.layout import pieces
from slotcache.models.training.sample import encode
from slotcache.models.training.world import telling
from slotcache.models.training.world.conversation import Conversation
from slotcache.models.training.world.curriculum import FREER, FREER_SHORT
from slotcache.models.training.world.reading import Reader
from slotcache.models.training.world.wording import UNKNOWN
from slotcache.models.training.world.words import Words

CORPUS = FreerCorpus.load()
WORDS = Words.load()
FUNCTION_WORDS = (
    "the a an of in on at by to is was are were be been has have had its it her his she he and which who that with for from"
)
FUNCTION = set(FUNCTION_WORDS.split())


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


def conversations(count: int) -> list[Conversation]:
    reader = Reader(Random(4), WORDS, frozenset(WORDS["reserved"]))
    return [reader.write(FREER if number % 2 else FREER_SHORT) for number in range(count)]


def runs(text: str, size: int, function: set[str]) -> set[str]:
    """Return all runs of `size` words outside `function` that stand in one sentence, without marks for values."""
    found: set[str] = set()
    for part in re.split(r"[{<][\w ]+[}>]|[.;!?\n\"]", text.lower()):
        words = [word for word in re.findall(r"[a-z0-9]+", part) if word not in function]
        found |= {" ".join(words[at : at + size]) for at in range(len(words) - size + 1)}
    return found


@pytest.mark.parametrize(("size", "function"), [(4, FUNCTION), (5, set[str]())], ids=["four words that mean", "five words"])
def test_the_material_of_training_repeats_no_wording_of_the_documents(size: int, function: set[str]) -> None:
    folder = telling.FOLDER.parent
    material = "\n".join(path.read_text("utf-8") for path in folder.rglob("*.toml"))
    documents = "\n".join(document.text for document in CORPUS.documents.values())
    told, given = runs(material, size, function), runs(documents, size, function)
    assert len(told) > 1500 and told & given == set()


def test_the_names_of_the_documents_are_reserved() -> None:
    reserved = set(WORDS["reserved"])
    people = ("Halvard Renk", "Odile Granter", "Jorun Teale", "Piet Holvorst", "Cosima Bellard", "Noor Castellan")
    places = ("Kessen", "Hobbing", "Lomvik", "Keld", "Ostrey", "Medlin", "Wexcombe", "Skerra")
    assert {word.lower() for name in (*people, *places) for word in name.split()} <= reserved
    text = json.dumps([piece.text for one in conversations(40) for piece in pieces(one)]).lower()
    assert not [name for name in reserved if re.search(rf"\b{name}\b", text)]


def test_answers_in_freer_wording_are_sentences_of_the_documents() -> None:
    kinds: set[str] = set()
    for conversation in conversations(60):
        read = ""
        for turn in conversation.turns:
            read += "".join(f" {page.text} \n".replace("\n", " \n ") for page in turn.documents)
            kinds.add(turn.sort)
            assert turn.answer == UNKNOWN if turn.sort == "unknown" else f" {turn.answer} " in read
            assert not re.search(r"[{}<>]", turn.question + turn.answer)
    assert kinds == {"free", "unknown"}


def test_a_sentence_in_freer_wording_is_looked_for_as_a_whole_and_for_longer() -> None:
    encoder = Encoder.load()
    for conversation in conversations(10):
        sample = encode(conversation, encoder)
        assert sample is not None
        sentences, sought = sample.evidence()
        for answer in sample.answers:
            if answer.sort == "free" and (number := sought[answer.start - 1]):
                assert (sought[answer.start - 1 : answer.start + 5] == number).all() or answer.stop - answer.start < 7
                assert (sentences[: answer.start] == number).sum() >= answer.stop - answer.start - 3
