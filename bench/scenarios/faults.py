"""Faults in a server: are bystanders hurt, does each request end exactly once, and is /health right?"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from ...models.demo import FILE as MODEL
from .. import rude
from ..journal import note
from ..report import Bar, BenchError, Report, Table
from ..rude import PATH, Ending, Health, ask, health, live, prompts
from ..servers import Server, ServerOptions, free_port

SLOTS = 2
BYSTANDERS = 4  # more than slots: some of them always wait
QUEUE = 8
SHOTS = 3
CONVERSATIONS = 20  # that are idle at a fault
IDLE = 2.0  # s that they are
LEAST_KEPT = 0.95  # of the tokens that their next turns reuse without a fault
BETWEEN = 0.5  # s between two faults
TIMEOUT = 30.0  # s to answer
GAP_FACTOR, GAP = 10.0, 0.5  # limit of a gap: this multiple of the longest quiet gap, or these seconds
DYING = 10.0  # s until a server with a dead engine must end
TELLING = 2.0  # s after the fault in which /health may still answer 200


@dataclass(slots=True)
class Stage:
    """A running server, and the notes of the attack on it."""

    server: Server
    http: aiohttp.ClientSession
    args: argparse.Namespace
    folder: Path
    notes: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    held: list[socket.socket] = field(default_factory=list)

    def shoot(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault and the attack that triggers it.

    fault: a name in `bench.faulty`. may_fail: how many requests may end with an error, those that ran at a fault; None if
    all may fail and the server ends. flags: more flags of the server. opening: runs before the bystanders start.
    """

    fault: str
    attack: Callable[[Stage], Awaitable[None]]
    may_fail: int | None = 0
    flags: tuple[str, ...] = ()
    opening: Callable[[Stage], Awaitable[None]] | None = None


async def nothing(stage: Stage) -> None:
    pass


async def faults(stage: Stage) -> None:
    for _ in range(SHOTS):
        stage.shoot()
        await asyncio.sleep(BETWEEN)


async def idle_conversations(stage: Stage) -> None:
    """Let conversations rest, then let a step of another request fail; compare their next turns with those of others."""
    reused = []
    for fails in (False, True):
        names = [f"trip {100 + 2 * number + fails}" for number in range(CONVERSATIONS)]
        for name in names:
            await _turn(stage, name, "Which train leaves first?")
        await asyncio.sleep(IDLE)
        if fails:
            stage.shoot()
            await _turn(stage, "trip 99", "What is the fee?")  # 200: it runs again, since it has no token yet
        reused.append(sum([await _turn(stage, name, "And which one leaves next?") for name in names]))
    usual, struck = reused
    stage.notes.append(f"{CONVERSATIONS} idle conversations reuse {struck} tokens behind a failed step, {usual} without one")
    if struck < LEAST_KEPT * usual or not usual:
        stage.wrongs.append(f"idle conversations reuse {struck} tokens behind a failed step, and {usual} without one")


async def _turn(stage: Stage, conversation: str, question: str) -> int:
    """Ask in a conversation over documents; return the tokens that were reused."""
    documents = [{"id": str(at), "text": f"Text {at} of {conversation}: the train leaves late. " * 8} for at in range(3)]
    body = {"messages": [{"role": "user", "content": question}], "conversation": conversation, "documents": documents}
    async with stage.http.post(PATH, json={**body, "max_tokens": 16, "temperature": 0}) as answer:
        told = await answer.json()
    if answer.status != 200:
        stage.wrongs.append(f"a turn of conversation {conversation} was answered {answer.status}: {told}")
        return 0
    return int(told["slotcache"]["cached_tokens"])


async def one_fault(stage: Stage) -> None:
    stage.shoot()


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


async def stall(stage: Stage) -> None:
    """Open more streams than slots and queue places without reading them. Return when their output is computed."""
    before = await _generated(stage)
    stage.held += await rude.stall(stage.server.url, SLOTS + QUEUE + BYSTANDERS, stage.args.unread)
    unread, end = (SLOTS + QUEUE) * stage.args.unread, perf_counter() + TIMEOUT
    while await _generated(stage) < before + unread and perf_counter() < end:
        await asyncio.sleep(BETWEEN)


async def _generated(stage: Stage) -> float:
    async with stage.http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("slotcache_generated_tokens_total "))


async def leaving(stage: Stage) -> None:
    await rude.leave(stage.server.url, stage.args.clients)


