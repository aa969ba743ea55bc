"""Tests a server under faults, rude clients and hours of mixed load: other clients must not suffer, and nothing may leak."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import aiohttp

from ...models.demo import FILE as MODEL
from .. import rude
from ..journal import note
from ..report import Bar, BenchError, Cell, Report, Table, median
from ..rude import PATH, Ending, Health, Lost, Visitor
from ..servers import Server, ServerOptions, free_port, tie_to_parent

SLOTS, QUEUE = 2, 8
BYSTANDERS = 4  # more than slots, so that some always wait
OUTPUT = 60  # tokens of a bystander's answer
UNREAD = 1000  # tokens of an answer that nobody reads
DESCRIPTORS = 1024  # `ulimit -n` of the server
SHOTS, BETWEEN = 3, 0.5  # faults, and s between two of them
CALM = 3.0  # s in which bystanders run without the attack, before and after it
CONVERSATIONS, IDLE = 20, 2.0  # idle conversations at a fault, and s for which they are idle
TIMEOUT = 30.0  # s for an answer
DYING = 10.0  # s until a server with a dead engine must end
GRACE = 2.0  # s after the fault in which /health may still answer 200
AFTER = 1.0  # s between the disconnection of all clients and the count of descriptors
SAMPLE, REPORT_EVERY = 1.0, 60  # s between two samples of memory, and samples between two lines of progress
PAUSE, LONG_PAUSE = 0.02, 1.0  # s between a visitor's acts, and after a lost act, as a dead server would lose thousands
TIMED = ("chat", "stream", "converse")  # acts whose time is reported

GAP_FACTOR, GAP = 10.0, 0.5  # the longest gap: this multiple of the longest quiet gap, or these seconds
LEAST_KEPT = 0.95  # of the tokens that idle conversations reuse without a fault
MORE_DESCRIPTORS, MORE_LOG, A_REQUEST, MORE_MEMORY = 10, 100.0, 0.3, 100.0  # limits: kB of log, kB per request; MiB
STEADY = 1.05  # most memory under mixed load after the first quarter of the time, over the most in that quarter
LONG_NAME = ("--alias", "a" * 8192)  # the model's name is in each chunk, so few tokens fill the system's buffer


@dataclass(slots=True)
class Stage:
    """A running server under attack, and the observations of all clients.

    seconds, clients: the time and the number of clients of the attack.
    quiet, beside: the bystanders' requests without the attack, and during it.
    code: the server's exit code; None if it still runs.
    tail: the end of the server's log.
    wrongs: events that must not happen.
    times: the share of the time that has passed, and the seconds that an act took.
    memory: the server's memory about once a second, in MiB.
    descriptors, log: the increase in descriptors and in kB of log.
    """

    server: Server
    http: aiohttp.ClientSession
    seconds: float = 0.0
    clients: int = 0
    quiet: Sequence[Ending] = ()
    beside: Sequence[Ending] = ()
    health: Health = field(default_factory=Health)
    began: float = 0.0
    code: int | None = None
    tail: str = ""
    notes: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    acts: Counter[str] = field(default_factory=Counter)
    times: list[tuple[float, float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: int = 0
    log: float = 0.0

    def shoot(self) -> None:
        assert self.server.pid is not None
        with suppress(ProcessLookupError):  # an earlier shot has ended the server
            os.kill(self.server.pid, signal.SIGUSR1)

    @property
    def growth(self) -> float:
        """The maximum resident memory above the first sample, in MiB."""
        return max(self.memory) - self.memory[0] if self.memory else 0.0

    @property
    def steadiness(self) -> float:
        """The maximum memory after the first quarter of the samples, over the maximum in that quarter."""
        quarter = len(self.memory) // 4
        return max(self.memory[quarter:]) / max(self.memory[:quarter]) if quarter else nan


# ---- Attacks ------------------------------------------------------------------------------------------------------------


async def faults(stage: Stage) -> None:
    for _ in range(SHOTS):
        stage.shoot()
        await asyncio.sleep(BETWEEN)
    with suppress(aiohttp.ClientError):
        stage.notes.append(f"{await _metric(stage, 'slotcache_failed_steps_total'):.0f} steps failed")


async def disk(stage: Stage) -> None:
    """Trigger a full or slow disk, and save slots to it."""
    stage.shoot()
    for number in range(SHOTS):
        async with stage.http.post(f"/slots/{number % SLOTS}?action=save", json={"filename": f"s{number}"}) as answer:
            body = await answer.json()
            stage.notes.append(f"a slot save was answered {answer.status}: {body.get('error', body)}")
            if answer.status != 200 and "error" not in body:
                stage.wrongs.append("a refused slot save does not say why")
        await asyncio.sleep(BETWEEN)


async def idle_conversations(stage: Stage) -> None:
    """Let conversations become idle. Compare the reuse of their next turns with and without a failed step."""
    reused = []
    for fails in (False, True):
        names = [f"trip {100 + 2 * number + fails}" for number in range(CONVERSATIONS)]
        for name in names:
            await _turn(stage, name, "Which train leaves first?")
        await asyncio.sleep(IDLE)
        if fails:
            stage.shoot()
            await _turn(stage, "trip 99", "What is the fee?")  # 200: the request has no token yet, so it runs again
        reused.append(sum([await _turn(stage, name, "And which one leaves next?") for name in names]))
    usual, struck = reused
    summary = f"{CONVERSATIONS} idle conversations reuse {struck} tokens behind a failed step, {usual} without one"
    (stage.wrongs if struck < LEAST_KEPT * usual or not usual else stage.notes).append(summary)


async def _turn(stage: Stage, conversation: str, question: str) -> int:
    """Ask in a conversation over documents. Return the number of reused tokens."""
    documents = [{"id": str(at), "text": f"Text {at} of {conversation}: the train leaves late. " * 8} for at in range(3)]
    body = {"messages": [{"role": "user", "content": question}], "conversation": conversation, "documents": documents}
    async with stage.http.post(PATH, json={**body, "max_tokens": 16, "temperature": 0}) as answer:
        reply = await answer.json()
    if answer.status != 200:
        stage.wrongs.append(f"a turn of conversation {conversation} was answered {answer.status}: {reply}")
        return 0
    return int(reply["slotcache"]["cached_tokens"])


async def stalling(stage: Stage) -> None:
    """Open more streams than slots and queue places, without reading them. Return when their output is computed."""
    enough, end = await _metric(stage) + (SLOTS + QUEUE) * UNREAD // 2, monotonic() + stage.seconds
    stage.connections += await rude.stall(stage.server.url, stage.clients, UNREAD // 2)
    while await _metric(stage) < enough and monotonic() < end:
        await asyncio.sleep(BETWEEN)


async def _metric(stage: Stage, name: str = "slotcache_generated_tokens_total") -> float:
    async with stage.http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def unread(stage: Stage) -> None:
    """Open streams, and keep them open without reading them."""
    stage.connections += await rude.stall(stage.server.url, stage.clients, UNREAD)
    await asyncio.sleep(stage.seconds)


async def dawdling(stage: Stage) -> None:
    if failure := await rude.dawdle(stage.server.url, stage.clients, stage.seconds):
        stage.wrongs.append(f"{failure} bodies that never end are held after {stage.seconds:.0f} s")


async def crowding(stage: Stage) -> None:
    """Open connections from another process, so that this process has only the bystanders."""
    with ProcessPoolExecutor(1, get_context("spawn"), tie_to_parent) as pool:
        crowd = pool.submit(rude.crowd, stage.server.url, stage.clients, stage.seconds)
        stage.notes.append(f"{await asyncio.wrap_future(crowd):,} connections were opened")


async def visiting(stage: Stage) -> None:
    """Let visitors use all routes."""
    began = monotonic()

    async def visit(visitor: Visitor) -> None:
        while (passed := monotonic() - began) < stage.seconds:
            at = perf_counter()
            try:
                name = await visitor.act()
            except Lost as error:
                stage.wrongs.append(f"lost: {error}")
                await asyncio.sleep(LONG_PAUSE)
                continue
            stage.acts[name] += 1
            if name in TIMED:
                stage.times.append((passed / stage.seconds, perf_counter() - at))
            await asyncio.sleep(PAUSE)

    await asyncio.gather(*(visit(Visitor(stage.http, number)) for number in range(stage.clients)))
    first, last = (median([took for at, took in stage.times if low <= at < low + 0.25]) for low in (0.0, 0.75))
    stage.notes.append(f"{stage.acts.total():,} acts; chats of the last quarter over the first's: {last / first:.2f} at p50")


@dataclass(frozen=True, slots=True)
class Trial:
    """An attack, and the effects on bystanders that are allowed.

    fault: a name in `bench.faulty`.
    seconds, clients: the time and the number of clients of the attack.
    ask: the bystanders' requests, `chats` or `texts`; empty: there are no bystanders.
    may_fail: how many requests may end with an error because they ran at a fault. None: all, because the server must end.
    most_gap: the seconds that a stream may pause; 0: the limit depends on the quiet streams.
    is_before: whether the attack ends before the bystanders start.
    """

    attack: Callable[[Stage], Awaitable[None]]
    fault: str = "none"
    seconds: float = 3.0
    clients: int = 0
    ask: str = "chats"
    may_fail: int | None = 0
    most_gap: float = 0.0
    is_before: bool = False
    flags: tuple[str, ...] = ()


_MANY = ("--max-queue", "256", "--conversations", "40", "--conversation-ram", "8", "--cache-disk", "32")
TRIALS = {
    "decode": Trial(faults, "decode", may_fail=SLOTS),  # the third fault may hit the second's requests
    "allocation": Trial(faults, "allocation", may_fail=SLOTS),
    "idle": Trial(idle_conversations, "decode", is_before=True, flags=("--cache-ram", "256")),
    "full-disk": Trial(disk, "full-disk"),
    "slow-disk": Trial(disk, "slow-disk"),
    "killed": Trial(faults, "killed", may_fail=None),
    "stall": Trial(stalling, seconds=60, clients=SLOTS + QUEUE + BYSTANDERS, is_before=True, flags=LONG_NAME),
    "leave": Trial(lambda stage: rude.disconnect(stage.server.url, stage.clients), clients=24),
    "dawdle": Trial(dawdling, seconds=120, clients=12),
    "half-open": Trial(crowding, seconds=60, clients=2000, ask="texts", most_gap=2.0),
    "unread": Trial(unread, "eager", 120, clients=50, ask="texts", most_gap=2.0, flags=(*LONG_NAME, "--max-queue", "256")),
    "mixed": Trial(visiting, seconds=600, clients=6, ask="", flags=_MANY),
}


# ---- The driver ---------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench endurance`."""
    add = parser.add_argument
    add("--only", default=",".join(TRIALS), help="trials (default: %(default)s)")
    add("-m", "--model", type=Path, default=MODEL, help="GGUF to serve (default: the embedded model)")
    add("--seconds", type=float, help="seconds of each attack (default: depends on the trial, 3 for a fault, 600 for mixed)")
    add("--clients", type=int, help="clients of each attack (default: depends on the trial, such as 2,000 for half-open)")
    add("-t", "--threads", type=int, default=1, help="threads of the server (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")


