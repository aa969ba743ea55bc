"""A client that never asks for the cache is told once what it would have saved, and nothing of others."""

import logging

import numpy as np
import pytest
from slotcache.server.chat.chat_prompt import ChatPrompt, Fixed
from slotcache.server.service.repeats import MOST_KEPT, STRIDE, Repeats

from server.conftest import running

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def shared(tiny):
    """A server whose clients have keys of their own."""
    with running(tiny, api_key="one,two") as up:
        yield up


def ask(up, text, key="one", path=CHAT, **fields):
    """The warnings of an answer to a prompt of some 2,200 tokens and a question."""
    said = f"{text} " * 1100 + fields.pop("question", "What?")
    body = {"input": said} if path == RESPONSES else {"messages": [{"role": "user", "content": said}]}
    body |= {"max_output_tokens" if path == RESPONSES else "max_tokens": 1} | fields
    answer = up.http.post(path, json=body, headers={"X-Api-Key": key})
    assert answer.status_code == 200, answer.text
    return answer.json().get("warnings", [])


def test_a_client_is_warned_once_and_only_of_its_own_prompts(shared, caplog):
    assert ask(shared, "one") == []
    assert ask(shared, "one", "two") == [], "the prompt was another one's"
    assert ask(shared, "one", cache_scope="other") == []
    with caplog.at_level(logging.WARNING, "slotcache"):
        (warning,) = ask(shared, "one", question="And why?")
    assert "--cache-prompt" in warning and any(f"first {number},000 tokens" in warning for number in (1, 2))
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert logged == [f"{CHAT}: {warning}"]
    assert ask(shared, "one", question="And how?") == [], "it was told"
    assert ask(shared, "one", "two", question="And how?") != []


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_each_dialect_is_warned(shared, path):
    scope = {"path": path, "cache_scope": path}
    assert ask(shared, "dialect", **scope) == [] and "computed again" in ask(shared, "dialect", **scope)[0]


@pytest.mark.parametrize("wish", [{"cache_prompt": False}, {"cache_prompt": True}, {"prompt_cache_key": "k"}])
def test_who_says_something_of_the_cache_is_not_warned(shared, wish):
    for _ in range(2):
        assert ask(shared, "wish", cache_scope=str(wish), **wish) == []


def test_a_short_repetition_is_not_worth_a_word(shared):
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "short " * 100}], "max_tokens": 1, "cache_scope": "short"}
        assert "warnings" not in shared.http.post(CHAT, json=body, headers={"X-Api-Key": "one"}).json()


def test_memory_is_bounded_and_the_longest_prefix_counts():
    repeats, random = Repeats(), np.random.default_rng(0)
    prompts = [
        ChatPrompt([Fixed(random.integers(0, 1 << 30, 9 * STRIDE).astype(np.int32), "x")]) for _ in range(MOST_KEPT // 8)
    ]
    for prompt in prompts:
        assert repeats.note(("a",), prompt) == 0
    assert len(repeats._kept) == MOST_KEPT
    part = prompts[-1].parts[0]
    assert isinstance(part, Fixed)
    assert repeats.note(("b",), prompts[-1]) == 0
    assert repeats.note(("a",), ChatPrompt([Fixed(part.tokens[: 5 * STRIDE + 7], "x")])) == 5 * STRIDE


def test_no_model_reuses_what_another_one_of_the_same_vocabulary_had():
    repeats, prompt = Repeats(), ChatPrompt([Fixed(np.arange(2 * STRIDE, dtype=np.int32), "x")])
    assert [repeats.note(("a",), prompt, model) for model in ("one", "two", "one")] == [0, 0, 2 * STRIDE]
