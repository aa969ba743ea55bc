"""The families of models, and the texts in a chat template that give one away."""

from __future__ import annotations

from dataclasses import replace

from .format import Format
from .headed_families import HEADED
from .object_families import GENERIC, OBJECTS
from .reader import Thinking
from .tagged_families import TAGGED

THINK = Thinking(("<think>",), ("</think>",))
THINKINGS = (
    Thinking(("[THINK]",), ("[/THINK]",)),
    Thinking(("<seed:think>",), ("</seed:think>",)),
    Thinking(("<mm:think>",), ("</mm:think>",)),
    Thinking(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    Thinking(("<|channel>thought",), ("<channel|>",), anywhere=True),
    Thinking(("<|inner_prefix|>",), ("<|inner_suffix|>",), anywhere=True),
    Thinking(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),
    Thinking(("<|think|>",), ("<|end|>",)),
    THINK,
)
"""The tags of thoughts, by which of them a template knows. The first that stands in it counts."""

FORMATS = TAGGED + HEADED + OBJECTS
"""Of several that fit a template, the first counts."""


def detect(source: str) -> Format:
    """Return the format of the models that a chat template belongs to. source: the template's."""
    found = next((format for format in FORMATS if format.fits(source)), GENERIC)
    if found.channels or found.thinking:
        return found
    known = (thinking for thinking in THINKINGS if all(tag in source for tag in thinking.starts))
    return replace(found, thinking=next(known, THINK if "</think>" in source else None))
