"""Breakpoints of clients, and the sessions that they name: what is pinned and for how long, and what leaves first."""

import pytest
from slotcache.server.chat.content import seconds_of

from server.conftest import running

SYSTEM = "You are a careful assistant who reads documents about the sea and the land. " * 6
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module")
def templated(tiny):
    with running(tiny, chat_template="chatml") as up:
        yield up


def pinned(server, scope):
    """The tokens that are pinned, and all that are cached."""
    runs = server.http.get(f"/v1/cache?scope={scope}").json()["runs"]
    return sum(run["tokens"] for run in runs if run["pinned"]), sum(run["tokens"] for run in runs)


def text(said, **mark):
    return [{"type": "text", "text": said, **mark}]


def anthropic(mark):
    return "/v1/messages", {"system": text(SYSTEM, **mark), "messages": [{"role": "user", "content": "Hello"}]}


def anthropic_tool(mark):
    tool = {"name": "look", "input_schema": {"type": "object"}, **mark}
    return "/v1/messages", anthropic({})[1] | {"tools": [tool], "tool_choice": {"type": "none"}}


def chat(mark):
    said = [{"role": "system", "content": text(SYSTEM, **mark)}, {"role": "user", "content": "Hello"}]
    return "/v1/chat/completions", {"messages": said}


def response(mark):
    given = {"prompt_cache_breakpoint": {"mode": "explicit"}} if mark else {}
    system = {"role": "system", "content": [{"type": "input_text", "text": SYSTEM, **given}]}
    return "/v1/responses", {
        "input": [system, {"role": "user", "content": "Hello"}],
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m" if mark else None},
    }


@pytest.mark.parametrize("body", [anthropic, anthropic_tool, chat, response])
def test_a_breakpoint_with_a_time_is_pinned_up_to_its_message(templated, body):
    limit = {"max_output_tokens" if body is response else "max_tokens": 1}
    for name, mark in (("marked", {"cache_control": HOUR}), ("bare", {})):
        scope = f"{body.__name__} {name}"
        path, fields = body(mark)
        answer = templated.http.post(path, json=fields | limit | {"cache_scope": scope, "cache_prompt": True})
        assert answer.status_code == 200, answer.text
        pinned_tokens, cached = pinned(templated, scope)
        assert cached > 100 and (cached / 2 < pinned_tokens < cached if mark else not pinned_tokens)


def test_the_end_of_the_prompt_may_be_one(templated):
    for name, field in (("control", {"cache_control": HOUR}), ("options", {"prompt_cache_options": {"ttl": "30m"}})):
        templated.chat(messages=chat({})[1]["messages"], cache_scope=name, max_tokens=1, **field)
        pinned_tokens, cached = pinned(templated, name)
        assert cached - 20 < pinned_tokens <= cached
    templated.chat(cache_scope="untimed", cache_control={"type": "ephemeral"})
    assert pinned(templated, "untimed")[0] == 0, "without a time it only opts in"


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300), ("1h", 3600), ("30s", 30), ("99d", 604_800), ("soon", 0), (5, 0)])
def test_times(ttl, seconds):
    assert seconds_of(ttl) == seconds


@pytest.mark.parametrize(("ttl", "says"), [("8d", "'8d' is longer than 7d"), ("soon", "'soon' is no time"), ("7d", "")])
def test_a_time_that_does_not_count_as_it_stands_is_named(templated, ttl, says):
    for field in ({"cache_control": {"type": "ephemeral", "ttl": ttl}}, {"prompt_cache_options": {"ttl": ttl}}):
        scope = f"{ttl} {field}"
        answer = templated.chat(messages=chat({})[1]["messages"], cache_scope=scope, max_tokens=1, **field)
        warnings = answer.get("warnings", [])
        assert len(warnings) == bool(says) and all(says in warning for warning in warnings), warnings
        assert (pinned(templated, scope)[0] > 0) == (ttl != "soon")


def test_the_end_of_a_session(templated):
    def ask(session, question):
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return templated.chat(messages=said, session_id=session, cache_scope="sessions", cache_prompt=None)

    first = ask("one", "Which ship is the largest of all in the harbour?")
    assert ask("two", "When does the tide come in?")["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    path = "/v1/sessions/one?scope=sessions"
    ended = templated.http.delete(path).json()
    alone = first["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 10 < ended["tokens"] < alone / 2, "its question and answer, and not what the other session has, too"
    assert templated.http.delete(path).status_code == 404
    assert templated.http.delete("/v1/sessions/two").status_code == 404, "it is of another scope"


def test_the_end_of_a_session_leaves_what_another_client_asked_too(templated):
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which ship is the largest of all?"}]

    def ask(**fields):
        return templated.chat(messages=said, cache_scope="shared", max_tokens=1, **fields)["usage"]

    def worth():
        runs = templated.http.get("/v1/cache?scope=shared").json()["runs"]
        return [(run["tokens"], run["frequency"]) for run in runs]

    ask(session_id="one", cache_prompt=None)
    used = ask()
    assert used["prompt_tokens_details"]["cached_tokens"] > 0.9 * used["prompt_tokens"]
    known = worth()
    assert templated.http.delete("/v1/sessions/one?scope=shared").json()["tokens"] == 0
    assert worth() == known and all(frequency for _, frequency in known)


def test_a_sub_agent_whose_last_message_is_taken_over_has_ended(templated):
    def ask(*messages):
        fields = {"session_id": "parent", "cache_scope": "quotes", "cache_prompt": None, "max_tokens": 40}
        answer = templated.chat(messages=messages, **fields)
        return answer["choices"][0]["message"]["content"], answer["usage"]

    task = {"role": "user", "content": "Which harbour is the deepest, and who has measured it?"}
    opening, _ = ask({"role": "system", "content": SYSTEM}, {"role": "user", "content": "Begin."})
    found, used = ask({"role": "system", "content": SYSTEM}, task)
    history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Begin."}]
    history += [{"role": "assistant", "content": opening}]
    before = templated.metric("slotcache_retired_tokens_total")
    ask(*history, {"role": "user", "content": f"It has begun to say {found[:20]}"})
    assert templated.metric("slotcache_retired_tokens_total") == before, "a part of the message is not the end"
    ask(*history, {"role": "user", "content": f"It said: {found} Go on."})
    retired = templated.metric("slotcache_retired_tokens_total") - before
    assert 40 < retired < used["total_tokens"] - used["prompt_tokens_details"]["cached_tokens"] + 1
    assert templated.http.delete("/v1/sessions/parent?scope=quotes").json()["tokens"] > 0, "the parent goes on"


def test_a_session_holds_no_more_of_a_prompt_than_is_counted(templated):
    """An answer without a limit has room for a whole context."""
    asked = {
        "messages": [{"role": "user", "content": "Hello"}],
        "session_id": "held",
        "stop": [*"abcdefghijklmnopqrstuvwxyz "],
    }
    assert templated.http.post("/v1/chat/completions", json=asked).status_code == 200
    (branch,) = templated.service.sessions.forget("", "held")
    pinned_tokens = branch.tokens if branch.tokens.base is None else branch.tokens.base
    assert pinned_tokens.nbytes == branch.tokens.nbytes
