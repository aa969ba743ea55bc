"""Adds chats over documents to `Life`. The orders of their sets of documents are chosen at admission."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from slotcache.ordering.document import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, Part, SeparatePrompt
from slotcache.slots.reuse import ids_of
from slotcache.slots.separate import read_by

from support.asks import CONTEXT, SCOPES, Ask
from support.life import EXPECTED, SEEN, Life

EXPECTED |= {
    "moved",
    "read and moved",
    "chat",
    "several sets",
    "reordered",
    "reordered history",
    "kept order",
    "repeated",
    "document reused",
}
TEXTS = ["0 1", "0 1 2", "1", "3 3 1", "4 0", "2 2", "2 2", "1 0 2 3 3 1 4 2 0 4 1"]  # some share a prefix, two are equal
DOCUMENTS = [Document(f"d{number}", text) for number, text in enumerate(TEXTS)]
POLICIES = ["auto", "auto", "auto", "retrieval", "sorted", "greedy"]


def ids(text):
    return np.array([int(token) for token in text.split()], np.int32)


def hint(text):
    """Return a short hint that differs from the hints of most orders."""
    return np.array([sum(map(ord, text)) % 5, len(text) % 5], np.int32)


@dataclass(frozen=True)
class Turn:
    """A question with its documents.

    of: the chat that it continues, counted from the latest; 0: a new chat.
    keeps: keep the earlier order of documents, as if the server remembers the conversation.
    separate: read the documents separately.
    """

    of: int
    ranks: list[int]
    question: list[int]
    policy: str
    hints: bool
    keep_first: int
    keep_last: int
    keeps: bool
    dedup: bool
    separate: bool


TURNS = st.builds(
    Turn,
    of=st.integers(0, 3),
    ranks=st.lists(st.integers(0, len(TEXTS) - 1), max_size=4, unique=True),
    question=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    policy=st.sampled_from(POLICIES),
    hints=st.booleans(),
    keep_first=st.sampled_from([0, 0, 1]),
    keep_last=st.sampled_from([0, 0, 1]),
    keeps=st.booleans(),
    dedup=st.booleans(),
    separate=st.sampled_from([False, False, False, True, True]),
)
ASKED = st.builds(
    Ask,
    of=st.integers(1, 4),
    share=st.just(1.0),
    fresh=st.just([]),
    stops=st.just(set()),
    limit=st.integers(1, 4),
    scope=SCOPES,
    cache=st.sampled_from([True, True, True, False]),
    priority=st.sampled_from([0, 0, 1]),
    background=st.sampled_from([False, False, False, True]),
    slot=st.sampled_from([0, 0, 1]),
    forced=st.sampled_from([0, 0, 2]),
)


class Chatting(Life):
    @initialize()
    def begin_without_chats(self):
        self.chats: list[tuple[Part, ...]] = [(Fixed(np.array([3, 1], np.int32), "the system prompt"),)]

    @rule(turns=st.lists(st.tuples(TURNS, ASKED), min_size=1, max_size=3), steps=st.integers(0, 6))
    def chat(self, turns, steps):
        for turn, ask in turns:
            parts = self.parts(turn)
            if (
                sum(part.num_tokens if isinstance(part, Fixed) else most_tokens(part) for part in parts) + ask.limit
                <= CONTEXT
            ):
                separate = turn.separate and self.can_cut
                self.submit_prompt(SeparatePrompt(parts) if separate else ChatPrompt(parts), ask)
        self.step(steps)

    def parts(self, turn):
        history = self.chats[0] if not turn.of else self.chats[-min(turn.of, len(self.chats))]
        if not turn.keeps:
            history = tuple(part if isinstance(part, Fixed) else replace(part, order=None) for part in history)
        shown = {document.id for part in history if isinstance(part, DocumentSet) for document in part.documents}
        new = [DOCUMENTS[rank] for rank in turn.ranks if not turn.dedup or DOCUMENTS[rank].id not in shown]
        repeated = tuple(DOCUMENTS[rank].id for rank in turn.ranks if turn.dedup and DOCUMENTS[rank].id in shown)
        documents = DocumentSet(
            documents=tuple(new),
            tokens=tuple(ids(document.text) for document in new),
            policy=turn.policy,
            hint=hint if turn.hints else None,
            repeated=repeated,
            location=np.array([4] * len(repeated), np.int32),
            keep_first=turn.keep_first,
            keep_last=turn.keep_last,
        )
        return (*history, documents, Fixed(np.array(turn.question, np.int32), "the question"))

    def end(self, job):
        super().end(job)
        if not isinstance(job.request.prompt, ChatPrompt):
            return
        parts, placed = job.request.prompt.parts, list(job.layout.documents)
        sets, orders = [part for part in parts if isinstance(part, DocumentSet)], []
        for part in sets:
            mine, placed = placed[: len(part.documents)], placed[len(part.documents) :]
            assert sorted(one.key for one in mine) == sorted(part.keys), "each document stands where it belongs, once"
            for one in mine:
                text = part.tokens[part.keys.index(one.key)]
                assert ids_of(job.tokens[one.start : one.stop]).tolist() == text.tolist()
            orders.append(tuple(part.keys.index(one.key) for one in mine))
            assert part.order is None or orders[-1] == part.order
        assert not placed
        self.count(job, sets, orders)
        ordered = iter(orders)
        kept = tuple(part if isinstance(part, Fixed) else replace(part, order=next(ordered)) for part in parts)
        answer = job.tokens[job.num_prompt : job.num_tokens].copy()
        self.chats.append((*kept, Fixed(answer, "the answer")))

    def count(self, job, sets, orders):
        moved = [list(order) != sorted(order) for order in orders]
        SEEN.update(["chat", *["several sets"] * (sum(len(part.keys) > 1 for part in sets) > 1)])
        SEEN["reordered"] += any(moved)
        SEEN["reordered history"] += any(moved[:-1]) and any(part.order is None for part in sets[:-1])
        SEEN["kept order"] += any(len(part.order or ()) > 1 for part in sets)
        SEEN["repeated"] += any(part.repeated for part in sets)
        SEEN["moved"] += bool(job.reuse.sources.get("moved"))
        SEEN["read and moved"] += bool(read_by(job).tokens)
        SEEN["document reused"] += any(one.stop <= job.reuse.cached for one in job.layout.documents)


def most_tokens(part):
    """Return the most tokens that a part may have. Hints have two tokens."""
    if isinstance(part, Fixed):
        return part.num_tokens
    return sum(map(len, part.tokens)) + len(part.location) + (2 if part.hint else 0)
