"""Runs a server with random clients, and compares each answer with the answer of a reference server without a cache.

What is compared, and when two answers differ
- The server is a process that records the ids of each prompt and answer, and the logits for each token that it chose
  (`support/recorder.py`). The reference gets exactly these ids, so clients, templates and orders of documents do not
  matter. Only chats with documents that are read separately are sent to it as they are, because their ids do not show
  these documents.
- Both servers run on the CPU with `-fa off`, so weights are not repacked, and choose the most probable token. The reference
  has host memory. Without it, the second of several documents that are read separately would be at other cells.
- `alone`: weights as they are served (Q8_0), one request at a time, a host tier, no idle work, and no prompt continues KV
  that was computed token by token. docs/exactness.md promises equal bits, so all rows of logits must be bit-equal. A prompt
  that by chance has KV of an earlier answer is not compared.
- Otherwise: requests at the same time, `n`, answers in histories, pauses, and idle work. Then KV is rounded in other ways,
  and with quantised weights a last bit may become the next of 255 steps. Therefore weights and KV are float32, whose
  rounding is at most MOST_ROUNDED: each of the best logits must be so near. If another token was chosen, both tokens must
  be as near in the reference's logits, and the reference continues after the token that the server chose.
- A prompt has no more cached tokens than it shares with another prompt of its scope since the scope was dropped. This check
  finds reuse of KV from other scopes, which gives right answers. Documents that are read separately may add more.
- Each complete answer has one end, no step fails, and the cache's invariants hold whenever a server is idle (`--check`).
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
from server.conftest import DEADLINE, until
from slotcache.bench.servers import Server
from slotcache.slots.radix import common_prefix
from slotcache.slots.reuse import ids_of

from support import recorder
from support.ports import free_port
from support.random_clients import RAW, WARM, Act
from support.recorder import Record, Recorded

MOST_ROUNDED = 0.001
USUAL = ["-fa", "off", "-t", "1", "--no-ui"]
JSON = {"Content-Type": "application/json"}
REFUSALS = {
    "too long": b"exceed",
    "nothing to warm": b"nothing to warm",
}  # with -cram 0, a model whose KV cannot be cut caches nothing
Sent = tuple[str, Mapping[str, Any]]
"""The path and the body of a request."""


@contextmanager
def recorded(folder: Path, name: str, flags: Sequence[str]) -> Iterator[tuple[Server, Record]]:
    """Run a server that writes its record to a folder."""
    file, port = folder / f"{name}.jsonl", free_port()
    command = [sys.executable, recorder.__file__, str(file), "serve", "--port", str(port), *USUAL, *flags]
    with Server(command, port) as server:
        yield server, Record(file)


def ask(server: Server, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Send a request that must succeed. Return its answer."""
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=DEADLINE)) as connection:
        connection.request(method, path, json.dumps(body), JSON)
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer


def events_of(response: HTTPResponse) -> Iterator[Any]:
    """Yield the events of a stream."""
    return (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))


