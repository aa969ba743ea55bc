"""Large prompts take turns: one client's never stand in front of another's, and what nobody waits for ends."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread, get_ident

import httpx
import pytest
from slotcache.server.config.settings import Settings
from slotcache.server.http import threads as turns
from slotcache.server.http.security import Gate, Keys, Origins
from slotcache.server.http.threads import CLIENT, MOST_STARTED, Disconnected, PromptThreads, Turns, WaitingThread, give_way

from server.conftest import DEADLINE, running, until

WORDS = "some words of a text " * 20_000  # of more than one call


@pytest.fixture
def eager(monkeypatch):
    """Each call of `give_way` ends a turn."""
    monkeypatch.setattr(turns, "TURN", 0.0)


@pytest.fixture
def patient(monkeypatch):
    """A turn lasts until its work has ended."""
    monkeypatch.setattr(turns, "TURN", 1e6)


def gated(done):
    """Turns in which nothing begins before `done` is set."""
    made, began = Turns("test"), Event()
    made.submit(lambda: began.set() or done.wait(DEADLINE), ("gate",))
    assert began.wait(DEADLINE)
    return made


def endless(began):
    began.set()
    while True:
        give_way()


def test_clients_take_turns_whatever_each_of_them_has_queued(eager):
    order, go = [], Event()
    made = gated(go)

    def work(name):
        for _ in range(3):
            order.append(name)
            give_way()

    asked = [made.submit(lambda name=name: work(name), (name[0],)) for name in ("a1", "a2", "a3", "b1")]
    go.set()
    for one in asked:
        one.future.result(DEADLINE)
    made.close()
    assert [name[0] for name in order[:6]] == ["a", "b"] * 3, "b waits for a turn of a, not for all that a has queued"
    assert order[:6:2] == ["a1", "a2", "a3"], "the work of one client takes turns, too"
    assert sorted(order) == sorted(["a1", "a2", "a3", "b1"] * 3)


def test_one_piece_of_work_runs_at_a_time(eager):
    running_now, most, go = set(), [], Event()
    made = gated(go)

    def work(name):
        for _ in range(20):
            running_now.add(name)
            most.append(len(running_now))
            running_now.remove(name)
            give_way()

    asked = [made.submit(lambda name=name: work(name), (name % 3,)) for name in range(2 * MOST_STARTED)]
    go.set()
    for one in asked:
        one.future.result(DEADLINE)
    made.close()
    assert set(most) == {1}


def test_work_that_nobody_waits_for_ends_where_it_gives_way_and_later_work_runs(patient):
    seen, began = [], Event()

    def watched():
        try:
            endless(began)
        except BaseException as error:
            seen.append(type(error))
            raise

    async def disconnect():
        made = PromptThreads(1 << 30)
        first = asyncio.ensure_future(made.run(1 << 20, watched))
        await asyncio.to_thread(began.wait, DEADLINE)
        second = asyncio.ensure_future(made.run(1 << 20, seen.append, "never begun"))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.wait({first, second})
        assert await made.run(1 << 20, lambda: "later") == "later"
        assert (made.num_open, made.room) == (0, 1 << 30)
        made.close()

    asyncio.run(disconnect())
    assert seen == [Disconnected]


def test_a_close_ends_what_runs_and_begins_nothing(patient):
    began, started = Event(), []
    made = Turns("test")
    first, second = made.submit(lambda: endless(began)), made.submit(lambda: started.append(1))
    assert began.wait(DEADLINE)
    made.close()
    assert all(isinstance(one.future.exception(DEADLINE), Disconnected) for one in (first, second)) and not started


def test_what_waits_at_a_close_is_refused_and_so_is_what_comes_later(patient):
    """A model that is loaded anew closes its threads while the server goes on."""
    began, later = Event(), []

    async def close():
        made = PromptThreads(1 << 30)
        asked = [
            asyncio.ensure_future(made.run(1 << 20, work)) for work in (partial(endless, began), lambda: later.append(1))
        ]
        await asyncio.to_thread(began.wait, DEADLINE)
        await asyncio.to_thread(made.close)
        asked.append(asyncio.ensure_future(made.run(1, lambda: later.append(2))))
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [getattr(error, "status", error) for error in asyncio.run(close())] == [503] * 3 and not later


def test_what_waits_for_a_disk_at_a_close_is_refused_and_so_is_what_comes_later():
    began, go, later = Event(), Event(), []

    async def close():
        made = WaitingThread("test")
        asked = [
            asyncio.ensure_future(made.run(work))
            for work in (lambda: began.set() or go.wait(DEADLINE), lambda: later.append(1))
        ]
        await asyncio.to_thread(began.wait, DEADLINE)
        closing = asyncio.ensure_future(asyncio.to_thread(made.close))
        await asyncio.to_thread(until, lambda: made._closed)
        go.set()
        await closing
        asked.append(asyncio.ensure_future(made.run(later.append, 2)))
        return await asyncio.gather(*asked, return_exceptions=True)

    written, *refused = asyncio.run(close())
    assert written is True and [getattr(error, "status", error) for error in refused] == [503] * 2 and not later


def test_work_without_a_thread_is_refused_and_the_turn_is_the_next_one_s(monkeypatch):
    made, start, refuses = Turns("test"), Thread.start, [True]

    def no_thread(self):
        if refuses:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(Thread, "start", no_thread)
    refused = made.submit(lambda: 1)
    refuses.clear()
    assert made.submit(lambda: 2).future.result(DEADLINE) == 2
    assert getattr(refused.future.exception(DEADLINE), "status", 0) == 503
    made.close()


def test_a_client_with_more_work_than_there_are_threads_leaves_some_to_others(eager):
    ended, seen = Event(), []

    def work():
        until(lambda: give_way() or seen.append(get_ident()) or ended.is_set())

    made, asked = Turns("test"), []
    try:
        asked += [made.submit(work, ("a",)) for _ in range(2 * MOST_STARTED)]
        until(lambda: len(seen) > len(set(seen)) > 1)  # its first piece has had another turn: the others that may have begun
        others = [made.submit(lambda: give_way() or "done", (name,)) for name in range(MOST_STARTED)]
        assert [one.future.result(DEADLINE) for one in others] == ["done"] * MOST_STARTED
    finally:
        ended.set()
    for one in asked:
        one.future.result(DEADLINE)
    made.close()


@pytest.mark.parametrize("keys", ["", "one,two"])
def test_a_client_is_an_address_and_a_key_of_the_server(keys):
    """Any other header would make one client many, each with a turn of its own."""

    async def clients():
        found = []

        async def note(scope, receive, send):
            found.append(CLIENT.get())

        async def receive():
            return {}

        async def send(message):
            pass

        settings = Settings(api_key=keys)
        gate = Gate(note, settings, Keys.of(settings), Origins(settings))
        asked = [
            ("1.1.1.1", {"authorization": "Bearer one"}),
            ("1.1.1.1", {"x-api-key": "one"}),
            ("1.1.1.1", {"authorization": "Bearer another", "x-api-key": "one"}),
            ("2.2.2.2", {"x-api-key": "one"}),
            ("1.1.1.1", {"x-api-key": "two"}),
        ]
        for address, given in asked:
            headers = [(name.encode(), value.encode()) for name, value in given.items()]
            scope = {"type": "http", "method": "POST", "path": "/completion", "headers": headers, "client": (address, 1)}
            await gate(scope, receive, send)
        return found

    same, again, third, far, other = asyncio.run(clients())
    assert same == again == third != far and (same != other) == bool(keys)


# ---- on a real port -----------------------------------------------------------------------------------------------------


def hooked(up, hook):
    """Have `hook` called within the first large text that is tokenised, instead of the first time to give way."""
    began = Event()

    def between():
        if not began.is_set() and threads_work() is not None:
            began.set()
            hook()
        give_way()

    up.service.model.tokenizer.between = between


def threads_work():
    return getattr(turns._running, "work", None)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/input_tokens"])
def test_a_large_text_of_one_client_holds_up_no_large_text_of_another(tiny, eager, path):
    bodies = {
        "/tokenize": {"content": WORDS},
        "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": WORDS}]},
    }
    answered, began = Event(), Event()

    def block():  # as if the text never ended
        began.set()
        until(lambda: give_way() or answered.is_set())

    with running(tiny) as up, ThreadPoolExecutor(1) as clients:
        hooked(up, block)
        ask = {"json": bodies[path], "timeout": DEADLINE}
        first = clients.submit(httpx.post, up.url + path, **ask)
        try:
            assert began.wait(DEADLINE)
            assert up.http.post(path, json=bodies[path] | {"model": None}).status_code == 200
            assert not first.done()
        finally:
            answered.set()
        assert first.result(DEADLINE).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/completion"])
def test_the_text_of_a_client_that_disconnects_is_not_tokenised_to_its_end(tiny, path):
    body = b'{"%b":"%b"}' % (b"content" if path == "/tokenize" else b"prompt", WORDS.encode())
    ended, began = [], Event()

    def block():
        began.set()
        try:
            until(lambda: give_way())  # it returns nothing
        except BaseException as error:
            ended.append(type(error))
            raise

    with running(tiny) as up:
        hooked(up, block)
        with socket.create_connection(("127.0.0.1", httpx.URL(up.url).port)) as client:
            client.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)))
            client.sendall(body)
            assert began.wait(DEADLINE)
        threads = up.vectors.threads if path == "/tokenize" else up.service.builder.threads
        until(lambda: ended and threads.num_open == 0)
        assert ended == [Disconnected]
        assert up.http.post("/tokenize", json={"content": WORDS}).status_code == 200
