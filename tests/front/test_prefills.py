"""An engine that reports no cached tokens: what its time to the first token tells, on a clock that the engine turns."""

import json
import random
from collections import deque
from itertools import takewhile
from operator import eq

import pytest
from server.conftest import until
from slotcache.front.engines import Listener
from slotcache.front.prefills import LEAST, MOST_MODELS, Prefills, PrefillSpeeds

from front.conftest import ordering
from front.test_learning import metric
from front.upstreams import DONE, event, response, scripted

KEPT, REGIONS, K = 5, 8, 5  # prompts that the engine keeps; regions of eight documents; documents of a question
SYSTEM = "Answer from the documents. " * 4


def common_length(one, other):
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


class Engine:
    """Caches the prefixes of its newest prompts, and takes a second for a thousand characters that it computes."""

    def __init__(self, reports: bool) -> None:
        self.reports, self.now, self.computed = reports, 0.0, 0
        self.kept: deque[str] = deque(maxlen=KEPT)

    def answer(self, body: bytes) -> bytes:
        prompt = "".join(message["content"] for message in json.loads(body)["messages"])
        cached = max((common_length(prompt, kept) for kept in self.kept), default=0)
        self.kept.append(prompt)
        self.computed += len(prompt) - cached
        self.now += 0.05 + (len(prompt) - cached) / 1000
        usage = b'{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}' % (len(prompt) // 4, cached // 4)
        reported = b'data: {"choices":[],"usage":%b}\n\n' % usage if self.reports else b""
        return response("200 OK", event("Yes") + reported + DONE, "text/event-stream")


def question(front, number, ids, **fields):
    """Ask; return when the front has learnt from the answer."""
    documents = [{"id": id, "text": f"{id} says much about itself. " * 12} for id in ids]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is number {number}?"}]
    before = metric(front, "documents")
    answer = front.chat(messages=messages, documents=documents, stream=True, **fields)
    until(lambda: metric(front, "documents") == before + len(ids))
    return answer


def test_an_engine_that_lost_its_cache_is_found_out_within_three_requests():
    engine = Engine(reports=False)
    with scripted(answer=engine.answer) as upstream, ordering(upstream.url, dialect="openai") as front:
        front.host.prefills.clock = lambda: engine.now
        for number in range(LEAST + 1):
            question(front, number, [f"{number}-{at}" for at in range(K)])
        newest = [f"{LEAST}-{at}" for at in range(K)]
        for number in range(10):
            question(front, f"again {number}", newest)
        assert metric(front, "stale") == 0
        engine.kept.clear()
        answers = []
        while metric(front, "stale") == 0 and len(answers) < 3:
            answers.append(question(front, f"later {len(answers)}", newest))
        assert metric(front, "stale") == 1 and metric(front, "unreported") == LEAST + 11 + len(answers)
        assert answers[0].headers["x-slotcache-order"].endswith("expected=5/5")
        question(front, "last", newest)
        assert metric(front, "stale") == 1, "it has them again by now"


def computed(reports, **fields):
    """The characters that an engine computes for questions in bursts; in their middle it loses its cache."""
    engine, draw = Engine(reports), random.Random(7)
    with scripted(answer=engine.answer) as upstream, ordering(upstream.url, dialect="openai") as front:
        front.host.prefills.clock = lambda: engine.now
        for burst in range(12):
            region = [f"{draw.randrange(REGIONS)}-{at}" for at in range(8)]
            ids = draw.sample(region, K)
            for number in range(5):
                question(front, f"{burst}, {number}", ids, **fields)
                ids = draw.sample([*draw.sample(ids, 3), *draw.sample([id for id in region if id not in ids], 2)], K)
            if burst == 5:
                engine.kept.clear()
        assert metric(front, "cached") > 0 or not reports
    return engine.computed


def test_the_gain_in_front_of_a_mute_engine_is_nearly_that_in_front_of_one_that_reports():
    plain = computed(True, document_order="retrieval")
    gain, mute = plain - computed(True), plain - computed(False)
    assert gain > 0.1 * plain
    assert mute >= 0.9 * gain, (plain, gain, mute)


def test_a_wait_beside_another_one_reports_nothing():
    now = [0.0]
    prefills = Prefills(lambda: now[0])
    alone = prefills.begin()
    now[0] = 2.0
    alone.token()
    now[0] = 3.0
    alone.token()
    first, second = prefills.begin(), prefills.begin()
    for prefill in (first, second):
        now[0] += 1.0
        prefill.token()
    late = prefills.begin()
    late.end()
    late.token()
    assert (alone.seconds, first.seconds, second.seconds, late.seconds) == (2.0, None, None, None)
    assert prefills.num_waiting == 0


def test_a_chat_without_documents_counts_as_a_prompt_that_waits():
    waiting = []

    def answer(body):
        waiting.append(front.host.prefills.num_waiting)
        return response("200 OK", event("Yes") + DONE, "text/event-stream")

    with scripted(answer=answer) as upstream, ordering(upstream.url, dialect="openai") as front:
        front.chat(messages=[{"role": "user", "content": "Hello"}], stream=True)
        until(lambda: front.host.prefills.num_waiting == 0)
    assert waiting == [1]


def test_a_prompt_is_judged_by_the_median_of_cold_ones_of_its_own_model():
    speeds = PrefillSpeeds()
    assert speeds.cached(b"a", 1000, 800, 1.0) is None, "nothing is known yet"
    for seconds in (1.0, 1.1, 30.0, 0.9, 1.0):
        assert speeds.cached(b"a", 1000, 100, 0.9 * seconds) is None
    assert speeds.cached(b"a", 1000, 800, 0.25) is None
    assert speeds.cached(b"a", 1000, 800, 0.55) is None
    assert speeds.cached(b"a", 1000, 800, 0.7) == 300
    assert speeds.cached(b"a", 1000, 800, 1.1) == 0
    assert speeds.cached(b"a", 1000, 800, 9.0) is None, "no cold prompt takes so long"
    assert speeds.cached(b"b", 1000, 800, 9.0) is None
    for number in range(MOST_MODELS):
        speeds.cached(b"%d" % number, 1000, 0, 1.0)
    assert len(speeds._waits) == MOST_MODELS


def test_a_new_front_of_a_warm_engine_learns_that_what_it_took_for_cold_was_not():
    speeds, speed = PrefillSpeeds(), 0.001
    for _ in range(4):  # a fifth of each prompt was computed, which the front cannot know
        assert speeds.cached(b"a", 1000, 0, 200 * speed) is None
    for _ in range(6):
        assert speeds.cached(b"a", 1000, 600, 400 * speed) is None, "it was cached as expected"
    assert 0 in [speeds.cached(b"a", 1000, 600, 1000 * speed) for _ in range(3)], "a lost cache is found out by now"


@pytest.mark.parametrize(
    ("delta", "is_token"),
    [
        ('{"role":"assistant","content":""}', False),
        ('{"role":"assistant","content":null}', False),
        ('{"content": "A"}', True),
        ('{"reasoning_content":"A"}', True),
        ('{"tool_calls":[{"index":0}]}', True),
        ('{"tool_calls":[]}', False),
    ],
)
def test_the_first_token_is_the_first_text(delta, is_token):
    now = [0.0]
    prefill = Prefills(lambda: now[0]).begin()
    now[0] = 1.0
    Listener(False, prefill).events(b'data: {"choices":[{"delta":%b}]}\n\n' % delta.encode())
    assert prefill.seconds == (1.0 if is_token else None)
