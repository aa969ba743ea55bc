"""OpenAI's `chat.completion` and its chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...chat.answer import CallArguments, CallStart, Content, Fragment, Reader, Thought, message
from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from .native import verbose
from .probabilities import of_chat
from .reply import DONE, Answer, Envelope, accounts, event


class Chat:
    """Chunks with `delta`, and a message at once. reader: makes the reader of one choice."""

    def __init__(self, envelope: Envelope, reader: Callable[[], Reader]) -> None:
        self.envelope, self._reader = envelope, reader
        self._readers = [reader() for _ in range(envelope.num_choices)]
        self._has_calls = [False] * envelope.num_choices
        self._probabilities = envelope.probabilities()
        self._unsent: list[list[Fields]] = [[] for _ in range(envelope.num_choices)]  # tokens, for the next chunk

    def begin(self) -> list[bytes]:
        first: Fields = {"role": "assistant", "content": None}
        return [self._chunk(index, first, {}) for index in range(self.envelope.num_choices)]

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return [event(self._body("chat.completion.chunk", [_choice(index, {})]) | self.envelope.progress(progress))]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        self._unsent[index] += self._probabilities[index].entries(delta)
        return self._chunks(index, self._readers[index].push(delta.text), self.envelope.times(index, delta))

    def end(self, index: int, end: End) -> list[bytes]:
        rest = self._chunks(index, self._readers[index].finish(), {})
        choice = self._choice(index, {}, finish_reason(end, self._has_calls[index]))
        last = self._body("chat.completion.chunk", [choice]) | accounts(end.report) | self.envelope.notes()
        return [*rest, event(last | verbose(self.envelope, index, Answer((), end)))]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return [DONE]
        last = self._body("chat.completion.chunk", []) | {"usage": self.envelope.usage(ends)} | accounts(ends[0].report)
        return [event(last), DONE]

    def fail(self, error: RequestError) -> list[bytes]:
        return [event(error.body()), DONE]

    def whole(self, answers: Sequence[Answer]) -> Fields:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        ends = [answer.end for answer in answers]
        body = self._body("chat.completion", choices) | accounts(ends[0].report) | self.envelope.notes()
        return body | {"usage": self.envelope.usage(ends)} | verbose(self.envelope, 0, answers[0])

    def _whole_choice(self, index: int, answer: Answer) -> Fields:
        reader = self._reader()
        said = message([*reader.push(answer.text), *reader.finish()])
        (probabilities, *_) = self.envelope.probabilities()
        logprobs = of_chat(probabilities.entries(answer.whole()))
        choice: Fields = {"index": index, "message": said | {"refusal": None}, "logprobs": logprobs}
        choice["finish_reason"] = finish_reason(answer.end, "tool_calls" in said)
        return choice if self.envelope.num_choices == 1 else choice | accounts(answer.end.report)

    def _chunks(self, index: int, fragments: Sequence[Fragment], times: Fields) -> list[bytes]:
        """times: of the answer so far, in each of its chunks."""
        self._has_calls[index] |= any(isinstance(fragment, CallStart) for fragment in fragments)
        return [self._chunk(index, _delta(fragment), times) for fragment in fragments]

    def _chunk(self, index: int, delta: Fields, times: Fields) -> bytes:
        return event(self._body("chat.completion.chunk", [self._choice(index, delta)]) | times)

    def _choice(self, index: int, delta: Fields, reason: str | None = None) -> Fields:
        """Return a choice with the tokens whose probabilities were not sent yet."""
        entries, self._unsent[index] = self._unsent[index], []
        return _choice(index, delta, reason) | {"logprobs": of_chat(entries)}

    def _body(self, kind: str, choices: list[Fields]) -> Fields:
        return self.envelope.head(kind) | {"choices": choices}


def finish_reason(end: End, has_calls: bool) -> str:
    """Return why a chat's answer ended: an answer that calls tools ends for their sake."""
    return "tool_calls" if has_calls and end.reason == "stop" else end.reason


def _choice(index: int, delta: Fields, reason: str | None = None) -> Fields:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _delta(fragment: Fragment) -> Fields:
    match fragment:
        case Content(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
