"""Histories that this server shortens: the question for a summary, and the messages of the shortened history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from .history import HistoryMessage
from .sampling_fields import JsonValue

Fields = dict[str, JsonValue]

KEPT = ("user", "system", "developer")  # the roles whose messages a shortened history keeps
QUESTION: Mapping[str, JsonValue] = {
    "role": "user",
    "content": "Write a summary of this conversation, so that the work can go on from the summary and the user's messages "
    "alone; nothing else of the conversation will be there. State what the user wants and what limits or preferences they "
    "gave; what was done, found and decided, with the names, paths, values and errors that matter; and what is still to be "
    "done, the next step first. Call no tools, answer no question, and write nothing but the summary.",
}
SAID = msgspec.json.encode(QUESTION)
"""The question, as JSON."""
FORM = "Summary of the conversation so far, in place of all but the user's messages:\n\n{}"
MOST_TOKENS = 4096  # most tokens of a summary and its reasoning, unless the request sets a limit
LONGEST, MOST = 256 << 10, 1000  # most bytes and messages of a shortened history that is computed ahead
NO_SUMMARY = "the model wrote no summary of the conversation"
SUMMARY = msgspec.json.encode({"role": "user", "content": FORM.format("")})[:-2]
"""The start of a message with a summary, as JSON."""


def summary_message(text: str) -> Fields:
    """Return the message that replaces a conversation. text: the summary of the conversation."""
    return {"role": "user", "content": FORM.format(text)}


def kept(entries: Sequence[HistoryMessage]) -> list[HistoryMessage]:
    """Return the messages that stay in a shortened history: users' messages, and instructions.

    Instructions that apply to one turn do not stay. An earlier summary is left out, since the new summary covers it.
    """
    return [e for e in entries if e.role in KEPT and not e.one_turn and not e.said.startswith(SUMMARY)]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a client keeps of the histories that this server shortens, as hashes of messages.

    said: the messages of the last summarised history that the client could keep, in order; empty once the client has sent
    the shortened history. late: messages that the client moves towards the end, to just before its last message. dropped:
    messages that the client could keep, but drops.
    """

    said: tuple[int, ...] = ()
    late: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()

    @property
    def num_hashes(self) -> int:
        return len(self.said) + len(self.late) + len(self.dropped)

    def learnt(self, entries: Sequence[HistoryMessage]) -> Kept:
        """Return the `Kept` that a later chat of the client reveals: which messages the client moved or dropped.

        Only the client's first chat with the summary reveals a `Kept`. If `entries` are any other chat, return `self`.
        """
        if not self.said:
            return self
        end = next((at for at, entry in enumerate(entries) if entry.said.startswith(SUMMARY)), None)
        if end is None:
            return self
        places = {said: at for at, said in enumerate(self.said)}
        back = [said for entry in entries[:end] if (said := hash(entry.said)) in places]
        furthest, late = -1, set[int]()
        for said in back:
            furthest = max(furthest, places[said])
            if places[said] < furthest:
                late.add(said)
        return Kept((), frozenset(late), frozenset(places) - frozenset(back))

    def order(self, stays: Sequence[HistoryMessage]) -> list[HistoryMessage]:
        """Return the messages that the client is likely to keep, in the order in which it is likely to send them.

        stays: the messages that could stay, from `kept`.
        """
        here = [entry for entry in stays if hash(entry.said) not in self.dropped]
        late = [entry for entry in here if hash(entry.said) in self.late]
        early = [entry for entry in here if hash(entry.said) not in self.late]
        return [*early[:-1], *late, *early[-1:]]


def follows(entries: Sequence[HistoryMessage], known: Kept) -> tuple[list[Mapping[str, JsonValue]], Kept] | None:
    """Predict the request after a summary. Return the messages of this request, and the new `Kept` of the client.

    Return None if the history does not end with a question of this server and its summary, or if it is too large.
    entries: the history, the question and the answer. known: the old `Kept` of the client.
    """
    if len(entries) < 2 or entries[-2].said != SAID:
        return None
    stays, summary = kept(entries[:-2]), entries[-1].message.get("content")
    if not isinstance(summary, str) or not summary.strip():
        return None
    if len(stays) > MOST or sum(len(entry.said) for entry in stays) > LONGEST:
        return None
    instructions = [entry for entry in entries if entry.one_turn]
    messages = [entry.message for entry in (*instructions, *known.order(stays))]
    return [*messages, summary_message(summary.strip())], replace(known, said=tuple(hash(entry.said) for entry in stays))
