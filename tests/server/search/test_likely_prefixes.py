"""Documents read ahead of all questions: which, how many, in whose way, and what a new question gains, over a real port."""

import os
from contextlib import contextmanager
from threading import Event

import pytest
from slotcache.retrieval import Index
from slotcache.server.config.settings import Settings
from slotcache.server.serve import serve
from slotcache.server.service import likely_prefixes
from slotcache.server.service.likely_prefixes import LikelyPrefixes
from support.architectures import delta
from support.notes import is_ready, write

from server.conftest import DEADLINE, REST, idle_tokens, running, until

NAMES = ["ash", "birch", "cedar", "date", "elm", "fir"]
SYSTEM = "You are a forester."


def note(name, words="is tall and older than the town beside it"):
    return f"# {name}\n\nThe {name} {words}. " + f"People met below the {name} for a market in spring and in autumn. " * 3


def forest(folder, names=NAMES):
    """A folder with a note for each name, the first one changed last."""
    write(folder, {f"{name}.md": note(name) for name in names})
    for age, name in enumerate(names):
        os.utime(folder / f"{name}.md", (1_000_000_000, 1_000_000_000 - age))
    return folder


@contextmanager
def reading(model, tmp_path, **changed):
    """A server that reads ahead, with its index ready."""
    folder = tmp_path / "notes"
    folder.mkdir(exist_ok=True)
    usual = {"docs": str(folder), "docs_db": str(tmp_path / "db"), "read_ahead": 16, "docs_top_k": 2}
    with running(model, **(usual | changed)) as up:
        until(lambda: is_ready(up))
        yield up


def progress(server):
    return server.http.get("/v1/sources").json()["read_ahead"]


def settled(server):
    """The progress once nothing is left."""
    until(lambda: progress(server)["done"] and server.service.idle.done)
    return progress(server)


def refresh(server):
    """Have the server look at its folder; return when it has."""
    looked = server.folder_index.prefixes.renew
    done = []
    server.folder_index.prefixes.renew = lambda: done.append(looked())
    server.http.post("/v1/sources/refresh", json={})
    until(lambda: done)
    server.folder_index.prefixes.renew = looked


def chunks(server):
    """The documents of the index by title."""
    store = server.folder_index.index.store
    numbers = [number for path in store.files() for number in store.numbers_at(path, 1, 99)]
    return {chunk.title: chunk for chunk in store.chunks(numbers).values()}


def at_the_front(server, system=""):
    """The titles of the documents that a new question could have at the front of its prompt at no cost."""
    asks = server.service.settings.retrieval_prompt  # in every chat whose documents are found
    messages = [{"role": "system", "content": f"{system}\n\n{asks}".strip()}, {"role": "user", "content": "?"}]
    found = []
    for title, chunk in chunks(server).items():
        document = {"id": chunk.id, "title": title, "text": chunk.text}
        reported = server.http.post("/v1/documents/order", json={"messages": messages, "documents": [document]}).json()
        (used,) = reported["documents"]
        found += [title] if used["cached_tokens"] == used["tokens"] else []
    return found


