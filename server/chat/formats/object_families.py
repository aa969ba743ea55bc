"""Families that write calls as JSON objects."""

from __future__ import annotations

from dataclasses import replace

from .calls import short_id
from .format import Format
from .objects import JsonCalls

HERMES = JsonCalls(("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>"), names=("name", "function"))

OBJECTS = (
    Format("mistral", ("[TOOL_CALLS]",), (JsonCalls(("[TOOL_CALLS]",), late_id=True),), new_id=short_id),
    Format(
        "command-r7b",
        ("<|START_ACTION|>",),
        (JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",), names=("tool_name",), ids=("tool_call_id",)),),
        calls_end_thoughts=True,
        noise=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Format("command-r", ("Action:", "directly-answer"), (JsonCalls(("Action:",), names=("tool_name",)),)),
    Format("apertus", ("<|tools_prefix|>",), (JsonCalls(("<|tools_prefix|>",), ("<|tools_suffix|>",), named=True),)),
    Format("nemotron-2", ("<TOOLCALL>",), (JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",)),)),
    Format(
        "gigachat",
        ("<|role_sep|>", "<|message_sep|>"),
        (
            JsonCalls(
                ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
                ("<|message_sep|>",),
            ),
        ),
    ),
    Format(
        "granite", ("<|tool_call|>",), (JsonCalls(("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),)
    ),
    Format("firefunction", (" functools[",), (JsonCalls(("functools",)),)),
    Format("hermes", ("<tool_call>",), (HERMES,)),
    Format("tool-calls", ("<tool_calls>",), (HERMES,)),
)

GENERIC = Format("generic", shapes=(replace(HERMES, bare=True),))
"""For templates without a notation of their own: the one that most models know, which the prompt explains."""
