"""OpenAI's `response`, whole and as a stream of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time

from msgspec import Raw

from ...chat.answer import Fragment, Reader, Thought
from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from .output import Output
from .reply import Answer, Envelope, accounts, encode, event

Keep = Callable[[bytes], None]
"""Stores a finished response, as JSON."""


class Responses:
    """The dialect of `/v1/responses`. reader: of the answer. echo: fields of the request that a response repeats."""

    def __init__(
        self, envelope: Envelope, reader: Reader, echo: Mapping[str, Raw], *, output: Output, keep: Keep, caches: bool
    ) -> None:
        self.envelope, self._reader, self._echo = envelope, reader, echo
        self._output, self._keep, self._caches = output, keep, caches
        self._num_events = self._length = self._thought = 0  # events so far; characters so far, and those of reasoning

    def begin(self) -> list[bytes]:
        if self._num_events:
            return []
        return [self._event({"type": f"response.{what}"} | self._now("in_progress")) for what in ("created", "in_progress")]

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        begun = self.begin()
        told = {"type": "response.in_progress"} | self._now("in_progress") | self.envelope.progress(progress)
        return [*begun, self._event(told)]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        self._length += len(delta.text)
        events = self._read(self._reader.push(delta.text))
        if events:
            events[-1] |= self.envelope.times(index, delta)
        return self._events(events)

    def end(self, index: int, end: End) -> list[bytes]:
        return self._events([*self._read(self._reader.finish()), *self._output.finish(_status(end))])

    def close(self, ends: Sequence[End]) -> list[bytes]:
        (end,) = ends
        response, status = self._finished(end), _status(end)
        self._keep(encode(response))
        return [self._event({"type": f"response.{status}", "response": response, "timings": response["timings"]})]

    def fail(self, error: RequestError) -> list[bytes]:
        told = {"code": error.type, "message": error.message}
        failed = self._response("failed") | {"error": told}
        return [*self.begin(), self._event({"type": "response.failed", "response": failed})]

    def whole(self, answers: Sequence[Answer]) -> Fields:
        (answer,) = answers
        for delta in answer.deltas:
            self.delta(0, delta)
        self.end(0, answer.end)
        response = self._finished(answer.end)
        self._keep(encode(response))
        return response

    def _read(self, fragments: Sequence[Fragment]) -> list[Fields]:
        self._thought += sum(len(fragment.text) for fragment in fragments if isinstance(fragment, Thought))
        return [event for fragment in fragments for event in self._output.push(fragment)]

    def _finished(self, end: End) -> Fields:
        report, status = end.report, _status(end)
        usage = {
            "input_tokens": report.num_prompt,
            "input_tokens_details": {
                "cached_tokens": report.num_cached,
                "cache_write_tokens": (report.num_prompt - report.num_cached) * self._caches,
            },
            "output_tokens": report.num_generated,
            # By its share of the text: which token wrote which part is not known.
            "output_tokens_details": {"reasoning_tokens": report.num_generated * self._thought // max(self._length, 1)},
            "total_tokens": report.num_prompt + report.num_generated,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time()) if status == "completed" else None, "incomplete_details": details}
        return self._response(status) | done | {"usage": usage} | accounts(report) | self.envelope.notes()

    def _now(self, status: str) -> Fields:
        return {"response": self._response(status)}

    def _response(self, status: str) -> Fields:
        envelope = self.envelope
        return {
            "id": envelope.id,
            "object": "response",
            "created_at": envelope.created,
            "completed_at": None,
            "model": envelope.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output.items,
            "usage": None,
            **self._echo,
        }

    def _events(self, events: Iterable[Fields]) -> list[bytes]:
        return [self._event(body) for body in events]

    def _event(self, body: Fields) -> bytes:
        self._num_events += 1
        return event(body | {"sequence_number": self._num_events - 1}, str(body["type"]))


def _status(end: End) -> str:
    return "incomplete" if end.reason == "length" else "completed"
