"""Finds the documents for a chat's question, and the citations in an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, takewhile
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta, Struct, field

from ...ordering.document import TOOLS, Document
from ...retrieval.files import Folder
from ...retrieval.languages import WORDS
from ...retrieval.ranking import BY_VECTORS, Hit, Query
from ...retrieval.terms import stems
from ...retrieval.writing import INDEXED, StoredChunk, StoredFile
from ...slots.scope import MAX_NAME
from ..chat.body import ChatRequest, Paths, Retrieval, SearchBy, TopK, check_scope
from ..chat.chat_prompt import DocumentSet
from ..chat.history import ChatHistory
from ..chat.sampling_fields import JsonValue
from ..formats.answer import AnswerReader, ContentText
from ..http.api_errors import RequestError
from .folder import EMBEDDING, READY, FolderIndex

MOST = 1000  # citations of an answer by id, and as many by quotation, since the search for them stops the event loop
QUOTED_WORDS = 5  # words of the shortest quotation that counts
BRACKETS = re.compile(r"\[([^\][\n]{1,400})\]")
NAME = re.compile(r"[^\s,;]+")
WORD = re.compile(r"\w+")
FREQUENT = frozenset(word for words in WORDS.values() for word in words.split())


@dataclass(frozen=True, slots=True)
class Citation:
    """A citation in an answer.

    id: the cited document.
    start, stop: the span of the citation in the answer, in characters.
    quote: whether the answer quotes words of the document; otherwise the answer names the document's id.
    """

    id: str
    start: int
    stop: int
    quote: bool = False

    def shown(self) -> dict[str, object]:
        cited: dict[str, object] = {"id": self.id, "start": self.start, "stop": self.stop}
        return cited | ({"quote": True} if self.quote else {})


class _Word(NamedTuple):
    text: str
    start: int
    stop: int


class Sources:
    """Finds the documents that an answer cites. Making this object takes time and memory for each word of the documents.

    questions: the questions of the chat. An answer may repeat words of the questions. So a quotation counts only if it has a
    word that is neither frequent nor in a question.
    """

    def __init__(self, documents: Iterable[Document], questions: Iterable[str] = ()) -> None:
        self._documents = list(documents)
        self._asked = {stem for question in questions for word in _words(question) for stem in stems(word.text, "en")}
        self._ids = {document.id for document in self._documents}
        self._words = [[word.text for word in _words(document.text)] for document in self._documents]
        self._places: dict[str, tuple[int, int]] = {}  # by `QUOTED_WORDS` words: the document, and the index of the first
        for at, words in enumerate(self._words):
            for first in range(len(words) - QUOTED_WORDS + 1):
                self._places.setdefault(_key(words[first : first + QUOTED_WORDS]), (at, first))

    def cited(self, text: str) -> list[Citation]:
        """Return the citations of an answer, in the order of the text."""
        found = [*islice(self._named(text), MOST), *islice(self._quoted(text), MOST)]
        return sorted(found, key=lambda one: (one.start, one.stop))

    def _named(self, text: str) -> Iterator[Citation]:
        """Yield a citation for each id in brackets.

        The citation's span includes the brackets only if they contain nothing but the id.
        """
        for bracket in BRACKETS.finditer(text):
            if bracket[1] in self._ids:
                yield Citation(bracket[1], bracket.start(), bracket.end())
                continue
            for name in NAME.finditer(text, bracket.start(1), bracket.end(1)):
                if name[0] in self._ids:
                    yield Citation(name[0], name.start(), name.end())

    def _quoted(self, text: str) -> Iterator[Citation]:
        words, at = list(_words(text)), 0
        texts = [word.text for word in words]
        while at + QUOTED_WORDS <= len(words):
            place = self._places.get(_key(texts[at : at + QUOTED_WORDS]))
            if place is None:
                at += 1
                continue
            document, first = place
            length = _common_length(texts, at, self._words[document], first)
            if any(self._is_new(word) for word in texts[at : at + length]):
                yield Citation(self._documents[document].id, words[at].start, words[at + length - 1].stop, quote=True)
            at += length

    def _is_new(self, word: str) -> bool:
        """Return whether a word is neither frequent nor part of a question."""
        return word not in FREQUENT and self._asked.isdisjoint(stems(word, "en"))


def _words(text: str) -> Iterator[_Word]:
    return (_Word(found[0].casefold(), found.start(), found.end()) for found in WORD.finditer(text))


def _key(words: Sequence[str]) -> str:
    return " ".join(words)


def _common_length(words: Sequence[str], at: int, others: Sequence[str], first: int) -> int:
    """Return how many words are equal in two texts, counted from position `at` of one and `first` of the other."""
    most = min(len(words) - at, len(others) - first)
    return next((n for n in range(most) if words[at + n] != others[first + n]), most)


# ---- The documents of `--docs` as JSON: folders, files, and a document with its neighbours. -----------------------------

Fields = dict[str, object]
NEIGHBOURS = 2  # on either side of a document


def collections(folder_index: FolderIndex, after: str, limit: int) -> Fields:
    """Return the folders, and one page of their files in the order of the paths. Runs in a thread of the index.

    after: the path after which the page starts.
    limit: the most files of a page.
    """
    files = list(folder_index.index.store.files(after, limit + 1).values())
    page = files[:limit]
    shown: Fields = {
        "object": "sources",
        "collections": [_collection(folder_index, folder, page) for folder in folder_index.folders],
        "next": page[-1].path if len(files) > limit else None,
    }
    return shown | ({"read_ahead": folder_index.prefixes.shown()} if folder_index.prefixes else {})


def _collection(folder_index: FolderIndex, folder: Folder, files: Iterable[StoredFile]) -> Fields:
    watcher = folder_index.watcher
    shown: Fields = {
        "path": os.fsencode(folder.root).decode(errors="backslashreplace"),
        "state": watcher.state,
        "stages": folder_index.stages,
        "progress": _progress(folder_index),
        "files": [_file(file) for file in files if _is_in(folder, file.path)],
    }
    named: Fields = {
        "error": watcher.error,
        "questions": folder_index.suggested,
        "advice": folder_index.advice,
        "not_read": folder_index.index.progress.not_read,
    }
    return shown | {name: value for name, value in named.items() if value}


def index_state(folder_index: FolderIndex | None) -> Fields:
    """Return the field `index` of an answer: the state and progress of the index.

    Return no field if the index is up to date.
    """
    if folder_index is None:
        return {}
    state = folder_index.watcher.state
    return {} if state == READY else {"index": {"state": state, **_progress(folder_index)}}


def unread(index: Fields) -> Sequence[str]:
    """Return a warning if the search for an answer began before all files were read, and otherwise nothing.

    index: the result of `index_state` for the answer.
    """
    about = index.get("index")
    if not isinstance(about, dict) or about["unit"] != "files" or (about["total"] and about["done"] == about["total"]):
        return ()
    share = f"{about['done']:,} of {about['total']:,} files were" if about["total"] else "no file was"
    return (f"retrieval: {share} read when the search began: the answer may lack the other files",)


def _is_in(folder: Folder, path: str) -> bool:
    name = folder.shown(())
    return not name or path == name or path.startswith(f"{name}/")


def _progress(folder_index: FolderIndex) -> Fields:
    """Return the progress of the index.

    The progress is counted in documents while vectors are computed, and otherwise in files.
    """
    now = folder_index.index.progress
    if folder_index.watcher.state == EMBEDDING:
        return {"unit": "documents", "done": now.vectors, "total": now.chunks - now.by_words}
    return {"unit": "files", "done": now.files - now.files_left, "total": now.files}


def _file(file: StoredFile) -> Fields:
    shown: Fields = {"path": file.path, "state": file.state}
    if file.state != INDEXED:
        return shown | {"error": file.reason}
    rest: Fields = {"by_words": file.num_by_words, "left_out": {**file.left_out}}
    return shown | {"chunks": file.num_chunks, "vectors": file.num_vectors} | {k: v for k, v in rest.items() if v}


def document(folder_index: FolderIndex, id: str) -> Fields:
    """Return a document with its text and its neighbours in the file. Raises RequestError 404.

    Runs in a thread of the index.
    """
    around = folder_index.index.expand(id, NEIGHBOURS, NEIGHBOURS)
    own = next((at for at, chunk in enumerate(around) if chunk.id == id), None)
    if own is None:
        raise RequestError(f"no document {id[:80]!r} is in the index: its file may have changed", status=404)
    neighbours = [{"offset": at - own, **_text(chunk)} for at, chunk in enumerate(around) if at != own]
    places = [{"path": place.path, "page": place.page} for place in around[own].places]
    return _text(around[own]) | place_of(around[own]) | {"places": places, "neighbours": neighbours}


def _text(chunk: StoredChunk) -> Fields:
    return {"id": chunk.id, "title": chunk.title, "text": chunk.text}


def place_of(chunk: StoredChunk) -> Fields:
    """Return the first place of a document in the files."""
    place = chunk.places[0]
    return {"path": place.path, "page": place.page, "start": place.start, "stop": place.stop}


def results(hits: Sequence[Hit], with_text: bool) -> list[Fields]:
    """Return the hits of a search as JSON, the best first.

    with_text: whether to return the text of each hit. The text of a hit in an attached file is always returned, since the
    file may soon be removed.
    """
    return [
        {"id": hit.chunk.id, "title": hit.chunk.title}
        | ({"text": hit.chunk.text} if with_text or hit.file else {})
        | place_of(hit.chunk)
        | {"score": round(hit.score, 4), "lexical_rank": hit.lexical_rank, "vector_rank": hit.vector_rank}
        | ({"file": hit.file} if hit.file else {})
        for hit in hits
    ]


# ---- The sources of an answer: the documents that the search found, and the documents that the answer cites. ------------


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The result of a chat's search.

    hits: the hits, the best first.
    index: the fields of `index_state`.
    left_out: how many hits were dropped because of a low score.
    files: for each attached file that was searched, its id and the last stage of the search in the file.
    """

    hits: Sequence[Hit]
    index: Fields
    left_out: int = 0
    files: Sequence[Fields] = ()

    @property
    def fields(self) -> Fields:
        """The fields of the report, without the hits."""
        return {"left_out": self.left_out, **({"files": self.files} if self.files else {}), **self.index}


