"""Runs a server that records what it computes: `python recorder.py FILE serve ...` is `slotcache serve ...` with a record.

The record has a line of JSON for each request (`request`, with the id of its answer), for each prompt whose layout is
decided (`prompt`), and for each end (`end`). An end has the ids of the answer. For each id that was chosen in a step without
drafts, it also has the sum of all logits' bits and the BEST logits. A line is one write, so that a kill -9 loses at most the
last line.
"""

import json
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

BEST = 8
Row = tuple[int, Mapping[int, float]]
"""The sum of the bits of a row of logits, and the best logits, by token."""


def record(file: Path) -> None:
    """Record from now on what the engines of this process compute."""
    from slotcache.models.runner import Runner
    from slotcache.server.engine.engine import Engine
    from slotcache.slots.job import Job
    from slotcache.slots.scheduler import Scheduler

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    rows: dict[int, dict[int, list[Any]]] = defaultdict(dict)

    def write(**line: Any) -> None:
        os.write(descriptor, json.dumps(line).encode() + b"\n")

    def after(method: Any, note: Any) -> Any:
        @wraps(method)
        def noted(this: Any, *arguments: Any, **named: Any) -> Any:
            result = method(this, *arguments, **named)
            note(this, *arguments, result=result)
            return result

        return noted

    def submitted(_: Any, generations: Any, result: Any) -> None:
        for one in generations:
            write(request=one.request.id, answer=one.id, scope=one.scope)

    def laid_out(job: Any, layout: Any, result: Any) -> None:
        scope = job.request.index_scope  # a private scope belongs to one request or its choices
        name = scope.text if scope.is_shared else f"private {os.getpid()} {scope.text}"
        about = {"reads": job.is_reading, "moved": layout.in_pieces}
        write(prompt=job.request.id, scope=name, tokens=layout.tokens.tolist(), **about)

    def ran(runner: Any, plan: Any, *_: Any, result: list[int]) -> None:
        if not result or any(span.drafted or span.num_scored for span in plan.spans):
            return
        asking = [span for span in plan.spans if span.logits]
        for span, row in zip(asking, runner.logits(len(asking)), strict=True):
            best = np.argpartition(row, -BEST)[-BEST:]
            rows[span.request][span.stop] = [zlib.crc32(row), best.tolist(), row[best].tolist()]

    def finished(_: Any, job: Any, result: None) -> None:
        chosen = rows.pop(job.request.id, {})
        tokens = [] if job.is_reading else job.tokens[job.num_prompt : job.num_tokens].tolist()
        reuse = {"cached": job.reuse.cached, "source": job.reuse.source, "paused": job.reuse.num_preempted}
        write(end=job.request.id, tokens=tokens, rows=[[at, *row] for at, row in chosen.items()], **reuse)

    Engine.submit = after(Engine.submit, submitted)
    Job.lay_out = after(Job.lay_out, laid_out)
    Runner.run = after(Runner.run, ran)
    Scheduler.finish = after(Scheduler.finish, finished)


# ---- Reading a record. --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Recorded:
    """A request as the engine knows it.

    answer: the id of the client's answer; empty without a client.
    named: the scope that the client named.
    scope: the scope of its KV.
    prompt: the ids of the prompt, with the marks of documents that are read separately.
    rows: the rows of logits, by position.
    paused: how often it was paused.
    """

    number: int
    answer: str = ""
    named: str = ""
    scope: str = ""
    prompt: list[int] = field(default_factory=list)
    is_moved: bool = False
    tokens: list[int] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    cached: int = 0
    source: str = ""
    paused: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class Record:
    """Reads a record while it is written. laid_out: each prompt and each separate reading of a document, with its scope."""

    file: Path
    requests: dict[int, Recorded] = field(default_factory=dict)
    laid_out: list[tuple[Recorded, str, Sequence[int]]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> None:
        """Read the lines written since the last call."""
        with self.file.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    @property
    def is_settled(self) -> bool:
        """Whether all requests of clients have ended."""
        return all(one.has_ended for one in self.requests.values() if one.answer)

    def _take(self, line: Mapping[str, Any]) -> None:
        number = next(line[kind] for kind in ("request", "prompt", "end") if kind in line)
        one = self.requests.setdefault(number, Recorded(number))
        if "request" in line:
            one.answer, one.named = line["answer"], line["scope"]
        elif "prompt" in line:
            if not line["reads"]:
                one.prompt, one.scope, one.is_moved = line["tokens"], line["scope"], line["moved"]
            self.laid_out.append((one, line["scope"], line["tokens"]))
        else:
            one.tokens, one.cached, one.source, one.paused = (
                line[name] for name in ("tokens", "cached", "source", "paused")
            )
            one.rows = {at: (bits, dict(zip(best, logits, strict=True))) for at, bits, best, logits in line["rows"]}
            one.has_ended = True


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    import conftest  # noqa: F401  # finds `slotcache` in a bare checkout

    record(Path(sys.argv[1]))
    from slotcache.server.cli import main

    sys.exit(main(sys.argv[2:]))
