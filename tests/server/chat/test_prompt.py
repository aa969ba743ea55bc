"""Arranging a whole conversation: what it costs in questions to the tree, and that no order is guessed."""

from itertools import count

import numpy as np
import pytest
from slotcache.ordering import Document
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from slotcache.slots.check import check
from slotcache.slots.host import HostMemory
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.radix import CopySizes
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from slotcache.slots.state_tree import StateTree
from support.reuse import reuse_with
from support.scopes import COMMON


class CountingTree(PrefixTree):
    asked = 0

    def match_from(self, origin, tokens):
        self.asked += 1
        return super().match_from(origin, tokens)


def text(*tokens):
    return np.array(tokens, np.int32)


def conversation(turns, size=1):
    """Every turn has documents of its own, then a question."""
    parts = []
    for turn in range(turns):
        names = [f"{turn}-{at}" for at in range(size)]
        tokens = tuple(text(*[1000 * turn + 10 * at + 5] * 8) for at in range(size))
        parts += [Fixed(text(turn, 1, 2), "system"), DocumentSet(tuple(Document(n, n) for n in names), tokens, "auto", None)]
    return ChatPrompt([*parts, Fixed(text(3, 3, 3), "question")])


def read(tree, prompt, scope=COMMON):
    """Have a prompt computed and idle; its layout."""
    layout = prompt.arrange(tree, scope)
    documents = [(document.key, document.start, document.stop) for document in layout.documents]
    claim = tree.claim(scope, layout.tokens, layout.stops, documents)
    tree.device.advance(claim.sequence, len(layout.tokens))
    tree.release(claim.sequence)
    tree.device.take_operations()
    return layout


def questions(turns):
    tree = CountingTree(100_000)
    read(tree, conversation(turns))
    tree.asked = 0
    layout = conversation(turns).arrange(tree, COMMON)
    assert tree.match(COMMON, layout.tokens).length == len(layout.tokens)
    return tree.asked


def test_a_long_history_costs_in_proportion_to_its_turns():
    few, many = questions(10), questions(40)
    assert few <= 5 * 10 and many <= 5 * 40


def test_a_history_of_a_thousand_turns_is_arranged():
    assert questions(1000) <= 5 * 1000


def test_an_earlier_turn_keeps_the_order_that_the_rest_was_read_behind():
    tree = PrefixTree(100_000)
    first = conversation(2, size=3)
    swapped = ChatPrompt([_reversed(part) for part in first.parts])
    read(tree, swapped)  # both turns in another order than the ranking
    layout = first.arrange(tree, COMMON)
    assert [document.id for document in layout.documents] == ["0-2", "0-1", "0-0", "1-2", "1-1", "1-0"]
    assert tree.match(COMMON, layout.tokens).length == len(layout.tokens)


# ---- the best document, and what an order gains -------------------------------------------------------------------------


def asking(*names, **fields):
    """A system text of 3 tokens, documents of 8 tokens each, a question."""
    tokens = tuple(text(*[100 + ord(name)] * 8) for name in names)
    usual = {"policy": "auto", "hint": None}
    documents = DocumentSet(tuple(Document(name, name) for name in names), tokens, **usual | fields)
    return ChatPrompt([Fixed(text(1, 2, 3), "system"), documents, Fixed(text(7, 7), "question")])


def ids(layout):
    return "".join(document.id for document in layout.documents)


@pytest.mark.parametrize(("best", "order"), [("free", "abc"), ("first", "bac"), ("last", "acb")])
def test_a_price_outweighs_a_gain_of_as_many_ms(best, order):
    tree = PrefixTree(100_000)
    tree.profile.learn(100, 0, 1.0)  # 10 ms a token, at any depth
    read(tree, asking(*"abc"))
    assert ids(asking(*"bac", best=best).arrange(tree, COMMON)) == order
    gained = 10 * (2 + 8 * {"free": 3, "first": 3, "last": 2}[best])  # documents, and the question behind all of them
    for price, wanted in ((gained - 1, "abc"), (gained + 1, order if best != "free" else "bac")):
        assert ids(asking(*"bac", best=best, best_price_ms=price).arrange(tree, COMMON)) == wanted


def test_before_the_first_step_a_gain_is_guessed():
    tree = PrefixTree(100_000)
    read(tree, asking(*"ab"))
    assert ids(asking(*"ba", best_price_ms=17.5).arrange(tree, COMMON)) == "ab"
    assert ids(asking(*"ba", best_price_ms=18.5).arrange(tree, COMMON)) == "ba"


def test_a_layout_knows_the_ranks_and_what_retrieval_order_would_reuse():
    tree = PrefixTree(100_000)
    assert read(tree, asking(*"abc")).in_rank is None
    layout = asking(*"bcda", ranking=("x", *"bcda"), hint=lambda hint: text(*hint.encode())).arrange(tree, COMMON)
    assert [(one.id, one.rank, one.moved) for one in layout.documents] == [
        ("a", 5, True),
        ("b", 2, True),
        ("c", 3, True),
        ("d", 4, True),
    ]
    assert layout.in_rank == 3, "the system text alone"
    assert layout.hint == "Most relevant: x > b > c > d"
    assert bytes(layout.tokens[35:-2].tolist()).decode() == layout.hint + "\n\n"
    read(tree, asking(*"bc", policy="retrieval"))
    assert asking(*"bca").arrange(tree, COMMON).in_rank == 3 + 16
    kept = asking(*"bca", order=(2, 0, 1)).arrange(tree, COMMON)
    assert kept.in_rank is None and [one.moved for one in kept.documents] == [True] * 3, "an earlier turn's stays"


