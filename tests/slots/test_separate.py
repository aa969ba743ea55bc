"""Documents that are read separately: which pieces of a prompt are computed, against a model of memory."""

import random

import numpy as np
import pytest
from slotcache.ordering.document import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, SeparatePrompt
from slotcache.server.engine.usage import document_reuse
from slotcache.slots.device import DeviceCells
from slotcache.slots.job import Phase
from slotcache.slots.plan import Clear
from slotcache.slots.radix import NO_TOKENS
from slotcache.slots.record import file_name
from slotcache.slots.request import NO_LAYOUT, Kind
from slotcache.slots.reuse import SEPARATE
from slotcache.slots.separate import SeparateLayout, num_kept, read_by
from slotcache.slots.store.record_index import RecordIndex
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


def test_a_question_over_documents_that_were_read_counts_for_itself_alone():
    """Beside a prompt that lacks more than the question, and less than it with its documents."""
    world = World(host=1000, cells=2000)
    world.run(prompt(1000, 2000, 3000))
    long = world.submit(range(5000, 5600))
    while long.computed < 512:
        world.step()
    asked = world.submit(prompt(3000, 2000, 1000))
    world.step()
    assert pieces(world, asked) == [12]


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


def test_a_document_that_is_evicted_while_its_prompt_waits_for_cells():
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
    assert pieces(world, waiting) == [32, 3, 12, 1], "it has kept the document that it found in its first stage"