Found = SearchReport | None
"""The result of a chat's search. None if the chat asks for no search."""


@dataclass(frozen=True, slots=True, eq=False)
class AnswerSources:
    """The sources of an answer.

    found: the ids of the documents that the search found, the best first.
    retrieved: the found documents as JSON for the client.
    sources: finds the citations of any document in the prompt.
    reader: makes a reader that finds the content in the answer's text.
    about: the fields of the search's `SearchReport`.
    """

    found: Sequence[str]
    retrieved: list[Fields]
    sources: Sources
    reader: Callable[[], AnswerReader]
    about: Fields

    @classmethod
    def of(cls, found: SearchReport, chat: ChatHistory) -> Self:
        """Make the sources of an answer to a chat. Call this in a thread, since long documents take time."""
        sets = [part for part in chat.prompt.parts if isinstance(part, DocumentSet)]
        questions = (_text_in(entry.message.get("content")) for entry in chat.entries if entry.role == "user")
        sources = Sources((document for one in sets for document in one.documents), questions)
        ids, retrieved = [hit.chunk.id for hit in found.hits], results(found.hits, with_text=False)
        return cls(ids, retrieved, sources, chat.shown_reader, about=found.fields)

    def fields(self, text: str) -> Fields:
        """Return the fields of the report. The positions of citations are positions in the content of the answer.

        text: the text that the model generated, which may also contain reasoning and tool calls.
        """
        reader = self.reader()
        fragments = [*reader.push(text), *reader.finish()]
        content = "".join(fragment.text for fragment in fragments if isinstance(fragment, ContentText))
        citations = [one.shown() for one in self.sources.cited(content)]
        return {"retrieved": self.retrieved, "citations": citations, **self.about}


