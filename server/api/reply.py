"""The parts of answers: common fields, usage, probabilities, events and whole bodies."""

from __future__ import annotations

import base64
import math
from abc import abstractmethod
from binascii import Error
from codecs import getincrementaldecoder
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from time import time
from typing import Protocol

import msgspec
from msgspec import Raw
from starlette.responses import Response

from ...models.sampling import Logprobs
from ..chat.body import Options
from ..engine.generation import Delta, End, Generation, PromptProgress
from ..engine.usage import Fields, Report
from ..formats.answer import AnswerReader, Plain
from ..http.api_errors import RequestError

# ---- The tokens of an answer with their probabilities, as OpenAI and llama-server write them. ---------------------------

Piece = Callable[[int], bytes]


class Probabilities:
    """Writes the tokens of one choice with their probabilities. The joined texts of the tokens are the answer.

    If a character consists of several tokens, the last token's text is the whole character, and the other texts are
    empty. If a stop string begins in a token, the token's text ends before the stop string.

    piece: returns the bytes of a token.
    after: if true, write the probability of each token after the samplers; if false, write the logarithm of the
        probability that the model itself gives.
    num_prompt: the number of the prompt's tokens, if the choice starts with its prompt; else 0.
    spelling: like `piece`, but for control tokens in the prompt.
    """

    def __init__(self, piece: Piece, after: bool = False, num_prompt: int = 0, spelling: Piece | None = None) -> None:
        self._piece, self._after, self._offset = piece, after, 0
        self._num_prompt, self._spelling = num_prompt, spelling or piece
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def entries(self, delta: Delta) -> list[Raw]:
        """Return one object for each of the next tokens, with OpenAI's fields for chats and llama-server's `id`.

        The objects are returned as JSON to save memory: a listed token takes 84 bytes as JSON, but 400 as Python objects.
        """
        return [entry for _, entry in self._with_texts(delta)]

    def _with_texts(self, delta: Delta) -> list[tuple[str, Raw]]:
        """Return, for each of the next tokens, its part of the text, and its object as JSON."""
        last = len(delta.logprobs) - 1 if delta.is_last else -1
        return [
            self._entry(logprobs, final=at == last, kept=delta.kept if at == last else None)
            for at, logprobs in enumerate(delta.logprobs)
        ]

    def _entry(self, logprobs: Logprobs, final: bool, kept: int | None) -> tuple[str, Raw]:
        piece = self._piece(logprobs.token)
        if self._num_prompt:
            self._num_prompt -= 1
            piece = piece or self._spelling(logprobs.token)
        if kept is not None:
            piece = self._shortest(piece, kept)
        text = self._decoder.decode(piece, final)[:kept]
        best = zip(logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist(), strict=True)
        top = [self._token(token, spelt(self._piece(token)), self._piece(token), logprob) for token, logprob in best]
        chosen = self._token(logprobs.token, text, piece, logprobs.logprob)
        return text, Raw(encode(chosen | {"top_probs" if self._after else "top_logprobs": top}))

    def _shortest(self, piece: bytes, length: int) -> bytes:
        """Return the shortest prefix of a piece that completes `length` characters."""
        before = self._decoder.getstate()
        for size in range(len(piece)):
            self._decoder.setstate(before)
            if len(self._decoder.decode(piece[:size])) >= length:
                piece = piece[:size]
                break
        self._decoder.setstate(before)
        return piece

    def _token(self, token: int, text: str, piece: bytes, logprob: float) -> Fields:
        name, value = ("prob", math.exp(logprob)) if self._after else ("logprob", logprob)
        return {"id": token, "token": text, "bytes": list(piece), name: value}

    def of_text(self, delta: Delta) -> tuple[str, Fields]:
        """Return the text of the next tokens, and their `logprobs` in OpenAI's form for text completions.

        The object `logprobs` also has llama-server's field `content`.
        """
        entries, logprobs = self._with_texts(delta), delta.logprobs
        texts = [text for text, _ in entries]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return "".join(texts), {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [None if math.isnan(each.logprob) else self._top(each) for each in logprobs],
            "text_offset": offsets,
            "content": [entry for _, entry in entries],
        }

    def _top(self, logprobs: Logprobs) -> Fields:
        """Return the logprobs of the most probable tokens, by the text of each token.

        If several tokens have the same text, the text gets the highest logprob.
        """
        best = reversed(list(zip(logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist(), strict=True)))
        return {spelt(self._piece(token)): logprob for token, logprob in best}


