"""The sessions that clients name: how their instructions began, what they asked last, and how they shorten a history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...slots.radix import common_prefix
from ...slots.scope import Scope
from .chat_files import ChatFiles
from .compactions import Compactions
from .history import HistoryMessage
from .volatile import VolatileText

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
    """What is known of each session, by its scope and its name. It belongs to the event loop, but for `volatile`.

    files: of instructions, which outlive a restart; None: they are held in memory only.
    """

    def __init__(self, files: ChatFiles | None = None) -> None:
        self.volatile, self.compactions = VolatileText(), Compactions()
        if files is not None:
            self.volatile.restore(files)
        self._branches: OrderedDict[tuple[str, str], list[Branch]] = OrderedDict()
        self._num_tokens = 0  # of all

    def note(self, name: tuple[str, str], branch: Branch, heard: Sequence[str] = ()) -> list[Branch]:
        """Remember an answered prompt, in place of the one that it goes on from.

        heard: what it was told behind its answer before. Return the prompts whose answer stands there, now forgotten: a
        sub-agent whose last message its parent has taken over is done.
        """
        others = [one for one in self._end(name) if not one.is_continued_by(branch)]
        done = [one for one in others if one.answer and any(one.answer in text for text in heard)]
        self._branches[name] = [*(one for one in others if one not in done), branch][-MOST_BRANCHES:]
        self._num_tokens += _num_tokens(self._branches[name])
        while self._num_tokens > MOST_TOKENS or len(self._branches) > MOST_SESSIONS:
            oldest = next(iter(self._branches))
            if oldest == name:
                break
            self._end(oldest)
        return done

    def forget(self, scope: str, name: str | None = None) -> list[Branch]:
        """Forget a session, and return its prompts; without a name, what the sessions of a scope have said.

        The prompts of these stay known: what a running request has in the cache is not dropped with the scope.
        """
        self.volatile.forget(scope, name)
        self.compactions.forget(scope, name)
        return [] if name is None else self._end((scope, name))

    def _end(self, name: tuple[str, str]) -> list[Branch]:
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