def test_a_paused_answer_does_not_begin_anew_where_the_copy_of_a_document_is_lost():
    """Its client has its first tokens."""
    world = World(host=1000, slots=2)
    first, second = (world.submit(prompt(1000, 2000, question=QUESTION + at), limit=9) for at in (0, 50))
    while not (first.num_generated and second.num_generated):
        world.step()
    paused = world.scheduler.recover().paused
    world.memory.apply(Clear())
    assert {*paused} == {first, second}
    world.step()
    assert world.scheduler.running == paused[:1] and [*world.scheduler.waiting] == paused[1:]
    for piece in read_by(first).pieces[0]:
        piece.copy.data = None
    assert world.scheduler.recover().failed == paused
    assert world.scheduler.idle and paused[1].phase is Phase.DONE


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
    assert pieces(world, longer) == [recompute_last, len(QUESTION), 1] and longer.reuse.cached == 84 - recompute_last, (
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


def test_reading_documents_takes_no_chats_slot():
    world = World(host=1000, slots=3, batch=16)
    others = [world.run(np.arange(at, at + 20)) for at in (5000, 6000, 7000)]
    job = world.run(prompt(1000, 2000, 3000))
    assert [slot.last for slot in world.scheduler.slots] == [job.request.id, *(one.request.id for one in others[1:])]
    world.submit(prompt(4000))
    world.step()
    assert world.scheduler.running[0].is_reading
    world.scheduler.finish(world.scheduler.running[0])
    assert [slot.last for slot in world.scheduler.slots] == [job.request.id, *(one.request.id for one in others[1:])]


def test_a_prompt_without_a_token_is_empty():
    assert SeparatePrompt((Fixed(NO_TOKENS, "the question"),)).num_tokens == 0


def test_the_front_is_in_memory_once():
    layout = prompt(1000, 2000, 3000).arrange(World().scheduler.tree, COMMON)
    assert isinstance(layout, SeparateLayout) and len({id(document.prefix) for document in layout.moved}) == 1


# ---- What documents are worth: many questions about few of them, and host memory for a part. ----------------------------

SIZE, NUM_DOCUMENTS, ROOM, OF_EACH = 40, 60, 35, 5


def question(number, chosen):
    """chosen: numbers of documents, which begin with different tokens."""
    tokens = tuple(np.arange(1000 * at, 1000 * at + SIZE, dtype=np.int32) for at in chosen)
    documents = DocumentSet(tuple(Document(str(at), str(at)) for at in chosen), tokens, "retrieval", hint=None)
    asked = np.arange(200_000 + 10 * number, 200_006 + 10 * number, dtype=np.int32)
    return SeparatePrompt((Fixed(FRONT, "the front"), documents, Fixed(asked, "the question")))


def asked_about(world, all_chosen):
    """Ask questions one after the other. Return for each the tokens of its documents that were not computed, by document."""
    found = []
    for number, chosen in enumerate(all_chosen):
        before = world.scheduler.counters.prefilled_tokens
        job = world.run(question(number, chosen), limit=6)
        computed = world.scheduler.counters.prefilled_tokens - before
        assert job.reuse.cached == job.num_prompt - computed, "what counts as reused was not computed"
        reused = [(span.start, span.stop) for span in job.reuse.spans]
        found.append({int(one["id"]): one["cached_tokens"] for one in document_reuse(job.layout, reused)})
    return found


def chosen_at_random(num_questions, seed=0):
    chance = random.Random(seed)
    return [chance.sample(range(1, NUM_DOCUMENTS + 1), OF_EACH) for _ in range(num_questions)]


def test_documents_stay_where_what_stands_at_their_places_is_evicted():
    world = World(cells=600, host=ROOM * SIZE, batch=512, budget=512)
    last = asked_about(world, chosen_at_random(100))[-25:]
    share = sum(sum(one.values()) for one in last) / (25 * OF_EACH * SIZE)
    assert share >= 0.45, "0.16 where both are worth the same and no use counts; 0.58 of the documents have room"


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_a_document_of_each_question_is_computed_once(rank):
    common = NUM_DOCUMENTS + 1
    given = [[*chosen[:rank], common, *chosen[rank + 1 :]] for chosen in chosen_at_random(50)]
    world = World(cells=600, host=12 * SIZE, batch=512, budget=512)
    found = asked_about(world, given)
    assert [one[common] for one in found] == [0, *[SIZE] * 49]
    readers = [job for job in world.jobs if any(job.layout.moved[at].id == str(common) for at in read_by(job).tokens)]
    assert readers == world.jobs[:1]


def run_of(world, text):
    """Return the run that ends where a text ends."""
    node = world.scheduler.tree.match(COMMON, np.asarray(text, np.int32)).exact_end
    assert node is not None
    return node


def test_each_request_counts_as_a_use_of_its_documents_but_no_further_turn_of_its_chat():
    world = World(host=1000, batch=512, budget=512)
    first = question(0, [1, 2])
    job = world.run(first)
    assert isinstance(job.layout, SeparateLayout)
    originals = [run_of(world, one.text) for one in job.layout.moved]
    assert [one.frequency for one in originals] == [1, 1]
    world.run(question(1, [3, 2]))
    assert [one.frequency for one in originals] == [1, 2]
    parts = first.parts
    for turn in range(2, 5):
        parts = (
            *parts,
            Fixed(job.tokens[job.num_prompt : job.num_tokens].copy(), "the answer"),
            *question(turn, []).parts[2:],
        )
        job = world.run(SeparatePrompt(parts))
    assert [one.frequency for one in originals] == [1, 2]


def test_a_document_that_was_read_ahead_counts_as_used_once_a_request_has_moved_it():
    world = World(host=1000, batch=512, budget=512)
    front, document, _ = question(0, [1]).parts
    world.run(ChatPrompt((front, document)), limit=1, kind=Kind.PREFETCH)
    layout = question(0, [1]).arrange(world.scheduler.tree, COMMON)
    assert isinstance(layout, SeparateLayout)
    (moved,) = layout.moved
    original = run_of(world, moved.text)
    assert original.frequency == 0
    assert pieces(world, world.run(question(0, [2, 1]))) == [SIZE, 6, 1], "it was read ahead"
    assert original.frequency == 1
    world.scheduler.tree.evict(1000, unused=True)
    assert original.ready or original.copy, "no prompt that is computed ahead pushes it out"


def test_what_stands_at_places_is_evicted_first_from_a_lower_tier():
    world = World(host=10_000, batch=512, budget=512)
    asked_about(world, chosen_at_random(20))
    while world.scheduler.tree.copies.save_ahead():
        world.carry_out()
    host, index = world.scheduler.tree.host, RecordIndex()
    for node in host.nodes:
        record = host.get(node)
        assert record is not None
        index.add(
            file_name(record),
            record.scope,
            record.start,
            record.tokens,
            size=len(record.data),
            used=0,
            frequency=record.frequency,
            token_cost=record.token_cost,
        )
    at_front = [entry for entry in index.entries.values() if entry.start == len(FRONT)]
    originals = {entry.key for entry in at_front if entry.node.tokens[0] < SEPARATE}
    read = {document for chosen in chosen_at_random(20) for document in chosen}
    assert len(originals) == len(read)
    while index.num_bytes > len(FRONT) + SIZE * len(read):
        index.evict()
    assert originals <= set(index.entries)
