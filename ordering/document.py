"""Documents: their ids and texts, and how they are found in a client's messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TypeGuard
from unicodedata import category

ID_DIGITS = 10  # digits of a document's hash that are its id: few, because the id is part of the prompt
MAX_ID = 200  # characters: an id is part of the prompt, before the text and again in hints

# OpenAI-style clients, Cohere and LangChain use different names for the text.
TEXT_FIELDS = ("text", "snippet", "content", "page_content")
UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}  # Unicode categories. Joiners (Cf) stay: several scripts need them
SHAPES = "a string, {id, text, title} or {id, data: {text, title}}"


class DocumentError(ValueError):
    """A document cannot be used. The message names the field, the mistake and the remedy.

    where: the path of the field, for example `documents[3].text`.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} {problem}")
        self.where = where


@dataclass(frozen=True, slots=True)
class Document:
    """A document with an id, a text and an optional title.

    Id and title become single lines, and the text is stripped, so that equal documents have equal text in a prompt.

    key: 32 hexadecimal digits. Two documents have the same key if, and only if, their ids, titles and texts are the same.
    form: the document's whole text in a prompt, as another program has written it; empty: `document_text` writes it.
    """

    id: str
    text: str
    title: str = ""
    key: str = field(init=False, repr=False, compare=False)
    form: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("id", _line(self.id)), ("text", self.text.strip()), ("title", _line(self.title))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "key", _digest(self.id, self.title, self.text))

    @classmethod
    def parse(cls, value: object, where: str = "document") -> Document:
        """Return a document from JSON: a string, `{id, text, title}`, `{doc_id, text}` or Cohere's `{id, data}`.

        The text may also be in a field `content`, `page_content` (LangChain) or `snippet`. Without an id, the first 10
        digits of a hash of title and text are the id.

        where: the path of `value`, for error messages.

        Raises DocumentError.
        """
        if isinstance(value, str):
            return cls(_digest("", text := _text(value, where))[:ID_DIGITS], text)
        if not _is_object(value):
            raise DocumentError(where, f"must be {SHAPES}, not {_kind(value)}")
        fields, inside = _fields(value, where)
        text = _field_text(fields, inside)
        title = _title(fields, inside) or _title(value, where)
        return cls(_id(value, where) or _digest(title, text)[:ID_DIGITS], text, title)


def parse_documents(values: object, where: str = "documents") -> tuple[Document, ...]:
    """Return the documents of a request, in retrieval rank. A document that is sent twice gets the better of its ranks.

    A null in the list is skipped. Raises DocumentError for a document that cannot be used, and for two documents with the
    same id and different texts.
    """
    if not _is_list(values):
        raise DocumentError(where, f"must be a list of documents, not {_kind(values)}")
    documents: dict[str, Document] = {}
    for i, value in enumerate(values):
        if value is None:
            continue
        document = Document.parse(value, f"{where}[{i}]")
        if document.id in documents and documents[document.id].text != document.text:
            document = replace(document, id=_own_id(document))
        if documents.setdefault(document.id, document).text != document.text:
            raise DocumentError(f"{where}[{i}].id", f"{document.id!r} has two texts: give each text its own id")
    return tuple(documents.values())


def _own_id(document: Document) -> str:
    """Return an id for a document whose own id belongs to another text already.

    If the id is the document's short hash, the new id is its full hash. Any other id is returned unchanged.
    """
    digest = _digest(document.title, document.text)
    return digest if document.id == digest[:ID_DIGITS] else document.id


def _fields(value: Mapping[str, object], where: str) -> tuple[Mapping[str, object], str]:
    """Return the object that has a document's text, and the path of this object.

    This object is the document itself, or Cohere's `data` object.

    If `data` has no text field, its fields make up the text, one in each line.
    """
    data = value.get("data")
    if data is None or any(value.get(name) is not None for name in TEXT_FIELDS):
        return value, where
    where = f"{where}.data"
    if isinstance(data, str):
        return {"text": _text(data, where)}, where
    if not _is_object(data):
        raise DocumentError(where, f"must be a string or an object with a text, not {_kind(data)}")
    if any(data.get(name) is not None for name in TEXT_FIELDS):
        return data, where
    lines = (f"{name}: {_shown(field)}" for name, field in data.items() if name != "title" and field is not None)
    return {"text": "\n".join(lines) or None, "title": data.get("title")}, where


