"""OpenAI's `text_completion`, whose chunks look like the whole."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from .native import verbose
from .reply import DONE, Answer, Envelope, accounts, event


class Text:
    """The dialect of `/v1/completions`. echoes: the prompts' texts, which the answers begin with; empty: they do not."""

    def __init__(self, envelope: Envelope, echoes: Sequence[str] = ()) -> None:
        self.envelope = envelope
        self._echoes = [echo for echo in echoes for _ in range(envelope.num_each)] or [""] * envelope.num_choices
        self._probabilities = envelope.probabilities()

    def begin(self) -> list[bytes]:
        return [event(self._body([_choice(index, echo)])) for index, echo in enumerate(self._echoes) if echo]

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return [event(self._body([_choice(index, "")]) | self.envelope.progress(progress))]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if not delta.text and not delta.chances:
            return []
        choice = _choice(index, delta.text) | self._logprobs(index, delta)
        return [event(self._body([choice]) | self.envelope.times(index, delta))]

    def end(self, index: int, end: End) -> list[bytes]:
        body = self._body([_choice(index, "", end.reason)]) | accounts(end.report) | self.envelope.notes()
        if not self.envelope.include_usage:
            body["usage"] = self.envelope.usage([end])
        return [event(body | verbose(self.envelope, index, Answer((), end)))]

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
        return body | {"usage": self.envelope.usage(ends)} | verbose(self.envelope, 0, answers[0])

    def _whole_choice(self, index: int, answer: Answer) -> Fields:
        choice = _choice(index, self._echoes[index] + answer.text, answer.end.reason)
        choice |= self._logprobs(index, answer.whole())
        return choice if self.envelope.num_choices == 1 else choice | accounts(answer.end.report)

    def _logprobs(self, index: int, delta: Delta) -> Fields:
        return {"logprobs": self._probabilities[index].of_text(delta)} if delta.chances else {}

    def _body(self, choices: list[Fields]) -> Fields:
        return self.envelope.head("text_completion") | {"choices": choices}


def _choice(index: int, text: str, reason: str | None = None) -> Fields:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
