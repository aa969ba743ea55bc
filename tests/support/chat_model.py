"""A simple second implementation of a chat's prompt: histories, documents, hints and sampled ids.

A world knows no caches. It predicts the exact ids of a prompt. Only the order of documents, which a server may choose, is
taken from the answer.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slotcache.ordering.document import Document
from slotcache.ordering.prompt import document_text, location_hint, order_hint

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A message as a client sends it. documents: None if the message has no such field."""

    role: str
    text: str
    documents: tuple[Document, ...] | None = None

    def body(self) -> dict[str, Any]:
        said = {"role": self.role, "content": self.text}
        if self.documents is None:
            return said
        return said | {"documents": [{"id": one.id, "text": one.text, "title": one.title} for one in self.documents]}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. options: the fields of its body except the messages."""

    scope: str
    messages: tuple[Message, ...]
    options: Mapping[str, Any]
    conversation: str = ""
    kind: str = "auto"
    previous: str = ""
    store: bool | None = None

    @property
    def caches(self) -> bool:
        return self.options.get("cache_prompt", True)

    def body(self) -> dict[str, Any]:
        body = {"cache_prompt": True, "cache_scope": self.scope} | dict(self.options)
        body["messages"] = [message.body() for message in self.messages]
        if self.conversation:
            body["conversation"] = {"id": self.conversation, "history": self.kind}
        if self.previous:
            body["previous_response_id"] = self.previous
        return body | ({} if self.store is None else {"store": self.store})


@dataclass(frozen=True, slots=True)
class Shown:
    """The documents of one message in a prompt.

    given: all documents of the message, including repeated ones.
    rank: the documents in the prompt, by rank.
    order: the documents in prompt order; None until the order is known.
    """

    given: tuple[Document, ...]
    rank: tuple[Document, ...]
    repeated: tuple[str, ...]
    hinted: bool
    fixed: int  # the number of first documents that keep their place
    policy: str
    best: str  # the place of its best document
    is_priced: bool  # whether the best document may have another place
    order: tuple[Document, ...] | None = None

    def placed(self, ids: Sequence[str]) -> "Shown":
        """Return the documents in the order that an answer reports."""
        known = {document.id: document for document in self.rank}
        assert sorted(ids) == sorted(known), f"shown are {list(ids)} and not {list(known)}"
        order = tuple(known[id] for id in ids)
        assert self.order in (None, order), "an earlier turn's documents have moved"
        assert order[: self.fixed] == self.rank[: self.fixed], "a document was moved that must stay"
        if self.best != "free" and not self.is_priced:
            assert order[0 if self.best == "first" else -1] == self.rank[0], "the best document has left its place"
        if self.policy == "retrieval":
            assert order == self.rank or (self.best == "last" and order == (*self.rank[1:], self.rank[0]))
        return replace(self, order=order)

    def texts(self) -> list[str]:
        assert self.order is not None
        hint = order_hint(self.order, self.given) if self.hinted and self.order != self.rank else ""
        return [*map(document_text, self.order), location_hint(self.repeated), hint]


@dataclass(frozen=True, slots=True)
class Entry:
    """A message in a prompt. keys: the keys of all its documents. sampled: the ids of an answer."""

    role: str
    text: str
    keys: tuple[str, ...] = ()
    shown: Shown | None = None
    sampled: Ids | None = None


@dataclass(slots=True)
class Conversation:
    """A conversation: the history up to and including each answer, by the answer's id."""

    id: str
    answers: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    head: str = ""


@dataclass(slots=True)
class Scope:
    """A scope. conversations: by name. spelt: the sampled ids of answers, by their text."""

    conversations: dict[str, Conversation] = field(default_factory=dict)
    of_answer: dict[str, Conversation] = field(default_factory=dict)
    spelt: dict[str, Ids] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as the server should understand it. origin: the conversation and the answer that it continues."""

    ask: Ask
    entries: tuple[Entry, ...]
    num_kept: int
    ref: tuple[Conversation | None, str]

    @property
    def repeated(self) -> list[str]:
        return [id for entry in self.entries if entry.shown for id in entry.shown.repeated]

    def placed(self, reported: Sequence[str]) -> tuple[Entry, ...]:
        """Return the entries, with documents in the order of an answer's report."""
        left = iter(reported)

        def place(entry: Entry) -> Entry:
            if entry.shown is None:
                return entry
            return replace(entry, shown=entry.shown.placed(list(itertools.islice(left, len(entry.shown.rank)))))

        entries = tuple(map(place, self.entries))
        assert not list(left), "an answer reports documents that the request does not have"
        return entries