def spelt(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


Spell = Callable[[Generation], Awaitable[str]]
"""Returns the text of a computed prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMeta:
    """What the replies of all APIs need: common fields of an answer, its generations, and functions on them.

    options: the fields of the request, without its texts.
    num_prompts: the number of prompts. Each prompt has `options.n` choices.
    echoes: the prompts' texts, if the answers start with them.
    generations: one generation for each choice, in order.
    reader: makes an object that splits the text of a choice into reasoning, content and calls.
    caches: whether the prompt stays in the cache.
    verbose: whether the answer shows its prompt and its options, as in llama-server.
    warnings: texts about the request's fields.
    piece: returns the bytes of a token.
    spelling: like `piece`, but also for control tokens.
    prompt_text: returns the text of a computed prompt.
    abandon: ends an open generation.
    disconnect: ends an open generation, unless the request wants it to go on without its client.
    keep: stores the whole answer (JSON), if the API stores answers; called in the event loop.
    media_type: the type of a stream.
    """

    id: str
    model: str
    fingerprint: str
    options: Options
    num_prompts: int = 1
    echoes: Sequence[str] = ()
    generations: Sequence[Generation] = ()
    reader: Callable[[], AnswerReader] = Plain
    caches: bool = False
    verbose: bool = False
    warnings: tuple[str, ...] = ()
    piece: Piece = lambda token: b""
    spelling: Piece = lambda token: b""
    prompt_text: Spell | None = None
    abandon: Callable[[Generation], None] = lambda generation: None
    disconnect: Callable[[Generation], None] = lambda generation: None
    keep: Callable[[bytes], None] = lambda answer: None
    media_type: str = "text/event-stream"
    created: int = field(default_factory=lambda: int(time()))

    @property
    def num_each(self) -> int:
        """The number of choices for each prompt."""
        return self.options.n or 1

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.num_each

    @property
    def spell(self) -> Spell | None:
        """The function that returns the prompts' texts; None if the answer does not show them."""
        return self.prompt_text if self.verbose else None

    def probabilities(self) -> list[Probabilities]:
        """Return a writer of probabilities for each choice."""
        return [
            Probabilities(self.piece, self.options.post_sampling_probs, generation.num_echoed, self.spelling)
            for generation in self.generations
        ]

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.options.stream_options is not None and self.options.stream_options.include_usage

    def notes(self) -> Fields:
        """Return the field `warnings` of a whole answer or of a stream's last chunk. Without warnings, return no field."""
        return {"warnings": self.warnings} if self.warnings else {}

    def head(self, kind: str) -> Fields:
        """Return the fields with which all of OpenAI's objects start. kind: the value of the field `object`."""
        made: Fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"system_fingerprint": self.fingerprint}

    def progress(self, progress: PromptProgress) -> Fields:
        """Return the fields that report the progress of the prefill."""
        fields: Fields = {"prompt_progress": asdict(progress)}
        return fields | {"timings": progress.timings()} if self.options.timings_per_token else fields

    def times(self, index: int, delta: Delta) -> Fields:
        """Return the field with an answer's timings so far. Without `timings_per_token`, return no field."""
        if not self.options.timings_per_token:
            return {}
        return {"timings": self.generations[index].timings(delta.num_generated)}

    def usage(self, ends: Sequence[End]) -> Fields:
        """Return OpenAI's `usage` for all choices together. A prompt that has several choices is counted once."""
        prompts, reports = ends[:: self.num_each], [end.report for end in ends]
        num_prompt, num_generated = sum(end.report.num_prompt for end in prompts), sum(r.num_generated for r in reports)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(end.report.num_cached for end in prompts)},
        }


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """One choice of an answer that is sent whole. deltas: all pieces of the choice, in order."""

    deltas: tuple[Delta, ...]
    end: End

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(delta.tokens for delta in self.deltas))

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return tuple(chain.from_iterable(delta.logprobs for delta in self.deltas))

    def whole(self) -> Delta:
        return Delta(self.text, self.tokens, self.logprobs, is_last=True, kept=self.end.kept)


class ReplyFormat(Protocol):
    """The form of an answer in one API.

    All methods except `whole` return pieces of a stream: encoded server-sent events, or lines of JSON.
    """

    envelope: ResponseMeta

    def begin(self) -> list[bytes]:
        """Begin the answer. Called once, before any event of a choice and possibly before the prefill."""
        ...

    def ping(self) -> list[bytes]:
        """Return a piece that keeps the connection alive. May be called at any time, even before the model is loaded.

        If the API has events without text, the piece is such an event and not a comment: some clients ignore comments.
        """
        ...

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]: ...

    def delta(self, index: int, delta: Delta) -> list[bytes]: ...

    def end(self, index: int, end: End) -> list[bytes]:
        """End a choice. The choice's last text and tokens have already been sent as a delta."""
        ...

    def close(self, ends: Sequence[End]) -> list[bytes]:
        """End the answer. Called once, after all choices have ended. ends: the ends of all choices, in order."""
        ...

    def fail(self, error: RequestError) -> list[bytes]:
        """End the answer with an error. No event follows."""
        ...

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields | list[Fields]:
        """Return the body of an answer that is sent whole."""
        ...