def run(args: argparse.Namespace) -> Report:
    """Run each trial on a new server. The benchmark fails if there is a complaint."""
    names = args.only.split(",")
    if unknown := [name for name in names if name not in TRIALS]:
        raise BenchError(f"--only {unknown[0]}: expected some of {', '.join(TRIALS)}")
    found: dict[str, tuple[Stage, list[str]]] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        stage = _measure(name, args)
        found[name] = stage, complaints(TRIALS[name], stage)
        note(trial=name, complaints=found[name][1], **_data(stage))
    return report(found)


def report(found: Mapping[str, tuple[Stage, list[str]]]) -> Report:
    """Return a row for each trial, and the complaints. found: the results by the trials' names."""
    columns = ("trial", "asked", "failed", "gap ms", "quiet ms", "MiB more", "log kB", "descriptors", "complaints")
    rows = [_row(name, *one) for name, one in found.items()]
    num_complaints = sum(len(of) for _, of in found.values())
    num_twice = sum(not one.ended_once for stage, _ in found.values() for one in stage.beside)
    bars = [Bar(4, "complaints", num_complaints, 0), Bar(4, "requests without one final event", num_twice, 0)]
    if "mixed" in found:
        bars.append(Bar(5, "memory after the first quarter over the most in it", found["mixed"][0].steadiness, STEADY))
    notes = [f"{name}: {what}" for name, (stage, of) in found.items() for what in dict.fromkeys([*of, *stage.notes])]
    title = f"endurance: {BYSTANDERS} bystanders, {SLOTS} slots"
    data = {name: _data(stage) for name, (stage, _) in found.items()}
    return Report("endurance", [Table(title, columns, rows)], bars, notes, data, has_failed=bool(num_complaints))


