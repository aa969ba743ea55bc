"""Arranging a whole conversation: what it costs in questions to the tree, and that no order is guessed."""

import numpy as np
import pytest
from slotcache.ordering import Document
from slotcache.server.chat.parts import DocumentSet, Fixed
from slotcache.server.chat.prompt import ChatPrompt
from slotcache.slots.tree import PrefixTree
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
    """Have a prompt computed and parked; its layout."""
    layout = prompt.arrange(tree, scope)
    documents = [(document.key, document.start, document.stop) for document in layout.documents]
    claim = tree.claim(scope, layout.tokens, layout.stops, documents)
    tree.ledger.advance(claim.sequence, len(layout.tokens))
    tree.release(claim.sequence)
    tree.ledger.take_operations()
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
