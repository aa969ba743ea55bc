"""OpenAI's completions, llama-server's completion and infill, and the routes of llama-server's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..chat.body import ChatRequest, CompletionRequest, InfillRequest, TextRequest
from ..chat.sampling_fields import JsonValue
from ..engine.generation import Delta, End, PromptProgress
from ..engine.usage import Fields
from ..http.api_errors import RequestError
from ..search.vectors import Vectors
from ..service.service import Service
from .endpoint import begin_answer, early_meta, loaded_of, predict, prepare, service_of, vectors_of, while_connected
from .reply import (
    ChoicesReply,
    JsonReply,
    ReplyFormat,
    ResponseMeta,
    WholeAnswer,
    accounts,
    encode,
    last_body,
    sse_event,
    verbose,
)

COMMENT = b":\n\n"


class NativeReply:
    """The replies of `/completion` and `/infill`."""

    def __init__(self, envelope: ResponseMeta) -> None:
        self.envelope, self._fields = envelope, envelope.options.response_fields
        self._has_line = [False] * envelope.num_choices
        self._probabilities = envelope.probabilities()

    def begin(self) -> list[bytes]:
        return self.ping()  # a comment instead of an empty piece: llama-server's clients expect tokens in each piece

    def ping(self) -> list[bytes]:
        return [COMMENT]

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]:
        return [sse_event(self._piece(index, Delta("")) | self.envelope.progress(progress))]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        self._has_line[index] |= "\n" in delta.text
        if not delta.text and not delta.tokens:
            return []
        *first, last = self._probabilities[index].entries(delta) or [None]  # one event for each token, as in llama-server
        sent: list[bytes] = []
        for entry, token in zip(first, delta.tokens, strict=False):
            alone = Delta("", (token,), num_generated=delta.num_generated - len(delta.tokens) + len(sent) + 1)
            sent.append(sse_event(self._piece(index, alone) | _with(entry)))
        rest = replace(delta, tokens=delta.tokens[len(sent) :])
        logprobs = _with(last) or self._no_logprobs(index)
        return [*sent, sse_event(self._piece(index, rest) | logprobs | self.envelope.times(index, rest))]

    def end(self, index: int, end: End) -> list[bytes]:
        body = last_body(self.envelope, index, WholeAnswer((), end), self._has_line[index])
        return [sse_event(selected(body, self._fields))]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        if not self.envelope.include_usage:
            return []
        return [sse_event({"index": 0, "content": "", "stop": True, "choices": [], "usage": self.envelope.usage(ends)})]

    def fail(self, error: RequestError) -> list[bytes]:
        return [sse_event(error.body())]

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields | list[Fields]:
        made = self.envelope
        bodies: list[Fields] = []
        for index, answer in enumerate(answers):
            body = last_body(made, index, answer, "\n" in answer.text) | {"usage": made.usage([answer.end])}
            body |= _with(*self._probabilities[index].entries(answer.whole()))
            bodies.append(selected(body, self._fields))
        return bodies[0] if made.num_choices == 1 else bodies

    def _no_logprobs(self, index: int) -> Fields:
        """Return the field `completion_probabilities` for a piece whose tokens belong to a stop string: an empty list.

        If the request does not ask for probabilities, return no field.
        """
        return {} if self.envelope.generations[index].sampling.n_probs is None else {"completion_probabilities": []}

    def _piece(self, index: int, delta: Delta) -> Fields:
        job = self.envelope.generations[index].job
        return {
            "index": index,
            "content": delta.text,
            "tokens": delta.tokens,
            "stop": False,
            "id_slot": job.slot,
            "tokens_predicted": delta.num_generated,
            "tokens_evaluated": job.num_prompt,
        }


def selected(body: Fields, paths: Sequence[str]) -> Fields:
    """Return the fields at these paths, with the paths as keys. Without paths, return all fields.

    A path may lead into nested objects: `timings/prompt_n`. A path that leads to no field is skipped.
    """
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


def _with(*entries: msgspec.Raw | None) -> Fields:
    """Return the field `completion_probabilities` with the entries other than None. If all entries are None, return {}."""
    given = [entry for entry in entries if entry is not None]
    return {"completion_probabilities": given} if given else {}


# ---- OpenAI's completions: chunks of a stream have the form of a whole answer. ------------------------------------------


class TextReply(ChoicesReply):
    """The replies of `/v1/completions`.

    If answers start with their prompts, the text of an answer with logprobs is joined from the texts of its tokens. The
    text and the logprobs of the answer then agree.
    """

    def __init__(self, envelope: ResponseMeta) -> None:
        super().__init__(envelope, "text_completion", "text_completion")
        self._shows_prompts = any(generation.num_echoed for generation in envelope.generations)
        self._echoes = [echo for echo in envelope.echoes for _ in range(envelope.num_each)] or [""] * envelope.num_choices

    def begin(self) -> list[bytes]:
        return [self._chunk([self._choice(index, echo)], {}) for index, echo in enumerate(self._echoes)]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if not delta.text and not delta.logprobs:
            return []
        choice = self._with_logprobs(index, self._choice(index, delta.text), delta)
        return [self._chunk([choice], self.envelope.times(index, delta))]

    def end(self, index: int, end: End) -> list[bytes]:
        more = accounts(end.report) | self.envelope.notes()
        if not self.envelope.include_usage:
            more["usage"] = self.envelope.usage([end])
        more |= verbose(self.envelope, index, WholeAnswer((), end))
        return [self._chunk([self._choice(index, "", end.reason)], more)]

    def _whole_choice(self, index: int, answer: WholeAnswer) -> Fields:
        choice = self._choice(index, self._echoes[index] + answer.text, answer.end.reason)
        return self._accounted(self._with_logprobs(index, choice, answer.whole()), answer.end)

    def _with_logprobs(self, index: int, choice: Fields, delta: Delta) -> Fields:
        """Return a choice with the logprobs of the delta's tokens, if the delta has logprobs."""
        if not delta.logprobs:
            return choice
        text, logprobs = self._probabilities[index].of_text(delta)
        return choice | {"logprobs": logprobs} | ({"text": text} if self._shows_prompts else {})

    def _choice(self, index: int, text: str = "", reason: str | None = None) -> Fields:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def opening(request: Request, asked: CompletionRequest | InfillRequest) -> ReplyFormat | None:
    form = TextReply if isinstance(asked, TextRequest) else NativeReply
    return form(early_meta(request, asked, "cmpl-")) if asked.stream else None


