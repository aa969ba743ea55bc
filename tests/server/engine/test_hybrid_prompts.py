"""Chats of short turns and raw prompts, of models whose memory cannot be cut: what comes again is found again."""

from dataclasses import replace
from typing import Any

import pytest
from slotcache.bench.random_models import TokenType
from support import architectures

from server.api.test_infill import MARKS
from server.conftest import REST, idle_tokens, running, until

KINDS = {"lfm2": architectures.hybrid, "qwen35": architectures.delta}
SPACING = 64  # tokens between two states of a chat, at most
TURNS = 16
DIGITS = {"max_tokens": 6, "grammar": "root ::= [0-9]+"}  # answers whose text has the tokens that were generated


@pytest.fixture(scope="module", params=sorted(KINDS))
def model(request, tmp_path_factory):
    """A tiny model that can fill gaps, too."""
    words = architectures.vocabulary()
    types = words.types[: -len(MARKS)] + (int(TokenType.CONTROL),) * len(MARKS)
    marked = replace(words, tokens=words.tokens[: -len(MARKS)] + MARKS, types=types)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architectures, "vocabulary", lambda: marked)
        return KINDS[request.param](tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


def user(content):
    return {"role": "user", "content": content}


def converse(up, *, waits=False) -> list[dict[str, Any]]:
    """Lead a chat of short turns; return the messages of its last request. waits: for what is computed ahead."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        before = idle_tokens(up)
        messages.append(user(f"And in year {turn}?"))
        answer = up.chat(messages=messages, **DIGITS)["choices"][0]["message"]
        messages.append({"role": "assistant", "content": answer["content"]})
        if waits:
            until(lambda before=before: idle_tokens(up) > before and up.service.idle.done)
    return messages[:-1]


def missing(answer):
    """The tokens of a chat's prompt that were not found."""
    return answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def found(answer):
    """The share of a chat's prompt that was found."""
    return 1 - missing(answer) / answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_chat_of_short_turns_is_found_again_with_another_question_too(model, ahead):
    with running(model, idle_prefill=ahead) as up:
        messages = converse(up, waits=ahead)
        states = up.metric("slotcache_snapshots")
        first = up.chat(messages=messages, **DIGITS)
        again = [up.chat(messages=messages, **DIGITS) for _ in range(2)]
        edits = [[*messages[:at], user("Who was there?")] for at in (len(messages) - 1, len(messages) - 3, 20, 14, 10)]
        edited = [up.chat(messages=asked, **DIGITS) for asked in edits]
        fresh = [up.chat(messages=asked, cache_prompt=False, **DIGITS) for asked in (messages, messages, messages, *edits)]
    assert found(first) >= 0.9 and min(map(found, again)) >= 0.9 and found(edited[0]) >= 0.9
    assert max(map(missing, edited)) < SPACING + 40, "of a question and its turn"
    assert states <= TURNS / 2 + 2, "turns of 30 tokens: every second one, and the last two"
    assert [one["choices"] for one in (first, *again, *edited)] == [one["choices"] for one in fresh]


def test_a_chat_is_found_each_time_after_a_restart(model, tmp_path):
    with running(model, cache_dir=str(tmp_path)) as up:
        messages = converse(up)
    with running(model, cache_dir=str(tmp_path)) as up:
        asked = [up.chat(messages=messages, **DIGITS) for _ in range(4)]
        fresh = up.chat(messages=messages, cache_prompt=False, **DIGITS)
    assert [one["slotcache"]["source"] for one in asked] == ["disk", *["snapshot"] * 3]
    assert found(asked[0]) >= 0.9 and len(set(map(missing, asked))) == 1
    assert all(one["choices"] == fresh["choices"] for one in asked)


# ---- Raw prompts have no parts, at whose ends a prompt would part from another one. --------------------------------------

TEXT = "The canal was dug by those who built the castle, and the school stands where it ends. " * 6
RAW = {
    "/completion": {"prompt": TEXT, "n_predict": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/infill": {"input_prefix": TEXT, "input_suffix": "And so it ends. " * 9, "n_predict": 4},
    "/api/generate": {"prompt": TEXT, "raw": True, "stream": False, "options": {"num_predict": 4, "temperature": 0}},
}


def ask(up, path, **changed):
    """Return the text of an answer, and how many tokens of its prompt were cached and computed."""
    names = ("slotcache_cached_tokens_total", "slotcache_prompt_tokens_total")
    before = [up.metric(names[0], source="snapshot"), up.metric(names[1])]
    body = {"temperature": 0, "cache_prompt": True, "ignore_eos": True} if path != "/api/generate" else {"model": "tiny"}
    answer = up.http.post(path, json=body | RAW[path] | changed)
    assert answer.status_code == 200, answer.text
    reported = answer.json()
    text = reported.get("content") or reported.get("response") or [one["text"] for one in reported["choices"]]
    return text, up.metric(names[0], source="snapshot") - before[0], up.metric(names[1]) - before[1]


@pytest.mark.parametrize("path", RAW)
def test_a_raw_prompt_that_has_come_twice_is_found(model, path):
    with running(model, alias="tiny", cache_prompt=True) as up:
        texts, cached, computed = zip(*(ask(up, path) for _ in range(4)), strict=True)
    assert cached[2] == cached[3] > 100 and computed[2] == computed[3] == REST
    assert len(set(map(str, texts))) == 1


def test_further_answers_to_a_raw_prompt_continue_from_the_first_one(model):
    with running(model) as up:
        texts, cached, computed = ask(up, "/v1/completions", n=3)
        alone, *_ = ask(up, "/v1/completions", cache_prompt=False)
    assert cached == 2 * (computed - 3 * REST) > 200
    assert texts == 3 * alone
