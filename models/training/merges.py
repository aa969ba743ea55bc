"""Learn the vocabulary from conversations and plain English, and replace vocabulary.json: models.training.merges --save"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random

from ..vocabulary import corpus
from .encoder import Encoder
from .layout import Source, pieces
from .world.conversation import Author
from .world.recipe import Recipe
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
    parser = argparse.ArgumentParser(prog="python3 -m models.training.merges", description=__doc__, allow_abbrev=False)
    parser.add_argument("--save", action="store_true", required=True, help="replace vocabulary.json")
    parser.parse_args()
    Encoder.train(texts(), SIZE).save()
