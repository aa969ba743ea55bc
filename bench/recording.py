"""Makes a session of a coding agent with sub-agents from files of this machine: every request that the client sends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from .agent_tasks import File, Task, read_tasks
from .report import BenchError
from .trace import prose

Message = dict[str, Any]

ROOMS = ("bench", "docs", "front", "models", "ordering", "retrieval", "server", "slots")
GUIDES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/how-it-works.md", "docs/api.md")
"""The project notes in the instructions: an agent reads them at its start."""
SUB_AGENTS = ("reviewer", "researcher", "tester")
KINDS = ("search", "read", "read", "edit", "test")
"""The kinds of an agent's calls, which take turns."""
EVERY = 6  # turns of the main agent between two questions of the user
GUIDE, SUB_GUIDE = 0.12, 0.06  # size of the notes, of the longest prompt
ALONE, BESIDE, SUB, AFTER = 0.4, 0.7, 0.25, 0.5  # likewise: main alone, main beside the others, a sub-agent, main at the end
STEPS = 25  # calls whose results fill the longest prompt
LEAST_RESULT, MOST_RESULT = 600, 6000  # characters of a call's result
MOST_HITS = 40
WORD = re.compile(r"(?:def|class) (\w{5,})")


# ---- What is sent -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A request of one agent.

    phase: the part of the session.
    new: the share of its text that no earlier request of the session had.
    is_cut: whether the client disconnects during prefill and then sends the request again.
    """

    agent: str
    phase: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    new: float
    is_cut: bool = False

    def texts(self) -> list[str]:
        """Return all texts of the request."""
        return [json.dumps(value) for value in (*self.tools, *self.messages)]


@dataclass(frozen=True, slots=True)
class Recording:
    """A session.

    waves: groups of requests that are sent together, at most one request of each agent.
    restart: the index of the wave before which the server restarts.
    """

    waves: tuple[tuple[Request, ...], ...]
    restart: int

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.waves))


def _tool(name: str, description: str, **parameters: str) -> Message:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("read_file", "Return lines of a file, with their numbers.", path="path of the file", offset="the first line"),
    _tool("search", "Return the lines of all files that hold a text.", text="the text, to the letter"),
    _tool("edit_file", "Replace a text in a file.", path="path of the file", old="what is there", new="what comes there"),
    _tool("run_tests", "Run the tests of a module and return what they print.", path="path of the module"),
)
TASK = _tool("task", "Start an agent for a part of the work. It runs beside this one.", agent="its name", prompt="its work")
RESULT = _tool("task_result", "Return the last message of an agent that task has started.", agent="its name")
INSTRUCTIONS = """\
You are a coding agent. Work on the user's request with your functions, step by step, until it is done. Read a file before
you change it, keep changes small, run the tests of what you changed, and say in few words what you did."""
SUMMARISE = """\
Summarise this conversation so that another agent can go on with the work: the user's requests, the files that were read or
changed, what the tests said, and what is left to do. Answer with the summary alone."""


@dataclass(slots=True)
class _Clock:
    """The changing lines of a session: one in the instructions, one after the user's last message.

    Both change with each message of the user.
    """

    questions: int = 0

    @property
    def line(self) -> str:
        minutes = 9 * 60 + 17 * self.questions
        return f"It is {minutes // 60:02}:{minutes % 60:02}. {self.questions} files differ from the last commit."

    @property
    def reminder(self) -> str:
        """The reminder at the end of the user's last message. It moves to each new message."""
        left = 9 - self.questions % 9
        return f"\n\n<reminder>Build mode: you may change files and run tests. To-dos open: {left}.</reminder>"


