"""Histories that this server shortens: the question for a summary, and the messages that the shortened one begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .history import HistoryMessage
from .sampling_fields import JsonValue

Fields = dict[str, JsonValue]

KEPT = ("user", "system", "developer")  # the roles whose messages stay
QUESTION: Mapping[str, JsonValue] = {
    "role": "user",
    "content": "Write a summary of this conversation, so that the work can go on from the summary and the user's messages "
    "alone; nothing else of the conversation will be there. State what the user wants and what limits or preferences they "
    "gave; what was done, found and decided, with the names, paths, values and errors that matter; and what is still to be "
    "done, the next step first. Call no tools, answer no question, and write nothing but the summary.",
}
SAID = msgspec.json.encode(QUESTION)
"""The question as a history has it."""
FORM = "Summary of the conversation so far, in place of all but the user's messages:\n\n{}"
MOST_TOKENS = 4096  # of a summary, with the reasoning in front of it, unless the request says otherwise
LONGEST = 256 << 10  # bytes of the messages that stay, for what follows to be known ahead
NO_SUMMARY = "the model wrote no summary of the conversation"


def summary_message(text: str) -> Fields:
    """Return the message that stands for a conversation. text: its summary."""
    return {"role": "user", "content": FORM.format(text)}


def follows(entries: Sequence[HistoryMessage]) -> list[Mapping[str, JsonValue]] | None:
    """Return the messages with which a history goes on that was just summarised; None if it was not, or is too large.

    entries: the history with this server's question for a summary, and the answer.
    """
    if len(entries) < 2 or entries[-2].said != SAID:
        return None
    kept = [entry for entry in entries[:-2] if entry.role in KEPT]
    summary = entries[-1].message.get("content")
    if not isinstance(summary, str) or not summary.strip() or sum(len(entry.said) for entry in kept) > LONGEST:
        return None
    return [*(entry.message for entry in kept), summary_message(summary.strip())]
