"""OpenAI's chat completions: the handlers, and the answers, which are sent as one object or as chunks of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import cast

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from ..chat.body import ChatRequest
from ..chat.content import INPUT, custom_names
from ..engine.generation import Delta, End, Generation
from ..engine.usage import Fields
from ..formats.answer import AnswerReader, CallArguments, CallStart, ContentText, Fragment, ReasoningText, message
from .endpoint import (
    answer_service_of,
    begin_answer,
    count_prompt,
    early_meta,
    not_stored,
    prepare,
    scope_of,
    service_of,
    stored_record,
)
from .reply import ChoicesReply, JsonReply, ReplyFormat, ResponseMeta, WholeAnswer, accounts, encode, verbose
from .response_tools import FreeText, free_text

KIND = "chatcmpl-"  # the prefix of an answer's id
CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatReply(ChoicesReply):
    """The replies of `/v1/chat/completions`: chunks with a `delta`, or one object with a `message`.

    customs: the names of the tools that take free text instead of JSON arguments.
    """

    def __init__(self, envelope: ResponseMeta, customs: frozenset[str] = frozenset()) -> None:
        super().__init__(envelope, "chat.completion.chunk", "chat.completion")
        self._readers = [envelope.reader() for _ in self._probabilities]
        self._has_calls = [False for _ in self._probabilities]
        self._unsent: list[list[Raw]] = [[] for _ in self._probabilities]  # tokens with logprobs, for the next chunk
        self._customs = customs
        self._texts: list[dict[int, FreeText]] = [{} for _ in self._probabilities]  # free texts, by the call's number
        # For each choice, the start of a chunk that has only text. Nearly all chunks of a stream have only text.
        self._openings = [
            b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":%d,"delta":{"content":' % index
            for index in range(len(self._readers))
        ]
        self._is_old = isinstance(envelope.options, ChatRequest) and envelope.options.functions is not None

    def begin(self) -> list[bytes]:
        first: Fields = {"role": "assistant", "content": None}
        return [self._delta_chunk(index, first, {}) for index in range(len(self._readers))]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if delta.logprobs:
            self._unsent[index] += self._probabilities[index].entries(delta)
        return self._chunks(index, self._readers[index].push(delta.text), self.envelope.times(index, delta))

    def end(self, index: int, end: End) -> list[bytes]:
        rest = self._chunks(index, self._readers[index].finish(end.is_cut), {})
        rest += [self._delta_chunk(index, _custom(at, text.finish()), {}) for at, text in self._texts[index].items()]
        choice = self._choice_with_logprobs(index, {}, self._reason(end, self._has_calls[index]))
        more = accounts(end.report) | self.envelope.notes() | verbose(self.envelope, index, WholeAnswer((), end))
        return [*rest, self._chunk([choice], more)]

    def _whole_choice(self, index: int, answer: WholeAnswer) -> Fields:
        reader = self.envelope.reader()
        said = message([*reader.push(answer.text), *reader.finish(answer.end.is_cut)])
        (probabilities, *_) = self.envelope.probabilities()
        logprobs = _logprobs(probabilities.entries(answer.whole()))
        reason = self._reason(answer.end, "tool_calls" in said)
        if self._is_old and isinstance(calls := said.pop("tool_calls", None), list):
            said["function_call"] = calls[0]["function"]
        elif isinstance(calls := said.get("tool_calls"), list):
            said["tool_calls"] = [
                _custom_call(call) if call["function"]["name"] in self._customs else call for call in calls
            ]
        choice: Fields = {"index": index, "message": said | {"refusal": None}, "logprobs": logprobs, "finish_reason": reason}
        return self._accounted(choice, answer.end)

    def _chunks(self, index: int, fragments: Sequence[Fragment], times: Fields) -> list[bytes]:
        """Return one chunk for each fragment. times: the field `timings`, which is added to each chunk, or no field."""
        write = _old_delta if self._is_old else partial(self._delta, index) if self._customs else _delta
        is_bare, sent = not (times or self._unsent[index]), list[bytes]()
        for fragment in fragments:
            if is_bare and isinstance(fragment, ContentText):
                sent.append(self._openings[index] + encode(fragment.text) + CLOSING)
            else:
                self._has_calls[index] |= isinstance(fragment, CallStart)
                sent.append(self._delta_chunk(index, write(fragment), times))
        return sent

    def _delta(self, index: int, fragment: Fragment) -> Fields:
        """Return the delta of a fragment. This method is used if some of the client's tools take free text."""
        texts = self._texts[index]
        match fragment:
            case CallStart(at, id, name) if name in self._customs:
                texts[at] = FreeText()
                call = {"index": at, "id": id, "type": "custom", "custom": {"name": name, INPUT: ""}}
                return {"tool_calls": [call]}
            case CallArguments(at, text) if at in texts:
                return _custom(at, texts[at].push(text))
        return _delta(fragment)

    def _reason(self, end: End, has_calls: bool) -> str:
        return "function_call" if self._is_old and has_calls and end.reason == "stop" else finish_reason(end, has_calls)

    def _delta_chunk(self, index: int, delta: Fields, times: Fields) -> bytes:
        return self._chunk([self._choice_with_logprobs(index, delta)], times)

    def _choice_with_logprobs(self, index: int, delta: Fields, reason: str | None = None) -> Fields:
        """Return a choice that has all unsent logprobs, and mark these logprobs as sent."""
        entries, self._unsent[index] = self._unsent[index], []
        return {"index": index, "delta": delta, "logprobs": _logprobs(entries), "finish_reason": reason}

    def _choice(self, index: int) -> Fields:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


