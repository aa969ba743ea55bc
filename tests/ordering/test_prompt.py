"""How documents and hints read in a prompt."""

from itertools import permutations

from slotcache.ordering import Document, document_text, order_hint

SEA = Document("d1", "The moon raises two tides a day.", "Tides")
PORT = Document("d2", "  The port closes at low tide.\n")
MOON = Document("d3", "It is full.")


def test_a_document_reads_the_same_wherever_it_stands() -> None:
    assert document_text(SEA) == "[d1] Tides\nThe moon raises two tides a day.\n\n"
    assert document_text(PORT) == "[d2]\nThe port closes at low tide.\n\n"


def test_different_documents_part_at_the_label() -> None:
    one, other = Document("d1", "same"), Document("d2", "same")
    assert document_text(one).splitlines()[0] != document_text(other).splitlines()[0]


def test_the_hint_says_the_rank_when_the_order_differs() -> None:
    assert order_hint([PORT, SEA, MOON], [MOON, SEA, PORT]) == "Most relevant: d3 > d1\n\n"


def test_the_hint_names_no_more_than_it_takes_to_know_the_rank() -> None:
    assert order_hint([SEA, PORT, MOON], [MOON, SEA, PORT]) == "Most relevant: d3\n\n"
    documents = [Document(f"d{number}", "text") for number in range(5)]
    for order in permutations(documents):
        hint = order_hint(order, documents)
        named = hint.removeprefix("Most relevant: ").strip().split(" > ") if hint else []
        rest = [document.id for document in order if document.id not in named]
        assert [*named, *rest] == [document.id for document in documents]


def test_no_hint_when_the_order_is_the_rank() -> None:
    assert order_hint([SEA, PORT], [SEA, PORT]) == ""
    assert order_hint([], []) == ""


def test_a_hint_never_contains_document_text() -> None:
    hint = order_hint([PORT, SEA], [SEA, PORT])
    assert hint and not any(document.text in hint for document in (SEA, PORT)) and SEA.title not in hint


def test_a_document_of_the_ranking_that_does_not_stand_there_is_no_error():
    assert order_hint([SEA, SEA], [SEA, PORT]) == f"Most relevant: {SEA.id}\n\n"
