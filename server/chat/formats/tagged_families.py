"""Families that write a call's parameters between tags."""

from __future__ import annotations

import re

from .bodies import TaggedBody
from .format import Format
from .headed import HeadedCalls
from .reader import Thinking

FUNCTION_EQUALS = re.compile(r"(?:\s*<function=)?\s*(?P<name>[^<>\n]+?)>\s*")
INVOKE = re.compile(r'(?:\s*<(?:｜DSML｜)?invoke name=")?(?P<name>[^"<>]+)">\s*')
BARE_NAME = re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*")

TAGGED = (
    Format(
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
        thinking=Thinking(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),
        noise=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    ),
    Format(
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
        calls_end_thoughts=True,
    ),
    Format(
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
    ),
    Format(
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
    ),
    Format(
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
    ),
    Format(
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
        thinking=Thinking(("<think:opensource>",), ("</think:opensource>",)),
    ),
    Format(
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
    ),
    Format(
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
        calls_end_thoughts=True,
    ),
    Format(
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
    ),
)
