"""Documents that are read separately: which pieces of a prompt are computed, against a model of memory."""

import numpy as np
from slotcache.ordering.document import Document
from slotcache.server.chat.parts import DocumentSet, Fixed
from slotcache.server.chat.prompt import SeparatePrompt
from support.scopes import COMMON
from support.world import World

REST = 8
FRONT, QUESTION = np.arange(4, dtype=np.int32), np.arange(100, 112, dtype=np.int32)
HEADING = np.arange(200, 205)  # all documents begin with it


def prompt(*documents, links):
    """documents: the first token of each behind the heading; each has 40."""
    tokens = tuple(np.concatenate([HEADING, np.arange(at, at + 35)]).astype(np.int32) for at in documents)
    placed = DocumentSet(tuple(Document(str(at), str(at)) for at in documents), tokens, "retrieval", hint=None)
    return SeparatePrompt((Fixed(FRONT, "the front"), placed, Fixed(QUESTION, "the question")), links)


def pieces(world, request):
    return [len(span.tokens) for plan in world.plans for span in plan.spans if span.request == request.id]


def test_a_document_is_read_once_and_moved():
    world = World(host=1000)
    first = world.run(prompt(1000, 2000, links=0))
    assert pieces(world, first) == [44, 35, 12, 1], "both documents, the question, and the first answer's token"
    again = world.run(prompt(2000, 1000, links=0))
    assert pieces(world, again) == [12, 1] and again.sources["moved"] > 70


def test_link_tokens_are_computed_in_one_piece_where_some_of_them_are_cached():
    world = World(host=1000, rest=REST)
    world.run(prompt(1000, 2000, links=8))
    other = world.run(prompt(1000, 3000, links=8))
    assert pieces(world, other)[-3:] == [8, 12, 1], "five of the eight were cached, and three are too small a piece"


def test_a_document_that_leaves_the_cache_while_its_prompt_waits_is_read_again():
    world = World()
    world.run(prompt(2000, links=0))
    request = world.submit(prompt(1000, 2000, links=0))
    while not request.readings.pieces:
        world.step()
    assert world.scheduler.waiting.next() is request and request.layout and len(request.layout.moved) == 2, "both are cached"
    world.scheduler.tree.drop(COMMON)
    world.finish()
    assert pieces(world, request)[-3:] == [44, 12, 1]