# ---- Pipelining ---------------------------------------------------------------------------------------------------------
# Prefill with the first results of a search that still runs (RAGCache, section 5.3: dynamic speculative pipelining).

logger = logging.getLogger("slotcache.docs")

Prefill = Callable[[Sequence[Hit]], Awaitable[object]]
"""Prefills a prompt with these documents if the server is idle."""


class StagePrefetch:
    """Passes the documents of each stage of a search to `prefill`, unless they are the same as in the stage before.

    If a later stage finds other documents, the prefill of the earlier stage is cancelled.

    delay: seconds before the documents of a stage are passed on. A stage that is replaced or stopped before `delay` has
    passed starts no prefill.
    """

    def __init__(self, prefill: Prefill, delay: float = 0.0) -> None:
        self._prefill, self._delay = prefill, delay
        self._shown: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._front: asyncio.Task[None] | None = None

    def begin(self, front: Callable[[], Awaitable[object]]) -> None:
        """Start `front`, which prefills the text before all documents.

        `front` is cancelled when documents are passed to `prefill`.
        """
        self._front = asyncio.ensure_future(_only_ahead(front))

    def show(self, hits: Sequence[Hit]) -> None:
        """Pass the documents of the newest stage to `prefill` after `delay`. hits: the documents, the best first."""
        ids = [hit.chunk.id for hit in hits]
        if not ids or ids == self._shown:
            return
        if self._task is not None:
            self._task.cancel()
        self._shown = ids
        self._task = asyncio.ensure_future(self._run(hits))

    def stop(self) -> None:
        """Pass no more documents to `prefill`. Prompts that were already submitted are still computed."""
        for task in (self._front, self._task):
            if task is not None:
                task.cancel()

    async def settled(self) -> None:
        """Wait until the newest documents have been passed to `prefill`."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, hits: Sequence[Hit]) -> None:
        await asyncio.sleep(self._delay)
        if self._front is not None:
            self._front.cancel()
        await _only_ahead(partial(self._prefill, hits))


async def _only_ahead(work: Callable[[], Awaitable[object]]) -> None:
    """Do work that only saves time later. If the work raises RequestError, only log the error."""
    try:
        await work()
    except RequestError as error:
        logger.debug("a prompt could not be computed ahead: %s", error)


# ---- `POST /v1/search`: its fields. -------------------------------------------------------------------------------------


class ChatToCome(ChatRequest, frozen=True, kw_only=True):
    """The body of a chat completion that still lacks its last question."""

    messages: list[dict[str, JsonValue]] = field(default_factory=list)


class SearchRequest(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/search`.

    stream: whether the answer has an event for each stage.
    speculate: a name for the next turn of `chat`. The documents of each stage of the search are prefilled for the next turn.
    chat: the chat before its next question. The default of `chat` is the stored conversation that `speculate` names, or a
    new chat if no conversation has this name.
    """

    query: str
    top_k: TopK | None = None
    paths: Paths = []
    min_score: float | None = None
    by: SearchBy | None = None
    stream: bool = False
    speculate: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None
    chat: ChatToCome | None = None
    cache_scope: str = ""

    def check(self) -> None:
        """Raise RequestError if the scope has a NUL character or is too long."""
        check_scope(self.cache_scope, "cache_scope")


