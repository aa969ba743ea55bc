"""llama-server's `/completion`: an object for one answer, a list of them for several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from .reply import DONE, Answer, Envelope, accounts, event


class Native:
    """The dialect of `/completion`."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def begin(self) -> list[bytes]:
        return []

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return [event(_piece(index, "") | {"prompt_progress": asdict(progress)})]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        return [event(_piece(index, delta.text))] if delta.text else []

    def end(self, index: int, end: End) -> list[bytes]:
        return [event(self._last(index, "", end))]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return [DONE]
        last = self._last(0, "", ends[0]) | {"choices": [], "usage": self.envelope.usage(ends)}
        return [event(last), DONE]

    def fail(self, error: RequestError) -> list[bytes]:
        return [event(error.body()), DONE]

    def whole(self, answers: Sequence[Answer]) -> Fields | list[Fields]:
        made = self.envelope
        bodies = [
            self._last(index, answer.text, answer.end) | {"usage": made.usage([answer.end])}
            for index, answer in enumerate(answers)
        ]
        return bodies[0] if made.num_choices == 1 else bodies

    def _last(self, index: int, text: str, end: End) -> Fields:
        stop_type = "limit" if end.reason == "length" else "eos"
        about = {"index": index, "content": text, "stop": True, "stop_type": stop_type, "model": self.envelope.model}
        return about | accounts(end.report) | self.envelope.notes()


def _piece(index: int, text: str) -> Fields:
    return {"index": index, "content": text, "stop": False}