def test_documents_in_rank_have_not_moved():
    layout = asking(*"bc", ranking=("a", "b", "c")).arrange(PrefixTree(100_000), COMMON)
    assert [(one.rank, one.moved) for one in layout.documents] == [(2, False), (3, False)]
    assert layout.in_rank is None and not layout.hint


def _reversed(part):
    if isinstance(part, Fixed):
        return part
    return DocumentSet(part.documents[::-1], part.tokens[::-1], "retrieval", None)


@pytest.mark.parametrize("attempt", range(12))
def test_the_order_of_documents_that_read_alike_is_not_guessed(attempt):
    """A run that ends several documents: `b` behind `twin` and `a`, and `both`, which reads like `a` and `b` together."""
    tree = PrefixTree(100_000)
    names = {name: Document(f"{name}{attempt}", name) for name in ("twin", "a", "b", "both")}
    tokens = {"twin": text(*[8] * 4), "a": text(*[7] * 4), "b": text(*[8] * 4), "both": text(*[7] * 4, *[8] * 4)}

    def asking(*order, policy="auto"):
        documents = DocumentSet(tuple(names[n] for n in order), tuple(tokens[n] for n in order), policy, None)
        return ChatPrompt([Fixed(text(1, 2), "system"), documents, Fixed(text(3), "question")])

    read(tree, asking("twin", "a", "b", policy="retrieval"))
    read(tree, asking("b", "both", policy="retrieval"))
    layout = asking("both", "b").arrange(tree, COMMON)
    assert [document.id for document in layout.documents] == [f"b{attempt}", f"both{attempt}"]


# ---- models whose memory cannot be cut: what counts is the deepest snapshot --------------------------------------------


def ask(scheduler, prompt):
    """Have a prompt computed and answered by one token; return the request."""
    cuts = scheduler.index is scheduler.tree
    kept, number = (None if cuts else COMMON), next(NUMBERS)
    scope = COMMON if cuts else Scope.private(number)
    job = scheduler.submit(Request(number, prompt, 1, scope, cuts, snapshot_scope=kept))
    while job.num_tokens == job.num_prompt:
        plan = scheduler.plan()
        scheduler.commit(plan, [1 for span in plan.spans if span.logits])
        check(scheduler)
    scheduler.finish(job)
    return job


def documents(*names, tokens=100):
    """Some instructions, documents of that many tokens each, and a question that no other prompt has."""
    texts = tuple(np.arange(tokens, dtype=np.int32) + 1000 * ord(name) for name in names)
    found = DocumentSet(tuple(Document(name, name) for name in names), texts, "auto", None)
    question = text(*[5_000_000 + next(NUMBERS)] * 30)
    return ChatPrompt([Fixed(text(*range(80)), "system"), found, Fixed(question, "question")])


NUMBERS = count(1)


def hybrid(budget=10_000):
    tree = PrefixTree(5000, 16)
    states = HostMemory(budget, sizes=CopySizes(run_token=1, state=20))
    return Scheduler(tree, num_slots=2, **reuse_with(Snapshots(tree, states)))


def placed(job):
    return "".join(document.id for document in job.layout.documents)


def test_documents_are_ordered_as_far_as_a_snapshot_goes():
    scheduler = hybrid()
    assert placed(ask(scheduler, documents(*"abc"))) == "abc"
    assert isinstance(scheduler.index, StateTree)
    again = ask(scheduler, documents(*"cdba"))
    assert placed(again) == "abcd" and again.reuse.cached == 80 + 300 and again.reuse.source == "snapshot"
    for node in scheduler.index.of(COMMON):  # the runs of a, b and c stay: they stand in front of d
        if node.end in (280, 380):
            scheduler.index.forget(node)
    less = ask(scheduler, documents(*"cba"))
    assert less.reuse.cached == 80 + 100 and placed(less) == "acb", "b and c would be computed anyway"


def test_a_document_without_a_snapshot_counts_where_a_later_one_has_it():
    scheduler = hybrid()
    ask(scheduler, documents(*"ab"))
    ask(scheduler, documents(*"c"))
    assert isinstance(scheduler.index, StateTree)
    (after_a,) = (node for node in scheduler.index.of(COMMON) if node.tokens[0] == 1000 * ord("a"))
    scheduler.index.forget(after_a)
    again = ask(scheduler, documents(*"cba"))
    assert placed(again) == "abc" and again.reuse.cached == 280


def test_a_burst_reuses_nearly_as_much_of_a_hybrid_as_of_a_dense_model():
    rng = np.random.default_rng(0)
    sets = [rng.permutation(10)[:5] for _ in range(40)]
    reused: dict[str, int] = {}
    dense = Scheduler(PrefixTree(5000, 16, HostMemory(100_000)), num_slots=2)
    for name, scheduler in {"dense": dense, "hybrid": hybrid(100_000), "short": hybrid(4000)}.items():
        jobs = [ask(scheduler, documents(*("abcdefghij"[at] for at in chosen))) for chosen in sets]
        reused[name] = sum(job.reuse.cached for job in jobs)
    assert reused["hybrid"] >= 0.95 * reused["dense"] > 0 and reused["short"] >= 0.6 * reused["dense"]
