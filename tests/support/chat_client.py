"""A client of the chat routes that looks closely: each request has one end, and each answer says all that it should."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from server.conftest import Running, until

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """queue_ms: between arrival and admission. told: of its conversation, None where it has none."""

    id: str
    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    source: str
    documents: tuple[str, ...]
    repeated: tuple[str, ...]
    told: Mapping[str, Any] | None
    queue_ms: float


class ChatClient:
    """Counts its requests, so that the server's own count of ends can be compared with them."""

    def __init__(self, server: Running) -> None:
        self.server, self.http = server, server.http
        self.num_asked = 0

    def ask(self, body: Mapping[str, Any], stream: bool) -> Answer:
        """One chat completion, whole or streamed."""
        self.num_asked += 1
        if not stream:
            said = self.post(PATH, body)
            (choice,) = said["choices"]
            return _answer(said, choice["message"]["content"], choice["finish_reason"])
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.http.stream("POST", PATH, json=wanted) as response:
            assert response.status_code == 200, response.read()
            return _joined(list(_events(response)))

    def leave(self, body: Mapping[str, Any], after: int) -> bool:
        """Ask for a stream and leave after `after` events; return whether the server noticed in time."""
        self.num_asked += 1
        before = self._ended("cancelled")
        with self.http.stream("POST", PATH, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for _, _ in zip(range(after), _events(response), strict=False):
                pass
        self.settle()
        return self._ended("cancelled") > before

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def warm(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.num_asked += 1
        return self.post("/v1/cache/warm", body)

    def settle(self) -> None:
        """Wait until every request has had its one end."""
        until(lambda: sum(map(self._ended, ("stop", "length", "cancelled", "error"))) >= self.num_asked)
        assert sum(map(self._ended, ("stop", "length", "cancelled"))) == self.num_asked and not self._ended("error")

    def rest(self) -> None:
        """Wait until idle prefill has no more work, or no room for it."""
        idle, scheduler = self.server.service.idle, self.server.service.engine.scheduler
        until(lambda: idle.done or (idle._task is None and scheduler.idle))

    def _ended(self, how: str) -> float:
        return self.server.metric("slotcache_requests_total", end=how)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its [DONE], which must come."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: {"), line
            yield json.loads(line[6:])
    raise AssertionError("the stream ended without [DONE]")


def _joined(events: list[dict[str, Any]]) -> Answer:
    text, ends = "", []
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            assert not (ends and choice["delta"].get("content")), "there is text behind the end"
            text += choice["delta"].get("content") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(ends) == 1, f"{len(ends)} final events"
    assert len({event["id"] for event in events}) == 1
    return _answer(events[-1], text, ends[0])


def _answer(said: Mapping[str, Any], text: str, reason: str) -> Answer:
    own, usage = said["slotcache"], said["usage"]
    return Answer(
        said["id"],
        text,
        reason,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        own["cached_tokens"],
        own["source"],
        tuple(document["id"] for document in own["documents"]),
        tuple(own["repeated"]),
        own.get("conversation"),
        said["timings"]["queue_ms"],
    )