@dataclass(slots=True)
class _Agent:
    """An agent and its growing history. guide: the project notes in its instructions, after the line of `clock`."""

    name: str
    guide: str
    tools: tuple[Message, ...]
    files: Files
    clock: _Clock
    seen: set[str]
    messages: list[Message] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=count)

    @property
    def size(self) -> int:
        """The number of characters in the agent's prompt."""
        return len(self.guide) + len(INSTRUCTIONS) + sum(map(_length, self.messages)) + sum(map(_length, self.tools))

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def call(self, name: str, result: str, **arguments: str) -> None:
        made = f"call_{self.name}_{next(self.ids)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": made, "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": made, "content": result})

    def step(self) -> None:
        """Make the agent's next call. The kinds of calls take turns."""
        number = next(self.ids)
        name, result, arguments = self.files.result(KINDS[number % len(KINDS)], f"{self.name} {number}")
        self.call(name, result, **arguments)

    def request(self, phase: str, is_cut: bool = False) -> Request:
        """Return the agent's next request. The lines of `clock` do not count as new text, as they should cost nothing."""
        place = f"{INSTRUCTIONS}\n\n<environment>\nWorking directory: /work/slotcache\n{self.clock.line}\n</environment>"
        sent = [{"role": "system", "content": f"{place}\n\n{self.guide}"}, *self.messages]
        asked = (at for at, message in enumerate(sent) if message["role"] == "user" and message["content"] != SUMMARISE)
        last = max(asked)
        sent[last] = {**sent[last], "content": sent[last]["content"] + self.clock.reminder}
        texts = [self.guide, *map(json.dumps, (*self.tools, *self.messages))]
        new = sum(len(text) for text in texts if text not in self.seen) / sum(map(len, texts))
        self.seen.update(texts)
        return Request(self.name, phase, tuple(sent), self.tools, new, is_cut)

    def compact(self, summary: str) -> None:
        """Replace the history with a summary and the last two messages."""
        kept = self.messages[-2:]
        self.messages = [{"role": "user", "content": f"The conversation so far, in short:\n\n{summary}\n\nGo on."}, *kept]


def _length(value: Message) -> int:
    return len(json.dumps(value))