# ---- From a chat with `retrieval` to the query, and from the hits to the chat with its documents. -----------------------


def query_of(asked: ChatRequest, top_k: int) -> Query | None:
    """Return the query of a chat: `retrieval.query` or, if it is not given, the last question.

    The result is None if the chat has tool results but no question. Raises RequestError for a chat that has neither tool
    results nor a question.

    top_k: the default number of hits.
    """
    wish = wish_of(asked)
    text = _last_question(asked) if wish.query is None else wish.query
    if text is None:
        return None
    return search_for(text, wish, top_k)


def wish_of(asked: ChatRequest) -> Retrieval:
    """Return the options of a chat's search: its `retrieval`, or the defaults."""
    return asked.retrieval if isinstance(asked.retrieval, Retrieval) else Retrieval()


def check_by(wish: Retrieval | SearchRequest, folder_index: FolderIndex | None) -> None:
    """Raise RequestError if the client wants a search only by vectors and the documents have no vectors."""
    if wish.by == BY_VECTORS and folder_index is not None and not folder_index.index.has_vectors:
        where = "by" if isinstance(wish, SearchRequest) else "retrieval.by"
        why = folder_index.advice or "expected a server with --embedding-model"
        raise RequestError(f"{where} is vectors, and these documents have none: {why}", param=where)


