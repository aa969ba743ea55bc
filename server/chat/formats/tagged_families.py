"""Families that write a call's parameters between tags."""

from __future__ import annotations

import re

from .bodies import TaggedBody
from .format import Format
from .headed import HeadedCalls
from .reader import Thinking
from .written import Written

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
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        noise=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        written=Written(
            '<|open|>call tool="$name" index="$number"<|sep|>$arguments<|close|>call<|sep|>',
            between="",
            begin="<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
            end="<|close|>tools<|sep|>",
            parameter='<|open|>argument key="$key" type="$kind"<|sep|>$value<|close|>argument<|sep|>',
        ),
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
        written=Written(
            '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
            between="\n",
            begin="\n\n<｜DSML｜function_calls>\n",
            end="\n</｜DSML｜function_calls>",
            parameter='<｜DSML｜parameter name="$key" string="$is_text">$value</｜DSML｜parameter>\n',
        ),
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
        written=Written(
            ']<]minimax[>[<invoke name="$name">$arguments]<]minimax[>[</invoke>\n',
            between="",
            begin="]<]minimax[>[<tool_call>\n",
            end="]<]minimax[>[</tool_call>",
            parameter="]<]minimax[>[<$key>$value]<]minimax[>[</$key>",
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
        written=Written(
            '<invoke name="$name">\n$arguments</invoke>\n',
            between="",
            begin="<minimax:tool_call>\n",
            end="</minimax:tool_call>",
            parameter='<parameter name="$key">$value</parameter>\n',
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
        written=Written(
            "<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
            between="\n",
            parameter="<parameter=$key>$value</parameter>\n",
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
        written=Written(
            "<tool_call:opensource>$name<tool_sep:opensource>\n$arguments</tool_call:opensource>\n",
            between="",
            begin="<tool_calls:opensource>\n",
            end="</tool_calls:opensource>",
            parameter="<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>$value</arg_value:opensource>\n",
        ),
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
        written=Written(
            "<tool_call>$name\n$arguments</tool_call>",
            between="\n",
            parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
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
        written=Written(
            "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
            between="\n",
            parameter="<parameter=$key>\n$value\n</parameter>\n",
        ),
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
        written=Written(
            '<function name="$name">$arguments</function>', between="\n", parameter='<param name="$key">$value</param>'
        ),
    ),
)
