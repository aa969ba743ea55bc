"""Anthropic's `POST /v1/messages`: its fields, and the chat that they ask for."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from ..errors import RequestError
from ..settings import Attention
from .blocks import CacheControl, Said, Text, messages_of, system_text, wants_cache
from .requests import ChatRequest, Count, Json, Options
from .retrieval import Retrieval

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thought(Struct, frozen=True):
    """Whether the model reasons before it answers. display: omitted leaves the text of its thoughts out."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Json] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self, where: str) -> dict[str, Json]:
        """Return the tool as a chat has it. Raises RequestError."""
        if self.type not in (None, "custom"):
            raise RequestError(f"{where}.type is {self.type[:80]!r}: expected custom, with a schema", param=f"{where}.type")
        if self.input_schema is None:
            raise RequestError(f"{where}.input_schema: expected a JSON schema", param=f"{where}.input_schema")
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class ToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> Json:
        """Return the choice as a chat has it. Raises RequestError."""
        if self.type != "tool":
            return TOOL_CHOICES[self.type]
        if self.name is None:
            raise RequestError("tool_choice.name: expected the name of a tool", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Json]


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesCountRequest(Options, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt."""

    messages: list[Said]
    system: str | list[Text] = ""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thought | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    stop_sequences: list[str] | None = None
    context_management: dict[str, Json] | None = None
    mcp_servers: list[Json] | None = None
    container: Json = None
    metadata: dict[str, Json] | None = None
    service_tier: str | None = None

    documents: list[Json] | None = None
    documents_attention: Attention | None = None
    link_tokens: Literal[0, 8, 16, 32] | None = None
    retrieval: bool | Retrieval | None = None
    tool_documents: Literal["auto", "off"] | None = None
    chat_template_kwargs: dict[str, Json] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        edits = (self.context_management or {}).get("edits") or []
        for is_wrong, param, message in (
            ((self.n or 1) > 1, "n", "there is one message an answer: leave n out"),
            (self.logprobs or self.n_probs, "logprobs", "a message has no logprobs: leave them out"),
            (self.mcp_servers, "mcp_servers", "mcp_servers are not supported: run the tools in the client"),
            (self.container, "container", "containers are not supported: leave it out"),
            (
                any(not _is_about_thoughts(edit) for edit in edits),
                "context_management",
                "context_management: only edits of thoughts are supported, which stay as the chat template wants them",
            ),
        ):
            if is_wrong:
                raise RequestError(message, param=param)

    def chat(self) -> ChatRequest:
        """Return the chat. Raises RequestError."""
        self.check()
        shared = {name: getattr(self, name) for name in Options.__struct_fields__}
        if shared["cache_prompt"] is None and self._wants_cache():
            shared["cache_prompt"] = True
        if self.stop_sequences:
            shared["stop"] = [*self.stops(), *self.stop_sequences]
        if self.output_config and self.output_config.format:
            schema = {"name": "answer", "schema": self.output_config.format.schema}
            shared["response_format"] = {"type": "json_schema", "json_schema": schema}
        system = [{"role": "system", "content": system_text(self.system)}] if self.system else []
        messages = messages_of(self.messages, self._orders_documents)
        if not messages:
            raise RequestError("messages is empty: expected at least one", param="messages")
        return ChatRequest(
            **shared,
            messages=[*system, *messages],
            echo=False,
            documents=self.documents,
            documents_attention=self.documents_attention,
            link_tokens=self.link_tokens,
            retrieval=self.retrieval,
            tool_documents=self.tool_documents,
            tools=[tool.for_chat(f"tools[{at}]") for at, tool in enumerate(self.tools)] if self.tools else None,
            tool_choice=self.tool_choice.for_chat() if self.tool_choice else None,
            parallel_tool_calls=False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            reasoning_effort=self.output_config.effort if self.output_config else None,
            thinking_budget_tokens=self.thinking.budget_tokens if self.thinks and self.thinking else None,
            chat_template_kwargs={"enable_thinking": self.thinks} | self.chat_template_kwargs,
        )

    @property
    def thinks(self) -> bool:
        """Whether the model may reason. As in Anthropic's API it is asked not to by default."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def _orders_documents(self) -> bool:
        """Whether blocks with documents become documents: for a field that texts would ignore."""
        return self.document_order is not None or self.documents_attention == "separate" or self.link_tokens is not None

    def _wants_cache(self) -> bool:
        marked = self.cache_control or any(tool.cache_control for tool in self.tools or ())
        return bool(marked) or wants_cache([self.system, *(message.content for message in self.messages)])


class MessagesRequest(MessagesCountRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`, which demands `max_tokens`."""

    def check(self) -> None:
        super().check()
        if self.max_tokens is None or self.max_tokens < 1:
            raise RequestError("max_tokens: expected a number of tokens, 1 or more", param="max_tokens")


def _is_about_thoughts(edit: Json) -> bool:
    return isinstance(edit, dict) and str(edit.get("type", "")).startswith("clear_thinking")
