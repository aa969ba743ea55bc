"""OpenAI's `text_completion`, whose chunks look like the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from .reply import DONE, Answer, Envelope, accounts, event


class Text:
    """The dialect of `/v1/completions`."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def begin(self) -> list[bytes]:
        return []

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return [event(self._body([_choice(index, "")]) | {"prompt_progress": asdict(progress)})]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        return [event(self._body([_choice(index, delta.text)]))] if delta.text else []

    def end(self, index: int, end: End) -> list[bytes]:
        choices = [_choice(index, "", end.reason)]
        return [event(self._body(choices) | accounts(end.report) | self.envelope.notes())]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return [DONE]
        return [event(self._body([]) | {"usage": self.envelope.usage(ends)} | accounts(ends[0].report)), DONE]

    def fail(self, error: RequestError) -> list[bytes]:
        return [event(error.body()), DONE]

    def whole(self, answers: Sequence[Answer]) -> Fields:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        ends = [answer.end for answer in answers]
        body = self._body(choices) | accounts(ends[0].report) | self.envelope.notes()
        return body | {"usage": self.envelope.usage(ends)}

    def _whole_choice(self, index: int, answer: Answer) -> Fields:
        choice = _choice(index, answer.text, answer.end.reason)
        return choice if self.envelope.num_choices == 1 else choice | accounts(answer.end.report)

    def _body(self, choices: list[Fields]) -> Fields:
        return self.envelope.head("text_completion") | {"choices": choices}


def _choice(index: int, text: str, reason: str | None = None) -> Fields:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
