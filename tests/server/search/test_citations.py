"""Citations of an answer: ids in brackets, and quotations, in linear time."""

from itertools import count
from sys import setprofile

import pytest
from slotcache.ordering import Document
from slotcache.server.search.retrieve import Sources

TIDES = Document("d1", "The moon raises two tides a day. The sun raises smaller ones.")
STONE = Document("d2", "Every day the city of stone sleeps in the sun.")


def cited(text, *documents):
    found = Sources(documents or (TIDES, STONE)).cited(text)
    return [(one.id, text[one.start : one.stop], one.quote) for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two [d1].", [("d1", "[d1]", False)]),
        ("Two [d1, d2; x].", [("d1", "d1", False), ("d2", "d2", False)]),
        ("Two (d1), [d3], [d1", []),
        ("THE MOON raises\ntwo tides, he said", [("d1", "THE MOON raises\ntwo tides", True)]),
        ("the moon raises two stones", []),
        ("a day. The sun raises smaller ones", [("d1", "a day. The sun raises smaller ones", True)]),
        (
            "the city of stone sleeps [d2] and the moon raises two tides [d1]",
            [
                ("d2", "the city of stone sleeps", True),
                ("d2", "[d2]", False),
                ("d1", "the moon raises two tides", True),
                ("d1", "[d1]", False),
            ],
        ),
        ("", []),
    ],
)
def test_ids_and_quotations_are_found_with_their_places(text, expected):
    assert cited(text) == expected


def test_words_of_all_scripts_are_quoted():
    document = Document("d", "Луна поднимает два прилива в день 😀 всегда.")
    assert cited("Да: луна поднимает два прилива в день!", document) == [("d", "луна поднимает два прилива в день", True)]


CODES = Document("codes", "The code of section 1234 is 5512. The code of section 7 is 80, and the lamp of Sundrift is red.")


@pytest.mark.parametrize(
    ("question", "answer", "quoted"),
    [
        ("What is the code of section 1234?", "The code of section 1234 is 9981.", []),
        ("Tell me section 1234's codes", "The code of section 1234 is 9981.", []),
        ("What is the code of section 1234?", "The code of section 1234 is 5512.", ["The code of section 1234 is 5512"]),
        ("Which colour has the lamp of Sundrift?", "It says the lamp of Sundrift is blue.", []),
        ("Which colour has the lamp of Sundrift?", "It says the lamp of Sundrift is red.", ["the lamp of Sundrift is red"]),
    ],
)
def test_words_that_stand_in_the_question_prove_nothing(question, answer, quoted):
    found = Sources([CODES], [question]).cited(answer)
    assert [answer[one.start : one.stop] for one in found] == quoted


def test_no_documents_are_cited_by_no_text():
    assert Sources([]).cited("[d1] the moon raises two tides a day") == []


@pytest.mark.parametrize("text", ["a ", "[d", "[d] ", "a b c d e f "])
def test_work_grows_with_the_size(text):
    def calls(number):
        document, counted = Document("d", text * number), count()
        setprofile(lambda *_: next(counted))
        try:
            Sources([document]).cited(text * number)
        finally:
            setprofile(None)
        return next(counted)

    assert calls(8000) < 9 * calls(1000)