async def create_text(request: Request, asked: TextRequest) -> ReplyFormat:
    return TextReply(begin_answer(request, await prepare(request, asked)))


async def create_native(request: Request, asked: CompletionRequest | InfillRequest) -> ReplyFormat:
    return NativeReply(replace(begin_answer(request, await prepare(request, asked)), verbose=True))


async def infill(request: Request, asked: InfillRequest) -> ReplyFormat:
    return await create_native(request, asked)


# ---- llama-server's routes that convert between text and tokens. --------------------------------------------------------

PIECE = 50_000  # tokens that are encoded at a time


class TokenizeRequest(msgspec.Struct):
    """`POST /tokenize`. content: a text, a list of token ids, or a list of both."""

    content: str | list[JsonValue]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: str | None = None


async def tokenize(request: Request, asked: TokenizeRequest) -> Response:
    vectors, service = vectors_of(request), loaded_of(request).service
    if service is not None:
        service.engine.sleep.expect()
    tokens = await while_connected(request, vectors.threads.run(request.state.num_bytes, _tokens, vectors, asked))
    return JsonReply(await asyncio.to_thread(_encode_tokens, tokens, vectors.model.spelling if asked.with_pieces else None))


async def detokenize(request: Request, asked: DetokenizeRequest) -> Response:
    vectors = vectors_of(request)
    work = vectors.threads.run(request.state.num_bytes, _encode_text, vectors, asked.tokens)
    return JsonReply(await while_connected(request, work))


async def apply_template(request: Request, asked: ChatRequest) -> Response:
    """Render a chat as one prompt. The chat's documents have the order that they would have if the chat were sent now."""
    service, layout = service_of(request), (await predict(request, asked)).layout
    work = service.builder.threads.run(request.state.num_bytes, _encode_prompt, service, layout.ids)
    return JsonReply(await while_connected(request, work))


# ---- These answers may be as long as the body of a request, so a thread makes them. -------------------------------------


def _tokens(vectors: Vectors, asked: TokenizeRequest) -> np.ndarray:
    return vectors.texts.tokens(asked.content, "content", special=asked.parse_special, begin=asked.add_special)


def _encode_tokens(tokens: np.ndarray, spelling: Callable[[int], bytes] | None) -> bytes:
    """Encode tokens as JSON, `PIECE` tokens at a time, because all other threads wait while the encoder runs.

    spelling: returns the bytes of a token; None: the client wants only the ids.
    """
    pieces = (encode(_shown(tokens[at : at + PIECE].tolist(), spelling))[1:-1] for at in range(0, len(tokens), PIECE))
    return b'{"tokens":[' + b",".join(pieces) + b"]}"


def _shown(tokens: list[int], spelling: Callable[[int], bytes] | None) -> list[object]:
    return [{"id": token, "piece": _piece(spelling(token))} for token in tokens] if spelling else [*tokens]


def _piece(spelling: bytes) -> str | list[int]:
    """Return the text of a token, or a list of its bytes if they are not whole characters."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)


def _encode_text(vectors: Vectors, tokens: list[int]) -> bytes:
    """Encode the text of tokens. Raises RequestError for a token outside the vocabulary."""
    model = vectors.model
    if unknown := next((token for token in tokens if token >= model.num_vocab), None):
        raise RequestError(f"tokens: {unknown} is not below {model.num_vocab}", param="tokens")
    return encode({"content": model.detokenize(np.array(tokens, np.int32), special=True)})


def _encode_prompt(service: Service, tokens: np.ndarray) -> bytes:
    """Encode a prompt as a text that `/completion` turns into the same tokens.

    The text has no BOS, because `/completion` adds it.
    """
    begin = service.model.tokenizer.begin
    shown = tokens[len(begin) :] if np.array_equal(tokens[: len(begin)], begin) else tokens
    return encode({"prompt": service.model.prompt_text(shown), "n_tokens": len(tokens)})
