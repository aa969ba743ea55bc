"""Misses that a date, a counter or an id in the prompt causes are named."""

import pytest
from slotcache.server.engine.usage import volatile_span

from server.conftest import REST

SYSTEM = "You are a careful assistant who reads documents about the sea and the land. " * 5


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("Today is 2026-11-22, a Sunday.", 15, "a date (2026-11-22)"),
        ("Today is 2026-11-22 10:15:30, a Sunday.", 22, "a time (2026-11-22 10:15:30)"),
        ("It is 22 November 2026 now", 8, "a date (22 November 2026)"),
        ("Nov 22, 2026: news", 5, "a date (Nov 22, 2026)"),
        ("session 3f2b8c1e-9d4a-4f6b-8e2a-1c3d5e7f9a0b begins", 20, "a UUID (3f2b8c1e-9d4a-4f6b-8e2a-1c3d5e7f9a0b)"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;\nYou are", 50, "a billing line"),
        ("request 4711 of 9000", 9, "a counter (4711)"),
        ("the sea and the land", 9, None),
        ("on 2026-11-22 the sea and the land", 25, None),
    ],
)
def test_spans(text, at, says):
    found = volatile_span(text, at)
    assert found is None if says is None else found is not None and found.startswith(says)


def test_long_text_takes_no_longer_than_its_length():
    """Digits and letters without end around the place, at most 64 tokens of text in practice."""
    for text in ("1" * 20_000, "a-" * 10_000, "Jan " * 5_000, "0123-" * 4_000):
        volatile_span(text, 10_000)


def test_a_date_that_breaks_a_prefix_is_named(server):
    def miss(date):
        messages = [
            {"role": "system", "content": f"{SYSTEM}Today is {date}. {SYSTEM}"},
            {"role": "user", "content": "Hello"},
        ]
        return server.chat(messages=messages)["slotcache"]["miss"]

    miss("2026-11-21")
    second = miss("2026-11-22")
    assert second["at"] > 0 and "a date (2026-11-22) differs" in second["why"]
    assert "date" not in str(miss("2026-11-22"))


@pytest.mark.parametrize("scope", ["", "a name"])
def test_what_changed_is_quoted_with_what_it_cost(server, scope):
    def asked(place):
        messages = [
            {"role": "system", "content": f"{SYSTEM}You are in {place} now. {SYSTEM}"},
            {"role": "user", "content": "Hello"},
        ]
        return server.chat(messages=messages, cache_scope=scope)

    asked("Rome")
    answer = asked("Cape Town")
    miss, changed = answer["slotcache"]["miss"], answer["slotcache"]["miss"]["changed"]
    assert "Cape Town" in changed["after"] and changed["ms"] > 0
    assert ("Rome" in changed["before"]) if scope else "before" not in changed, "others may share the nameless scope"
    assert 50 < changed["tokens"] < answer["usage"]["prompt_tokens"] - miss["at"]
    again = asked("Cape Town")
    assert again["timings"]["prompt_n"] == REST and again["slotcache"]["miss"] is None


def test_a_message_that_is_new_as_a_whole_names_no_span(server):
    def miss(text):
        messages = [{"role": "system", "content": "Answer. " * 20}, {"role": "user", "content": text}]
        return server.chat(messages=messages)["slotcache"]["miss"]

    miss("2026 was a good year for wine")
    second = miss("the wine of 2027 was better")
    assert "differs" not in second["why"] and "changed" not in second
