"""A strict client of the chat routes: each request must have one end, and each answer must be complete."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.conftest import Running, until

from support.dialects import CHAT

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. queue_ms: from arrival to admission. report: the report on its conversation; None without one."""

    id: str
    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    source: str
    documents: tuple[str, ...]
    repeated: tuple[str, ...]
    report: Mapping[str, Any] | None
    queue_ms: float


class ChatClient:
    """Counts its requests, to compare them with the server's count of ends."""

    def __init__(self, server: Running) -> None:
        self.server, self.http = server, server.http
        self.num_asked = 0

    def ask(self, body: Mapping[str, Any], stream: bool) -> Answer:
        """Ask for one chat completion, whole or streamed."""
        self.num_asked += 1
        if not stream:
            said = self.post(PATH, body)
            (choice,) = said["choices"]
            return _answer(said, choice["message"]["content"], choice["finish_reason"])
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.http.stream("POST", PATH, json=wanted) as response:
            assert response.status_code == 200, response.read()
            events = [*CHAT.events(response.iter_lines())]
        said = CHAT.join(events)
        return _answer(events[-1], said.text, said.reason)

    def disconnect(self, body: Mapping[str, Any], after: int) -> bool:
        """Ask for a stream and disconnect after `after` events. Return whether the server noticed in time."""
        self.num_asked += 1
        before = self._ended("cancelled")
        with self.http.stream("POST", PATH, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for _, _ in zip(range(after), CHAT.events(response.iter_lines()), strict=False):
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
        """Wait until every request has its one end."""
        until(lambda: sum(map(self._ended, ("stop", "length", "cancelled", "error"))) >= self.num_asked)
        assert sum(map(self._ended, ("stop", "length", "cancelled"))) == self.num_asked and not self._ended("error")

    def rest(self) -> None:
        """Wait until idle prefill has no more work or no room."""
        idle, scheduler = self.server.service.idle, self.server.service.engine.scheduler
        until(lambda: idle.done or (idle._task is None and scheduler.idle))

    def _ended(self, how: str) -> float:
        return self.server.metric("slotcache_requests_total", end=how)


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
