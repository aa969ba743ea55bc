"""Clients that shorten their history: the summary reuses all of it, and what follows is computed before it is asked."""

import pytest

from server.conftest import REST, cached, running, until
from server.service.test_idle import settled

SYSTEM = {"role": "system", "content": "You are a careful assistant who reads documents about the sea and the land. " * 6}
SUM_UP = {"role": "user", "content": "Sum up all that was said so far, so that others can go on from there."}


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, chat_template="chatml", idle_prefill=True) as up:
        yield up


def user(text):
    return {"role": "user", "content": text}


def asked(server, history, **fields):
    answer = server.chat(messages=[SYSTEM, *history], **fields)
    settled(server)
    return answer


def shortened(server, number, wrap, **fields):
    """Ask some questions, have them summed up, and return what a client goes on with, and the answer with the summary."""
    history = []
    for at in range(3):
        history.append(user(f"{number}.{at}: what do the boats bring, and which of them comes in with the tide? " * 3))
        history.append(asked(server, history, **fields)["choices"][0]["message"])
    before = asked(server, history[:-1], **fields)["usage"]["prompt_tokens"]
    answer = asked(server, [*history, SUM_UP], max_tokens=200, seed=number, temperature=1.0, **fields)
    assert cached(answer) >= before, "the summary's prompt goes on from the whole history"
    return [user(wrap(answer["choices"][0]["message"]["content"].strip()))], answer


def wrapped(summary):
    return f"What was said until now:\n{summary}\nGo on from there."


@pytest.mark.parametrize("fields", [{"cache_scope": "a scope"}, {"session_id": "a session"}])
def test_the_shortened_history_is_computed_ahead(server, fields):
    first, _ = shortened(server, 1, wrapped, **fields)
    assert cached(asked(server, first, **fields)) < 0.8 * asked(server, first, **fields)["usage"]["prompt_tokens"]
    second, _ = shortened(server, 2, wrapped, **fields)
    answer = server.chat(messages=[SYSTEM, *second], **fields)
    assert answer["timings"]["prompt_n"] == REST, "its prompt was there"


def test_another_question_or_another_scope_learns_nothing(server):
    shortened(server, 3, wrapped, cache_scope="from")
    second, _ = shortened(server, 4, wrapped, cache_scope="to")
    answer = server.chat(messages=[SYSTEM, *second], cache_scope="to")
    assert answer["timings"]["prompt_n"] > 2 * REST


def test_a_dropped_scope_is_forgotten(server):
    first, _ = shortened(server, 5, wrapped, cache_scope="dropped")
    asked(server, first, cache_scope="dropped")
    until(lambda: server.service.idle.done)
    server.http.delete("/v1/cache?scope=dropped")
    second, _ = shortened(server, 6, wrapped, cache_scope="dropped")
    assert server.chat(messages=[SYSTEM, *second], cache_scope="dropped")["timings"]["prompt_n"] > 2 * REST
