"""Names text that changes from one request to the next and so ends the common prefix: dates, counters, ids."""

from __future__ import annotations

import re

SPANS = (
    ("a billing line", r"x-anthropic-billing-header:[^\n]*"),
    ("a UUID", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    ("a time", r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?[\d.:Z+-]*"),
    ("a date", r"\b\d{4}-\d\d-\d\d\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"),
    ("a date", r"\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:, \d{4})?\b"),
    ("a date", r"\b\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{4}\b"),
    ("a time", r"\b\d{1,2}:\d\d(?::\d\d)?\b"),
    ("a counter", r"\b\d+\b"),
)
"""The kinds of such text, the surest first."""
COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in SPANS)
LONGEST = 80  # characters that are quoted


def volatile_span(text: str, at: int) -> str | None:
    """Return the kind and the text of the volatile span that covers position `at` of a text; None without one.

    A span counts from one character before its first: tokens may begin with the blank in front.
    """
    for name, pattern in COMPILED:
        for found in pattern.finditer(text):
            if found.start() - 1 <= at <= found.end():
                return f"{name} ({found[0][:LONGEST]})"
    return None
