"""The author of a recipe: of plain documents, or of documents in freer wording."""

from __future__ import annotations

from random import Random

from .conversation import Author, Conversation
from .reading import Reader
from .recipe import Recipe
from .words import Words


class AnyAuthor:
    """Writes conversations of both kinds."""

    def __init__(self, rng: Random, words: Words, reserved: frozenset[str] = frozenset()) -> None:
        self._plain, self._freer = Author(rng, words, reserved), Reader(rng, words, reserved)

    def write(self, recipe: Recipe) -> Conversation:
        """Return a conversation in a world of its own."""
        return (self._freer if recipe.freer else self._plain).write(recipe)
