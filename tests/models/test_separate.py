"""Documents that are read separately: the same logits, bit for bit, whatever was read before and beside them."""

from dataclasses import dataclass

import numpy as np
import pytest
from slotcache.models.model import Model
from slotcache.ordering.document import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, SeparatePrompt
from slotcache.slots.request import Request
from slotcache.slots.scope import Scope
from slotcache.slots.separate import SeparateLayout
from support.lab import Answer, Lab
from support.on_device import same_answers
from support.scopes import COMMON

RNG = np.random.default_rng(0)
FRONT, QUESTION = (RNG.integers(300, 900, size).astype(np.int32) for size in (45, 30))
TEXTS = {name: RNG.integers(300, 900, size).astype(np.int32) for name, size in zip("abcd", (70, 64, 101, 40), strict=True)}


def prompt_of(names: str, question=QUESTION, joint=False):
    documents = tuple(Document(name, name) for name in names)
    tokens = tuple(TEXTS[name] for name in names)
    parts = [Fixed(FRONT, "front"), DocumentSet(documents, tokens, "retrieval", None), Fixed(question, "question")]
    return ChatPrompt(parts) if joint else SeparatePrompt(parts)


@dataclass
class Desk:
    """Asks one question after the other."""

    lab: Lab

    def ask(self, prompt, limit=6, scope=COMMON, cache=True) -> Answer:
        answer = self.submit(prompt, limit, scope, cache)
        self.lab.finish()
        return answer

    def submit(self, prompt, limit=6, scope=COMMON, cache=True) -> Answer:
        lab = self.lab
        lab.number += 1
        return lab.enter(Request(lab.number, prompt, limit, scope if cache else Scope.private(lab.number), cache))


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny)
    yield model
    model.close()


@pytest.fixture
def desk(model):
    lab = Lab(model, host=8192)
    lab.runner.warm_up()
    yield Desk(lab)
    lab.close()


def fresh(model, prompt, **options) -> Answer:
    lab = Lab(model, host=8192)
    lab.runner.warm_up()
    found = Desk(lab).ask(prompt, **options)
    lab.close()
    return found


def test_the_answer_is_that_of_an_empty_cache_to_the_bit(model, desk):
    alone = {names: fresh(model, prompt_of(names)) for names in ("abc", "cab", "ba", "dcb")}
    desk.ask(prompt_of("ab", joint=True))
    for names in ("abc", "cab", "ba", "dcb", "abc"):
        assert same_answers(desk.ask(prompt_of(names)), alone[names]), names


def test_documents_that_were_read_are_not_computed_again(desk):
    first = desk.ask(prompt_of("abc")).job
    assert (first.reuse.cached, first.reuse.sources.get("moved", 0)) == (0, 0)
    before = desk.lab.scheduler.counters.prefilled_tokens
    again = desk.ask(prompt_of("cba", question=QUESTION[::-1].copy())).job
    assert desk.lab.scheduler.counters.prefilled_tokens - before == len(QUESTION)
    assert again.reuse.sources["moved"] == sum(len(TEXTS[name]) for name in "abc")
    assert again.reuse.cached == again.num_prompt - len(QUESTION)
    partly = desk.ask(prompt_of("da")).job
    assert partly.num_prompt - partly.reuse.cached == len(QUESTION) + len(TEXTS["d"])


def test_no_joint_prompt_reads_a_moved_document(model, desk):
    joint = fresh(model, prompt_of("ab", joint=True))
    separate = desk.ask(prompt_of("ab"))
    found = desk.ask(prompt_of("ab", joint=True))
    assert same_answers(found, joint)
    assert found.job.reuse.cached == len(FRONT) + len(TEXTS["a"])
    assert not same_answers(separate, joint)


def test_the_same_text_in_other_documents_is_another_path(model, desk):
    """One document of both texts sees all of itself; two of them do not see each other."""
    both = np.concatenate([TEXTS["a"], TEXTS["b"]])
    parts = [Fixed(FRONT, "front"), DocumentSet((Document("ab", "ab"),), (both,), "retrieval", None)]
    whole = SeparatePrompt([*parts, Fixed(QUESTION, "question")])
    alone = fresh(model, whole)
    cut = desk.ask(prompt_of("ab"))
    assert same_answers(desk.ask(whole), alone)
    assert same_answers(desk.ask(prompt_of("ab")), cut)
    assert not same_answers(cut, alone)
    assert same_answers(alone, fresh(model, prompt_of("ab", joint=True)))  # alone it sees what it sees jointly


def test_requests_together_read_each_document_once(desk):
    answers = [desk.submit(prompt_of(names)) for names in ("abc", "bca", "cab", "abd")]
    desk.lab.finish()
    alone = Desk(desk.lab)
    for answer, names in zip(answers, ("abc", "bca", "cab", "abd"), strict=True):
        assert answer.tokens == alone.ask(prompt_of(names)).tokens
    needed = len(FRONT) + sum(len(TEXTS[name]) for name in "abcd") + 4 * len(QUESTION)
    assert desk.lab.scheduler.counters.prefilled_tokens < 1.6 * needed


@pytest.mark.parametrize("host", [60, 200])
def test_a_host_tier_without_room_changes_nothing(model, host):
    lab = Lab(model, host=host, num_cells=512)
    lab.runner.warm_up()
    desk = Desk(lab)
    for names in ("abc", "cab"):
        assert same_answers(desk.ask(prompt_of(names)), fresh(model, prompt_of(names)))
    lab.close()


def test_private_requests_leave_nothing(desk):
    private = desk.ask(prompt_of("abc"), cache=False)
    assert not desk.lab.scheduler.tree.roots
    assert same_answers(private, desk.ask(prompt_of("abc"), scope=Scope.shared("other")))
    assert desk.ask(prompt_of("abc")).job.reuse.cached == 0


def test_preempted_requests_go_on(model):
    lab = Lab(model, host=0, num_cells=560, slots=2, batch=64)
    lab.runner.warm_up()
    desk = Desk(lab)
    answers = [desk.submit(prompt_of(names), limit=40) for names in ("abc", "dcb")]
    lab.finish()
    assert lab.scheduler.counters.preemptions
    for answer, names in zip(answers, ("abc", "dcb"), strict=True):
        assert len(answer.tokens) == 40
        assert isinstance(answer.job.layout, SeparateLayout) and len(answer.job.layout.moved) == len(names)
    lab.close()