def complaints(trial: Trial, stage: Stage) -> list[str]:
    """Return one line for each observation that is not allowed."""
    right = {one.prompt: one.text for one in stage.quiet}
    found = [f"the quiet run failed: {one.error}" for one in stage.quiet if one.error or not one.ended_once]
    found += stage.wrongs
    for one in stage.beside:
        if not one.ended_once:
            found.append(f"a request had {one.finals} final events ({one.error or 'no error'})")
        elif one.error is None and one.text != right.get(one.prompt):
            found.append(f"another answer to {one.prompt!r}: {one.text!r}")
    if trial.may_fail is None:
        late = [status for at, status in stage.health.looks if at > stage.began + GRACE and status not in (0, 503)]
        found += [f"health said {status or 'nothing'} of a server that cannot go on" for status in late]
        if stage.code is None or stage.code <= 0:
            found.append(f"the server did not end with an error within {DYING:.0f} s: {stage.code}")
        return found
    failed = [one for one in stage.beside if one.error and not one.refused]
    found += [f"a request failed: {one.error}" for one in failed[trial.may_fail :]]
    found += [f"there was no server: {one.error}" for one in stage.beside if one.refused]
    if _longest(stage.beside) > max(trial.most_gap or GAP_FACTOR * _longest(stage.quiet), GAP):
        found.append(f"a stream paused for {_longest(stage.beside):.2f} s")
    found += [f"health said {status or 'nothing'}" for _, status in stage.health.looks if status != 200]
    if stage.code is not None:
        found.append(f"the server ended with code {stage.code}: {stage.tail}")
    most_log = MORE_LOG + A_REQUEST * (len(stage.beside) + stage.acts.total())
    more = (("descriptors", stage.descriptors, MORE_DESCRIPTORS), ("kB of log", stage.log, most_log))
    if trial.ask:
        more = (*more, ("MiB", stage.growth, MORE_MEMORY))
    return found + [f"the server has {value:.0f} {what} more" for what, value, most in more if value > most]


