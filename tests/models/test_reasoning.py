"""Reasoning of a bounded length, byte by byte: each token is a piece of text here."""

from typing import Any

import numpy as np
import pytest
from slotcache.models.detokenizer import ReasoningClock, ReasoningLimit
from slotcache.models.grammar import Grammars
from slotcache.models.json_schema import GrammarSource
from slotcache.models.model import Model
from slotcache.models.sampling import Sampler
from slotcache.models.sampling_params import GREEDY

OPEN = {"is_open": True}
NO_CONTEXT: Any = None  # the best token is chosen without one


def clock(most: int, pieces: list[bytes], **changed):
    """A clock that has seen these pieces, one token each."""
    usual = {"start": b"<think>", "end": b"</think>", "is_open": False, "closing": (7,), "piece": pieces.__getitem__}
    made = ReasoningClock(ReasoningLimit(most=most, **usual | changed))
    for token in range(len(pieces)):
        made.push(token)
    return made


def over_at(most: int, pieces: list[bytes], **changed) -> list[int]:
    """The numbers of tokens behind which the reasoning must end."""
    return [seen for seen in range(len(pieces) + 1) if clock(most, pieces[:seen], **changed).is_over]


@pytest.mark.parametrize(
    ("most", "pieces", "changed", "over"),
    [
        (0, [b"a", b"b"], OPEN, [0, 1, 2]),
        (1, [b"a", b"b"], OPEN, [1, 2]),
        (2, [b"a", b"b", b"</think>", b"c"], OPEN, [2]),
        (3, [b"a", b"b", b"</think>", b"c"], OPEN, []),  # it ends itself exactly at the limit
        (0, [b"<think>", b"a"], {}, [1, 2]),
        (1, [b"<think>", b"a"], {}, [2]),
        (1, [b"<thi", b"nk>a", b"b", b"</th", b"ink>", b"c"], {}, [3]),
        (1, [b"a", b"</th", b"ink", b">"], OPEN, [1]),  # at the limit the tag has not begun
        (2, [b"a", b"</th", b"ink", b">", b"c"], OPEN, []),  # here it has: it may go on
        (2, [b"a", b"</th", b"at", b"b"], OPEN, [3, 4]),  # it was none
        (2, [b"a", b"<"] + [b"<"] * 20, OPEN, [10 + at for at in range(13)]),  # it never comes
        (1, ["é".encode()[:1], "é".encode()[1:], b"b"], OPEN, [2, 3]),  # not between the bytes of a character
        (1, [b"\xe2"] * 12, OPEN, [9, 10, 11, 12]),  # which never comes
        (0, [b"<think></think>", b"a"], {}, []),
        (0, [b"<think></think>", b"<think>"], {"anywhere": True}, [2]),
        (0, [b"", b" \n", b"\n <th", b"ink>"], {}, [4]),
        (0, [b"The ", b"<think>", b" tag"], {}, []),  # content
        (0, [b"The ", b"<think>", b" tag"], {"anywhere": True}, [2, 3]),
        (1, [b"a</think>", b"<think>", b"b"], OPEN, []),  # content, too
        (2, [b"a</think>", b"x<think>", b"b"], OPEN | {"anywhere": True}, [3]),  # reasoning count together
        (1, [b"<tool>", b"b"], OPEN | {"calls": (b"<tool>",)}, []),
        (2, [b"a", b"<tool>", b"{}", b"</tool>"], OPEN | {"calls": (b"<tool>",)}, []),  # no tag within a call
        (2, [b"a", b"<tool>", b"{}"], OPEN, [2, 3]),
        (0, [b"x" * 1000] * 3, {}, []),
    ],
)
def test_where_a_thought_must_end(most, pieces, changed, over):
    assert over_at(most, pieces, **changed) == over


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def grammars(model):
    grammars = Grammars(model)
    yield grammars
    grammars.close()


def answer(model, most, grammar=None, message="", length=60, **changed):
    """The text of random logits, and whether all tokens after the first ones were forced."""
    usual = {"start": b"<think>", "end": b"</think>", "is_open": True, "piece": model.piece}
    closing = tuple(model.tokenize(message + "</think>").tolist())
    limit = ReasoningLimit(most=most, closing=closing, **usual | changed)
    changes = {"reasoning": limit, "grammar": grammar}
    sampler, random, tokens = Sampler(model, GREEDY.changed(changes)), np.random.default_rng(5), []
    sampler.prime(np.zeros(0, np.int32))
    while len(tokens) < length and not (tokens and model.is_end(tokens[-1])):
        tokens.append(sampler.choose(random.standard_normal(model.num_vocab).astype(np.float32), NO_CONTEXT, 0))
        tokens += sampler.take_forced()
        assert not sampler.error
    sampler.close()
    return b"".join(map(model.piece, tokens)).decode("utf-8", "replace")


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("message", ["", " Enough."])
def test_the_grammar_after_a_thought_goes_on_where_it_is_ended(model, grammars, most, message):
    """Its rest is forced as soon as the tag has begun: the tag's own tokens come one by one all the same."""
    source = GrammarSource("lark", 'start: /[a-zA-Z .]*/ "</think>" "{" /[01]{3}/ "}"')
    text = answer(model, most, grammars.compile(source).result(), message)
    reasoning, _, form = text.partition("</think>")
    assert reasoning.endswith(message) and len(form) == 5 and form[0] == "{" and set(form[1:4]) <= {"0", "1"}


def test_a_thought_that_the_grammar_begins_ends_at_once(model, grammars):
    source = GrammarSource(
        "lark", 'start: "<think>" /[\u0430-\u044f]*/ "</think>" "yes"'
    )  # no token has the tag's end and more
    assert answer(model, 0, grammars.compile(source).result(), is_open=False) == "<think></think>yes"


def test_no_limit_is_a_limit_that_is_never_reached(model):
    assert answer(model, 10**30) == answer(model, 0, is_open=False)


def test_each_answer_has_a_clock_of_its_own(model):
    assert answer(model, 3) == answer(model, 3) != answer(model, 4)