def accounts(report: Report) -> Fields:
    """Return two fields of an answer: `timings`, as in llama-server, and this server's own `slotcache`.

    If a stop string ended the answer, also return `stopping_word`.
    """
    fields: Fields = {"timings": report.timings(), "slotcache": report.slotcache()}
    return fields if report.stop is None else fields | {"stopping_word": report.stop}


def sse_event(body: Fields, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(body) + b"\n\n"


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


# ---- OpenAI's choices, whole or in chunks of the same form, and llama-server's body of an answer. -----------------------


class ChoicesReply:
    """What the replies to OpenAI's chats and text completions have in common.

    kind, whole_kind: the value of the field `object` in a chunk and in a whole answer.
    """

    def __init__(self, envelope: ResponseMeta, kind: str, whole_kind: str) -> None:
        self.envelope, self._probabilities = envelope, envelope.probabilities()
        self._head, self._whole_head = envelope.head(kind), envelope.head(whole_kind)

    @abstractmethod
    def _choice(self, index: int) -> Fields:
        """Return a chunk's choice that has no text."""

    @abstractmethod
    def _whole_choice(self, index: int, answer: WholeAnswer) -> Fields: ...

    def _chunk(self, choices: list[Fields], more: Fields) -> bytes:
        return sse_event(self._head | {"choices": choices} | more)

    def ping(self) -> list[bytes]:
        return [self._chunk([self._choice(0)], {})]

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]:
        return [self._chunk([self._choice(index)], self.envelope.progress(progress))]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return [DONE]
        return [self._chunk([], {"usage": self.envelope.usage(ends)} | accounts(ends[0].report)), DONE]

    def fail(self, error: RequestError) -> list[bytes]:
        return [sse_event(error.body()), DONE]

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields:
        choices, ends = [self._whole_choice(index, one) for index, one in enumerate(answers)], [one.end for one in answers]
        body = self._whole_head | {"choices": choices} | accounts(ends[0].report) | self.envelope.notes()
        return body | {"usage": self.envelope.usage(ends)} | verbose(self.envelope, 0, answers[0])

    def _accounted(self, choice: Fields, end: End) -> Fields:
        """Return a whole choice. If the answer has several choices, add this choice's `timings` and `slotcache`."""
        return choice if self.envelope.num_choices == 1 else choice | accounts(end.report)


def verbose(envelope: ResponseMeta, index: int, answer: WholeAnswer) -> Fields:
    """Return the field `__verbose`, which shows the answer as `/completion` would. Without `verbose`, return no field."""
    return {"__verbose": last_body(envelope, index, answer, "\n" in answer.text)} if envelope.verbose else {}


def last_body(envelope: ResponseMeta, index: int, answer: WholeAnswer, has_line: bool) -> Fields:
    """Return the body of a whole answer, or the last body of a stream. has_line: whether the text has a newline."""
    generation, end = envelope.generations[index], answer.end
    report = end.report
    about: Fields = {
        "index": index,
        "content": answer.text,
        "tokens": answer.tokens if envelope.options.return_tokens else (),
        "id_slot": report.slot,
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


def generation_settings(envelope: ResponseMeta, generation: Generation) -> Fields:
    """Return the options that are in force for a generation, with llama-server's names."""
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


def _is_truncated(generation: Generation, end: End) -> bool:
    """Return whether the answer ended because the context was full, not because of the request's limit."""
    return end.reason == "length" and not 0 <= generation.wanted <= generation.limit


# ---- Sealed -------------------------------------------------------------------------------------------------------------
# Reasoning as a text that a client keeps for the server and sends back unchanged. It is no secret: anyone can read it.

MARK = "slotcache:"


def seal(reasoning: str) -> str:
    """Return reasoning as a text that the client keeps and sends back unchanged. `unseal` reads it."""
    return MARK + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning in a sealed text. If the text is damaged or from another server, return an empty text."""
    with suppress(Error, ValueError):
        if sealed.startswith(MARK):
            return base64.b64decode(sealed.removeprefix(MARK), validate=True).decode()
    return ""
