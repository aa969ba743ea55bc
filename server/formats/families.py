"""The answer formats of model families: a table with one entry for each family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...models.call_arguments import decode_json
from .answer import AnswerReader, Plain
from .json_text import UnreadText
from .readers import (
    Calls,
    CallShape,
    ChannelAnswer,
    Channels,
    HeadedCalls,
    JsonBody,
    JsonCalls,
    LiteralBody,
    SteppedReader,
    TaggedAnswer,
    TaggedBody,
    ThinkTags,
    Types,
    plain_id,
    short_id,
)

# ---- The notations in which families write calls: texts with holes. -----------------------------------------------------

HOLE = re.compile(r"\$([a-z_]+)")


@dataclass(frozen=True, slots=True)
class CallNotation:
    """How a family writes tool calls.

    call: the text of one call, with the holes $name and $arguments, and maybe with $id (nine letters or digits) or $number.
    begin, end: the texts before the first call and after the last call.
    between: the text between two calls; None if an answer has at most one call.
    parameter: the text of one argument, with the holes $key and $value, and maybe with $kind (the value's JSON type) or
    $is_text (whether the value is a string). If the arguments are one JSON object, `parameter` is empty.
    separator: the text between two parameters.
    quote: the quotes around a string; empty if strings have no quotes, and None if strings are written as in JSON.
    after_call: texts that may follow a call in other versions of this notation.
    """

    call: str
    between: str | None = None
    begin: str = ""
    end: str = ""
    parameter: str = ""
    separator: str = ""
    quote: str | None = ""
    after_call: tuple[str, ...] = ()

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls in this notation. calls: the name of each call, and its arguments as JSON text."""
        return self.begin + (self.between or "\n").join(self._one(*call) for call in calls) + self.end

    def _one(self, name: str, arguments: str) -> str:
        shown = self._parameters(arguments) if self.parameter else arguments
        holes = {"name": name, "arguments": shown, "id": "000000000", "number": "0"}
        return HOLE.sub(lambda hole: holes[hole[1]], self.call)

    def _parameters(self, arguments: str) -> str:
        try:
            values = decode_json(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(values, Mapping):
            return arguments
        return self.separator.join(self._parameter(key, value) for key, value in values.items())

    def _parameter(self, key: str, value: object) -> str:
        is_text = isinstance(value, str)
        in_json = json.dumps(value, ensure_ascii=False)
        shown = f"{self.quote}{value}{self.quote}" if is_text and self.quote is not None else in_json
        holes = {"key": key, "value": shown, "kind": "string" if is_text else "object", "is_text": str(is_text).lower()}
        return HOLE.sub(lambda hole: holes[hole[1]], self.parameter)


CALL_NOTATION = CallNotation('<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>', between="\n")
"""The form that most models were trained on."""


# ---- A family of models, and the reader of one answer. ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models, and the format of its answers.

    signs: texts that each chat template of the family contains.
    shapes: the forms of calls that the reader recognises.
    noise: tags that have no meaning here, and are removed from the content.
    written: the form in which a grammar makes the model write calls.
    around: the tags around content.
    calls_end_reasoning: whether a call may begin inside reasoning and thereby end the reasoning.
    new_id: makes a call's id from a hexadecimal digest.
    """

    name: str
    signs: tuple[str, ...] = ()
    shapes: tuple[CallShape, ...] = ()
    thinking: ThinkTags | None = None
    channels: Channels | None = None
    noise: tuple[str, ...] = ()
    written: CallNotation = CALL_NOTATION
    around: tuple[str, str] = ("", "")
    calls_end_reasoning: bool = False
    new_id: Callable[[str], str] = plain_id

    def fits(self, source: str) -> bool:
        return all(sign in source for sign in self.signs)

    @property
    def tags(self) -> frozenset[str]:
        """All tags that the readers look for."""
        thinking, channels = self.thinking.tags if self.thinking else (), self.channels.tags if self.channels else ()
        return frozenset((*thinking, *channels, *self.noise, *(tag for shape in self.shapes for tag in shape.tags)))

    def spelled(self, controls: Iterable[str]) -> frozenset[str]:
        """Return the control tokens that occur in a tag.

        The answer's text must keep these control tokens, so that readers find the tags.

        controls: the texts of all control tokens.
        """
        tags = self.tags
        return frozenset(control for control in controls if control and any(control in tag for tag in tags))

    def reader(
        self,
        tools: Mapping[str, Types],
        *,
        seed: str,
        thinks: bool = True,
        opened: str = "",
        controls: Collection[str] = (),
    ) -> AnswerReader:
        """Return the reader of one answer.

        tools: the tools that may be called.
        seed: a text from which the calls' ids are made.
        thinks: whether to separate reasoning from content.
        opened: the end of the prompt. If the prompt ends inside reasoning or a message, the answer continues it.
        controls: the control tokens that the answer's text keeps (see `spelled`). The reader removes the control tokens from
        the content, but if `thinks` is false, the tags of reasoning stay.
        """
        text, calls, shapes = UnreadText(), Calls(tools, self.new_id, seed), self.shapes if tools else ()
        if self.channels:
            messages = ChannelAnswer(text, self.channels, calls, thinks=thinks)
            reader = SteppedReader(text, messages.read())
            reader.open(opened[max(opened.rfind(self.channels.starts[0]), 0) :])
            messages.drop_space()
            return reader
        if not (shapes or self.thinking or self.noise or controls):
            return Plain()
        shown = self.thinking.tags if self.thinking and not thinks else ()
        answer = TaggedAnswer(
            text,
            shapes,
            calls,
            thinking=self.thinking if thinks else None,
            calls_end=self.calls_end_reasoning,
            opened=self._opened(opened),
            dropped={*self.noise, *controls}.difference(shown),
        )
        return SteppedReader(text, answer.read())

    def _opened(self, prompt: str) -> str:
        """Return the reasoning at the end of a prompt, with its opening tag.

        Return an empty text if the prompt ends outside reasoning.
        """
        if self.thinking is None:
            return ""
        start, end = self.thinking.last(prompt)
        return prompt[start:] if start > end else ""

    @property
    def thinks_anywhere(self) -> bool:
        """Whether reasoning may also come after content."""
        return self.channels is not None or (self.thinking is not None and self.thinking.anywhere)

    @property
    def breaks(self) -> tuple[str, ...]:
        """The tags that start a call and thereby end reasoning."""
        return tuple(tag for shape in self.shapes for tag in shape.opens) if self.calls_end_reasoning else ()

    def reasoning(self, prompt: str) -> tuple[str, str, bool] | None:
        """Return the tags around the reasoning of an answer, and whether the prompt already contains the opening tag.

        Return None if the family has no reasoning, or if the prompt ends after the reasoning.
        """
        if self.channels:
            return self.channels.written_reasoning and (*self.channels.written_reasoning, False)
        if self.thinking is None:
            return None
        start, end = self.thinking.last(prompt)
        return None if end > start else (self.thinking.starts[0], self.thinking.ends[0], start >= 0)


# ---- Families that write a call's parameters between tags. --------------------------------------------------------------

FUNCTION_EQUALS = re.compile(r"(?:\s*<function=)?\s*(?P<name>[^<>\n]+?)>\s*")
INVOKE = re.compile(r'(?:\s*<(?:｜DSML｜)?invoke name=")?(?P<name>[^"<>]+)">\s*')
BARE_NAME = re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*")

TAGGED = (
    Family(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|end_of_msg|>"),
        (
            HeadedCalls(
                starts=('<|open|>call tool="',),
                header=re.compile(r'(?P<name>[^"]+)"[^<>]*<\|sep\|>\s*'),
                body=TaggedBody(
                    opens=('<|open|>argument key="',),
                    key_ends=tuple(
                        f'" type="{kind}"<|sep|>' for kind in ("number", "integer", "boolean", "object", "array", "null")
                    ),
                    text_key_ends=('" type="string"<|sep|>',),
                    value_ends=("<|close|>argument<|sep|>",),
                    ends=("<|close|>call<|sep|>",),
                ),
                sections=("<|open|>tools<|sep|>",),
                section_ends=("<|close|>tools<|sep|>",),
            ),
        ),
        thinking=ThinkTags(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        noise=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        written=CallNotation(
            '<|open|>call tool="$name" index="$number"<|sep|>$arguments<|close|>call<|sep|>',
            between="",
            begin="<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
            end="<|close|>tools<|sep|>",
            parameter='<|open|>argument key="$key" type="$kind"<|sep|>$value<|close|>argument<|sep|>',
        ),
    ),
    Family(
        "deepseek-3.2",
        ("DSML", "invoke name="),
        (
            HeadedCalls(
                starts=('<｜DSML｜invoke name="',),
                header=INVOKE,
                body=TaggedBody(
                    opens=('<｜DSML｜parameter name="',),
                    key_ends=('" string="false">', '">'),
                    text_key_ends=('" string="true">',),
                    value_ends=("</｜DSML｜parameter>",),
                    ends=("</｜DSML｜invoke>",),
                ),
                sections=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
                section_ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            ),
        ),
        calls_end_reasoning=True,
        written=CallNotation(
            '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
            between="\n",
            begin="\n\n<｜DSML｜function_calls>\n",
            end="\n</｜DSML｜function_calls>",
            parameter='<｜DSML｜parameter name="$key" string="$is_text">$value</｜DSML｜parameter>\n',
            after_call=("</｜DSML｜tool_calls>",),
        ),
    ),
    Family(
        "minimax-m3",
        ("]<]minimax[>[", "<invoke name="),
        (
            HeadedCalls(
                starts=(']<]minimax[>[<invoke name="',),
                header=INVOKE,
                body=TaggedBody(
                    opens=("]<]minimax[>[<",),
                    key_ends=(">",),
                    value_ends=("]<]minimax[>[</{key}>",),
                    ends=("]<]minimax[>[</invoke>",),
                ),
                sections=("]<]minimax[>[<tool_call>",),
                section_ends=("]<]minimax[>[</tool_call>",),
            ),
        ),
        written=CallNotation(
            ']<]minimax[>[<invoke name="$name">$arguments]<]minimax[>[</invoke>\n',
            between="",
            begin="]<]minimax[>[<tool_call>\n",
            end="]<]minimax[>[</tool_call>",
            parameter="]<]minimax[>[<$key>$value]<]minimax[>[</$key>",
        ),
    ),
    Family(
        "minimax-m2",
        ("<minimax:tool_call>", "<invoke name="),
        (
            HeadedCalls(
                starts=('<invoke name="',),
                header=INVOKE,
                body=TaggedBody(('<parameter name="',), ('">',), ("</parameter>",), ("</invoke>",)),
                sections=("<minimax:tool_call>",),
                section_ends=("</minimax:tool_call>",),
            ),
        ),
        written=CallNotation(
            '<invoke name="$name">\n$arguments</invoke>\n',
            between="",
            begin="<minimax:tool_call>\n",
            end="</minimax:tool_call>",
            parameter='<parameter name="$key">$value</parameter>\n',
        ),
    ),
    Family(
        "seed",
        ("<seed:tool_call>",),
        (
            HeadedCalls(
                starts=("<seed:tool_call>", "<function="),
                header=FUNCTION_EQUALS,
                body=TaggedBody(("<parameter=",), (">",), ("</parameter>",), ("</function>",)),
                closes=("</seed:tool_call>",),
            ),
        ),
        written=CallNotation(
            "<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
            between="\n",
            parameter="<parameter=$key>$value</parameter>\n",
        ),
    ),
    Family(
        "hunyuan",
        ("<arg_key", "<tool_sep"),
        (
            HeadedCalls(
                starts=("<tool_call:opensource>",),
                header=re.compile(r"\s*(?P<name>[^\s<>]+)\s*(?:<tool_sep:opensource>)?\s*"),
                inner=("<tool_sep:opensource>",),
                body=TaggedBody(
                    opens=("<arg_key:opensource>",),
                    key_ends=("</arg_key:opensource>",),
                    value_opens=("<arg_value:opensource>",),
                    value_ends=("</arg_value:opensource>",),
                    ends=("</tool_call:opensource>",),
                ),
                sections=("<tool_calls:opensource>",),
                section_ends=("</tool_calls:opensource>",),
            ),
        ),
        thinking=ThinkTags(("<think:opensource>",), ("</think:opensource>",)),
        written=CallNotation(
            "<tool_call:opensource>$name<tool_sep:opensource>\n$arguments</tool_call:opensource>\n",
            between="",
            begin="<tool_calls:opensource>\n",
            end="</tool_calls:opensource>",
            parameter="<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>$value</arg_value:opensource>\n",
        ),
    ),
    Family(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        (
            HeadedCalls(
                starts=("<tool_call>",),
                header=BARE_NAME,
                body=TaggedBody(
                    opens=("<arg_key>",),
                    key_ends=("</arg_key>",),
                    value_opens=("<arg_value>",),
                    value_ends=("</arg_value>",),
                    ends=("</tool_call>",),
                ),
            ),
        ),
        written=CallNotation(
            "<tool_call>$name\n$arguments</tool_call>",
            between="\n",
            parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
        ),
    ),
    Family(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        (
            HeadedCalls(
                starts=("<tool_call>", "<function="),
                header=FUNCTION_EQUALS,
                body=TaggedBody(
                    opens=("<parameter=",),
                    key_ends=(">",),
                    value_opens=("\n",),
                    value_ends=("\n</parameter>", "</parameter>"),
                    ends=("</function>",),
                ),
                closes=("</tool_call>",),
            ),
        ),
        calls_end_reasoning=True,
        written=CallNotation(
            "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
            between="\n",
            parameter="<parameter=$key>\n$value\n</parameter>\n",
        ),
    ),
    Family(
        "minicpm-5",
        ('<function name="', '<param name="'),
        (
            HeadedCalls(
                starts=('<function name="',),
                header=INVOKE,
                body=TaggedBody(
                    opens=('<param name="',),
                    key_ends=('">',),
                    value_opens=("<![CDATA[",),
                    value_ends=("]]></param>", "</param>"),
                    ends=("</function>",),
                ),
            ),
        ),
        written=CallNotation(
            '<function name="$name">$arguments</function>', between="\n", parameter='<param name="$key">$value</param>'
        ),
    ),
)


# ---- Families that write a tool's name between tags, and its arguments after it. ----------------------------------------

JSON = JsonBody()
NEVER = re.compile("(?!)")
ARGS = re.compile(r"\s*(?P<name>[^\[\]]+?)(?:\[CALL_ID\](?P<id>[^\[\]]*))?\[ARGS\]\s*")
DEEPSEEK = re.compile(r"(?:\s*function<｜tool▁sep｜>)?\s*(?P<name>[^<>\s]+)(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*")
KIMI = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^:<>]+):[0-9]+)\s*<\|tool_call_argument_begin\|>\s*")

HEADED = (
    Family(
        "harmony",
        ("<|channel|>", "<|message|>", "<|start|>"),
        channels=Channels(
            starts=("<|start|>", "<|channel|>"),
            message="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            to=re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)"),
            reasoning=re.compile(r"^analysis|<\|channel\|>\s*analysis"),
            plain=re.compile(r"(?s).*"),
            written_reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ),
        around=("<|channel|>final<|message|>", ""),
        written=CallNotation("<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments"),
    ),
    Family(
        "functionary-3.2",
        (">>>all", ">>>${recipient}"),
        channels=Channels(
            starts=(">>>",),
            message="\n",
            ends=(),
            to=re.compile(r"^(?:>>>)?\s*(?P<name>[^\s<>]+)\s*$"),
            reasoning=NEVER,
            plain=re.compile(r"(?:>>>)?\s*all\s*"),
        ),
        around=("all\n", ""),
        written=CallNotation("$name\n$arguments", between=">>>"),
    ),
    Family(
        "kimi-k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        (
            HeadedCalls(
                starts=("<|tool_call_begin|>",),
                header=KIMI,
                inner=("<|tool_call_argument_begin|>",),
                body=JSON,
                closes=("<|tool_call_end|>",),
                sections=("<|tool_calls_section_begin|>",),
                section_ends=("<|tool_calls_section_end|>",),
            ),
        ),
        written=CallNotation(
            "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
            between="",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        (
            HeadedCalls(
                starts=("<｜tool▁call▁begin｜>",),
                header=DEEPSEEK,
                inner=("<｜tool▁sep｜>",),
                body=JSON,
                closes=("```", "<｜tool▁call▁end｜>"),
                sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls｜>"),
                section_ends=("<｜tool▁calls▁end｜>",),
            ),
        ),
        written=CallNotation(
            "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
            between="",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Family(
        "gemma-4",
        ("<|tool_call>call:",),
        (
            HeadedCalls(
                starts=("<|tool_call>",),
                header=re.compile(r"\s*call:\s*(?P<name>[^\s{}]+)\s*"),
                body=LiteralBody("{", ":", ('<|"|>', '"')),
                closes=("<tool_call|>",),
            ),
        ),
        noise=("<|tool_response>",),
        written=CallNotation(
            "<|tool_call>call:$name{$arguments}<tool_call|>",
            between="",
            parameter="$key:$value",
            separator=",",
            quote='<|"|>',
        ),
    ),
    Family(
        "functionary-3.1",
        ("<function=", "</function>", "<|eom_id|>"),
        (HeadedCalls(("<function=",), FUNCTION_EQUALS, JSON, closes=("</function>",)),),
        written=CallNotation("<function=$name>$arguments</function>", between=""),
    ),
    Family(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        (HeadedCalls(("[TOOL_CALLS]",), ARGS, JSON, inner=("[ARGS]", "[CALL_ID]")),),
        new_id=short_id,
        written=CallNotation("[TOOL_CALLS]$name[ARGS]$arguments", between=""),
    ),
    Family(
        "lfm-2",
        ("<|im_start|>", "List of tools: "),
        (
            HeadedCalls(
                starts=("[",),
                header=BARE_NAME,
                body=LiteralBody("(", "=", ("'", '"')),
                closes=("]",),
                more=(",",),
                sections=("<|tool_call_start|>",),
                section_ends=("<|tool_call_end|>",),
            ),
        ),
        written=CallNotation(
            "$name($arguments)",
            between=", ",
            begin="<|tool_call_start|>[",
            end="]<|tool_call_end|>",
            parameter="$key=$value",
            separator=", ",
            quote=None,
        ),
    ),
    Family(
        "solar",
        ("<|tool_call:begin|>", "<|tool_call:args|>"),
        (
            HeadedCalls(
                starts=("<|tool_call:begin|>",),
                inner=("<|tool_call:name|>", "<|tool_call:args|>"),
                header=re.compile(r"\s*(?P<id>[^<>]*)<\|tool_call:name\|>(?P<name>[^<>]+)<\|tool_call:args\|>\s*"),
                body=JSON,
                closes=("<|tool_call:end|>",),
                sections=("<|tool_calls|>",),
                section_ends=("<|calls|>",),
            ),
        ),
        noise=("<|content|>", "<|begin|>"),
        written=CallNotation(
            "<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
            between="",
            begin="<|tool_calls|>",
            end="<|calls|>",
        ),
    ),
    Family(
        "llama-3",
        ("<|start_header_id|>", '"parameters"'),
        (
            JsonCalls(("<|python_tag|>",), ("<|eom_id|>",), bare=True),
            HeadedCalls(("<function=",), FUNCTION_EQUALS, JSON, closes=("</function>",)),
        ),
        written=CallNotation('{"name": "$name", "parameters": $arguments}'),
    ),
)


# ---- Families that write calls as JSON objects. -------------------------------------------------------------------------

HERMES = JsonCalls(("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>"), names=("name", "function"))

OBJECTS = (
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        (JsonCalls(("[TOOL_CALLS]",), late_id=True),),
        new_id=short_id,
        written=CallNotation(
            '{"name": "$name", "arguments": $arguments, "id": "$id"}', between=", ", begin="[TOOL_CALLS][", end="]"
        ),
    ),
    Family(
        "command-r7b",
        ("<|START_ACTION|>",),
        (JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",), names=("tool_name",), ids=("tool_call_id",)),),
        calls_end_reasoning=True,
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        noise=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        written=CallNotation(
            '{"tool_call_id": "$number", "tool_name": "$name", "parameters": $arguments}',
            between=",\n    ",
            begin="<|START_ACTION|>[\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    Family(
        "command-r",
        ("Action:", "directly-answer"),
        (JsonCalls(("Action:",), names=("tool_name",)),),
        written=CallNotation(
            '{"tool_name": "$name", "parameters": $arguments}',
            between=",\n    ",
            begin="Action:\n```json\n[\n    ",
            end="\n]```",
        ),
    ),
    Family(
        "apertus",
        ("<|tools_prefix|>",),
        (JsonCalls(("<|tools_prefix|>",), ("<|tools_suffix|>",), named=True),),
        written=CallNotation('{"$name": $arguments}', between=", ", begin="<|tools_prefix|>[", end="]<|tools_suffix|>"),
    ),
    Family(
        "nemotron-2",
        ("<TOOLCALL>",),
        (JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",)),),
        written=CallNotation(
            '{"name": "$name", "arguments": $arguments}', between=", ", begin="<TOOLCALL>[", end="]</TOOLCALL>"
        ),
    ),
    Family(
        "gigachat",
        ("<|role_sep|>", "<|message_sep|>"),
        (
            JsonCalls(
                ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
                ("<|message_sep|>",),
            ),
        ),
        written=CallNotation('<|function_call|>{"name": "$name", "arguments": $arguments}'),
    ),
    Family(
        "granite",
        ("<|tool_call|>",),
        (JsonCalls(("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),),
        written=CallNotation('{"name": "$name", "arguments": $arguments}', between=", ", begin="<|tool_call|>[", end="]"),
    ),
    Family(
        "firefunction",
        (" functools[",),
        (JsonCalls(("functools",)),),
        written=CallNotation('{"name": "$name", "arguments": $arguments}', between=", ", begin=" functools[", end="]"),
    ),
    Family("hermes", ("<tool_call>",), (HERMES,)),
    Family(
        "tool-calls",
        ("<tool_calls>",),
        (HERMES,),
        written=CallNotation(
            '{"name": "$name", "arguments": $arguments}', between=", ", begin="<tool_calls>[", end="]</tool_calls>"
        ),
    ),
)

GENERIC = Family("generic", shapes=(replace(HERMES, bare=True),))
"""For templates without a notation of their own: the notation that most models know, which the prompt explains."""


THINK = ThinkTags(("<think>",), ("</think>",))
THINKINGS = (
    ThinkTags(("[THINK]",), ("[/THINK]",)),
    ThinkTags(("<seed:think>",), ("</seed:think>",)),
    ThinkTags(("<mm:think>",), ("</mm:think>",)),
    ThinkTags(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    ThinkTags(("<|channel>thought",), ("<channel|>",), anywhere=True),
    ThinkTags(("<|inner_prefix|>",), ("<|inner_suffix|>",), anywhere=True),
    ThinkTags(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),
    ThinkTags(("<|think|>",), ("<|end|>",)),
    THINK,
)
"""Tags around reasoning. A template uses the first pair whose start tags it contains."""

FORMATS = TAGGED + HEADED + OBJECTS
"""All families. A template belongs to the first family that fits."""


def detect(source: str) -> Family:
    """Return the family of a chat template. source: the text of the template."""
    found = next((format for format in FORMATS if format.fits(source)), GENERIC)
    if found.channels or found.thinking:
        return found
    known = (thinking for thinking in THINKINGS if all(tag in source for tag in thinking.starts))
    return replace(found, thinking=next(known, THINK if "</think>" in source else None))