def _measure(name: str, args: argparse.Namespace) -> Stage:
    trial, port = TRIALS[name], free_port()
    with tempfile.TemporaryDirectory(prefix="slotcache-endurance-") as folder:
        slots = Path(folder) / "slots"
        slots.mkdir(mode=0o700)
        extra = ("--max-queue", str(QUEUE), "--cache-ram", "16", "--slot-save-path", str(slots))
        extra += ("--cache-dir", f"{folder}/cache", *trial.flags, *shlex.split(args.slotcache_args))
        options = ServerOptions(args.model, 4096, SLOTS, args.threads, flash_attention="off", extra=extra)
        command = [sys.executable, "-m", "slotcache.bench.faulty", trial.fault, "serve", *options.flags(port)]
        limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *command]
        with Server(limited, port) as server:
            return asyncio.run(_play(trial, server, args))


async def _play(trial: Trial, server: Server, args: argparse.Namespace) -> Stage:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, connector=connector) as http:
        stage = Stage(server, http, args.seconds or trial.seconds, args.clients or trial.clients)
        await rude.ask(http, rude.chats(0, OUTPUT)[0], TIMEOUT)  # not counted: the first request of a process is slow
        stage.quiet = await _bystand(trial, http, asyncio.sleep(min(stage.seconds, CALM)))
        descriptors, log, stage.began = _descriptors(server), server.log.stat().st_size, perf_counter()
        watching = [asyncio.create_task(of) for of in (stage.health.watch(http), _watch(stage))]
        if trial.is_before:
            await trial.attack(stage)
        stage.beside = await _bystand(trial, http, _attack(trial, stage))
        for connection in stage.connections:
            connection.close()
        if trial.may_fail is None:
            await _wait_for_end(server)
            await stage.health.look(http)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.sleep(AFTER)
        stage.descriptors, stage.code = _descriptors(server) - descriptors, server.code
        stage.tail = server.tail()
        stage.log = (server.log.stat().st_size - log) / 1000
        return stage


