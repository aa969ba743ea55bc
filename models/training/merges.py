"""Learn the vocabulary from conversations and plain English, as vocabulary.json: python3 -m models.training.merges"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ..vocabulary import corpus
from .encoder import Encoder
from .layout import Source, pieces
from .world.conversation import Author, Recipe
from .world.words import Words

CONVERSATIONS = 12_000
SIZE = 2048  # tokens


def texts() -> Iterator[str]:
    """Yield the texts that the model will read, and Python's documentation, for words that people use in questions."""
    words = Words.load()
    author = Author(Random(0), words, frozenset(words["reserved"]))
    for _ in range(CONVERSATIONS):
        yield from (piece.text for piece in pieces(author.write(Recipe())) if piece.source is not Source.TEMPLATE)
    yield from corpus()


if __name__ == "__main__":
    Encoder.train(texts(), SIZE).save()
