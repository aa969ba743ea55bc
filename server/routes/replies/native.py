"""llama-server's `/completion`: an object for one answer, a list of them for several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...engine.view import Delta, End, Fields, Generation, Progress
from ...errors import RequestError
from .reply import Answer, Envelope, accounts, event


class Native:
    """The dialect of `/completion` and `/infill`."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope, self._fields = envelope, envelope.options.response_fields
        self._has_line = [False] * envelope.num_choices
        self._probabilities = envelope.probabilities()

    def begin(self) -> list[bytes]:
        return []

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return [event(self._piece(index, Delta("")) | self.envelope.progress(progress))]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        self._has_line[index] |= "\n" in delta.text
        if not delta.text and not delta.chances:
            return []
        *first, last = self._probabilities[index].entries(delta) or [None]  # an event for each, as in llama-server
        sent: list[bytes] = []
        for entry, token in zip(first, delta.tokens, strict=False):
            alone = Delta("", (token,), num_generated=delta.num_generated - len(delta.tokens) + len(sent) + 1)
            sent.append(event(self._piece(index, alone) | _with(entry)))
        rest = replace(delta, tokens=delta.tokens[len(sent) :])
        return [*sent, event(self._piece(index, rest) | _with(last) | self.envelope.times(index, rest))]

    def end(self, index: int, end: End) -> list[bytes]:
        body = last_body(self.envelope, index, Answer((), end), self._has_line[index])
        return [event(selected(body, self._fields))]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return []
        return [event({"index": 0, "content": "", "stop": True, "choices": [], "usage": self.envelope.usage(ends)})]

    def fail(self, error: RequestError) -> list[bytes]:
        return [event(error.body())]

    def whole(self, answers: Sequence[Answer]) -> Fields | list[Fields]:
        made = self.envelope
        bodies: list[Fields] = []
        for index, answer in enumerate(answers):
            body = last_body(made, index, answer, "\n" in answer.text) | {"usage": made.usage([answer.end])}
            body |= _with(*self._probabilities[index].entries(answer.whole()))
            bodies.append(selected(body, self._fields))
        return bodies[0] if made.num_choices == 1 else bodies

    def _piece(self, index: int, delta: Delta) -> Fields:
        request = self.envelope.generations[index].request
        return {
            "index": index,
            "content": delta.text,
            "tokens": delta.tokens,
            "stop": False,
            "id_slot": request.lane,
            "tokens_predicted": delta.num_generated,
            "tokens_evaluated": request.num_prompt,
        }


def verbose(envelope: Envelope, index: int, answer: Answer) -> Fields:
    """Return `__verbose`, which shows the answer as `/completion` would, if it is wanted."""
    return {"__verbose": last_body(envelope, index, answer, "\n" in answer.text)} if envelope.verbose else {}


def last_body(envelope: Envelope, index: int, answer: Answer, has_line: bool) -> Fields:
    """Return the body of an answer, or the last one of a stream. has_line: whether its text has a line's end."""
    generation, end = envelope.generations[index], answer.end
    report = end.report
    about: Fields = {
        "index": index,
        "content": answer.text,
        "tokens": answer.tokens if envelope.options.return_tokens else (),
        "id_slot": report.lane,
        "stop": True,
        "model": envelope.model,
        "tokens_predicted": report.num_generated,
        "tokens_evaluated": report.num_prompt,
        "generation_settings": generation_settings(envelope, generation),
        "prompt": end.prompt,
        "has_new_line": has_line,
        "truncated": _is_truncated(generation, end),
        "stop_type": "limit" if end.reason == "length" else "word" if report.stop is not None else "eos",
        "stopping_word": report.stop or "",
        "tokens_cached": report.num_prompt + max(report.num_generated - 1, 0),
    }
    return about | accounts(report) | envelope.notes()


def generation_settings(envelope: Envelope, generation: Generation) -> Fields:
    """Return the options in force, by llama-server's names."""
    options = envelope.options
    return generation.sampling.shown() | {
        "stop": options.stops(),
        "max_tokens": generation.wanted,
        "n_predict": generation.wanted,
        "n_keep": 0,
        "n_discard": 0,
        "stream": bool(options.stream),
        "timings_per_token": options.timings_per_token,
    }


def selected(body: Fields, paths: Sequence[str]) -> Fields:
    """Return the fields at these paths, such as `timings/prompt_n`, by their paths; without paths, all fields."""
    if not paths:
        return body
    found: Fields = {}
    for path in paths:
        value: object = body
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found


def _is_truncated(generation: Generation, end: End) -> bool:
    """Whether the context, and not the request, ended the answer."""
    return end.reason == "length" and not 0 <= generation.wanted <= generation.limit


def _with(*entries: Fields | None) -> Fields:
    """Return the field of tokens with their probabilities, if there are some."""
    told = [entry for entry in entries if entry is not None]
    return {"completion_probabilities": told} if told else {}
