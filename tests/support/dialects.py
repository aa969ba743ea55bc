"""All APIs that generate, in one table: how to ask, and how to read a whole or a streamed answer.

Their common behaviour is tested once, with a parameter of `ALL`, `CHATS` or `CALLERS`. Reading a stream checks its shape:
events that an API's clients would not expect, or in another order, fail the test.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import httpx
from slotcache.server.api.chat import ChatReply
from slotcache.server.api.completions import NativeReply, TextReply
from slotcache.server.api.messages import MessagesReply
from slotcache.server.api.ollama import OllamaReply
from slotcache.server.api.responses import ResponsesReply

Body = dict[str, Any]
QUESTION = "Tell me of the town."
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


@dataclass(frozen=True, slots=True)
class Said:
    """The content of an answer, the same for every API.

    thought: its reasoning.
    calls: the name and the arguments of each call.
    reason: `length`, `stop` or `calls`.
    word: the stop string that ended it, if the API reports it.
    num_prompt, num_cached, num_generated: numbers of tokens.
    """

    text: str
    thought: str
    calls: tuple[tuple[str, Any], ...]
    reason: str
    word: str | None
    num_prompt: int
    num_cached: int
    num_generated: int
    warnings: tuple[str, ...]


class Dialect(ABC):
    """One API.

    reply: the class that writes its answers.
    is_chat: whether the question is inside a chat template.
    names_word: whether an answer reports the stop string that ended it.
    kinds: the types of errors, by status.
    """

    path = ""
    reply: type
    media_type = "text/event-stream; charset=utf-8"
    is_chat, names_word = True, True
    has_names = has_done = False  # whether a stream's events have names, and whether a last line follows them
    kinds: Mapping[int, str] = KINDS

    def __str__(self) -> str:
        return self.path

    # ---- to ask ------------------------------------------------------------------------------------------------------

    def body(
        self, said: str = QUESTION, *, most: int = 12, stop: str | Sequence[str] = (), system: str = "", **fields: Any
    ) -> Body:
        """Return a body that asks for a greedy answer. said: the question, or the prompt if there is no template."""
        return (
            {"model": "tiny", "temperature": 0, "ignore_eos": True}
            | self._asks(said, system)
            | self._ends(most, stop)
            | fields
        )

    def _asks(self, said: str, system: str) -> Body:
        first = [{"role": "system", "content": system}] if system else []
        return {"messages": [*first, {"role": "user", "content": said}]}

    def _ends(self, most: int, stop: str | Sequence[str]) -> Body:
        return {"max_tokens": most, "stop": stop}

    def tools(self, **parameters: Body) -> Body:
        """Return the fields of a request whose answer must call one of these functions, once."""
        made = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in parameters.items()]
        return {"tools": made, "tool_choice": "required", "parallel_tool_calls": False, "ignore_eos": False}

    def ask(self, server: Any, *said: str, **fields: Any) -> httpx.Response:
        return server.http.post(self.path, json=self.body(*said, **fields))

    def whole(self, server: Any, *said: str, **fields: Any) -> Said:
        answer = self.ask(server, *said, stream=False, **fields)
        assert answer.status_code == 200, answer.text
        return self.read(answer.json())

    def streamed(self, server: Any, *said: str, **fields: Any) -> Said:
        return self.join(self.events_of(self.ask(server, *said, stream=True, **fields)))

    # ---- to read -----------------------------------------------------------------------------------------------------

    def events(self, lines: Iterable[str]) -> Iterator[Body]:
        """Yield the events of a stream as its lines arrive. Comments are skipped."""
        name, is_done = None, False
        for line in filter(None, lines):
            assert not is_done, "nothing follows the last line"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert name == (event["type"] if self.has_names else None)
                yield event
                name = None
            elif line.startswith("event: "):
                name = line.removeprefix("event: ")
            else:
                is_done = line == "data: [DONE]"
                assert is_done or line.startswith(":"), line
        assert is_done == self.has_done

    def events_of(self, answer: httpx.Response) -> list[Body]:
        """Return the events of a stream that has ended."""
        assert (answer.status_code, answer.headers["content-type"]) == (200, self.media_type), answer.text
        return [*self.events(answer.text.split("\n"))]

    @abstractmethod
    def read(self, body: Body) -> Said:
        """Read a whole answer."""

    @abstractmethod
    def join(self, events: Sequence[Body]) -> Said:
        """Read an answer from its events."""

    def refused(self, answer: httpx.Response, status: int = 400) -> str:
        """Return the message of a refusal, and check its shape and type."""
        assert answer.status_code == status, answer.text
        return self.message(answer.json(), status)

    def message(self, body: Body, status: int) -> str:
        error = body["error"]
        assert error.keys() >= {"message", "type", "param", "code"} and error["message"]
        assert error["type"] == ("exceed_context_size_error" if "n_ctx" in error else self.kinds[status])
        return error["message"]

    def failure(self, event: Body, status: int = 500) -> str:
        """Return the message of the error that ends a stream."""
        return self.message(event, status)


class Chat(Dialect):
    """OpenAI's chat completions."""

    path, reply, has_done = "/v1/chat/completions", ChatReply, True
    whole_kind, kind = "chat.completion", "chat.completion.chunk"

    def body(self, *said: str, **fields: Any) -> Body:
        usage = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
        return super().body(*said, **usage | fields)

    def read(self, body: Body) -> Said:
        (choice,) = body["choices"]
        assert body["object"] == self.whole_kind and choice["index"] == 0
        return self._said(body, choice["finish_reason"], *self._parts_of(choice))

    def _parts_of(self, choice: Body) -> tuple[str, str, list[tuple[str, Any]]]:
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(one["name"], decoded(one["arguments"])) for one in functions]
        return message["content"] or "", message.get("reasoning_content") or "", calls

    def join(self, events: Sequence[Body]) -> Said:
        assert len({event["id"] for event in events}) == 1 and {event["object"] for event in events} == {self.kind}
        *reported, last = events
        assert last["choices"] == [] and last["usage"], "the usage, which was asked for"
        choices = [choice for event in reported for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons.index(reasons[-1]) == len(reasons) - 1 and set(reasons[:-1]) == {None}
        notes = {name: value for event in reported for name, value in event.items() if name == "warnings"}
        return self._said(last | notes, reasons[-1], *self._joined(choices))

    def _joined(self, choices: Sequence[Body]) -> tuple[str, str, list[tuple[str, Any]]]:
        deltas = [choice["delta"] for choice in choices if choice["delta"]]  # pings and the end have an empty delta
        assert deltas[0] == {"role": "assistant", "content": None} and not choices[-1]["delta"]
        calls: list[list[str]] = []
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if "id" in call:
                assert call["index"] == len(calls) and call["id"]
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        text, thought = ("".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content"))
        return text, thought, [(name, decoded(arguments)) for name, arguments in calls]

    def _said(self, body: Body, reason: str, text: str, thought: str = "", calls: Sequence[tuple[str, Any]] = ()) -> Said:
        usage = body["usage"]
        num_prompt, num_generated = usage["prompt_tokens"], usage["completion_tokens"]
        assert usage["total_tokens"] == num_prompt + num_generated == body["timings"]["predicted_n"] + num_prompt
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason, word = "calls" if reason == "tool_calls" else reason, body.get("stopping_word")
        notes = tuple(body.get("warnings", ()))
        return Said(text, thought, tuple(calls), reason, word, num_prompt, cached, num_generated, notes)


class Text(Chat):
    """OpenAI's completions."""

    path, reply, is_chat = "/v1/completions", TextReply, False
    whole_kind = kind = "text_completion"

    def _asks(self, said: str, system: str) -> Body:
        return {"prompt": said}

    def _parts_of(self, choice: Body) -> tuple[str, str, list[tuple[str, Any]]]:
        return choice["text"], "", []

    def _joined(self, choices: Sequence[Body]) -> tuple[str, str, list[tuple[str, Any]]]:
        return "".join(choice["text"] for choice in choices), "", []


class Native(Dialect):
    """llama-server's completion."""

    path, reply, is_chat = "/completion", NativeReply, False

    def _asks(self, said: str, system: str) -> Body:
        return {"prompt": said}

    def _ends(self, most: int, stop: str | Sequence[str]) -> Body:
        return {"n_predict": most, "stop": stop}

    def read(self, body: Body) -> Said:
        assert body["stop"] is True and body["index"] == 0
        reason = "length" if body["stop_type"] == "limit" else "stop"
        word, costs = body["stopping_word"] or None, (body["tokens_evaluated"], body["timings"]["cache_n"])
        assert (body["stop_type"] == "word") == (word is not None)
        notes = tuple(body.get("warnings", ()))
        return Said(body["content"], "", (), reason, word, *costs, body["tokens_predicted"], notes)

    def join(self, events: Sequence[Body]) -> Said:
        *pieces, last = events
        assert last["content"] == "" and not any(piece["stop"] for piece in pieces)
        counts = [piece["tokens_predicted"] for piece in pieces]
        assert counts == sorted(counts) and {piece["tokens_evaluated"] for piece in pieces} == {last["tokens_evaluated"]}
        return self.read(last | {"content": "".join(piece["content"] for piece in pieces)})


class Messages(Dialect):
    """Anthropic's Messages."""

    path, reply, has_names = "/v1/messages", MessagesReply, True
    kinds = KINDS | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    reasons: Mapping[str, str] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "tool_use": "calls",
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
    }

    def _asks(self, said: str, system: str) -> Body:
        return super()._asks(said, "") | ({"system": system} if system else {})

    def _ends(self, most: int, stop: str | Sequence[str]) -> Body:
        return {"max_tokens": most, "stop_sequences": [stop] if isinstance(stop, str) else [*stop]}

    def tools(self, **parameters: Body) -> Body:
        made = [{"name": name, "input_schema": one} for name, one in parameters.items()]
        return {"tools": made, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "ignore_eos": False}

    def read(self, body: Body) -> Said:
        assert (body["type"], body["role"]) == ("message", "assistant") and body["id"].startswith("msg_")
        blocks, usage = body["content"], body["usage"]
        text, thought = ("".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("text", "thinking"))
        calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
        word = body["stop_sequence"]
        assert (body["stop_reason"] == "stop_sequence") == (word is not None)
        cached, num_generated = usage["cache_read_input_tokens"], usage["output_tokens"]
        num_prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        ends = self.reasons[body["stop_reason"]], word
        return Said(text, thought, calls, *ends, num_prompt, cached, num_generated, tuple(body.get("warnings", ())))

    def join(self, events: Sequence[Body]) -> Said:
        first, second, *reported, changed, last = events
        kinds = [event["type"] for event in (first, second, changed, last)]
        assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
        message = first["message"]
        assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
        of_blocks = [event for event in reported if event["type"] != "ping"]
        blocks = [_block(at, [*one]) for at, one in groupby(of_blocks, lambda event: event["index"])]
        assert [at for at, _ in blocks] == [*range(len(blocks))]
        costs = {"usage": changed["usage"]} | {name: changed[name] for name in ("warnings",) if name in changed}
        said = self.read(message | {"content": [block for _, block in blocks]} | changed["delta"] | costs)
        if not any("retrieved" in (report_in(event) or {}) for event in events):  # a search may lengthen the prompt
            assert sum(message["usage"].values()) in (said.num_prompt, 0), "0 where its model was still to be loaded"
        return said

    def message(self, body: Body, status: int) -> str:
        error = body["error"]
        assert body.keys() == {"type", "error"} and body["type"] == "error" and error["message"]
        assert error["type"] == self.kinds[status]
        return error["message"]


def _block(at: int, events: Sequence[Body]) -> tuple[int, Body]:
    """Return the number and the content of a message's block, from the events that open, fill and close it."""
    first, *deltas, last = events
    assert first["type"] == "content_block_start" and last["type"] == "content_block_stop"
    assert {event["type"] for event in deltas} <= {"content_block_delta"}
    block, texts = first["content_block"], dict[str, str]()
    for event in deltas:
        kind, (name, text) = event["delta"]["type"], [*event["delta"].items()][1]
        assert kind in ("text_delta", "thinking_delta", "signature_delta", "input_json_delta")
        texts[name] = texts.get(name, "") + text
    if "partial_json" in texts:
        texts = {"input": decoded(texts["partial_json"])}
    return at, block | texts


class Responses(Dialect):
    """OpenAI's Responses."""

    path, reply, has_names = "/v1/responses", ResponsesReply, True
    parts: Mapping[str, str] = {
        "message": "content_part.added output_text.delta output_text.done content_part.done",
        "reasoning": "content_part.added reasoning_text.delta reasoning_text.done content_part.done",
        "summary": "reasoning_summary_part.added reasoning_summary_text.delta reasoning_summary_text.done "
        "reasoning_summary_part.done",
        "function_call": "function_call_arguments.delta function_call_arguments.done",
    }
    """The events within an item, by its type. Successive deltas count as one."""

    def _asks(self, said: str, system: str) -> Body:
        return {"input": said} | ({"instructions": system} if system else {})

    def _ends(self, most: int, stop: str | Sequence[str]) -> Body:
        return {"max_output_tokens": most, "stop": stop}

    def tools(self, **parameters: Body) -> Body:
        made = [{"type": "function", "name": name, "parameters": one} for name, one in parameters.items()]
        return super().tools() | {"tools": made}

    def read(self, body: Body) -> Said:
        assert body["object"] == "response" and body["id"].startswith("resp_") and body["error"] is None
        items, usage = body["output"], body["usage"]
        parts = [part for item in items for name in ("summary", "content") for part in item.get(name, ())]
        text, thought = (
            "".join(part["text"] for part in parts if (part["type"] == "output_text") == is_text)
            for is_text in (True, False)
        )
        calls = tuple((one["name"], decoded(one["arguments"])) for one in items if one["type"] == "function_call")
        is_cut = body["status"] == "incomplete"
        assert is_cut or (body["status"] == "completed" and body["completed_at"])
        assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
        num_prompt, num_generated = usage["input_tokens"], usage["output_tokens"]
        assert usage["total_tokens"] == num_prompt + num_generated
        ends = "length" if is_cut else "calls" if calls else "stop", body.get("stopping_word")
        costs = num_prompt, usage["input_tokens_details"]["cached_tokens"], num_generated
        return Said(text, thought, calls, *ends, *costs, tuple(body.get("warnings", ())))

    def join(self, events: Sequence[Body]) -> Said:
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        first, second, *reported, last = events
        response = last["response"]
        kinds = [event["type"].removeprefix("response.") for event in (first, second, last)]
        assert kinds == ["created", "in_progress", response["status"]] and last["timings"] == response["timings"]
        assert all(event["response"]["status"] == "in_progress" for event in (first, second))
        reported = [event for event in reported if event["type"] != "response.in_progress"]
        items = [self._item([*one]) for _, one in groupby(reported, lambda event: event["output_index"])]
        assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [response["status"]]
        assert items == response["output"] and {event["response"]["id"] for event in (first, second)} == {response["id"]}
        return self.read(response)

    def _item(self, events: Sequence[Body]) -> Body:
        """Return an item, from the events that add, fill and end it."""
        first, *within, last = events
        item = last["item"]
        assert first["item"]["status"] == "in_progress" and {event["item_id"] for event in within} == {item["id"]}
        deltas = [event["delta"] for event in within if event["type"].endswith(".delta")]
        kinds = [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]
        between = self.parts["summary" if item.get("summary") else item["type"]].split()
        between = [kind for kind in between if deltas or not kind.endswith(".delta")]
        assert kinds == ["output_item.added", *between, "output_item.done"]
        (done,) = (event for event in within if event["type"].endswith(("text.done", "arguments.done")))
        whole = item["arguments"] if "arguments" in item else (item.get("summary") or item["content"])[0]["text"]
        parts = [event["part"]["text"] for event in within if event["type"].endswith("part.done")]
        assert {whole, done.get("text", done.get("arguments")), *parts} == {"".join(deltas)}
        return item

    def failure(self, event: Body, status: int = 500) -> str:
        response = event["response"]
        assert (event["type"], response["status"]) == ("response.failed", "failed")
        assert response["error"]["code"] == self.kinds[status]
        return response["error"]["message"]


class Ollama(Dialect):
    """Ollama's chat, which streams by default."""

    path, reply = "/api/chat", OllamaReply
    media_type, names_word = "application/x-ndjson", False

    def _ends(self, most: int, stop: str | Sequence[str]) -> Body:
        return {"options": {"num_predict": most, "stop": stop}}

    def events(self, lines: Iterable[str]) -> Iterator[Body]:
        return map(json.loads, filter(None, lines))

    def read(self, body: Body) -> Said:
        assert body["done"] is True and body["created_at"]
        text, thought, calls = self._parts_of(body)
        reason, num_cached = body["done_reason"], body["slotcache"]["cached_tokens"]
        costs = body["prompt_eval_count"], num_cached, body["eval_count"]
        ends = "calls" if calls and reason == "stop" else reason, None
        return Said(text, thought, calls, *ends, *costs, tuple(body.get("warnings", ())))

    def join(self, events: Sequence[Body]) -> Said:
        *pieces, last = events
        assert not any(piece["done"] for piece in pieces) and self._parts_of(last) == ("", "", ())
        assert {event["model"] for event in events} == {last["model"]}
        texts, thoughts, calls = zip(*map(self._parts_of, pieces), strict=True)
        said: Body = {"content": "".join(texts), "thinking": "".join(thoughts)}
        said["tool_calls"] = [{"function": {"name": name, "arguments": given}} for some in calls for name, given in some]
        return self.read(last | ({"message": said} if "message" in last else said | {"response": said["content"]}))

    def _parts_of(self, body: Body) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
        said = body.get("message", body)
        calls = [call["function"] for call in said.get("tool_calls", ())]
        text = said["content"] if "message" in body else said["response"]
        return text, said.get("thinking", ""), tuple((call["name"], call["arguments"]) for call in calls)

    def message(self, body: Body, status: int) -> str:
        assert body.keys() == {"error"} and body["error"]
        return body["error"]


class Generate(Ollama):
    """Ollama's generate."""

    path = "/api/generate"

    def _asks(self, said: str, system: str) -> Body:
        return {"prompt": said} | ({"system": system} if system else {})


def report_in(body: Body) -> Body | None:
    """Return slotcache's report, from any of its places in a body or an event."""
    found = [body, *(body.get(name) or {} for name in ("response", "message")), *body.get("choices", ())]
    return next((one["slotcache"] for one in found if isinstance(one, dict) and one.get("slotcache")), None)


def decoded(text: str) -> Any:
    """Return the decoded arguments of a call, or their text if they are incomplete."""
    try:
        return json.loads(text)
    except ValueError:
        return text


CHAT, TEXT, NATIVE, MESSAGES, RESPONSES, OLLAMA, GENERATE = (
    one() for one in (Chat, Text, Native, Messages, Responses, Ollama, Generate)
)
ALL: tuple[Dialect, ...] = (CHAT, TEXT, NATIVE, MESSAGES, RESPONSES, OLLAMA, GENERATE)
OF = {one.path: one for one in ALL}
CHATS = tuple(one for one in ALL if one.is_chat)
CALLERS = tuple(one for one in CHATS if one is not GENERATE)  # whose answers call tools