async def dawdling(stage: Stage) -> None:
    held = await rude.dawdle(stage.server.url, stage.args.clients // 2, stage.args.patience)
    if held:
        stage.wrongs.append(f"{held} bodies that never end are held after {stage.args.patience:.0f} s")


TRIALS = {
    "decode": Trial("decode", faults, may_fail=SHOTS * SLOTS),
    "allocation": Trial("allocation", faults, may_fail=SHOTS * SLOTS),
    "idle": Trial("decode", nothing, opening=idle_conversations, flags=("--cache-ram", "256")),
    "full-disk": Trial("full-disk", disk),
    "slow-disk": Trial("slow-disk", disk),
    "killed": Trial("killed", one_fault, may_fail=None),
    # Every chunk holds the model's name: with a long name, few tokens fill the socket buffers.
    "stall": Trial("none", nothing, flags=("--alias", "a" * 8192), opening=stall),
    "leave": Trial("none", leaving),
    "dawdle": Trial("none", dawdling),
}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The requests of the bystanders without the attack (quiet) and with it (beside).

    code: the server's exit code; None if it still runs.
    """

    quiet: Sequence[Ending]
    beside: Sequence[Ending]
    health: Health
    began: float
    code: int | None
    tail: str
    stage: Stage

    @property
    def most_gap(self) -> float:
        return max(GAP_FACTOR * _longest(self.quiet), GAP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench faults`."""
    add = parser.add_argument
    add("--only", default=",".join(TRIALS), help="scenarios (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="seconds of bystanders after an attack (default: %(default)s)")
    add("--max-tokens", type=int, default=60, help="of a bystander's answer (default: %(default)s)")
    add("--clients", type=int, default=24, help="clients that leave; half as many never end a body (default: %(default)s)")
    add("--unread", type=int, default=500, help="tokens that a client does not read (default: %(default)s)")
    add("--patience", type=float, default=120.0, help="seconds for a body that never ends (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Run each trial on a server of its own with the embedded model. A hurt bystander fails the benchmark."""
    names = args.only.split(",")
    if unknown := [name for name in names if name not in TRIALS]:
        raise BenchError(f"--only {unknown[0]}: expected some of {', '.join(TRIALS)}")
    found: dict[str, tuple[TrialResult, list[str]]] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        outcome = _measure(TRIALS[name], args)
        found[name] = outcome, complaints(TRIALS[name], outcome)
        note(trial=name, complaints=found[name][1], beside=[_described(one) for one in outcome.beside])
    columns = ("scenario", "asked", "failed", "gap ms", "quiet ms", "complaints")
    rows = [_row(name, *one) for name, one in found.items()]
    num_complaints = sum(len(of) for _, of in found.values())
    num_twice = sum(not one.ended_once for outcome, _ in found.values() for one in outcome.beside)
    bars = [Bar(4, "complaints of bystanders", num_complaints, 0), Bar(4, "requests without one final event", num_twice, 0)]
    notes = [f"{name}: {what}" for name, (_, of) in found.items() for what in dict.fromkeys(of)]
    notes += [f"{name}: {what}" for name, (outcome, _) in found.items() for what in dict.fromkeys(outcome.stage.notes)]
    data = {name: [_described(one) for one in outcome.beside] for name, (outcome, _) in found.items()}
    title = f"faults: {BYSTANDERS} bystanders, {SLOTS} slots"
    return Report(
        "faults", [Table(title, columns, rows)], bars=bars, notes=notes, data=data, has_failed=bool(num_complaints)
    )


def complaints(scenario: Trial, outcome: TrialResult) -> list[str]:
    """Return one line for each event that must not happen."""
    right = {one.prompt: one.text for one in outcome.quiet}
    found = [f"the quiet run failed: {one.error}" for one in outcome.quiet if one.error or not one.ended_once]
    found += outcome.stage.wrongs
    for one in outcome.beside:
        if not one.ended_once:
            found.append(f"a request had {one.finals} final events ({one.error or 'no error'})")
        elif one.error is None and one.text != right.get(one.prompt):
            found.append(f"another answer to {one.prompt!r}: {one.text!r}")
    failed = [one for one in outcome.beside if one.error and not one.refused]
    if scenario.may_fail is not None:
        found += [f"a request failed: {one.error}" for one in failed[scenario.may_fail :]]
        found += [f"there was no server: {one.error}" for one in outcome.beside if one.refused]
        if _longest(outcome.beside) > outcome.most_gap:
            found.append(f"a stream paused for {_longest(outcome.beside):.2f} s")
    return [*found, *_health_lies(scenario, outcome), *_bad_end(scenario, outcome)]


def _health_lies(scenario: Trial, outcome: TrialResult) -> list[str]:
    looks = outcome.health.looks
    if scenario.may_fail is not None:
        return [f"health said {status or 'nothing'}" for _, status in looks if status != 200]
    late = [status for at, status in looks if at > outcome.began + TELLING and status not in (0, 503)]
    return [f"health said {status or 'nothing'} of a server that cannot go on" for status in late]


def _bad_end(scenario: Trial, outcome: TrialResult) -> list[str]:
    if scenario.may_fail is not None:
        return [] if outcome.code is None else [f"the server ended with code {outcome.code}: {outcome.tail}"]
    if outcome.code is None:
        return [f"the server did not end within {DYING:.0f} s"]
    return [] if outcome.code > 0 else [f"the server ended with code {outcome.code}: expected one that tells of an error"]


def _measure(scenario: Trial, args: argparse.Namespace) -> TrialResult:
    with tempfile.TemporaryDirectory(prefix="slotcache-faults-") as name:
        folder, port = Path(name), free_port()
        (folder / "slots").mkdir(mode=0o700)
        with Server(_command(scenario, folder, port, args), port) as server:
            return asyncio.run(_play(scenario, server, args, folder))


def _command(scenario: Trial, folder: Path, port: int, args: argparse.Namespace) -> list[str]:
    extra = ("--max-queue", str(QUEUE), "--cache-ram", "16", "--slot-save-path", str(folder / "slots"))
    extra += ("--cache-dir", str(folder / "cache"), *scenario.flags, *shlex.split(args.slotcache_args))
    options = ServerOptions(MODEL, context=4096, slots=SLOTS, threads=1, flash_attention="off", extra=extra)
    return [sys.executable, "-m", "slotcache.bench.faulty", scenario.fault, "serve", *options.flags(port)]


async def _play(scenario: Trial, server: Server, args: argparse.Namespace, folder: Path) -> TrialResult:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, connector=connector) as http:
        bodies = [prompts(number, args.max_tokens) for number in range(BYSTANDERS)]
        await ask(http, bodies[0][0], TIMEOUT)  # uncounted: the first request of a process pays for its start
        quiet = await _bystand(http, bodies, asyncio.sleep(args.seconds))
        stage, told = Stage(server, http, args, folder), Health()
        watching = asyncio.create_task(told.watch(http))
        began = perf_counter()
        if scenario.opening:
            await scenario.opening(stage)
        beside = await _bystand(http, bodies, _attacked(scenario, stage, args.seconds))
        for connection in stage.held:
            connection.close()
        if scenario.may_fail is None:
            await _wait_for_end(server)
            told.looks.append((perf_counter(), await health(http)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return TrialResult(
            quiet=quiet, beside=beside, health=told, began=began, code=server.code, tail=server.tail(), stage=stage
        )


async def _bystand(http: aiohttp.ClientSession, bodies: Sequence[Any], meanwhile: Awaitable[Any]) -> list[Ending]:
    """Return the requests of all bystanders during `meanwhile`."""
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        living = [clients.create_task(live(http, of, enough, TIMEOUT)) for of in bodies]
        try:
            await meanwhile
        finally:
            enough.set()
    return [ending for task in living for ending in task.result()]


async def _attacked(scenario: Trial, stage: Stage, seconds: float) -> None:
    await asyncio.sleep(BETWEEN)
    await scenario.attack(stage)
    await asyncio.sleep(seconds)


async def _wait_for_end(server: Server) -> None:
    end = perf_counter() + DYING
    while server.code is None and perf_counter() < end:
        await asyncio.sleep(0.05)


def _longest(endings: Sequence[Ending]) -> float:
    return max((one.longest_gap for one in endings), default=0.0)


def _row(name: str, outcome: TrialResult, found: Sequence[str]) -> tuple[str | int | float, ...]:
    failed = sum(one.error is not None for one in outcome.beside)
    gaps = (1000 * _longest(of) for of in (outcome.beside, outcome.quiet))
    return name, len(outcome.beside), failed, *gaps, len(found)


def _described(one: Ending) -> dict[str, Any]:
    return {"prompt": one.prompt, "status": one.status, "finals": one.finals, "error": one.error, "gap": one.longest_gap}