def _field_text(fields: Mapping[str, object], where: str) -> str:
    for name in TEXT_FIELDS:
        if (text := fields.get(name)) is not None:
            return _text(text, f"{where}.{name}")
    raise DocumentError(f"{where}.text", f"is missing: a document is {SHAPES}")


def _text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise DocumentError(where, f"must be a string, not {_kind(text)}")
    if not text.strip():
        raise DocumentError(where, "is empty: a document needs text, leave it out if it has none")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(where, f"has half a character at {error.start} (a lone surrogate): send UTF-8") from None
    return text.strip()


def _title(fields: Mapping[str, object], where: str) -> str:
    title = fields.get("title")
    if title is not None and not isinstance(title, str):
        raise DocumentError(f"{where}.title", f"must be a string, not {_kind(title)}")
    return _line(title or "")


def _id(value: Mapping[str, object], where: str) -> str | None:
    name = "id" if value.get("id") is not None else "doc_id"
    given = value.get(name)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise DocumentError(f"{where}.{name}", f"must be a string or an integer, not {_kind(given)}")
    label = _line(str(given))
    if not label:
        raise DocumentError(f"{where}.{name}", "is blank: leave it out to have the content's hash")
    if len(label) > MAX_ID:
        raise DocumentError(f"{where}.{name}", f"has {len(label)} characters: shorten it to {MAX_ID}")
    return label


