"""Sends a recorded session of an agent with sub-agents to servers. Measures the computed tokens and TTFT of each request."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np

from ...slots.radix import common_prefix
from ..agent_tasks import template_flag
from ..client import UNREADY, Client, EncodedRequest, Result
from ..recording import Recording, Request, record
from ..report import Bar, BenchError, Progress, Report, Summary, Table, median
from ..server_api import Body, ChatApi, Prompt, Sampling, StreamChunk
from ..servers import Arm, arms_for, in_rounds, sampling

OWN, THEIRS, REUSE = "slotcache", "llama-server", 256
MESSAGES, BILLED = "slotcache, /v1/messages", "slotcache, a billing line"
CACHED = {"cache_prompt": True, "session_id": "replay", "volatile": "move"}
CUT_AFTER = 1 / 3  # of the uncached tokens of a prompt
SAMPLE = 30_000  # characters of a session from which the length of a token is measured
SPARE = 512  # tokens of context beyond the longest prompt
IDLE_TOKENS, TOKENS = "slotcache_idle_prompt_tokens_total", "slotcache_prompt_tokens_total"
BILL = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={:05x};"


@dataclass(frozen=True, slots=True)
class RecordedChat(ChatApi):
    """OpenAI's chat API, with the messages of a recording."""

    def recorded(self, request: Request, number: int, sampling: Sampling) -> tuple[str, Body]:
        """Return the path and the body of a request. number: the request's index in the session."""
        body = {"model": "default", "messages": request.messages, "tools": request.tools, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "max_tokens": sampling.max_tokens, "ignore_eos": True}
        return "/v1/chat/completions", body | dict(self.extra or {})