class World:
    """The conversations that a server should remember, by scope."""

    def __init__(self) -> None:
        self.scopes: dict[str, Scope] = {}

    def scope(self, name: str) -> Scope:
        return self.scopes.setdefault(name, Scope())

    def turn(self, ask: Ask) -> Turn:
        """Return a request as the server should understand it."""
        scope = self.scope(ask.scope)
        conversation, answer = scope.conversations.get(ask.conversation), ""
        if ask.previous:
            conversation, answer = scope.of_answer[ask.previous], ask.previous
        elif conversation is not None:
            answer = conversation.head
        before = conversation.answers[answer] if conversation else ()
        kept, new = _continued(before, ask)
        entries = (*kept, *_entered(kept, new, ask.options))
        return Turn(ask, entries, len(kept), (conversation, answer))

    def remember(self, turn: Turn, entries: tuple[Entry, ...], id: str, report: Mapping[str, Any] | None) -> None:
        """Store a complete answer, the last of `entries`. report: the server's report on its conversation."""
        ask, (conversation, answer) = turn.ask, turn.ref
        scope, last = self.scope(ask.scope), entries[-1]
        if ask.caches and last.sampled is not None:
            scope.spelt[last.text] = last.sampled
        belongs = bool(ask.conversation or ask.previous or (ask.store and ask.caches))
        assert (report is not None) == belongs
        if report is None:
            return
        stores = ask.caches and ask.store is not False
        assert report["remembered"] == stores and (report["messages"], report["messages_kept"]) == (
            len(turn.entries),
            turn.num_kept,
        )
        assert (report["previous"] or "") == answer
        if not stores:
            return
        conversation = conversation or Conversation(ask.conversation or report["id"])
        assert report["id"] == conversation.id
        if not ask.previous or conversation.head == answer:
            conversation.head = id
        conversation.answers[id] = entries
        scope.conversations[conversation.id] = scope.of_answer[id] = conversation

    def forget(self, scope: str, name: str) -> bool:
        """Delete a conversation. Return whether it was known."""
        conversation = self.scope(scope).conversations.pop(name, None)
        for answer in conversation.answers if conversation else ():
            del self.scope(scope).of_answer[answer]
        return conversation is not None

    def ids(self, scope: str, entries: Sequence[Entry], cut: Callable[[str, bool], Ids]) -> Ids:
        """Return the ids of a ChatML prompt, whose parts are tokenised one by one.

        cut: tokenises a text; the flag says whether special tokens count as such.
        """
        ids: list[int] = []
        pending = ""  # the template's own text so far
        for entry in entries:
            pending += f"<|im_start|>{entry.role}\n"
            for text in self._parts(scope, entry):
                if isinstance(text, str) and not text.strip():
                    pending += text  # an empty message adds nothing
                    continue
                ids += [*cut(pending, True), *(cut(text, False) if isinstance(text, str) else text)]
                pending = ""
            pending += "<|im_end|>\n"
        return (*ids, *cut(f"{pending}<|im_start|>assistant\n", True))

    def _parts(self, scope: str, entry: Entry) -> Iterator[str | Ids]:
        if entry.shown:
            yield from (text for text in entry.shown.texts() if text)
        is_answer = entry.role == "assistant" and entry.text.strip()
        yield (is_answer and (entry.sampled or self.scope(scope).spelt.get(entry.text))) or entry.text


def _continued(before: tuple[Entry, ...], ask: Ask) -> tuple[tuple[Entry, ...], Sequence[Message]]:
    """Return the entries that are continued unchanged, and the messages after them."""
    looks_whole = ask.messages[0].role == "system" or any(message.role == "assistant" for message in ask.messages)
    if ask.kind == "new" or (ask.kind == "auto" and not looks_whole):
        return before, ask.messages
    same = 0
    for entry, message in zip(before, ask.messages, strict=False):
        keys = entry.keys if message.documents is None else tuple(one.key for one in message.documents)
        if (entry.role, entry.text, entry.keys) != (message.role, message.text, keys):
            break
        same += 1
    return before[:same], ask.messages[same:]


def _entered(kept: Sequence[Entry], new: Sequence[Message], options: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield new messages with their documents. Documents that are already in the prompt become references."""
    above = {document.key for entry in kept if entry.shown for document in entry.shown.rank}
    for message in new:
        given = message.documents or ()
        twice = [one for one in given if options.get("dedup") != "off" and one.key in above]
        rank = tuple(one for one in given if one not in twice)
        above.update(one.key for one in rank)
        shown = Shown(
            tuple(given),
            rank,
            tuple(one.id for one in twice),
            options.get("order_hint", True),
            options.get("keep_first", 0),
            options.get("document_order", "auto"),
            options.get("best", "free") if rank and rank[0] in given[:1] else "free",
            options.get("best_price_ms", 0) > 0,
        )
        yield Entry(message.role, message.text, tuple(one.key for one in given), shown if given else None)
