"""The sessions that clients name, and the prompts that each has asked last: when one ends, they leave the cache first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...slots.radix import common_prefix
from ...slots.scope import Scope
from ..chat.history import HistoryMessage

MOST_SESSIONS = 4096
MOST_BRANCHES = 16  # of a session: its own thread, and those of its sub-agents
MOST_TOKENS = 8 << 20  # of all sessions; those used last stay
OPENING = 32  # tokens at the end of a prompt that open the answer: in the next turn they may read another way
LEAST_QUOTE = 40  # characters of an answer: a shorter one may stand elsewhere by chance


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A prompt of a session. scope: where it was cached. tokens: its own and those of its answer (int32).

    answer: the text that it ended with, if it called nothing and is long enough to be known again.
    """

    scope: Scope
    tokens: np.ndarray
    num_prompt: int
    answer: str = ""

    def is_continued_by(self, other: Branch) -> bool:
        """Whether another prompt goes on from this one; its answer may come back in other tokens."""
        prompt = self.tokens[: max(self.num_prompt - OPENING, 1)]
        return self.scope == other.scope and common_prefix(prompt, other.tokens) == len(prompt)


class Sessions:
    """The newest prompts of each session, by its scope and its name. It belongs to the event loop."""

    def __init__(self) -> None:
        self._branches: OrderedDict[tuple[str, str], list[Branch]] = OrderedDict()
        self._num_tokens = 0  # of all

    def note(self, name: tuple[str, str], branch: Branch, heard: Sequence[str] = ()) -> list[Branch]:
        """Remember an answered prompt, in place of the one that it goes on from.

        heard: what it was told behind its answer before. Return the prompts whose answer stands there, now forgotten: a
        sub-agent whose last message its parent has taken over is done.
        """
        others = [one for one in self.end(name) if not one.is_continued_by(branch)]
        done = [one for one in others if one.answer and any(one.answer in text for text in heard)]
        self._branches[name] = [*(one for one in others if one not in done), branch][-MOST_BRANCHES:]
        self._num_tokens += _num_tokens(self._branches[name])
        while self._num_tokens > MOST_TOKENS or len(self._branches) > MOST_SESSIONS:
            oldest = next(iter(self._branches))
            if oldest == name:
                break
            self.end(oldest)
        return done

    def end(self, name: tuple[str, str]) -> list[Branch]:
        """Forget a session; return its prompts, none if it is not known."""
        branches = self._branches.pop(name, [])
        self._num_tokens -= _num_tokens(branches)
        return branches


def spoken(entries: Sequence[HistoryMessage]) -> tuple[str, list[str]]:
    """Return the text that a chat ends with, none for a call, and what stands between it and the answer before."""
    if not entries:
        return "", []
    *before, last = entries
    heard: list[str] = []
    for entry in reversed(before):
        if entry.role == "assistant":
            break
        heard += _texts(entry.message)
    message = last.message
    answer = "" if message.get("tool_calls") else "".join(_texts(message)).strip()
    return answer if len(answer) >= LEAST_QUOTE else "", heard


def _texts(message: Mapping[str, object]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def _num_tokens(branches: list[Branch]) -> int:
    return sum(len(branch.tokens) for branch in branches)
