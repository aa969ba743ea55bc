"""The sessions that clients name: their first instructions, newest prompts, and how their clients shorten histories."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import getsizeof
from threading import Lock

import numpy as np

from ...models.template import Message
from ...slots.radix import common_prefix
from ...slots.scope import Scope
from .body import ChatRequest
from .chat_files import ChatFiles
from .compactions import Compaction
from .history import HistoryMessage
from .volatile import ChangedText, Instructions, Lineage, encode, restore

# ---- The prompts of a session -------------------------------------------------------------------------------------------

MOST_BRANCHES = 16  # most prompts of a session, from the main agent and its sub-agents
OPENING = 32  # tokens at the end of a prompt that open the answer; the next turn may have other tokens there
LEAST_QUOTE = 40  # least characters of an answer that is recognised: a shorter answer may occur elsewhere by chance


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A prompt of a session and its answer.

    scope: the scope of the KV. tokens: the tokens (int32) of the prompt and the answer. num_prompt: the number of the
    prompt's tokens. answer: the answer's text; empty if the answer has calls or is too short to be recognised.
    """

    scope: Scope
    tokens: np.ndarray
    num_prompt: int
    answer: str = ""

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + getsizeof(self.answer)

    def is_continued_by(self, other: Branch) -> bool:
        """Return whether another prompt continues this one.

        The other prompt may have other tokens than `self.tokens` for the answer.
        """
        prompt = self.tokens[: max(self.num_prompt - OPENING, 1)]
        return self.scope == other.scope and common_prefix(prompt, other.tokens) == len(prompt)


def spoken(entries: Sequence[HistoryMessage]) -> tuple[str, list[str]]:
    """Return the text of a history's last message, and the texts between the previous answer and this message.

    If the last message has calls, or is too short to be recognised, its text is returned as empty.
    """
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


# ---- Sessions -----------------------------------------------------------------------------------------------------------

MOST_SESSIONS = 4096
MOST_TOOLS = 64  # most sets of tools in a session, each with its own instructions, since sub-agents have other tools
MOST_BYTES = 96 << 20  # most bytes of all sessions
MOST_INSTRUCTIONS = 32 << 20  # most bytes of instructions within `MOST_BYTES`, so that prompts keep some room

SessionKey = tuple[str, str]
"""A scope, and the name of a session in this scope."""


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one session.

    instructions: by a digest of the tools, the instructions of the first request with these tools; they survive a
        restart.
    branches: the newest prompts.
    compaction: how the client shortens its history.
    counted: the session's share of the store's totals: its `sizes` when the store last counted them.
    """

    instructions: OrderedDict[str, Instructions] = field(default_factory=OrderedDict)
    branches: list[Branch] = field(default_factory=list)
    compaction: Compaction = field(default_factory=Compaction)
    counted: tuple[int, int] = (0, 0)

    @property
    def sizes(self) -> tuple[int, int]:
        """The bytes of the session's instructions, and of everything else."""
        kept = sum(one.num_bytes for one in self.instructions.values())
        return kept, sum(branch.num_bytes for branch in self.branches) + self.compaction.num_bytes

    @property
    def is_too_large(self) -> bool:
        """Whether the session alone exceeds a bound of the store."""
        return self.counted[0] > MOST_INSTRUCTIONS or sum(self.counted) > MOST_BYTES


