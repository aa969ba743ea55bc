"""Documents that are read separately: which pieces of a prompt are computed, against a model of memory."""

import numpy as np
import pytest
from slotcache.ordering.document import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, SeparatePrompt
from slotcache.slots.device import DeviceCells
from slotcache.slots.radix import NO_TOKENS
from slotcache.slots.request import NO_LAYOUT
from slotcache.slots.separate import num_kept
from support.scopes import COMMON
from support.world import World

REST = 8
FRONT, QUESTION = np.arange(4, dtype=np.int32), np.arange(100, 112, dtype=np.int32)
HEADING = np.arange(200, 205)  # all documents begin with it


def prompt(*documents, question=QUESTION):
    """documents: the first token of each behind the heading; each has 40."""
    tokens = tuple(np.concatenate([HEADING, np.arange(at, at + 35)]).astype(np.int32) for at in documents)
    placed = DocumentSet(tuple(Document(str(at), str(at)) for at in documents), tokens, "retrieval", hint=None)
    return SeparatePrompt((Fixed(FRONT, "the front"), placed, Fixed(question, "the question")))


def pieces(world, job):
    return [len(span.tokens) for plan in world.plans for span in plan.spans if span.request == job.request.id]


def test_a_document_is_read_once_and_moved():
    world = World(host=1000)
    first = world.run(prompt(1000, 2000))
    assert pieces(world, first) == [44, 35, 12, 1], "both documents, the question, and the first answer's token"
    again = world.run(prompt(2000, 1000))
    assert pieces(world, again) == [12, 1] and again.reuse.sources["moved"] > 70


def jointly(document):
    """The front, a document and a question as one exact text."""
    given = prompt(document)
    return ChatPrompt(given.parts)


def test_a_copy_that_pushes_another_one_out_of_host_memory():
    """One document is on the device alone, the other one partly in host memory alone, which has room for no more."""
    world = World(host=36)
    world.run(jointly(1000))
    world.run(jointly(2000))
    tree = world.scheduler.tree
    (root,) = tree.roots.values()
    heading = root.children[0].children[HEADING[0]]
    while heading.children[1000].ready:
        tree.evict()
    world.carry_out()
    assert heading.children[1000].copy and not heading.copy and heading.children[2000].ready
    job = world.run(prompt(2000, 1000))
    assert job.reuse.sources["moved"] == 2 * 40 and pieces(world, job) == [12, 1]


def test_a_document_that_leaves_the_cache_while_its_prompt_waits_for_cells():
    world = World(host=1000, cells=180, slots=2)
    world.run(prompt(1000, 2000))
    running = world.submit(range(5000, 5100), limit=40)
    world.step()
    waiting = world.submit(prompt(3000, 2000))
    while waiting.layout is NO_LAYOUT or waiting.is_reading:
        world.step()
    assert waiting.sequence is None and running.sequence, "it has read one document, and its prompt does not fit"
    world.scheduler.tree.drop(COMMON)
    world.finish()
    assert pieces(world, waiting)[-3:] == [44, 12, 1]


def test_documents_of_one_prompt_are_moved_in_one_walk_over_its_path(monkeypatch):
    """Each move by itself would walk over all of it, for the square of their number."""
    names = range(1000, 2000, 40)
    world = World(cells=10_000, host=10_000, batch=512)
    world.run(prompt(*names))
    job = world.submit(prompt(*reversed(names)))
    calls = []
    advance = DeviceCells.advance
    monkeypatch.setattr(DeviceCells, "advance", lambda *args: calls.append(args) or advance(*args))
    world.scheduler.plan()
    assert job.computed == job.num_prompt - len(QUESTION) and len(calls) == 1


def test_a_prompt_is_due_when_others_have_computed_as_much_as_it_computes_itself():
    """Of 25 documents it computes no token, and twelve of a question."""
    names = range(1000, 2000, 40)
    world = World(cells=10_000, host=10_000, batch=512)
    world.run(prompt(*names))
    job = world.submit(prompt(*reversed(names)))
    world.scheduler.plan()
    assert job.num_prompt > 1000 and job.due == world.scheduler.counters.prefilled_tokens + 12


@pytest.mark.parametrize("recompute_last", [1, REST])
def test_a_prompt_that_ends_in_a_document_computes_its_last_token(recompute_last):
    world = World(host=1000, recompute_last=recompute_last)
    for documents, computed in (((1000,), [43, 1, 1]), ((2000, 1000), [35, 1, 1]), ((2000, 1000), [1, 1])):
        job = world.run(prompt(*documents, question=NO_TOKENS))
        assert pieces(world, job) == computed and job.num_prompt == 4 + 40 * len(documents)
    longer = world.run(prompt(2000, 1000))
    assert pieces(world, longer) == [recompute_last, len(QUESTION), 1] and longer.reuse.cached == 84 - 1, (
        "it was read as text before"
    )


def test_a_prompt_that_ends_in_a_document_of_one_token():
    tokens = (np.array([7], np.int32), np.array([8], np.int32))
    documents = DocumentSet(tuple(Document(str(at), str(at)) for at in (7, 8)), tokens, "retrieval", hint=None)
    for front in (FRONT, NO_TOKENS):
        world = World(host=1000)
        parts = (Fixed(front, "the front"), documents, Fixed(NO_TOKENS, "the question"))
        first, again = (world.run(SeparatePrompt(parts)) for _ in range(2))
        assert first.num_tokens == again.num_tokens == len(front) + 2 + first.request.limit


@pytest.mark.parametrize("host", [0, 100])
def test_copies_of_many_requests_are_bounded_where_host_memory_is_full(host):
    world = World(cells=3000, slots=16, host=host, batch=512, budget=512)
    names = range(1000, 1800, 40)
    given = [prompt(*names, question=np.arange(at, at + 20, dtype=np.int32)) for at in range(100, 116)]
    jobs, most = [world.submit(one, limit=20) for one in given], 0
    while not world.scheduler.idle:
        world.step()
        most = max(most, num_kept([*world.scheduler.running, *world.scheduler.waiting]))
    assert 1000 < most < 2 * 3000, "of 16 requests with 800 tokens of documents each"
    assert all(job.num_tokens == job.num_prompt + 20 for job in jobs)


def test_a_prompt_without_a_token_is_empty():
    assert SeparatePrompt((Fixed(NO_TOKENS, "the question"),)).num_tokens == 0


def test_the_front_is_in_memory_once():
    layout = prompt(1000, 2000, 3000).arrange(World().scheduler.tree, COMMON)
    assert len({id(document.prefix) for document in layout.moved}) == 1