@dataclass(frozen=True, slots=True)
class RecordedMessages(RecordedChat):
    """Anthropic's messages API, with the messages of a recording.

    billed: whether each request starts with Claude Code's billing line, which differs in each request.
    """

    billed: bool = False

    def recorded(self, request: Request, number: int, sampling: Sampling) -> tuple[str, Body]:
        system, *messages = request.messages
        texts = [*([BILL.format(7919 * number % 16**5)] if self.billed else []), system["content"]]
        tools = [_with_schema(tool["function"]) for tool in request.tools]
        body = {"model": "default", "max_tokens": sampling.max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        body |= {"system": [{"type": "text", "text": text} for text in texts], "tools": tools}
        return "/v1/messages", body | {"messages": [*map(_blocks, messages)]} | dict(self.extra or {})

    def read(self, event: Body) -> StreamChunk:
        if "type" not in event:
            return RecordedChat.read(self, event)  # the request that warms up the server
        delta, usage = event.get("delta") or {}, event.get("usage") or {}
        if event["type"] != "message_delta":
            return StreamChunk(text=delta.get("text", ""), has_token=event["type"] == "content_block_delta")
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        counts = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": usage["output_tokens"]}
        return StreamChunk(finish_reason=delta["stop_reason"], **counts)


def _with_schema(function: Body) -> Body:
    return {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def _blocks(message: Body) -> Body:
    """Return a message in Anthropic's form."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        for call in message.get("tool_calls", ())
        for function in [call["function"]]
    ]
    return {"role": message["role"], "content": calls or message["content"]}


# ---- One session of one server ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and its result.

    cut: the tokens that an earlier try computed before its client disconnected.
    is_first: whether it is the first request of its agent after the restart.
    new: the tokens after the longest prefix that it shares with an earlier prompt of the session.
    """

    request: Request
    result: Result
    cut: int = 0
    is_first: bool = False
    new: int = 0

    @property
    def computed(self) -> int:
        return self.result.computed_tokens + self.cut

    @property
    def read_again(self) -> int:
        """Recomputed tokens: the session had sent their text before, or the cut try had computed them."""
        return max(0, self.computed - self.num_unseen)

    @property
    def num_unseen(self) -> int:
        """The tokens of the prompt whose text the session had not sent before."""
        return round(self.request.new * self.result.prompt_tokens)

    @property
    def is_thrown_away(self) -> bool:
        """Whether more than half of the known part of the prompt was recomputed."""
        known = (1 - self.request.new) * self.result.prompt_tokens + self.cut
        return self.read_again > known / 2

    def data(self) -> dict[str, Any]:
        """Return the turn as JSON values."""
        named = {"agent": self.request.agent, "phase": self.request.phase, "new": round(self.request.new, 4)}
        named |= {"new_tokens": self.new, "is_first": self.is_first}
        return named | {"cut": self.cut, "ttft": self.result.ttft} | self.result.figures


@dataclass(frozen=True, slots=True)
class Session:
    """A session and its results.

    idle: the prompt tokens that the server computed in idle time.
    counted: the prompt tokens that the server computed for requests, by its own count; None if it has no such count. The
    count includes the last tokens of a cut try, which the client does not see.
    """

    turns: tuple[Turn, ...]
    idle: int = 0
    counted: int | None = None

    @property
    def computed(self) -> int:
        """All computed prompt tokens: for answers, for cut tries, and in idle time."""
        return self.idle + (sum(turn.computed for turn in self.turns) if self.counted is None else self.counted)

    @property
    def restarted(self) -> list[Turn]:
        """The first request of each agent after the restart."""
        return [turn for turn in self.turns if turn.is_first]

    @property
    def ttft(self) -> Summary:
        return Summary.of(turn.result.ttft for turn in self.turns)


RESTARTED = "TTFT p50 ms after the restart"
FIGURES: dict[str, Callable[[Session], float]] = {
    "prompt tokens": lambda session: sum(turn.result.prompt_tokens for turn in session.turns),
    "computed": lambda session: session.computed,
    "when idle": lambda session: session.idle,
    "when cut": lambda session: sum(turn.cut for turn in session.turns),
    "read again": lambda session: sum(turn.read_again for turn in session.turns),
    "prefills thrown away": lambda session: sum(turn.is_thrown_away for turn in session.turns),
    "TTFT p50 ms": lambda session: 1000 * session.ttft.p50,
    "TTFT p95 ms": lambda session: 1000 * session.ttft.p95,
    "computed after the restart": lambda session: sum(turn.computed for turn in session.restarted),
    RESTARTED: lambda session: 1000 * Summary.of(turn.result.ttft for turn in session.restarted).p50,
}
"""Columns of the table. Each figure is a median over the rounds."""
BARS = {"computed": 0.35, "TTFT p50 ms": 0.4, RESTARTED: 0.4}  # share of llama-server's best figure


def play(arm: Arm, recording: Recording, new: Sequence[int], args: argparse.Namespace) -> Session:
    """Send a session to a server, which is restarted in the middle. new: `Turn.new` of each request."""
    turns: list[Turn] = []
    counts, seen, asked = np.zeros(2, int), set[str](), sampling(args)
    middle = recording.restart if args.restart else len(recording.waves)
    halves = [waves for waves in (recording.waves[:middle], recording.waves[middle:]) if waves]
    with Progress(arm.name, recording.num_requests) as progress:
        for half, waves in enumerate(halves):

            async def work(client: Client, waves: Sequence[Sequence[Request]] = waves, half: int = half) -> np.ndarray:
                before = await _counts(client)
                for wave in waves:
                    numbered = enumerate(wave, len(turns))
                    results = await asyncio.gather(*(_ask(client, request, number) for number, request in numbered))
                    for request, (result, cut) in zip(wave, results, strict=True):
                        is_first = half == 1 and request.agent not in seen
                        turns.append(Turn(request, result, cut, is_first, new[len(turns)]))
                        seen.update([request.agent] if half else [])
                        progress.step(f"{request.agent}: {1000 * result.ttft:.0f} ms, {result.cached_tokens} cached")
                    await asyncio.sleep(args.pause)
                return await _counts(client) - before

            counts += arm.measure(asked, work)
    if failed := [turn.result.error for turn in turns if turn.result.error]:
        raise BenchError(f"{arm.name}: {len(failed)} requests failed, the first with: {failed[0]}")
    idle, counted = counts.tolist()
    return Session(tuple(turns), idle, counted if arm.name.startswith(OWN) else None)


async def _counts(client: Client) -> np.ndarray:
    """Return the prompt tokens that slotcache computed in idle time, and for requests. For llama-server, both are 0."""
    if not client.name.startswith(OWN):
        return np.zeros(2, int)
    return np.array([await client.gauge(name) for name in (IDLE_TOKENS, TOKENS)], int)


async def _ask(client: Client, request: Request, number: int) -> tuple[Result, int]:
    """Return the result of a request, and the tokens that its cut try computed before."""
    assert isinstance(client.api, RecordedChat)
    path, body = client.api.recorded(request, number, client.sampling)
    try:
        cut = await _hang_up(client, path, body) if request.is_cut and not isinstance(client.api, RecordedMessages) else 0
    except UNREADY as error:
        return Result(0.0, 0.0, error=f"a request that is cut: {error}"), 0
    return await client.send(EncodedRequest(path, json.dumps(body).encode(), request.agent, number)), cut


async def _hang_up(client: Client, path: str, body: Body) -> int:
    """Send a request, and disconnect during its prefill. Return the tokens computed until then."""
    computed = 0
    async with client.http.post(path, json=body | {"return_progress": True}, raise_for_status=True) as answer:
        async for line in answer.content:
            event = json.loads(line[5:]) if line.startswith(b"data:") and b"[DONE]" not in line else {}
            if prefill := event.get("prompt_progress"):
                computed = prefill["processed"] - prefill["cache"]
                if computed >= CUT_AFTER * (prefill["total"] - prefill["cache"]):
                    break
            elif client.api.read(event).has_token:
                break
        answer.close()
    return computed


# ---- The comparison -----------------------------------------------------------------------------------------------------


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench agent --replay`."""
    add = parser.add_argument
    add("--replay", action="store_true", help="replay one recorded session with sub-agents, in place of the tasks")
    add("--size", type=int, default=12000, metavar="TOKENS", help="of the session's longest prompt (default: %(default)s)")
    add("--cache-ram", type=int, default=1024, help="MiB of host memory of each server (default: %(default)s)")
    text = "restart each server in the middle of the session (default: %(default)s)"
    add("--restart", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--turns", action="store_true", help="print what each request computed, in each arm")
    add("--billing", action="store_true", help="add arms of /v1/messages, with and without a billing line that changes")


def run(args: argparse.Namespace) -> Report:
    """Replay the session on slotcache, and on llama-server with its best flags."""
    with template_flag() as flag, TemporaryDirectory(prefix="slotcache-bench-") as name:
        arms = _arms(args, flag, Path(name))
        recording, new = _sized(arms[0], args)
        played: dict[str, list[Session]] = {arm.name: [] for arm in arms}
        for _, arm in in_rounds(arms, args.rounds):
            played[arm.name].append(play(arm, recording, new, args))
            for folder in Path(name).iterdir():
                rmtree(folder)
    rounds = f"medians of {args.rounds}" if args.rounds > 1 else "one round"
    title = f"agent --replay: {args.size:,} tokens, {recording.num_requests} requests of 4 agents, {args.ctx_size:,} cells, "
    title += f"{args.parallel} slots, -cram {args.cache_ram}, {rounds}"
    listed = {name: [[turn.data() for turn in one.turns] for one in sessions] for name, sessions in played.items()}
    facts = {"sessions": listed, "arms": [arm.describe() for arm in arms], "restart": recording.restart}
    rows = [(name, *(_middle(sessions, figure) for figure in FIGURES)) for name, sessions in played.items()]
    tables = [Table(title, ("arm", *FIGURES), rows), *([_turns(played)] if args.turns else [])]
    return Report("agent", tables, bars=_bars(played), notes=_floors(played), data=facts)


def _arms(args: argparse.Namespace, flag: str, folder: Path) -> list[Arm]:
    """Return slotcache with a folder for its KV, and two arms of llama-server with as much memory.

    Only the second of these has `--cache-reuse`. With `--billing`, there are two more arms of slotcache.
    """
    shown = copy(args)
    memory = f"{flag} --cache-ram {args.cache_ram}"
    shown.slotcache_args = f"{memory} --cache-dir {folder / 'kv'} {args.slotcache_args}"
    shown.llama_args = f"{memory} --kv-unified {args.llama_args}"
    own, *theirs = arms_for(shown, llama_slots=args.parallel)
    arms = [replace(own, api=RecordedChat(extra=CACHED))]
    for arm in theirs:
        shown.llama_args += f" --cache-reuse {REUSE}"
        moving = arms_for(shown, llama_slots=args.parallel)[-1]
        arms.append(replace(arm, name=THEIRS, api=RecordedChat()))
        arms.append(replace(moving, name=f"{THEIRS}, --cache-reuse {REUSE}", api=RecordedChat()))
    if args.billing:
        for name, billed in ((MESSAGES, False), (BILLED, True)):
            arms.append(replace(own, name=name, api=RecordedMessages(extra=CACHED, billed=billed)))
    return arms


def _sized(arm: Arm, args: argparse.Namespace) -> tuple[Recording, list[int]]:
    """Return a session whose longest prompt has `--size` tokens, and the number of new tokens in each prompt.

    Raises BenchError if `-c` is too small for the session.
    """
    if args.ctx_size < (least := round(1.1 * args.size) + args.max_tokens + SPARE):
        raise BenchError(f"-c {args.ctx_size}: a session of {args.size} tokens needs {least} or more")
    data, sample = Path(args.data), record(Path(args.data), SAMPLE).waves[-1][0]

    async def sized() -> tuple[Recording, list[int]]:
        async with aiohttp.ClientSession(url) as http:
            tokens = len((await _prompt(http, sample)).tokens)
            recording = record(data, round(args.size * sum(map(len, sample.texts())) / tokens))
            prompts = [await _prompt(http, request) for wave in recording.waves for request in wave]
        return recording, new_tokens([prompt.tokens for prompt in prompts])

    with arm.up() as url:
        return asyncio.run(sized())


async def _prompt(http: aiohttp.ClientSession, request: Request) -> Prompt:
    return await Prompt.of(http, {"messages": request.messages, "tools": request.tools})


def new_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of tokens in each prompt after the longest prefix that it shares with an earlier prompt."""
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    shared = ([common_prefix(prompt, earlier) for earlier in arrays[:at]] for at, prompt in enumerate(arrays))
    return [len(prompt) - max(known, default=0) for prompt, known in zip(arrays, shared, strict=True)]


def _middle(sessions: Sequence[Session], figure: str) -> float:
    return median([FIGURES[figure](session) for session in sessions])


def _turns(played: dict[str, list[Session]]) -> Table:
    """Return a table with the computed and the new tokens of each request in the first round."""
    sessions = [sessions[0].turns for sessions in played.values()]
    columns = ("request", "phase", "prompt tokens", "new tokens", "new text", *played)
    rows = [
        (
            f"{at} {turn.request.agent}{', cut' * turn.request.is_cut}{', restarted' * turn.is_first}",
            *(turn.request.phase, turn.result.prompt_tokens, turn.new, turn.num_unseen),
            *(other.computed for other in (turn, *others)),
        )
        for at, (turn, *others) in enumerate(zip(*sessions, strict=True))
    ]
    return Table("computed tokens, request by request", columns, rows)


def _floors(played: dict[str, list[Session]]) -> list[str]:
    """Return lines about the least number of tokens that any server must compute."""
    turns = next(iter(played.values()))[0].turns
    new, unseen = sum(turn.new for turn in turns), sum(turn.num_unseen for turn in turns)
    text = f"{new:,} tokens come after the longest prefix shared with an earlier prompt of the session"
    return [text, f"{unseen:,} tokens have text that the session had not sent before"]


def _bars(played: dict[str, list[Session]]) -> list[Bar]:
    """Return the bars: slotcache's figures over llama-server's better arm, and computed tokens with a billing line over
    computed tokens without it.
    """
    bars = []
    others = [sessions for name, sessions in played.items() if name.startswith(THEIRS)]
    for figure, limit in BARS.items() if others else ():
        if figure != RESTARTED or played[OWN][0].restarted:
            share = _middle(played[OWN], figure) / min(_middle(sessions, figure) for sessions in others)
            bars.append(Bar(3, f"{figure}, of llama-server's at its best", share, limit))
    if BILLED in played:
        share = _middle(played[BILLED], "computed") / _middle(played[MESSAGES], "computed")
        bars.append(Bar(1, "computed tokens with a billing line that changes, of those without it", share, 1.02))
    return bars