# ---- What is read -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Files:
    """The files that the agents work on. size: the number of characters that a tool returns."""

    all: tuple[File, ...]
    size: int

    @classmethod
    def of(cls, tasks: Sequence[Task], size: int) -> Files:
        """Return this project's files and the tasks' files. Raises BenchError if there are none."""
        root = Path(__file__).resolve().parents[1]
        paths = sorted(path for room in ROOMS for kind in ("*.py", "*.md") for path in (root / room).rglob(kind))
        own = [(str(path.relative_to(root)), path.read_text("utf-8")) for path in paths]
        theirs = sorted({name: text for task in tasks for name, text in task.files}.items())
        if not (found := tuple(file for file in (*own, *theirs) if len(file[1]) > LEAST_RESULT)):
            raise BenchError(f"no files to read in {root}")
        return cls(found, size)

    def guide(self, size: int) -> str:
        """Return `size` characters of the project's notes."""
        texts = dict(self.all)
        return "\n\n".join(texts.get(name, "") for name in (*GUIDES, *texts))[:size]

    def result(self, kind: str, seed: str) -> tuple[str, str, dict[str, str]]:
        """Return a tool's name, its result and its arguments. The same seed gives the same call."""
        rng = Random(seed)
        path, text = rng.choice(self.all)
        if kind == "search":
            return self._search(rng, text)
        if kind == "edit":
            return self._edit(rng, path, text)
        return self._test(rng, path, text) if kind == "test" else self._read(rng, path, text)

    def _read(self, rng: Random, path: str, text: str) -> tuple[str, str, dict[str, str]]:
        lines = text.splitlines()
        first = rng.randrange(max(1, len(lines) - self.size // 50))
        numbered = (f"{number:5}  {line}" for number, line in enumerate(lines[first:], first + 1))
        return "read_file", _within(numbered, self.size), {"path": path, "offset": str(first + 1)}

    def _search(self, rng: Random, text: str) -> tuple[str, str, dict[str, str]]:
        word = rng.choice(WORD.findall(text) or re.findall(r"\w{5,}", text))
        hits = (
            f"{path}:{number}: {line.strip()}"
            for path, lines in self.all
            if word in lines
            for number, line in enumerate(lines.splitlines(), 1)
            if word in line
        )
        return "search", _within(hits, self.size, MOST_HITS), {"text": word}

    def _edit(self, rng: Random, path: str, text: str) -> tuple[str, str, dict[str, str]]:
        lines = text.splitlines()
        first = rng.randrange(max(1, len(lines) - 8))
        old = lines[first : first + 8]
        new = [*old[:4], f"    # checked in step {rng.randrange(1000)}", *old[4:]]
        diff = [f"@@ -{first + 1},{len(old)} +{first + 1},{len(new)} @@", *(f" {line}" for line in old[:4])]
        result = "\n".join([f"changed {path}", *diff, f"+{new[4]}"])
        return "edit_file", result, {"path": path, "old": "\n".join(old), "new": "\n".join(new)}

    def _test(self, rng: Random, path: str, text: str) -> tuple[str, str, dict[str, str]]:
        stem = Path(path).stem
        names = [f"test_{word.lower()}" for word in dict.fromkeys(WORD.findall(text))] or ["test_it"]
        passed = [f"tests/test_{stem}.py::{name} PASSED" for name in names]
        lines = text.splitlines()
        first = rng.randrange(max(1, len(lines) - 12))
        trace = [*(f"    {line}" for line in lines[first : first + 12]), f"E   AssertionError: {rng.randrange(100)} != 0"]
        failed = [f"tests/test_{stem}.py::{names[-1]}_again FAILED", "", *trace, f"{path}:{first + 1}: AssertionError"]
        return "run_tests", _within([*failed, *passed], self.size), {"path": path}


def _within(lines: Sequence[str] | Iterator[str], size: int, most: int = 10_000) -> str:
    """Return the first lines that fit into the size, and at least a part of the first line."""
    kept, length = [], 0
    for line in lines:
        length += len(line) + 1
        if kept and (length > size or len(kept) == most):
            break
        kept.append(line[:size])
    return "\n".join(kept)


# ---- The session --------------------------------------------------------------------------------------------------------


def record(data: Path, characters: int) -> Recording:
    """Return a session whose longest prompt has about `characters` characters. The same files give the same session.

    The main agent works alone, then beside three sub-agents. It takes their results, works until its prompt is full,
    compacts its history, and continues. The user sends a message every few turns. With each message, a line in all
    instructions changes, and the reminder moves to the new message. The first request, and the first request after the
    compaction, are cut and sent again.

    data: the folder with clawtasks/. Raises OSError or ValueError if it is something else.
    """
    tasks = read_tasks(data)
    size = min(max(characters // STEPS, LEAST_RESULT), MOST_RESULT)
    session = _Session(tasks, Files.of(tasks, size), characters)
    session.alone("alone", ALONE, is_cut=True)
    restart = session.beside()
    session.alone("results", 1.0)
    session.compacted()
    return Recording(tuple(session.waves), restart)


class _Session:
    """Collects the waves of a session."""

    def __init__(self, tasks: Sequence[Task], files: Files, characters: int) -> None:
        self.characters, self.clock = characters, _Clock()
        self.questions = iter([turn.question for task in tasks for turn in task.turns] * 100)
        guide, short = files.guide(int(GUIDE * characters)), files.guide(int(SUB_GUIDE * characters))
        seen: set[str] = set()
        self.main = _Agent("main", guide, (*TOOLS, TASK, RESULT), files, self.clock, seen)
        self.subs = [_Agent(name, f"You are the {name}.\n\n{short}", TOOLS, files, self.clock, seen) for name in SUB_AGENTS]
        self.waves: list[tuple[Request, ...]] = []
        self.num_turns = 0

    def alone(self, phase: str, share: float, is_cut: bool = False) -> None:
        """Add a message of the user, then let the main agent work until its prompt has a share of the longest prompt."""
        self._question()
        self.waves.append((self.main.request(phase, is_cut),))
        while self.main.size < share * self.characters:
            self._turn()
            self.waves.append((self.main.request(phase),))

    def beside(self) -> int:
        """Let all agents work at once until the sub-agents are done. Return the index of the wave in the middle."""
        num_before = len(self.waves)
        for sub in self.subs:
            prompt = next(self.questions)
            sub.ask(prompt)
            self.main.call("task", f"{sub.name} has started.", agent=sub.name, prompt=prompt)
        while busy := [sub for sub in self.subs if sub.size < SUB * self.characters]:
            wave = [sub.request("beside") for sub in busy]
            if self.main.size < BESIDE * self.characters:
                wave.insert(0, self.main.request("beside"))
                self._turn()
            self.waves.append(tuple(wave))
            for sub in busy:
                sub.step()
        for sub in self.subs:
            last = f"Done as {sub.name}. " + sub.messages[-1]["content"][: sub.files.size // 2]
            sub.say(last)
            self.main.call("task_result", last, agent=sub.name)
        return (num_before + len(self.waves)) // 2

    def compacted(self) -> None:
        """Let the main agent ask for a summary, then continue from the summary."""
        self.main.ask(SUMMARISE)
        self.waves.append((self.main.request("summary"),))
        self.main.messages.pop()
        self.main.compact(prose("summary", self.main.files.size // 6))
        self.waves.append((self.main.request("compacted", is_cut=True),))
        self.alone("compacted", AFTER)

    def _turn(self) -> None:
        self.main.step()
        self.num_turns += 1
        if self.num_turns % EVERY == 0:
            self.main.say("That is done; the tests say what is left.")
            self._question()

    def _question(self) -> None:
        self.main.ask(next(self.questions))
        self.clock.questions += 1