class Sessions:
    """The store of sessions, by scope and name. Safe from several threads.

    Locks: the lock of the store guards everything except the texts of instructions. The event loop takes this lock, so a
    thread that has it must neither work long nor wait. Each `Instructions` has its own lock, since comparing its texts may
    take long. A thread may take the lock of the store while it has the lock of instructions, but never the other way
    round. Instructions that are dropped while a thread uses them are marked as forgotten. The thread still makes its
    prompt, but the store neither counts nor writes the changes of forgotten instructions.

    Bounds: if there are too many sessions, the least recently used one is dropped. If all sessions together have too many
    bytes, the least recently used ones lose their prompts and compactions, which are only a cache. Sessions lose their
    instructions only if the instructions of all sessions alone have too many bytes: a session without its instructions
    cannot reuse its earlier prompts. A session that exceeds a bound by itself loses its own data, so that other sessions
    keep theirs.

    Stored conversations have their own names and bounds (see `Conversations`). The token ids of an answer are found by
    its text, in any session of the scope (see `AnswerMemory`).

    files: the files of instructions, which the constructor reads; None: the store is only in memory.
    """

    def __init__(self, files: ChatFiles | None = None) -> None:
        self._files, self._lock = files, Lock()
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # the least recently used first
        self._num_kept = self._num_cached = 0  # bytes of instructions, and of everything else
        for instructions in () if files is None else restore(files):
            scope, name, tools = instructions.lineage
            session = self._used((scope, name))
            session.instructions[tools] = instructions
            self._count(session)
            self._make_room(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def knows(self, key: SessionKey) -> bool:
        session = self._sessions.get(key)
        return session is not None and any(session.counted)

    def settle(self, lineage: Lineage, messages: Sequence[Message]) -> tuple[list[Message], tuple[ChangedText, ...]]:
        """Return the messages with the session's first instructions, and the changes: see `Instructions.settle`.

        Comparing may take long, so the event loop must not call this. lineage: the scope, the session's name and the
        digest of the tools. Raises TemplateError if the content of a message is not text.
        """
        scope, name, tools = lineage
        with self._lock:
            session = self._used((scope, name))
            instructions = session.instructions.setdefault(tools, Instructions(lineage))
            session.instructions.move_to_end(tools)
            self._drop_instructions(session, MOST_TOOLS)
            self._make_room(session)
        with instructions.lock:
            settled = instructions.settle(messages)
            with self._lock:
                self._keep(session, instructions)
        return settled

    def note_prompt(self, key: SessionKey, branch: Branch, heard: Sequence[str] = ()) -> list[Branch]:
        """Remember an answered prompt, in place of the prompt that it continues. Forget finished prompts, and return them.

        A prompt is finished if a text in `heard` contains its answer: for example, a parent agent has received the last
        message of its sub-agent. heard: the texts after the previous answer, from `spoken`.
        """
        with self._lock:
            session = self._used(key)
            others = [one for one in session.branches if not one.is_continued_by(branch)]
            done = [one for one in others if one.answer and any(one.answer in text for text in heard)]
            session.branches = [*(one for one in others if one not in done), branch][-MOST_BRANCHES:]
            self._count(session)
            self._make_room(session)
        return done

    def note_chat(self, key: SessionKey, options: bytes, entries: Sequence[HistoryMessage]) -> ChatRequest | None:
        """Learn from an answered chat how its client shortens histories. Return the likely next request, or None.

        See `Compaction.note`.
        """
        with self._lock:
            session = self._used(key)
            likely = session.compaction.note(options, entries)
            self._count(session)
            self._make_room(session)
        return likely

    def forget(self, scope: str, name: str | None = None) -> list[Branch]:
        """Forget a session, and return its prompts. Without a name, forget all sessions of a scope, but keep their prompts.

        The prompts stay because a dropped scope keeps the KV of running requests.
        """
        ended: list[Branch] = []
        with self._lock:
            for key in [key for key in self._sessions if key[0] == scope and name in (None, key[1])]:
                session = self._sessions[key]
                self._drop_instructions(session)
                session.compaction = Compaction()
                if name is not None:
                    ended, session.branches = session.branches, []
                    del self._sessions[key]
                self._count(session)
        return ended

    # ---- under the lock ----------------------------------------------------------------------------------------------

    def _used(self, key: SessionKey) -> Session:
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        return session

    def _keep(self, session: Session, instructions: Instructions) -> None:
        """Count and write the changes that a request made to its session's instructions."""
        changed, instructions.changed = instructions.changed, {}
        if instructions.is_forgotten:
            return
        instructions.num_bytes = sum(front.num_bytes for front in instructions.fronts)
        if self._files is not None:
            self._files.change({name: stored and partial(encode, stored) for name, stored in changed.items()})
            instructions.files -= changed.keys()
            instructions.files |= {name for name, stored in changed.items() if stored is not None}
        self._count(session)
        self._make_room(session)

    def _drop_instructions(self, session: Session, most: int = 0) -> None:
        """Drop the least recently used instructions of a session, with their files.

        most: how many instructions to keep. A session has one `Instructions` for each set of tools.
        """
        while len(session.instructions) > most:
            _, instructions = session.instructions.popitem(last=False)
            instructions.is_forgotten = True
            if self._files is not None:
                self._files.drop(instructions.files)

    def _count(self, session: Session) -> None:
        (kept, cached), session.counted = session.counted, session.sizes
        self._num_kept += session.counted[0] - kept
        self._num_cached += session.counted[1] - cached

    def _make_room(self, newest: Session) -> None:
        """Drop the least recently used data until the bounds hold.

        newest: the session of the current request. If this session alone exceeds a bound, it loses its data before other
        sessions do.
        """
        while len(self._sessions) > MOST_SESSIONS:
            self._empty(self._sessions.popitem(last=False)[1])
        if newest.is_too_large:
            self._empty(newest, instructions=newest.counted[0] > MOST_INSTRUCTIONS)
        for session in [*self._sessions.values()] if any(self._lacks_room) else ():
            instructions, prompts = self._lacks_room
            if not (instructions or prompts):
                break
            if (instructions and session.counted[0]) or (prompts and session.counted[1]):
                self._empty(session, instructions=instructions, prompts=prompts)

    @property
    def _lacks_room(self) -> tuple[bool, bool]:
        """Whether all instructions together exceed their bound, and whether all data together exceeds its bound."""
        return self._num_kept > MOST_INSTRUCTIONS, self._num_kept + self._num_cached > MOST_BYTES

    def _empty(self, session: Session, *, instructions: bool = True, prompts: bool = True) -> None:
        """Drop data of a session.

        instructions: whether to drop its instructions. prompts: whether to drop its prompts and its compaction.
        """
        if instructions:
            self._drop_instructions(session)
        if prompts:
            session.branches, session.compaction = [], Compaction()
        self._count(session)
