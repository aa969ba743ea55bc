"""Families that write a tool's name between tags, and its arguments behind it."""

from __future__ import annotations

import re

from .bodies import JsonBody, LiteralBody
from .calls import short_id
from .channels import Channels
from .format import Format
from .headed import HeadedCalls
from .objects import JsonCalls
from .tagged_families import BARE_NAME, FUNCTION_EQUALS
from .written import Written

JSON = JsonBody()
NEVER = re.compile("(?!)")
ARGS = re.compile(r"\s*(?P<name>[^\[\]]+?)(?:\[CALL_ID\](?P<id>[^\[\]]*))?\[ARGS\]\s*")
DEEPSEEK = re.compile(r"(?:\s*function<｜tool▁sep｜>)?\s*(?P<name>[^<>\s]+)(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*")
KIMI = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^:<>]+):[0-9]+)\s*<\|tool_call_argument_begin\|>\s*")

HEADED = (
    Format(
        "harmony",
        ("<|channel|>", "<|message|>", "<|start|>"),
        channels=Channels(
            starts=("<|start|>", "<|channel|>"),
            message="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            to=re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)"),
            thought=re.compile(r"^analysis|<\|channel\|>\s*analysis"),
            plain=re.compile(r"(?s).*"),
            written_thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ),
        around=("<|channel|>final<|message|>", ""),
        written=Written("<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments"),
    ),
    Format(
        "functionary-3.2",
        (">>>all", ">>>${recipient}"),
        channels=Channels(
            starts=(">>>",),
            message="\n",
            ends=(),
            to=re.compile(r"^(?:>>>)?\s*(?P<name>[^\s<>]+)\s*$"),
            thought=NEVER,
            plain=re.compile(r"(?:>>>)?\s*all\s*"),
        ),
        around=("all\n", ""),
        written=Written("$name\n$arguments", between=">>>"),
    ),
    Format(
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
        written=Written(
            "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
            between="",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    Format(
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
        written=Written(
            "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
            between="",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Format(
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
        written=Written(
            "<|tool_call>call:$name{$arguments}<tool_call|>",
            between="",
            parameter="$key:$value",
            separator=",",
            quote='<|"|>',
        ),
    ),
    Format(
        "functionary-3.1",
        ("<function=", "</function>", "<|eom_id|>"),
        (HeadedCalls(("<function=",), FUNCTION_EQUALS, JSON, closes=("</function>",)),),
        written=Written("<function=$name>$arguments</function>", between=""),
    ),
    Format(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        (HeadedCalls(("[TOOL_CALLS]",), ARGS, JSON, inner=("[ARGS]", "[CALL_ID]")),),
        new_id=short_id,
        written=Written("[TOOL_CALLS]$name[ARGS]$arguments", between=""),
    ),
    Format(
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
        written=Written(
            "$name($arguments)",
            between=", ",
            begin="<|tool_call_start|>[",
            end="]<|tool_call_end|>",
            parameter="$key=$value",
            separator=", ",
            quote=None,
        ),
    ),
    Format(
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
        written=Written(
            "<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
            between="",
            begin="<|tool_calls|>",
            end="<|calls|>",
        ),
    ),
    Format(
        "llama-3",
        ("<|start_header_id|>", '"parameters"'),
        (
            JsonCalls(("<|python_tag|>",), ("<|eom_id|>",), bare=True),
            HeadedCalls(("<function=",), FUNCTION_EQUALS, JSON, closes=("</function>",)),
        ),
        written=Written('{"name": "$name", "parameters": $arguments}'),
    ),
)