def search_for(text: str, wish: Retrieval | SearchRequest, top_k: int) -> Query:
    paths = tuple(wish.paths)
    return Query(text=text, top_k=wish.top_k or top_k, paths=paths, min_score=wish.min_score, by=wish.by or "")


def _last_question(asked: ChatRequest) -> str | None:
    at = _last(asked, "user")
    if at is None and _last(asked, *TOOLS) is not None:
        return None
    if at is None:
        raise RequestError("retrieval: expected a user message, or retrieval.query", param="retrieval")
    return _text_in(asked.messages[at].get("content"))


def _text_in(content: object) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _last(asked: ChatRequest, *roles: str) -> int | None:
    """Return the index of the last message with one of these roles, or None if no message has one of them."""
    return max((at for at, message in enumerate(asked.messages) if message.get("role") in roles), default=None)


def fitting(hits: Sequence[Hit], room: int, length: Callable[[Document], int]) -> list[Hit]:
    """Return as many of the first hits as fit into `room` tokens together, but at least one hit.

    length: returns the exact number of tokens of a document in the prompt, since the index only estimates this number.
    """
    totals = accumulate(length(hit.document) for hit in hits)
    return list(hits[: max(sum(1 for _ in takewhile(lambda total: total <= room, totals)), 1)])


def without_documents(asked: ChatRequest) -> ChatRequest | None:
    """Return a chat without the documents of its last question, or None if its last message is not a question."""
    if not asked.messages or asked.messages[-1].get("role") != "user":
        return None
    question = {name: value for name, value in asked.messages[-1].items() if name != "documents"}
    return msgspec.structs.replace(asked, messages=[*asked.messages[:-1], question], documents=None, retrieval=True)


def with_documents(asked: ChatRequest, hits: Iterable[Hit]) -> ChatRequest:
    """Add the documents of a search to a chat's last question or, if it has no question, to its last tool result.

    Return the new chat. If the message has a list of documents, the new documents are appended to the list. If it has none,
    the documents for a question are appended to the chat's own list, and a tool result gets a new list.
    """
    chunks = [hit.chunk for hit in hits]
    found: list[JsonValue] = [{"id": chunk.id, "title": chunk.title, "text": chunk.text} for chunk in chunks]
    asked, question = msgspec.structs.replace(asked, retrieval=True), _last(asked, "user")
    at = _last(asked, *TOOLS) if question is None else question
    if not found or at is None:
        return asked
    given = asked.messages[at].get("documents")
    if given is None and question is None:
        given = []
    if not isinstance(given, list):
        return msgspec.structs.replace(asked, documents=[*(asked.documents or []), *found])
    messages = [*asked.messages]
    messages[at] = {**messages[at], "documents": [*given, *found]}
    return msgspec.structs.replace(asked, messages=messages)
