"""`slotcache batch IN -o OUT`: answers the requests in a file. The model runs in this process, and no port is opened."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from msgspec import Raw
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import Message

from ..models.errors import ModelError
from ..slots.store.private_folder import FolderError
from . import load
from .app import AppState, make_app
from .config.settings import Settings, SettingsError
from .http.bodies import Bodies
from .serve import prepare, start
from .service.batch import Ask, BatchLine, LineAnswer, NoLines, NotAnswers, Results, read_lines, run

WIDTH = 30  # characters of the bar
NO_LIMIT = 1 << 31


def answer_file(settings: Settings, source: Path, target: Path) -> int:
    """Answer the requests in `source` that have no answer in `target`. Return the exit code.

    The code is 1 if a request failed or has no answer yet, and 2 if the command fails.
    """
    try:
        lines = read_lines(source.read_bytes())
        with closing(Results(target)) as results:
            if len(results.done) < len(lines):
                settings, path = prepare(unattended(settings))
                asyncio.run(_answer(settings, path, lines, results))
            print(_summary(lines, results, target), file=sys.stderr)
            return int(results.num_failed > 0 or len(results.done) < len(lines))
    except NoLines as error:
        print(f"slotcache batch: {source}: {error}", file=sys.stderr)
    except NotAnswers as error:
        print(f"slotcache batch: {target}: {error}: expected another -o", file=sys.stderr)
    except OSError as error:
        print(f"slotcache batch: {error.filename or source}: {error.strerror or error}", file=sys.stderr)
    except (ModelError, FolderError, SettingsError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nstopped: the same command continues where {target} ends", file=sys.stderr)
        return 1
    return 2


def unattended(settings: Settings) -> Settings:
    """Return settings for a process in which no client waits for an individual answer.

    Prefill has no budget, since no client watches the answers that a long prefill delays. The queue takes all requests, and
    each request uses the cache. Nothing is prefilled for a next turn.
    """
    shared = replace(settings, cache_prompt=True, idle_prefill=False, idle_sets=0)
    return replace(shared, prefill_budget=NO_LIMIT, max_stall=0, max_queue=NO_LIMIT)


async def _answer(settings: Settings, path: Path, lines: Sequence[BatchLine], results: Results) -> None:
    """Load the model, and answer the remaining requests. Stop early if the engine fails for good."""
    state = AppState(settings, Bodies.up_to(settings.max_body << 20))
    app = make_app(state)
    loaded = await asyncio.to_thread(load.load_all, settings, path)
    num_slots = (loaded.service or state).settings.parallel
    bar = ProgressBar(len(lines), len(results.done))
    work = run(lines, results, asking(app), num_slots=num_slots, on_answer=bar.advance)
    answering = asyncio.ensure_future(work)

    def fail() -> None:
        answering.cancel()

    try:
        start(state, loaded, fail)
        await answering
    except asyncio.CancelledError:
        if not state.failure:
            raise
        print(f"slotcache: {state.failure}", file=sys.stderr)
    finally:
        if state.service is not None:
            state.service.idle.stop()
        await asyncio.to_thread(state.stop)
        await asyncio.to_thread(state.close)


def asking(app: Starlette) -> Ask:
    """Return a function that answers a line of the file.

    The returned function calls the application's routes without a connection.
    """
    routes = ExceptionMiddleware(app.router, handlers=app.exception_handlers)

    async def ask(line: BatchLine) -> LineAnswer:
        id = f"req-{secrets.token_hex(8)}"
        body: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
        answer: list[Message] = []

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()  # the client never disconnects

        async def send(message: Message) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": app,
            "state": {"request_id": id},
        }
        await routes(scope, receive, send)
        start, *rest = answer
        return LineAnswer(start["status"], id, Raw(b"".join(message["body"] for message in rest)))

    return ask


class ProgressBar:
    """Shows how many lines are answered, if stderr is a terminal.

    done: the number of lines that are already answered when the bar is made.
    """

    def __init__(self, total: int, done: int) -> None:
        self._total, self._before, self._done = total, done, done
        self._began = time.perf_counter()
        self._shows = sys.stderr.isatty()

    def advance(self) -> None:
        self._done += 1
        if not self._shows:
            return
        left = (time.perf_counter() - self._began) / (self._done - self._before) * (self._total - self._done)
        full = WIDTH * self._done // self._total
        bar = "#" * full + "." * (WIDTH - full)
        end = "\n" if self._done == self._total else ""
        print(f"\r[{bar}] {self._done:,} of {self._total:,}, {left:,.0f} s left  ", end=end, file=sys.stderr, flush=True)


def _summary(lines: Sequence[BatchLine], results: Results, target: Path) -> str:
    failed = f", {results.num_failed:,} of them with an error" if results.num_failed else ""
    return f"{len(results.done):,} of {len(lines):,} lines are answered in {target}{failed}"
