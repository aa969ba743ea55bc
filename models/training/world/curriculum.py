"""The curriculum: recipes from copying within one document to long conversations about ten."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from .recipe import Recipe


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Recipes by level. The next level begins at `goal` exact match, or when its share of the time in `due` is over."""

    levels: tuple[Recipe, ...]
    goal: float
    due: tuple[float, ...]
    easier: float = 0.25
    """Share of samples of easier levels."""
    harder: float = 0.0
    """Share of samples of the next level."""
    long: float = 0.0
    """Share of very long conversations at the last level."""
    freer: float = 0.0
    """Share of conversations about documents in freer wording at the last level."""
    joined: float = 0.0
    """Share of conversations at the last level in which half of the questions need two documents."""

    def recipe(self, rng: Random, level: int) -> Recipe:
        """Return a recipe for a learner at this level: mostly of this level, sometimes of an easier or the next one."""
        way, last = rng.random(), len(self.levels) - 1
        if level == last and rng.random() < self.freer:
            return FREER if rng.random() < 0.35 else FREER_SHORT
        if level == last and way > 1 - self.joined:
            return replace(self.levels[level], documents=(2, 8), joined=0.5, linked=0.7, unknown=0.25)
        if level and way < self.easier:
            return self.levels[rng.randrange(level)]
        if level < last and way > 1 - self.harder:
            return self.levels[level + 1]
        if level == last and way > 1 - self.joined - self.long:
            return replace(self.levels[level], documents=(5, 10), turns=(4, 12), later=0.9)
        return self.levels[level]


_PLAIN = Recipe(plain=True, plain_questions=True, unknown=0, later=0, follow=0, hinted=0, aside=0, system=0)
FREER = Recipe(freer=True, documents=(2, 5), turns=(6, 12), unknown=0.1, later=0.3, hinted=0.15, system=0.05, noise=0.3)
FREER_SHORT = replace(FREER, documents=(1, 2), turns=(5, 10))
_LARGE = (
    replace(_PLAIN, documents=(1, 2), turns=(2, 5)),
    Recipe(documents=(1, 3), turns=(2, 7), unknown=0.08, later=0.2, follow=0.25, hinted=0.1),
    Recipe(documents=(1, 6), turns=(1, 6)),
    Recipe(documents=(2, 10), turns=(1, 7)),
)

# A curriculum for an hour or two on two cores: documents like `The river of Velmora is Oskel.`, in which each sentence
# names its subject, about the kinds of the bundled corpus; the questions use many wordings.
_KINDS = ("town", "person", "train", "festival", "museum")
_BARE = Recipe(kinds=_KINDS, plain=True, bare=True, noise=0.1, aside=0.01, system=0.05, unknown=0.3)
_SMALL = (
    replace(_PLAIN, kinds=_KINDS, bare=True, documents=(1, 2), turns=(3, 6), told=(2, 4), aside=0.0),
    replace(_BARE, documents=(1, 3), turns=(4, 8), told=(2, 5), unknown=0.1, later=0.1, follow=0.1, hinted=0.1),
    replace(_BARE, documents=(1, 6), turns=(6, 12), later=0.15, follow=0.2, hinted=0.2),
    replace(_BARE, documents=(2, 9), turns=(5, 12), later=0.3, noise=0.3),
)

CURRICULA = {
    "large": Curriculum(_LARGE, goal=0.7, due=(0.0, 0.07, 0.14, 0.22), long=0.12),
    "small": Curriculum(
        _SMALL, goal=0.8, due=(0.0, 0.04, 0.1, 0.25), easier=0.35, harder=0.1, long=0.05, freer=0.6, joined=0.2
    ),
}

SHIPPED = "small"
"""The size of slotcache-demo.gguf."""

# The held-out sets that measure a training. One turn, unless the name says otherwise; only the last answer counts.
_ONE = Recipe(turns=(1, 1), unknown=0, hinted=0, aside=0, system=0)
_TWO = replace(_ONE, documents=(3, 5), turns=(2, 2), later=1.0, repeat=0.0, follow=0)
_HELD_OUT = {
    "1 document": replace(_ONE, documents=(1, 1)),
    "2 documents": replace(_ONE, documents=(2, 2)),
    "5 documents": replace(_ONE, documents=(5, 5)),
    "10 documents": replace(_ONE, documents=(10, 10)),
    "order hint": replace(_ONE, documents=(5, 5), hinted=1.0),
    "two turns": _TWO,
    "repeated": replace(_TWO, repeat=0.7, located=0.0),
    "location": replace(_TWO, repeat=1.0, located=1.0),
    "follow-up": replace(_TWO, later=0.5, follow=1.0),
    "long": replace(_TWO, documents=(5, 8), turns=(3, 4)),
    "unknown": replace(_ONE, documents=(3, 6), unknown=1.0),
    "joined": replace(_ONE, documents=(5, 5), joined=1.0, linked=1.0),
}
FREER_HELD_OUT = {"freer": replace(FREER, documents=(5, 5), turns=(1, 1), unknown=0, hinted=0, system=0, later=0)}


def held_out(size: str) -> dict[str, Recipe]:
    """Return the recipes of the held-out sets, worded like the last level of a size's curriculum."""
    last = CURRICULA[size].levels[-1]
    return {
        name: replace(recipe, kinds=last.kinds, plain=last.plain, bare=last.bare, noise=last.noise)
        for name, recipe in _HELD_OUT.items()
    }
