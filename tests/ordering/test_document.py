"""Documents in all shapes that clients send, and the errors of wrong ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.ordering import Document, DocumentError, document_text, parse_documents
from slotcache.ordering import document as document_module
from slotcache.ordering.document import MOST_ELEMENTS, documents_in

text = st.text(min_size=1).filter(str.strip)


@pytest.mark.parametrize(
    ("value", "document"),
    [
        ({"id": "d7", "text": "Tides."}, Document("d7", "Tides.")),
        ({"id": "d7", "text": " Tides.\n", "title": "The\nsea"}, Document("d7", "Tides.", "The sea")),
        ({"id": "d7", "text": "Tides.", "title": None}, Document("d7", "Tides.")),
        ({"doc_id": "d7", "text": "Tides."}, Document("d7", "Tides.")),
        ({"id": 7, "text": "Tides."}, Document("7", "Tides.")),
        ({"id": 0, "text": "Tides."}, Document("0", "Tides.")),
        ({"id": "d7", "content": "Tides."}, Document("d7", "Tides.")),
        ({"id": "d7", "page_content": "Tides.", "metadata": {"page": 3}}, Document("d7", "Tides.")),
        ({"id": "d7", "data": "Tides."}, Document("d7", "Tides.")),
        ({"id": "d7", "data": {"text": "Tides.", "title": "Sea"}}, Document("d7", "Tides.", "Sea")),
        ({"id": "d7", "data": {"snippet": "Tides.", "url": "x"}}, Document("d7", "Tides.")),
        ({"id": "d7", "title": "Sea", "data": {"text": "Tides."}}, Document("d7", "Tides.", "Sea")),
        (
            {"id": "d7", "data": {"title": "Sea", "moon": "full", "tides": 2, "ports": ["Älvik"], "note": None}},
            Document("d7", 'moon: full\ntides: 2\nports: ["Älvik"]', "Sea"),
        ),
    ],
)
def test_shapes(value: object, document: Document) -> None:
    assert Document.parse(value) == document
    assert Document.parse(value).key == document.key


def test_a_document_without_an_id_is_named_by_its_content() -> None:
    document = Document.parse("Tides.")
    assert document.text == "Tides." and len(document.id) == 10
    assert int(document.id, 16) >= 0
    assert Document.parse({"text": " Tides. ", "id": None}) == document
    assert Document.parse({"data": "Tides."}) == document
    assert Document.parse("Ports.").id != document.id


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "documents[3] must be a string, {id, text, title} or {id, data: {text, title}}, not null"),
        (["a"], "documents[3] must be a string, {id, text, title} or {id, data: {text, title}}, not a list"),
        (" \n", "documents[3] is empty: a document needs text, leave it out if it has none"),
        ({"id": "d7"}, "documents[3].text is missing: a document is a string, {id, text, title} or {id, data:"),
        ({"text": 7}, "documents[3].text must be a string, not a number"),
        ({"text": ""}, "documents[3].text is empty"),
        ({"page_content": ""}, "documents[3].page_content is empty"),
        ({"text": "a\ud800"}, "documents[3].text has half a character at 1 (a lone surrogate): send UTF-8"),
        ({"data": 7}, "documents[3].data must be a string or an object with a text, not a number"),
        ({"data": ""}, "documents[3].data is empty"),
        ({"data": {}}, "documents[3].data.text is missing"),
        ({"data": {"title": "Sea"}}, "documents[3].data.text is missing"),
        ({"data": {"text": {}}}, "documents[3].data.text must be a string, not an object"),
        ({"text": "a", "title": 7}, "documents[3].title must be a string, not a number"),
        ({"text": "a", "id": True}, "documents[3].id must be a string or an integer, not a boolean"),
        ({"text": "a", "doc_id": 1.5}, "documents[3].doc_id must be a string or an integer, not a number"),
        ({"text": "a", "id": "\n"}, "documents[3].id is blank: leave it out to have the content's hash"),
        ({"text": "a", "id": "x" * 201}, "documents[3].id has 201 characters: shorten it to 200"),
    ],
)
def test_errors_name_the_mistake_and_the_field(value: object, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        Document.parse(value, "documents[3]")
    assert str(caught.value).startswith(message)
    assert caught.value.where == message.split(" ")[0]
    assert isinstance(caught.value, ValueError)


def test_an_id_is_one_line() -> None:
    assert Document.parse({"id": " a\r\n[b]\u2028\x00c\ud800 ", "text": "x"}).id == "a [b] c"
    assert Document.parse({"id": "x" * 200, "text": "x"}).id == "x" * 200
    assert Document("می\u200cروم", "x").id == "می\u200cروم", "joiners are part of words"


@given(text, text, st.text())
def test_any_text_makes_a_prompt_of_one_label_line(id: str, body: str, title: str) -> None:
    document = Document(id, body, title)
    assert document_text(document) == f"{document_text(document).splitlines()[0]}\n{body.strip()}\n\n"
    assert Document(document.id, document.text, document.title) == document


few = st.text("ab1:\n", max_size=3)
some_documents = st.builds(Document, few, few, few)


@given(some_documents, some_documents)
def test_the_key_identifies_the_document(one: Document, other: Document) -> None:
    assert (one.key == other.key) == (one == other)
    assert len(one.key) == 32


def test_the_key_tells_fields_apart() -> None:
    assert len({Document("a", "bc").key, Document("ab", "c").key, Document("a", "c", "b").key}) == 3


def test_a_document_sent_twice_keeps_its_better_rank() -> None:
    first, second = {"id": "a", "text": "A"}, {"id": "b", "text": "B"}
    assert parse_documents([first, second, {"id": "a", "text": "A\n"}]) == (Document("a", "A"), Document("b", "B"))
    assert parse_documents(["A", "B", "A"]) == parse_documents(("A", "B"))
    assert parse_documents([]) == ()


def test_one_text_under_two_ids_is_two_documents() -> None:
    assert len(parse_documents([{"id": "a", "text": "A"}, {"id": "b", "text": "A"}])) == 2


def test_one_id_with_two_texts_is_an_error() -> None:
    with pytest.raises(DocumentError, match=r"messages\[2\].documents\[1\].id 'a' has two texts: give each"):
        parse_documents([{"id": "a", "text": "A"}, {"id": "a", "text": "B"}], "messages[2].documents")


@pytest.mark.parametrize("values", ["text", {"id": "a", "text": "A"}, None])
def test_documents_are_a_list(values: object) -> None:
    with pytest.raises(DocumentError, match="documents must be a list of documents, not"):
        parse_documents(values)


def test_documents_without_an_id_that_hash_alike_are_two():
    """Two documents whose ids share 8 digits, as 2 of 98,000 do; and two with the same id."""
    seen, other, text = {}, "", ""
    for number in range(1_000_000):
        text = f"Text {number}."
        if (other := seen.setdefault(Document.parse(text).id[:8], text)) != text:
            break
    pair = parse_documents([other, {"text": text}])
    assert [document.text for document in pair] == [other, text] and len({document.id for document in pair}) == 2


def test_ids_that_are_the_same_by_chance_are_written_in_full(monkeypatch):
    monkeypatch.setattr(document_module, "ID_DIGITS", 1)
    texts = [f"Text {number}." for number in range(50)]
    documents = parse_documents(texts)
    assert [document.text for document in documents] == texts
    assert {len(document.id) for document in documents} == {1, 32}
    assert parse_documents(texts + texts) == documents
    with pytest.raises(DocumentError, match="two texts"):
        parse_documents([{"id": "ab", "text": "One."}, {"id": "ab", "text": "Two."}])


def test_a_result_of_very_many_elements_stays_a_text(monkeypatch):
    """To decode it would stop all other threads."""
    rows = [{"id": "a", "text": "x", "more": [[]] * (MOST_ELEMENTS // 3)}]
    assert documents_in({"role": "tool", "content": json.dumps(rows)}, "messages[0]")
    monkeypatch.setattr(json, "loads", None)
    rows[0]["more"] *= 2
    assert not documents_in({"role": "tool", "content": json.dumps(rows)}, "messages[0]")
    assert not documents_in({"role": "tool", "content": '{"a": 1}\n' * 2 * MOST_ELEMENTS}, "messages[0]")
