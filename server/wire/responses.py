"""`POST /v1/responses`: its fields, and the chat that they ask for."""

from __future__ import annotations

import reprlib
from typing import Literal, Self

import msgspec
from msgspec import Raw, Struct, field

from ..errors import RequestError
from ..settings import Attention
from .items import messages_of
from .requests import ChatRequest, ConversationReference, Count, Json, Options
from .retrieval import Retrieval

INCLUDABLE = {
    "reasoning.encrypted_content",
    # The results of tools that this server does not have, so nothing is left out:
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
}


class Reasoning(Struct, frozen=True):
    """effort: for the chat template. summary: send the thought as a summary; without it, as `reasoning_text`."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its former name


class Format(Struct, frozen=True):
    """The form of the answer. name, description, strict, schema: of a json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: dict[str, Json] | None = None

    def for_chat(self) -> dict[str, Json]:
        """Return it as the `response_format` of a chat. Raises RequestError."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema is None:
            raise RequestError("text.format.schema: expected a JSON schema", param="text.format.schema")
        named = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in named.items() if value is not None}
        return {"type": "json_schema", "json_schema": given | {"schema": self.schema}}


class TextConfig(Struct, frozen=True):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseChat(ChatRequest, frozen=True, kw_only=True):
    """The chat that a response asks for: its messages are the new ones. instructions: of this turn only."""

    instructions: str | None = None

    def without_texts(self) -> Self:
        return msgspec.structs.replace(super().without_texts(), instructions=None)


class ResponseRequest(Options, frozen=True, kw_only=True):
    """`POST /v1/responses`: OpenAI's fields of it, beside those of all completions and our own ones of a chat."""

    input: str | list[dict[str, Json]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    prompt: dict[str, Json] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    documents: list[Json] | None = None
    documents_attention: Attention | None = None
    link_tokens: Literal[0, 8, 16, 32] | None = None
    retrieval: bool | Retrieval | None = None
    tool_documents: Literal["auto", "off"] | None = None
    chat_template_kwargs: dict[str, Json] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        unknown = next((name for name in self.include or () if name not in INCLUDABLE), None)
        for is_wrong, param, message in (
            (self.background, "background", "background is not supported: leave it out, and stream"),
            (
                self.truncation == "auto",
                "truncation",
                "truncation is auto: nothing is left out of a prompt here",
            ),
            (self.prompt, "prompt", "prompt names a template that this server does not have: send input and instructions"),
            (self.logprobs or self.n_probs, "logprobs", "a response has no logprobs: leave them out"),
            ((self.n or 1) > 1, "n", "a response is one answer: leave n out"),
            (unknown, "include", f"include names {reprlib.repr(unknown)}: expected some of {', '.join(sorted(INCLUDABLE))}"),
            (
                self.text and self.text.verbosity in ("low", "high"),
                "text.verbosity",
                "text.verbosity is not supported: say in the instructions how long the answer shall be",
            ),
        ):
            if is_wrong:
                raise RequestError(message, param=param)

    @property
    def summarises(self) -> bool:
        """Whether thoughts are sent as summaries."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def seals(self) -> bool:
        """Whether thoughts are sent as `encrypted_content`, too."""
        return "reasoning.encrypted_content" in (self.include or ())

    def chat(self) -> ResponseChat:
        """Return the chat. Raises RequestError."""
        self.check()
        shared = {name: getattr(self, name) for name in Options.__struct_fields__}
        if self.max_output_tokens is not None:
            shared["max_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            shared["response_format"] = self.text.format.for_chat()
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return ResponseChat(
            **shared,
            messages=messages_of(items),
            instructions=self.instructions,
            documents=self.documents,
            documents_attention=self.documents_attention,
            link_tokens=self.link_tokens,
            retrieval=self.retrieval,
            tool_documents=self.tool_documents,
            previous_response_id=self.previous_response_id,
            conversation=self._conversation(),
            store=self.store is not False,
            tools=_tools(self.tools),
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def echo(self) -> dict[str, Raw]:
        """Return the fields that a response repeats, as JSON."""
        format = self.text.format if self.text and self.text.format else Format("text")
        repeated: dict[str, Json] = {
            "background": False,
            "conversation": {"id": named.id} if (named := self._conversation()) else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning else None,
                "summary": (self.reasoning.summary or self.reasoning.generate_summary) if self.reasoning else None,
            },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": {name: value for name, value in msgspec.to_builtins(format).items() if value is not None}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        return {name: Raw(msgspec.json.encode(value)) for name, value in repeated.items()}

    def _conversation(self) -> ConversationReference | None:
        """Return the conversation, whose new messages are the input."""
        if self.conversation is None:
            return None
        named = self.conversation
        return ConversationReference(named if isinstance(named, str) else named.id, "new")


class ResponseCountRequest(ResponseRequest, frozen=True, kw_only=True):
    """`POST /v1/responses/input_tokens`."""

    input: str | list[dict[str, Json]] = field(default_factory=list)


def _tools(tools: list[dict[str, Json]] | None) -> list[dict[str, Json]] | None:
    """Return function tools as a chat has them. Raises RequestError."""
    if tools is None:
        return None
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def _tool(tool: dict[str, Json], where: str) -> dict[str, Json]:
    if tool.get("type") != "function":
        kind = reprlib.repr(tool.get("type"))
        raise RequestError(f"{where}.type is {kind}: expected function, tools that the client runs", param=f"{where}.type")
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{where}.name: expected a text", param=f"{where}.name")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Json] | None) -> str | dict[str, Json] | None:
    """Return the choice as a chat has it: what these APIs name at the top, it names one level down."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("function", "allowed_tools") or kind in choice:
        return choice
    return {"type": kind, kind: {name: value for name, value in choice.items() if name != "type"}}
