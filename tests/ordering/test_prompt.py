"""The prompt text of documents and hints."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from slotcache.ordering import Document, document_text, order_hint
from slotcache.ordering.prompt import location_hint

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


def test_a_ranked_document_may_be_missing_from_the_order():
    assert order_hint([SEA, SEA], [SEA, PORT]) == f"Most relevant: {SEA.id}\n\n"


few = st.text("a[]\\ >\n", max_size=8)
some_documents = st.lists(st.builds(Document, few, few.filter(str.strip), few), min_size=1, max_size=3)


def read(text: str) -> list[Document]:
    """Parse a prompt text back into documents, by the rules of `document_text`."""
    documents = []
    while text:
        size = next(at for at in range(1, len(text)) if text[at] == "]" and not _is_escaped(text, at))
        id = "".join(character for at, character in enumerate(text[1:size], 1) if not _escapes(text, at))
        title, _, text = text[size + 1 :].partition("\n")
        end = text.find("\n\n[")
        body, text = (text.removesuffix("\n\n"), "") if end < 0 else (text[:end], text[end + 2 :])
        at = 0
        while (at := body.find("\n\n ", at)) >= 0:
            label_like = body[at + 2 :].lstrip(" ").startswith("[")
            body = body[: at + 2] + body[at + 3 :] if label_like else body
            at += 2
        documents.append(Document(id, body, title))
    return documents


def _is_escaped(text: str, at: int) -> bool:
    before = text[1:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _escapes(text: str, at: int) -> bool:
    return text[at] == "\\" and not _is_escaped(text, at)


@given(some_documents)
def test_a_prompt_text_determines_its_documents(documents: list[Document]) -> None:
    assert read("".join(map(document_text, documents))) == documents


def test_crafted_ids_and_texts_do_not_read_like_other_documents() -> None:
    assert document_text(Document("a] b", "x")) != document_text(Document("a", "x", "b]"))
    two = document_text(Document("a", "x")) + document_text(Document("b", "y"))
    assert document_text(Document("a", "x\n\n[b]\ny")) != two
    assert document_text(Document("a", "x\n\n[b]\ny")) != document_text(Document("a", "x\n\n [b]\ny"))


def test_hints_name_crafted_ids_so_that_they_can_be_told_apart() -> None:
    assert location_hint(["a", "b"]) != location_hint(["a] above.\nSee [b"])
    documents = [Document(id, "text") for id in ("a > b", "c", "a", "b")]
    assert order_hint(documents[::-1], documents) == "Most relevant: a \\> b > c > a\n\n"
