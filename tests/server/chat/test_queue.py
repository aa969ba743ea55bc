"""The queue and the order of documents together, on a model of memory: RAGBoost's figure 6 and what follows from it."""

import numpy as np
import pytest
from slotcache.models.times import CPU
from slotcache.ordering import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from slotcache.slots.check import check
from slotcache.slots.host import HostMemory
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from support.memory import Memory
from support.scopes import COMMON

SYSTEM = np.arange(10, dtype=np.int32)
SIZE = 40  # tokens of a document


def prompt(names, question):
    documents = tuple(Document(name, f"text {name}") for name in names)
    tokens = tuple(np.arange(100 * int(name) + 100, 100 * int(name) + 100 + SIZE, dtype=np.int32) for name in names)
    fixed = Fixed(SYSTEM, "system"), Fixed(np.array([5000 + question] * 5, np.int32), "question")
    return ChatPrompt([fixed[0], DocumentSet(documents, tokens, "auto", None), fixed[1]])


def serve(*sets, cells, slots=1, host=0, twice=0):
    """All at once in the queue; (order of starting, documents in the order used, documents reused) by request.

    twice: tokens of a document that two requests of one step may both compute.
    """
    scheduler = Scheduler(
        PrefixTree(cells, 16, HostMemory(host), costs=CPU), num_slots=slots, batch_size=64, prefill_budget=64
    )
    memory = Memory(cells)
    requests = [Request(number, prompt(names, number), 1, COMMON) for number, names in enumerate(sets)]
    jobs = [scheduler.submit(request) for request in requests]
    started = []
    while not scheduler.idle:
        plan = scheduler.plan()
        started += [span.request for span in plan.spans if span.request not in started]
        for job, _ in scheduler.commit(plan, memory.run(plan)):
            scheduler.finish(job)
        check(scheduler)
    layouts = [job.layout for job in jobs if job.layout]
    orders = ["".join(document.id for document in layout.documents) for layout in layouts]
    reused = [
        sum(document.stop <= job.reuse.cached + twice for document in layout.documents)
        for job, layout in zip(jobs, layouts, strict=True)
    ]
    return started, orders, reused


def test_requests_of_one_prefix_follow_each_other():
    """C6 {1,2,4}, C3 {1,4,0}, C7 {5,7,8}, C8 {1,2,9}; room for one path: three documents reused instead of one."""
    started, orders, reused = serve("124", "140", "578", "129", cells=3 * SIZE + 16 + SIZE // 2)
    assert started == [0, 3, 1, 2]
    assert orders == ["124", "140", "578", "129"]
    assert sum(reused) == 3


def test_a_cold_start_puts_first_what_those_that_wait_need():
    _, orders, reused = serve("412", "215", "621", cells=1000)
    assert orders[0][:2] in ("12", "21") and sum(reused) == 4
    _, alone, none = serve("412", cells=1000)
    assert alone == ["412"] and none == [0]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_order_does_not_lose_its_gain_when_requests_come_together(slots):
    _, _, reused = serve("123", "132", "213", "231", "312", "321", cells=2000, slots=slots, host=2000, twice=31)
    assert sum(reused) == 5 * 3