async def _attack(trial: Trial, stage: Stage) -> None:
    await asyncio.sleep(BETWEEN)
    if not trial.is_before:
        await trial.attack(stage)
    await asyncio.sleep(min(stage.seconds, CALM))


async def _bystand(trial: Trial, http: aiohttp.ClientSession, meanwhile: Awaitable[Any]) -> list[Ending]:
    """Run the bystanders during `meanwhile`. Return all their requests."""
    enough, asked = asyncio.Event(), {"chats": lambda number: rude.chats(number, OUTPUT), "texts": rude.texts}.get(trial.ask)
    async with asyncio.TaskGroup() as clients:
        bodies = [asked(number) for number in range(BYSTANDERS)] if asked else []
        living = [clients.create_task(rude.live(http, of, enough, TIMEOUT)) for of in bodies]
        try:
            await meanwhile
        finally:
            enough.set()
    return [ending for task in living for ending in task.result()]


async def _watch(stage: Stage) -> None:
    while True:
        stage.memory.append(stage.server.memory / 2**20)
        if stage.acts and len(stage.memory) % REPORT_EVERY == 0:
            summary = f"{stage.acts.total()} acts, {len(stage.wrongs)} lost, {stage.memory[-1]:.0f} MiB"
            print(f"  {len(stage.memory) * SAMPLE / 60:.0f} min, {summary}", file=sys.stderr, flush=True)
            note(acts=dict(stage.acts), lost=stage.wrongs[-1:], memory_mib=stage.memory[-1:])
        await asyncio.sleep(SAMPLE)


async def _wait_for_end(server: Server) -> None:
    end = perf_counter() + DYING
    while server.code is None and perf_counter() < end:
        await asyncio.sleep(0.05)


def _descriptors(server: Server) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{server.pid}/fd"))
    return 0


def _longest(endings: Sequence[Ending]) -> float:
    return max((one.longest_gap for one in endings), default=0.0)


def _row(name: str, stage: Stage, found: Sequence[str]) -> Sequence[Cell]:
    failed = sum(one.error is not None for one in stage.beside)
    gaps = (1000 * _longest(of) for of in (stage.beside, stage.quiet))
    asked = len(stage.beside) + stage.acts.total()
    return name, asked, failed, *gaps, stage.growth, stage.log, stage.descriptors, len(found)


def _data(stage: Stage) -> dict[str, Any]:
    shown = ("prompt", "status", "finals", "error", "longest_gap")
    beside = [{name: getattr(one, name) for name in shown} for one in stage.beside]
    return {"beside": beside, "acts": dict(stage.acts), "memory_mib": stage.memory}