class Reference:
    """A server without a cache, which answers one request at a time."""

    def __init__(self, server: Server, record: Record) -> None:
        self._server, self._record = server, record

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Recorded:
        """Return the answer to ids."""
        body = {"prompt": list(prompt), "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
        return self.repeat(RAW, body)

    def repeat(self, path: str, body: Mapping[str, Any]) -> Recorded:
        """Return the answer to a request, unchanged except that it uses no cache."""
        ask(self._server, "POST", path, {**body, "cache_prompt": False, "stream": False, "n": 1})
        self._record.read()
        self._record.laid_out.clear()
        _, found = self._record.requests.popitem()
        assert found.has_ended and not (found.cached or self._record.requests)
        return found


@contextmanager
def reference(folder: Path, flags: Sequence[str]) -> Iterator[Reference]:
    """Run a reference server. flags: the flags for the model and its number types."""
    with recorded(folder, "reference", [*flags, "-c", "8192", "-np", "1"]) as server:
        yield Reference(*server)


@dataclass(slots=True)
class Judge:
    """Compares a server's record with a reference server's answers to the same ids.

    seen: counts of the cases that occurred.
    worst: the largest difference of two logits that rounding caused.
    """

    reference: Reference
    alone: bool
    seen: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    _kept: dict[str, list[tuple[Recorded, np.ndarray, int]]] = field(default_factory=dict)
    """By scope: each request, the ids whose KV it may have cached, and how many of them have the KV of a fresh prefill."""

    def judge(self, record: Record, bodies: Mapping[str, Sent]) -> Iterator[tuple[str, Recorded]]:
        """Yield the errors of requests that have ended since the last call. bodies: clients' requests, by answer id."""
        laid_out, record.laid_out = record.laid_out, []
        for one, scope, tokens in laid_out:
            self._kept.setdefault(scope, []).append((one, np.array(tokens, np.int32), len(tokens)))
        for one in [one for one in record.requests.values() if one.has_ended]:
            del record.requests[one.number]
            most, is_prefill = self._take(one)
            if one.cached > most and not one.is_moved:
                yield f"{one.cached} tokens are cached, of which {most} were ever computed", one
            if one.answer and one.prompt and one.scope != one.named and not one.scope.startswith("private "):
                yield f"its KV is of scope {one.scope}", one
            if not one.answer or not one.tokens:
                self.seen["without a token"] += bool(one.answer)
                continue
            self.seen.update(["answers", one.source, *(["paused"] if one.paused else [])])
            if (self.alone and not is_prefill) or (one.is_moved and one.answer not in bodies):
                self.seen["not compared"] += 1
            elif wrong := self._differs(one, bodies):
                yield wrong, one

    def forget(self, scope: str) -> None:
        """Note that a scope was dropped."""
        self._kept.pop(scope, None)

    def _take(self, one: Recorded) -> tuple[int, bool]:
        """Note the KV that a request caches. Return the most tokens that it may reuse, and whether they are of a prefill."""
        kept, prompt = self._kept.setdefault(one.scope, []), np.array(one.prompt, np.int32)
        shared = [(common_prefix(ids, prompt), num) for other, ids, num in kept if other is not one]
        sampled = [num for common, num in shared if min(common, one.cached) > num]
        kept.append((one, np.array(one.prompt + one.tokens, np.int32), min(sampled, default=len(prompt))))
        return max((common for common, _ in shared), default=0), not sampled

    def _differs(self, one: Recorded, bodies: Mapping[str, Sent]) -> str:
        """Return how an answer differs from the reference's; empty if it does not."""
        prompt, begin, wrong = ids_of(np.array(one.prompt, np.int32)).tolist(), 0, ""
        if one.is_moved:
            other = self.reference.repeat(*bodies[one.answer])
            return self._compare(one, other, 0)[1] if other.prompt == one.prompt else "the prompt is another one"
        while begin < len(one.tokens) and not wrong:
            other = self.reference.answer([*prompt, *one.tokens[:begin]], len(one.tokens) - begin)
            begin, wrong = self._compare(one, other, begin)
        return wrong

    def _compare(self, one: Recorded, other: Recorded, begin: int) -> tuple[int, str]:
        """Compare tokens from place `begin` on. Return the place after the first different token, and the error."""
        for at, (token, expected) in enumerate(zip(one.tokens[begin:], other.tokens, strict=False), begin):
            where = f"token {at} behind {len(one.prompt)} ({one.cached} {one.source}): "
            place = len(one.prompt) + at
            (bits, mine), (its_bits, its) = one.rows.get(place, (None, {})), other.rows[place]
            self.seen["rows"] += bits is not None
            far = max((abs(mine[id] - its[id]) for id in mine.keys() & its.keys()), default=np.inf if mine else 0.0)
            if self.alone and bits not in (None, its_bits):
                return at, f"{where}the logits are not equal to the bit: {far:.3g} apart"
            if far > MOST_ROUNDED:
                return at, f"{where}logits are {far:.3g} apart"
            self.worst = max(self.worst, far)
            if token != expected:
                gap = its[expected] - its.get(token, -np.inf)
                if self.alone or gap > 2 * MOST_ROUNDED:
                    return at, f"{where}{token} instead of {expected}, which is {gap:.3g} more likely"
                self.seen["ties"] += 1
                return at + 1, ""
        return len(one.tokens), ""


class Life:
    """One life of a cache folder. Acts of clients are recorded, done and judged.

    about: describes the life, to replay it.
    wrong: the errors of answers.

    Raises AssertionError if an answer has no end or a step failed.
    """

    def __init__(self, folder: Path, flags: Sequence[str], judge: Judge, about: Mapping[str, Any]) -> None:
        self._folder, self._judge = folder, judge
        self._flags = ["--check", "--cache-dir", str(folder / "kv"), *flags]
        self._stack, self._num_starts, self._is_dying = ExitStack(), 0, False
        self._bodies: dict[str, Sent] = {}  # by the id of the answer
        self._journal = (folder / "life.jsonl").open("w")
        self.num_requests = 0
        self.wrong: list[str] = []
        self._note(**about)
        self._start()

    def do(self, act: Act) -> list[str | None]:
        """Do an act, and judge requests that have ended since the last act. Return the texts of complete answers."""
        self._note(**act)
        self._judge.seen[act["do"]] += 1
        requests, texts = act.get("requests", []), []
        self.num_requests += len(requests)
        match act["do"]:
            case "ask":
                texts = self._ask(requests)
                self._settle()
            case "drop":
                ask(self._server, "DELETE", f"/v1/cache?scope={act['scope']}")
                self._judge.forget(act["scope"])
            case "stop":
                self._check()
                self._server.stop(DEADLINE)
                self._judge_ended()
                self._start()
            case "kill":
                texts = self._ask(requests, kill_after=act["after"])
                self._server.stop(DEADLINE)
                self._judge_ended()
                self._start()
        return texts

    @property
    def worst(self) -> float:
        return self._judge.worst

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with self._stack, self._journal:
            if error is None:
                self._settle()
                self._check()
            else:
                error.add_note(f"the life is {self._journal.name}")

    def _note(self, **line: Any) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _start(self) -> None:
        self._num_starts += 1
        self._is_dying = False
        self._server, self._record = self._stack.enter_context(recorded(self._folder, str(self._num_starts), self._flags))

    def _settle(self) -> None:
        """Wait until all requests of clients have ended."""

        def has_ended() -> bool:
            self._record.read()
            return self._record.is_settled

        until(has_ended)
        self._judge_ended()

    def _judge_ended(self) -> None:
        self._record.read()
        for wrong, one in self._judge.judge(self._record, self._bodies):
            self.wrong.append(f"{self._journal.name}: {wrong}")
            self._note(wrong=wrong, answer=one.answer, scope=one.scope, prompt=one.prompt, tokens=one.tokens)

    def _check(self) -> None:
        """Check that no step has failed and no invariant of the cache was broken."""
        lines = ask(self._server, "GET", "/metrics").splitlines()
        values = dict(line.rsplit(b" ", 1) for line in lines if not line.startswith(b"#"))
        for name in (b"slotcache_failed_steps_total", b'slotcache_requests_total{end="error"}'):
            assert float(values.get(name, 0)) == 0, f"{name}: {self._server.tail()}"

    def _ask(self, requests: Sequence[Act], kill_after: int | None = None) -> list[str | None]:
        """Send requests at the same time. kill_after: end the server after the clients have received so many events."""
        events = Semaphore(0)
        with ThreadPoolExecutor(max(len(requests), 1)) as threads:
            sent = [threads.submit(self._send, request, events) for request in requests]
            if kill_after is not None:
                for _ in range(kill_after):
                    while not events.acquire(timeout=0.05) and not all(one.done() for one in sent):
                        pass
                self._is_dying = True
                assert self._server.pid is not None
                os.kill(self._server.pid, signal.SIGKILL)
            return [one.result() for one in sent]

    def _send(self, request: Act, events: Semaphore) -> str | None:
        """Send a request, and read its answer or disconnect. Return the text of a complete answer."""
        try:
            with closing(HTTPConnection(self._server.url.removeprefix("http://"), timeout=DEADLINE)) as connection:
                connection.request("POST", request["path"], json.dumps(request["body"]), JSON)
                if request["leave"] == 0:
                    self._judge.seen["left at once"] += 1
                    return None
                return self._read(connection.getresponse(), request, events)
        except (OSError, HTTPException, ValueError, AssertionError):
            if self._is_dying:
                return None
            raise

    def _read(self, response: HTTPResponse, request: Act, events: Semaphore) -> str | None:
        """Read an answer, or only some events if its client disconnects. A complete answer has one end for each choice."""
        if response.status != 200:
            refusal = response.read()
            found = next((name for name, words in REFUSALS.items() if words in refusal), None)
            assert response.status == 400 and found, refusal
            self._judge.seen[found] += 1
            return None
        said: list[str] = []
        ends: list[int] = []
        whole = None if "stream" in request["body"] else json.load(response)
        events_now = events_of(response) if whole is None else whole if isinstance(whole, list) else [whole]
        for number, event in enumerate(events_now, 1):
            assert "error" not in event, event
            events.release()
            if "id" in event:
                self._bodies[event["id"]] = request["path"], request["body"]
            for choice in event.get("choices", []):
                ends += [choice["index"]] if choice.get("finish_reason") else []
                if choice["index"] == 0:
                    said.append((choice.get("delta") or choice.get("message") or {}).get("content") or "")
            ends += [event["index"]] if event.get("stop") and not event.get("choices") else []
            if number == request["leave"]:
                self._judge.seen["left in the answer" if any(said) else "left in the prompt"] += 1
                return None
        assert request["path"] == WARM or sorted(ends) == list(range(request["body"].get("n", 1))), ends
        return "".join(said)