def ask(server, question, **fields):
    """A chat that searches, and says nothing of the cache."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0, "retrieval": True}
    answer = server.http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forest")
    forest(folder / "notes")
    with reading(tiny, folder) as up:
        yield up


def test_a_new_question_finds_a_document_at_the_front(server):
    assert settled(server)["documents"] == len(NAMES) == server.metric("slotcache_docs_read_ahead")
    assert progress(server)["tokens"] == server.metric("slotcache_docs_read_ahead_tokens")
    assert 0 < progress(server)["tokens"] <= idle_tokens(server)
    answer = ask(server, "the cedar and the elm")
    used = answer["slotcache"]["documents"]
    assert sum(one["cached_tokens"] == one["tokens"] for one in used) >= 1 and len(used) == 2
    assert answer["slotcache"]["source"] in ("own", "fork", "host")
    cold = ask(server, "the cedar and the elm", cache_prompt=False, document_order="retrieval")
    assert cold["slotcache"]["cached_tokens"] == 0


def test_where_documents_are_read_separately_a_new_question_finds_all_of_them(tiny, tmp_path):
    forest(tmp_path / "notes")
    with reading(tiny, tmp_path, documents_attention="separate") as server:
        assert settled(server)["documents"] == len(NAMES)
        answer = ask(server, "the cedar and the elm")
        used = answer["slotcache"]["documents"]
        assert [one["cached_tokens"] == one["tokens"] for one in used] == [True, True]
        cold = ask(server, "the cedar and the elm", cache_prompt=False)
        assert cold["slotcache"]["cached_tokens"] < answer["slotcache"]["cached_tokens"]
        assert cold["choices"] == answer["choices"]


def test_while_a_question_is_typed_its_documents_are_read_separately(tiny, tmp_path):
    forest(tmp_path / "notes")
    with reading(tiny, tmp_path, documents_attention="separate", read_ahead=0) as server:
        ask(server, "the fir")  # the chat that the next one is like
        found = server.http.post("/v1/search", json={"query": "the cedar and the elm", "speculate": "typed"})
        assert found.status_code == 200, found.text
        until(lambda: server.service.engine.inbox.ask(lambda: server.service.engine.scheduler.idle).result())
        answer = ask(server, "the cedar and the elm", conversation="typed", store=True)
        used = answer["slotcache"]["documents"]
        again = server.service.engine.scheduler.tree.recompute_last  # of the document that the typed turn ended with
        assert len(used) == 2 and all(one["cached_tokens"] >= one["tokens"] - again for one in used)
        assert ask(server, "the cedar and the elm", cache_prompt=False)["choices"] == answer["choices"]


def test_documents_stand_after_the_system_message_of_the_newest_chats(server):
    ask(server, "the elm")
    settled(server)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the fir"}]
    ask(server, "", messages=chat)
    settled(server)
    assert at_the_front(server, SYSTEM) == ["fir"], "it may never come back"
    ask(server, "", messages=chat)
    assert settled(server)["documents"] == len(NAMES)
    assert sorted(at_the_front(server, SYSTEM)) == NAMES
    before = idle_tokens(server)
    ask(server, "", messages=chat, seed=3)
    settled(server)
    assert idle_tokens(server) == before, "it is the same beginning"


def test_a_scope_that_is_dropped_stays_dropped(server):
    ask(server, "the ash")
    settled(server)
    server.http.delete("/v1/cache")
    before = idle_tokens(server)
    assert settled(server) == {"documents": 0, "tokens": 0, "done": True} and idle_tokens(server) == before
    ask(server, "the ash")
    assert settled(server)["documents"] == len(NAMES)


def test_a_request_interrupts_it_and_it_goes_on(tiny, tmp_path):
    forest(tmp_path / "notes", [f"tree{number}" for number in range(60)])
    with reading(tiny, tmp_path) as server:
        scheduler, steps = server.service.engine.scheduler, []
        commit = scheduler.commit

        def watched(plan, sampled):
            steps.append({not job.request.kind.is_client for job in scheduler.step.jobs})
            return commit(plan, sampled)

        until(lambda: idle_tokens(server))
        scheduler.commit = watched
        server.chat("Quick.", max_tokens=30)
        assert not progress(server)["done"]
        assert settled(server)["documents"] == 60
        scheduler.commit = commit
    first_front = steps.index({False})
    assert steps[:first_front] == [{True}] * first_front and steps[first_front : first_front + 30] == [{False}] * 30


def test_the_budget_holds_and_files_changed_last_come_first(tiny, tmp_path):
    names = [f"tree{number}" for number in range(60)]
    forest(tmp_path / "notes", names)
    with reading(tiny, tmp_path, read_ahead=1) as server:
        now, most = settled(server), server.folder_index.prefixes.most_tokens
        assert most == (1 << 20) / 512, "bytes of a token's KV"
        assert most - 150 < now["tokens"] <= most and 0 < now["documents"] < 60
        assert set(at_the_front(server)) == set(names[: now["documents"]])
        assert idle_tokens(server) <= most


def test_nothing_is_read_ahead_before_all_files_are_read(tiny, tmp_path, monkeypatch):
    """Documents of the first files would take the place of likelier ones, or come beside them."""
    names = [f"tree{number}" for number in range(60)]
    forest(tmp_path / "notes", names)
    read, reached, may_go_on = Index.read, Event(), Event()

    def paused_read(index, file, *given):
        if file.path == "tree20.md":
            reached.set()
            may_go_on.wait(DEADLINE)
        return read(index, file, *given)

    monkeypatch.setattr(Index, "read", paused_read)
    settings = {"docs": str(tmp_path / "notes"), "docs_db": str(tmp_path / "db"), "read_ahead": 1}
    with running(tiny, **settings) as server:
        try:
            assert reached.wait(DEADLINE)
            server.chat("Quick.")
            until(lambda: server.service.idle.done)
            assert len(chunks(server)) > 10 and not progress(server)["done"] and idle_tokens(server) == 0
        finally:
            may_go_on.set()
        until(lambda: is_ready(server))
        now = settled(server)
        assert set(at_the_front(server)) == set(names[: now["documents"]]) and now["documents"] > 0


def test_a_document_that_finds_no_room_holds_up_no_other(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(likely_prefixes, "AGAIN", 0.0)
    is_computed, tried = LikelyPrefixes._is_computed, []

    async def computes_all_but_the_first(self, likely, ahead):
        tried.append(likely.number)
        return likely.number != tried[0] and await is_computed(self, likely, ahead)

    monkeypatch.setattr(LikelyPrefixes, "_is_computed", computes_all_but_the_first)
    forest(tmp_path / "notes")
    with reading(tiny, tmp_path) as server:
        until(lambda: tried and server.service.idle._task is None)
        assert progress(server)["documents"] == len(NAMES) - 1 and not progress(server)["done"]


def test_what_was_used_comes_first_after_a_restart(tiny, tmp_path):
    names = [f"tree{number}" for number in range(60)]
    forest(tmp_path / "notes", names)
    with reading(tiny, tmp_path, read_ahead=1, docs_top_k=1) as server:
        settled(server)
        assert "tree59" not in at_the_front(server)
        assert ask(server, "What of tree59?")["slotcache"]["retrieved"][0]["title"] == "tree59"
        settled(server)
    with reading(tiny, tmp_path, read_ahead=1) as server:
        settled(server)
        assert {"tree59", "tree0"} <= set(at_the_front(server))


def test_kv_that_a_request_has_used_stays_on_the_device(tiny, tmp_path):
    with reading(tiny, tmp_path, ctx_size=1024, docs_watch=False) as server:
        server.chat("Tell me all.", max_tokens=300)
        forest(tmp_path / "notes", [f"tree{number}" for number in range(20)])
        refresh(server)
        now = settled(server)
        assert now["documents"] == 20 and now["tokens"] > 1024
        again = server.chat("Tell me all.", max_tokens=2)["slotcache"]
        assert again["source"] in ("own", "fork")
        assert server.metric("slotcache_cached_tokens_total", source="host") == 0
        assert ask(server, "What of tree3?")["slotcache"]["source"] == "host"


def test_an_edit_costs_its_own_documents_only(tiny, tmp_path):
    parts = {name: f"# {name}\n\n{note(name).split('. ', 1)[1]}\n\n" for name in NAMES}
    write(tmp_path / "notes", {"trees.md": "".join(parts.values()), "other.md": note("oak")})
    with reading(tiny, tmp_path, docs_watch=False, chunk_tokens=32) as server:
        before, documents, done = settled(server), set(chunks(server)), idle_tokens(server)
        edited = parts | {"cedar": parts["cedar"].replace("market", "fair")}
        write(tmp_path / "notes", {"trees.md": "".join(edited.values())})
        refresh(server)
        after = settled(server)
        assert after["documents"] == before["documents"] and set(chunks(server)) == documents
        changed = idle_tokens(server) - done
        assert 0 < changed < after["tokens"] / len(NAMES) + REST
        assert set(at_the_front(server)) == documents


def test_a_restart_has_them_at_once(tiny, tmp_path):
    forest(tmp_path / "notes")
    kept = {"cache_dir": str(tmp_path / "kv")}
    with reading(tiny, tmp_path, **kept) as server:
        before = settled(server)
        until(lambda: server.metric("slotcache_host_bytes") >= 512 * before["tokens"])
    with reading(tiny, tmp_path, **kept) as server:
        assert settled(server) == before and idle_tokens(server) == 0
        assert ask(server, "the birch")["slotcache"]["source"] == "disk"


def test_a_folder_larger_than_host_memory_answers_its_first_questions_from_disk(tiny, tmp_path):
    names = [f"tree{number}" for number in range(60)]
    forest(tmp_path / "notes", names)
    kept = {"cache_dir": str(tmp_path / "kv"), "cache_ram": 1, "docs_top_k": 1}
    with reading(tiny, tmp_path, **kept) as server:
        before = settled(server)
        assert before["documents"] == 60 and 512 * before["tokens"] > 1.4 * (1 << 20)
        until(lambda: server.metric("slotcache_disk_bytes") >= 512 * before["tokens"])
        assert server.metric("slotcache_host_bytes") <= 1 << 20
    with reading(tiny, tmp_path, **kept) as server:
        assert settled(server) == before and idle_tokens(server) == 0
        found = [ask(server, f"What of {names[number]}?")["slotcache"] for number in (0, 31, 59)]
        assert {one["source"] for one in found} == {"disk"}
        assert all(one["documents"][0]["cached_tokens"] == one["documents"][0]["tokens"] for one in found)


def test_no_more_is_read_ahead_than_the_disk_has_room_for(tiny, tmp_path):
    forest(tmp_path / "notes", [f"tree{number}" for number in range(60)])
    with reading(tiny, tmp_path, cache_dir=str(tmp_path / "kv"), cache_ram=1, cache_disk=1) as server:
        now = settled(server)
        assert 0 < now["documents"] < 60 and 512 * now["tokens"] <= 1 << 20


def test_a_hybrid_reads_ahead_as_many_documents_as_their_states_fit(tmp_path):
    model, names = delta(tmp_path / "delta.gguf"), [f"tree{number}" for number in range(40)]
    forest(tmp_path / "notes", names)
    kept = {"cache_dir": str(tmp_path / "kv"), "idle_prefill": False, "read_ahead": 1}
    with reading(model, tmp_path, **kept) as server:
        before = settled(server)
        sizes = server.service.engine.scheduler.index.host.sizes
        assert sizes.state > 50 * sizes.run_token
        taken = before["documents"] * sizes.state + before["tokens"] * sizes.run_token
        assert 0.7 * (1 << 20) < taken <= 1.1 * (1 << 20) and before["documents"] < 40
        assert set(at_the_front(server)) == set(names[: before["documents"]])
        until(lambda: server.metric("slotcache_disk_bytes") >= 0.7 * (1 << 20))
    with reading(model, tmp_path, **kept) as server:
        assert settled(server) == before and idle_tokens(server) == 0
        answer = ask(server, f"What of {names[0]}?")["slotcache"]
        assert answer["source"] == "disk" and answer["cached_tokens"] > 100


@pytest.mark.parametrize(("settings", "word"), [({}, "--docs"), ({"docs": ".", "cache_ram": 0}, "--cache-ram")])
def test_it_is_refused_where_nothing_could_be_read_ahead(tiny, capsys, settings, word):
    assert serve(Settings(model=str(tiny), port=0, read_ahead=1, ctx_size=512, **settings)) == 2
    assert word in capsys.readouterr().err


def test_without_the_flag_nothing_is_read_ahead(tiny, tmp_path):
    forest(tmp_path / "notes")
    with reading(tiny, tmp_path, read_ahead=0) as server:
        assert "read_ahead" not in server.http.get("/v1/sources").json()
        ask(server, "the birch")
        in_front = idle_tokens(server)  # of its documents, while they were searched
        until(lambda: server.service.idle.done)
        assert idle_tokens(server) == in_front < 100
