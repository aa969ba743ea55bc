"""The training material: worded like the server's prompts, answers taken from the documents, no reserved name."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from slotcache.models.demo.corpus import Corpus
from slotcache.models.training.encoder import Encoder
from slotcache.models.training.layout import Source, pieces
from slotcache.models.training.sample import HEAD, MAX_TOKENS, NOWHERE, encode
from slotcache.models.training.world.conversation import Author, Conversation
from slotcache.models.training.world.curriculum import CURRICULA, held_out
from slotcache.models.training.world.recipe import Recipe
from slotcache.models.training.world.wording import UNKNOWN
from slotcache.models.training.world.words import Words
from slotcache.ordering.document import Document
from slotcache.ordering.prompt import document_text, location_hint, order_hint

WORDS = Words.load()


def conversations(recipe: Recipe, count: int = 60) -> list[Conversation]:
    author = Author(Random(5), WORDS, frozenset(WORDS["reserved"]))
    return [author.write(recipe) for _ in range(count)]


def test_documents_and_hints_are_worded_as_the_server_words_them() -> None:
    for conversation in conversations(Recipe(hinted=1.0, aside=0, system=0)):
        texts = [piece.text for piece in pieces(conversation) if piece.source is Source.CONTENT]
        for turn in conversation.turns:
            shown = [Document(page.id, page.text, page.title) for page in turn.documents]
            expected = [document_text(document) for document in shown]
            expected += filter(None, [location_hint(turn.above)])
            by_id = {document.id: document for document in shown}
            if turn.rank and set(turn.rank) == set(by_id):
                expected += filter(None, [order_hint(shown, [by_id[name] for name in turn.rank])])
            assert texts[: len(expected)] == expected
            texts = texts[texts.index(turn.question) + 1 :]


@pytest.mark.parametrize("recipe", [*CURRICULA["large"].levels, *CURRICULA["small"].levels])
def test_an_answer_stands_in_a_document_or_is_none(recipe: Recipe) -> None:
    for conversation in conversations(recipe):
        read = ""
        for turn in conversation.turns:
            read += "\n".join(page.text for page in turn.documents) + "\n"
            assert turn.sort in ("aside", "joined") or turn.answer == UNKNOWN or turn.answer in read


def test_a_joined_question_needs_two_documents() -> None:
    for conversation in conversations(held_out("small")["joined"]):
        turn = conversation.turns[-1]
        rest = turn.answer.removeprefix(turn.first).strip()
        (tells,) = [page for page in turn.documents if turn.first in page.text]
        (answers,) = [page for page in turn.documents if rest in page.text]
        assert tells is not answers and answers.thing.bare in turn.first
        assert tells.thing.bare.lower() in turn.question.lower()
        assert answers.thing.bare not in turn.question


def test_the_second_half_of_a_joined_question_may_be_unsaid() -> None:
    asked = conversations(replace(held_out("small")["joined"], unknown=1.0))
    assert {turn.answer.removeprefix(turn.first).strip() for one in asked for turn in one.turns} == {UNKNOWN}


def test_questions_about_unsaid_facts_are_unknown() -> None:
    assert {one.turns[-1].answer for one in conversations(held_out("small")["unknown"])} == {UNKNOWN}


def test_reserved_names_are_never_drawn_and_the_same_seed_writes_the_same() -> None:
    drawn = conversations(Recipe())
    text = json.dumps([[piece.text for piece in pieces(one)] for one in drawn]).lower()
    names = [name for name in WORDS["reserved"] if len(name) > 7]  # shorter ones may be parts of words
    assert names and not [name for name in names if name in text]
    assert [[piece.text for piece in pieces(one)] for one in conversations(Recipe())] == [
        [piece.text for piece in pieces(one)] for one in drawn
    ]


def test_samples_are_whole_turns_within_the_context_and_mark_their_answers() -> None:
    encoder = Encoder.load()
    long = replace(Recipe(), documents=(8, 10), turns=(8, 12), later=0.9)
    for conversation in conversations(long, 12):
        sample = encode(conversation, encoder)
        assert sample is not None and len(sample.tokens) <= MAX_TOKENS + 1
        last = sample.answers[-1]
        assert last.stop == len(sample.tokens) and sample.tokens[-1] == encoder.special("<|im_end|>")
        answer = "".join(encoder.tokens[token] for token in sample.tokens[last.start : last.stop - 1])
        assert answer.replace("Ġ", " ").encode("ascii", "ignore") == conversation.turns[
            len(sample.answers) - 1
        ].answer.encode("ascii", "ignore")


def test_every_bundled_answer_is_a_sentence_of_its_document_and_every_name_is_reserved() -> None:
    corpus = Corpus.load()
    assert len(corpus.documents) == 60 and len(corpus.questions) == len({one.question for one in corpus.questions}) == 100
    for one in corpus.questions:
        assert f" {one.answer} " in f" {corpus.documents[one.document].text} "
        assert one.document in one.ranked and len(set(one.ranked)) == 5 and set(one.ranked) <= set(corpus.documents)
    reserved = set(WORDS["reserved"])
    towns_and_people = [
        one for one in corpus.documents.values() if "The population" in one.text or "The profession" in one.text
    ]
    for document in towns_and_people:
        assert all(word.lower() in reserved for word in document.title.split()), document.title
    assert sum(corpus.questions[0].ranked != one.ranked for one in corpus.questions) > 80


def test_where_to_look_for_an_answer_is_the_end_of_its_sentence_or_nowhere() -> None:
    encoder, sorts = Encoder.load(), set()
    for conversation in conversations(replace(CURRICULA["small"].levels[-1], joined=0.3, linked=0.7), 20):
        sample = encode(conversation, encoder)
        assert sample is not None
        sentences, sought = sample.evidence()
        assert sentences[0] == NOWHERE and not sentences[1:][sentences[1:] == NOWHERE].size
        for answer in (sentence for one in sample.answers for sentence in one.sentences()):
            (number,) = set(sought[answer.start - 1 : answer.start - 1 + HEAD].tolist())
            sorts.add(answer.sort)
            if answer.sort == "unknown":
                assert number == NOWHERE
            elif number:
                told = sample.tokens[answer.start + answer.told : answer.stop - 2]
                at = np.flatnonzero(sentences[: answer.start] == number)
                assert encoder.tokens[told[0]] == "Ġis" and len(at) % len(told) == 0
                assert np.array_equal(sample.tokens[at[: len(told)]], told)
            else:
                assert answer.sort == "aside" or answer.told == 1, "it is no sentence of a document"
    assert {"plain", "follow", "located", "unknown", "joined"} <= sorts