def finish_reason(end: End, has_calls: bool) -> str:
    """Return why a chat's answer ended: `tool_calls` if it is complete and has calls, else the reason in `end`."""
    return "tool_calls" if has_calls and end.reason == "stop" else end.reason


def _logprobs(entries: list[Raw]) -> Fields | None:
    return {"content": entries, "refusal": None} if entries else None


def _delta(fragment: Fragment) -> Fields:
    match fragment:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _custom(at: int, text: str) -> Fields:
    """Return a delta with the next piece of a call's free text. at: the index of the call."""
    return {"tool_calls": [{"index": at, "custom": {INPUT: text}}]}


def _custom_call(call: Fields) -> Fields:
    function = cast("dict[str, str]", call["function"])
    custom = {"name": function["name"], INPUT: free_text(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


def _old_delta(fragment: Fragment) -> Fields:
    """Return a delta for a client that sent the older field `functions`.

    A client that sent `functions` gets only the first call.
    """
    match fragment:
        case CallStart(0, _, name):
            return {"function_call": {"name": name, "arguments": ""}}
        case CallArguments(0, text):
            return {"function_call": {"arguments": text}}
        case CallStart() | CallArguments():
            return {}
    return _delta(fragment)


def opening(request: Request, asked: ChatRequest) -> ReplyFormat | None:
    return ChatReply(early_meta(request, asked, KIND)) if asked.stream else None


async def create(request: Request, asked: ChatRequest) -> ReplyFormat:
    reply = ChatReply(begin_answer(request, await prepare(request, asked)), custom_names(asked.tools))
    if asked.outlives_client:
        (generation,) = reply.envelope.generations
        service_of(request).keep_whole(generation, partial(_whole, reply, generation))
    return reply


def _whole(reply: ChatReply, generation: Generation, end: End) -> bytes:
    """Return a streamed answer as the JSON that an unstreamed request would get. Any thread may call this function."""
    return encode(reply.whole([WholeAnswer((Delta("".join(generation.parts)),), end)]))


async def show(request: Request) -> Response:
    """Show a stored answer, or the content that an unfinished answer has so far (`?scope=`).

    Answers are stored if the request sets `on_disconnect` to `finish`.
    """
    id, scope = request.path_params["id"], scope_of(request)
    service = answer_service_of(request, scope, id)
    if _is_chat(id) and (generation := service.find_open(scope, id)):
        text = "".join(generation.parts)
        turn, read = service.open[generation], partial(_content, text)
        content = "" if turn is None else await asyncio.to_thread(read, turn.chat.shown_reader())
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": None}
        return JsonReply({"id": id, "object": "chat.completion", "status": "in_progress", "choices": [choice]})
    await service.kept(id)
    return JsonReply(stored_record(service, scope, id, KIND))


def _content(text: str, reader: AnswerReader) -> str:
    """Return the content of an unfinished answer: its text without reasoning and tool calls."""
    return "".join(fragment.text for fragment in reader.push(text) if isinstance(fragment, ContentText))


def _is_chat(id: str) -> bool:
    return id.startswith(KIND)


async def forget(request: Request) -> Response:
    """Stop a running answer, or delete a stored answer (`?scope=`)."""
    id, scope = request.path_params["id"], scope_of(request)
    service = answer_service_of(request, scope, id)
    if _is_chat(id) and (generation := service.find_open(scope, id)):
        service.stop(generation)
    elif _is_chat(id) and service.conversations.forget_answer(scope, id):
        await service.view.disk_thread.run(service.conversations.settle)
    else:
        raise not_stored(id)
    return JsonReply({"id": id, "object": "chat.completion.deleted", "deleted": True})


async def count(request: Request, asked: ChatRequest) -> Response:
    """Count the tokens of a chat's prompt."""
    return JsonReply({"object": "chat.completion.input_tokens"} | await count_prompt(request, asked))
