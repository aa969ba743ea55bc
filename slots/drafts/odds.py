"""The chance that a drafted token is the next one, learnt from the drafts that were checked."""

from __future__ import annotations

from .lookup import Lookup

FIRST = (0.5, 0.5, 0.5, 0.6, 0.75, 0.85, 0.9)  # before any draft, by the bits of the matched length: a guess
FIRST_WEIGHT = 16.0  # tokens that the guess counts as
OWN_WEIGHT = 8.0  # tokens of all requests that count as much as the request's own
FADING = 0.98  # of what was learnt, at each draft
OWN_FADING = 0.5  # of a request's own, likewise
FORGETTING = 0.97  # of a request's own, at each step without a draft: one whose drafts were wrong has another try later


class Odds:
    """Chances by the matched length, of all requests; a request's own drafts change them for it."""

    def __init__(self) -> None:
        self._tried = [FIRST_WEIGHT] * len(FIRST)
        self._right = [FIRST_WEIGHT * chance for chance in FIRST]

    def chance(self, lookup: Lookup, matched: int) -> float:
        """Return the chance of a token if all in front of it in the draft are right."""
        place = _place(matched)
        general = self._right[place] / self._tried[place]
        return (OWN_WEIGHT * general + lookup.right) / (OWN_WEIGHT + lookup.tried)

    def learn(self, lookup: Lookup, matched: int, right: int, drafted: int) -> None:
        """Learn from a checked draft: nothing is known of its tokens behind the first wrong one."""
        place, tried = _place(matched), right + (right < drafted)
        self._tried[place] = FADING * self._tried[place] + tried
        self._right[place] = FADING * self._right[place] + right
        lookup.tried = OWN_FADING * lookup.tried + tried
        lookup.right = OWN_FADING * lookup.right + right

    @staticmethod
    def forget(lookup: Lookup) -> None:
        """Note a step without a draft."""
        lookup.tried *= FORGETTING
        lookup.right *= FORGETTING


def expected(chance: float, length: int) -> float:
    """Return how many of `length` drafted tokens are right on average, up to the first wrong one."""
    return length * chance if chance > 0.999 else chance * (1 - chance**length) / (1 - chance)


def _place(matched: int) -> int:
    return min(matched.bit_length(), len(FIRST) - 1)
