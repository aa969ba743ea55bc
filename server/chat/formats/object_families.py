"""Families that write calls as JSON objects."""

from __future__ import annotations

from dataclasses import replace

from .calls import short_id
from .format import Format
from .objects import JsonCalls
from .written import Written

HERMES = JsonCalls(("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>"), names=("name", "function"))

OBJECTS = (
    Format(
        "mistral",
        ("[TOOL_CALLS]",),
        (JsonCalls(("[TOOL_CALLS]",), late_id=True),),
        new_id=short_id,
        written=Written(
            '{"name": "$name", "arguments": $arguments, "id": "$id"}', between=", ", begin="[TOOL_CALLS][", end="]"
        ),
    ),
    Format(
        "command-r7b",
        ("<|START_ACTION|>",),
        (JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",), names=("tool_name",), ids=("tool_call_id",)),),
        calls_end_thoughts=True,
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        noise=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        written=Written(
            '{"tool_call_id": "$number", "tool_name": "$name", "parameters": $arguments}',
            between=",\n    ",
            begin="<|START_ACTION|>[\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    Format(
        "command-r",
        ("Action:", "directly-answer"),
        (JsonCalls(("Action:",), names=("tool_name",)),),
        written=Written(
            '{"tool_name": "$name", "parameters": $arguments}',
            between=",\n    ",
            begin="Action:\n```json\n[\n    ",
            end="\n]```",
        ),
    ),
    Format(
        "apertus",
        ("<|tools_prefix|>",),
        (JsonCalls(("<|tools_prefix|>",), ("<|tools_suffix|>",), named=True),),
        written=Written('{"$name": $arguments}', between=", ", begin="<|tools_prefix|>[", end="]<|tools_suffix|>"),
    ),
    Format(
        "nemotron-2",
        ("<TOOLCALL>",),
        (JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",)),),
        written=Written('{"name": "$name", "arguments": $arguments}', between=", ", begin="<TOOLCALL>[", end="]</TOOLCALL>"),
    ),
    Format(
        "gigachat",
        ("<|role_sep|>", "<|message_sep|>"),
        (
            JsonCalls(
                ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
                ("<|message_sep|>",),
            ),
        ),
        written=Written('<|function_call|>{"name": "$name", "arguments": $arguments}'),
    ),
    Format(
        "granite",
        ("<|tool_call|>",),
        (JsonCalls(("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),),
        written=Written('{"name": "$name", "arguments": $arguments}', between=", ", begin="<|tool_call|>[", end="]"),
    ),
    Format(
        "firefunction",
        (" functools[",),
        (JsonCalls(("functools",)),),
        written=Written('{"name": "$name", "arguments": $arguments}', between=", ", begin=" functools[", end="]"),
    ),
    Format(
        "hermes",
        ("<tool_call>",),
        (HERMES,),
    ),
    Format(
        "tool-calls",
        ("<tool_calls>",),
        (HERMES,),
        written=Written(
            '{"name": "$name", "arguments": $arguments}', between=", ", begin="<tool_calls>[", end="]</tool_calls>"
        ),
    ),
)

GENERIC = Format("generic", shapes=(replace(HERMES, bare=True),))
"""For templates without a notation of their own: the one that most models know, which the prompt explains."""