def _line(text: str) -> str:
    """Return `text` as one line. Line breaks, control characters and lone surrogates become spaces; several become one."""
    if not text.isprintable():
        text = "".join(" " if category(c) in UNPRINTABLE else c for c in text)
    return " ".join(text.split())


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _digest(*parts: str) -> str:
    """Return a hash of the strings `parts`.

    The lengths of the parts are hashed, too, so that different lists of parts give different inputs.
    """
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _kind(value: object) -> str:
    names: dict[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    if value is None:
        return "null"
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


# ---- The documents in the messages of a chat: in fields `documents`, and as results of tools. ---------------------------

TOOLS = ("tool", "function")  # roles of results
DOCUMENT_ROLES = ("user", *TOOLS)  # roles whose messages may have documents
LISTS = ("documents", "results", "hits", "passages", "chunks", "items", "data")  # fields with a result's documents
MOST_MESSAGES = MOST_DOCUMENTS = 10_000  # of a request: far more than a context holds, and read in a tenth of a second
ELEMENTS, MOST_ELEMENTS = "[{,", 1 << 18  # of a result that is decoded: decoding stops all other threads
RANKS = ("score", "rank", "distance", "similarity", "relevance", "index", "_score")  # depend on the query: not shown

Message = Mapping[str, object]


def find_documents(messages: Sequence[Message], top: object, takes_results: bool) -> dict[int, tuple[Document, ...]]:
    """Return the documents of each message that has any, in retrieval rank.

    The keys of the result are the indices of the messages.

    top: the field `documents` of the request itself. The documents in `top` belong to the last user message.
    takes_results: whether the content of a tool's message may be a list of documents. A tool's list is ignored if it has
        more than 262,144 elements, or more documents than the request may still have.

    Raises DocumentError, also for more than 10,000 messages or documents.
    """
    check_number(messages)
    found: dict[int, tuple[Document, ...]] = {}
    left = MOST_DOCUMENTS
    for at, message in enumerate(messages):
        where, given = f"messages[{at}]", message.get("documents")
        if given and message["role"] not in DOCUMENT_ROLES:
            raise DocumentError(f"{where}.documents", "stand in the wrong place: only users and tools have documents")
        if given is not None:
            found[at] = _parse(given, f"{where}.documents", left)
        elif takes_results and message["role"] in TOOLS and (listed := documents_in(message, f"{where}.content", left)):
            found[at] = listed
        left -= len(given) if _is_list(given) else len(found.get(at, ()))
    if top is None:
        return found
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None and top:
        raise DocumentError("documents", "belong to the last user message, and there is none")
    if last is not None:
        if found.get(last) and top:
            raise DocumentError("documents", f"and messages[{last}].documents: give one of them")
        found[last] = found.get(last) or _parse(top, "documents", left)
    return found


def _parse(values: object, where: str, most: int) -> tuple[Document, ...]:
    """Return the documents in `values`. Raises DocumentError, also for more than `most` documents."""
    if _is_list(values) and len(values) > most:
        raise DocumentError(where, f"brings more documents than the {MOST_DOCUMENTS:,} that a request may have")
    return parse_documents(values, where)


def check_number(messages: Sequence[object]) -> None:
    """Raise DocumentError if there are more messages than a request may have."""
    if len(messages) > MOST_MESSAGES:
        raise DocumentError("messages", f"are {len(messages):,}: a request may have {MOST_MESSAGES:,}")


def documents_in(message: Message, where: str, most: int = MOST_DOCUMENTS) -> tuple[Document, ...]:
    """Return the documents in the content of a tool's message.

    Return () if the content is not a list of documents, or has more than `most` of them. The content may be a list, an
    object with a list, or JSON text of either. Each document must have an id and a text. A document's other fields are put
    before its text, one in each line, except for ranks and scores.
    """
    listed, _ = _listed(message.get("content"))
    if not 0 < len(listed) <= most or not all(map(_is_document, listed)):
        return ()
    try:
        return parse_documents([_flat(value) for value in listed], where)
    except DocumentError:
        return ()


def beside_documents(message: Message) -> str:
    """Return the fields beside the list of documents in a tool's message, one in each line; empty if there are none."""
    _, beside = _listed(message.get("content"))
    return _lines(beside.items())


def leave_out(documents: Sequence[Document], shown_before: AbstractSet[str]) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """Return the documents that no earlier turn shows, and the ids of the other documents (RAGBoost, 6).

    shown_before: the keys of the documents in earlier turns.
    """
    new = tuple(document for document in documents if document.key not in shown_before)
    return new, tuple(document.id for document in documents if document.key in shown_before)


def _listed(content: object) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the list in a message's content, and the content's other fields.

    If there is no list, both results are empty.
    """
    if isinstance(content, str):
        if content.lstrip()[:1] not in ("[", "{") or sum(map(content.count, ELEMENTS)) > MOST_ELEMENTS:
            return (), {}
        try:
            content = json.loads(content, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return (), {}
    if _is_object(content):
        found = next(((name, listed) for name in LISTS if _is_list(listed := content.get(name))), None)
        return (found[1], {name: value for name, value in content.items() if name != found[0]}) if found else ((), {})
    return (content if _is_list(content) else ()), {}


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and Infinity, which are not JSON."""
    raise ValueError(constant)


def _is_document(value: object) -> bool:
    if not _is_object(value) or value.get("type") in ("text", "image_url"):
        return False
    return any(value.get(name) is not None for name in ("id", "doc_id")) and any(value.get(name) for name in TEXT_FIELDS)


def _flat(value: object) -> object:
    """Return a document in which all other fields have become lines before the text."""
    assert _is_object(value)
    id = "id" if value.get("id") is not None else "doc_id"
    text = next(name for name in TEXT_FIELDS if value.get(name))
    shown = (id, "title", text)
    lines = _lines((name, inner) for name, inner in value.items() if name not in shown and not _is_rank(name, inner))
    return {name: value.get(name) for name in shown} | ({text: f"{lines}\n{value[text]}"} if lines else {})


def _is_rank(name: object, value: object) -> bool:
    return name in RANKS and isinstance(value, int | float)


def _lines(fields: Iterable[tuple[object, object]]) -> str:
    shown = (
        f"{name}: {inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)}"
        for name, inner in fields
        if inner is not None
    )
    return "\n".join(shown)
