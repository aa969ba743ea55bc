"""The documents that the messages of a chat bring: in fields of their own, and as results of tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from .document import TEXT_FIELDS, Document, DocumentError, parse_documents

TOOLS = ("tool", "function")  # roles of results
HOLDERS = ("user", *TOOLS)  # roles whose messages may have documents
LISTS = ("documents", "results", "hits", "passages", "chunks", "items", "data")  # fields that hold a result's documents
RANKS = ("score", "rank", "distance", "similarity", "relevance", "index", "_score")  # numbers of the query: not shown

Message = Mapping[str, object]


def find_documents(messages: Sequence[Message], top: object, takes_results: bool) -> dict[int, tuple[Document, ...]]:
    """Return the documents of each message that has some, by its index, in retrieval rank.

    top: the request's own field `documents`, whose documents belong to the last message of a user. takes_results: a tool's
    message whose content is a list of documents has these. Raises DocumentError.
    """
    found: dict[int, tuple[Document, ...]] = {}
    for at, message in enumerate(messages):
        where, given = f"messages[{at}]", message.get("documents")
        if given and message["role"] not in HOLDERS:
            raise DocumentError(f"{where}.documents", "stand in the wrong place: only users and tools have documents")
        if given is not None:
            found[at] = parse_documents(given, f"{where}.documents")
        elif takes_results and message["role"] in TOOLS and (listed := documents_in(message, f"{where}.content")):
            found[at] = listed
    if top is None:
        return found
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None and top:
        raise DocumentError("documents", "belong to the last user message, and there is none")
    if last is not None:
        if found.get(last) and top:
            raise DocumentError("documents", f"and messages[{last}].documents: give one of them")
        found[last] = found.get(last) or parse_documents(top)
    return found


def documents_in(message: Message, where: str) -> tuple[Document, ...]:
    """Return the documents that the content of a tool's message is; empty if it is something else.

    The content is a list of documents, or JSON text of one, or of an object with one; each document has an id and a text.
    Further fields of a document are lines in front of its text; its rank and score are left out.
    """
    listed, _ = _listed(message.get("content"))
    if not listed or not all(map(_is_document, listed)):
        return ()
    try:
        return parse_documents([_flat(value) for value in listed], where)
    except DocumentError:
        return ()


def beside_documents(message: Message) -> str:
    """Return the further fields of the object whose list `documents_in` returns, a line each; empty without any."""
    _, beside = _listed(message.get("content"))
    return _lines(beside.items())


def leave_out(documents: Sequence[Document], held: AbstractSet[str]) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """Return the documents that no earlier turn shows, and the ids of the rest (RAGBoost, 5.4). held: keys of shown ones."""
    new = tuple(document for document in documents if document.key not in held)
    return new, tuple(document.id for document in documents if document.key in held)


def _listed(content: object) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the list of objects that a content is or holds, and the fields beside it; empty without one."""
    if isinstance(content, str):
        if content.lstrip()[:1] not in ("[", "{"):
            return (), {}
        try:
            content = json.loads(content, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return (), {}
    if isinstance(content, Mapping):
        held = next((name for name in LISTS if isinstance(content.get(name), list)), None)
        beside = {name: value for name, value in content.items() if name != held}
        return (content[held], beside) if held else ((), {})
    return (content if isinstance(content, list) else ()), {}


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


def _is_document(value: object) -> bool:
    if not isinstance(value, Mapping) or value.get("type") in ("text", "image_url"):
        return False
    return any(value.get(name) is not None for name in ("id", "doc_id")) and any(value.get(name) for name in TEXT_FIELDS)


def _flat(value: object) -> object:
    """Return a document whose further fields stand in its text."""
    assert isinstance(value, Mapping)
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
