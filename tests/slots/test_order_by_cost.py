"""The order of documents where some are in a lower tier only: each counts at what it costs to read."""

import numpy as np
import pytest
from slotcache.ordering.document import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from slotcache.slots.request import Request

from slots.test_fetches import Lab, S, record

FRONT, QUESTION = [1, 2, 3, 4], [3, 3, 1, 2]
FAR, NEAR = Document("far", "40 tokens in the tier alone"), Document("near", "30 tokens in host memory, too")
TOKENS = {FAR: [0, 1] * 20, NEAR: [1, 4] * 15}


def as_array(tokens):
    return np.array(tokens, np.int32)


def prompt():
    documents = DocumentSet((FAR, NEAR), tuple(as_array(TOKENS[one]) for one in (FAR, NEAR)), "auto", hint=None)
    return ChatPrompt((Fixed(as_array(FRONT), "the front"), documents, Fixed(as_array(QUESTION), "the question")))


@pytest.mark.parametrize(("slow", "first"), [(0, "far"), (22_500, "near")])
def test_a_document_that_is_dear_to_read_stands_after_a_shorter_one_in_memory(slow, first):
    """A read of `slow` seconds is all that is known of the tier: 40 bytes take half of the 10 s to compute them, or none."""
    lab = Lab(host=1000, cells=1000, ends=())
    begins = record(FRONT, 0)
    ends = {one: record(FRONT + TOKENS[one], len(FRONT), documents=((one.key, len(FRONT)),)) for one in (FAR, NEAR)}
    for one in (begins, *ends.values()):
        assert lab.remote.put(one)
    assert lab.tree.host.put(begins, "remote") and lab.tree.host.put(ends[NEAR], "remote")
    lab.fetches._speeds["remote"].learn(0, slow)
    job = lab.scheduler.submit(Request(0, prompt(), 3, S))
    lab.fetches.expect(job)
    lab.look()
    assert len(lab.reads) == (first == "far"), "nobody waits for what will not be used"
    lab.arrive(len(lab.reads))
    lab.finish()
    assert job.layout.documents[0].id == first
    assert job.reuse.cached == len(FRONT) + len(TOKENS[FAR if first == "far" else NEAR])
