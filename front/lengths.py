"""Numbers of tokens.

The front has no tokenizer: the upstream counts the tokens, or the front estimates them from characters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

CHARS_A_TOKEN = 4.0  # before the first answer: about right for English
LEAST_CHARS = 0.1  # per token: wrong figures must not bring the ratio to zero
WEIGHT = 0.1  # of the newest answer in the learnt ratio


class Measurable(Protocol):
    """A text or a document of a prompt."""

    @property
    def key(self) -> str: ...

    @property
    def chars(self) -> int: ...


class Lengths:
    """Counts tokens.

    most: the number of documents whose count is remembered; the least recently counted document is dropped first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counted: OrderedDict[str, int] = OrderedDict()
        self._chars_a_token = CHARS_A_TOKEN

    def tokens(self, part: Measurable) -> int:
        """Return the number of a part's tokens: the upstream's count, or an estimate from its characters."""
        counted = self._counted.get(part.key)
        return round(part.chars / self._chars_a_token) if counted is None else counted

    def __contains__(self, key: str) -> bool:
        """Return whether the upstream has counted a document."""
        return key in self._counted

    def count(self, key: str, tokens: int) -> None:
        """Remember the upstream's count of a document's tokens."""
        self._counted[key] = tokens
        self._counted.move_to_end(key)
        while len(self._counted) > self._most:
            self._counted.popitem(last=False)

    def fit(self, parts: Sequence[Measurable], chars: int, prompt_tokens: int | None) -> list[tuple[str, int]]:
        """Return the key and the number of tokens of each part of a prompt.

        Parts that the upstream has counted keep their counts. The remaining tokens, including those of the chat template,
        are spread over the other parts by their characters. If the upstream has counted no part, the prompt also corrects
        the ratio of characters to tokens with which the method `tokens` estimates.

        chars: the characters of the prompt after the last part.
        prompt_tokens: the tokens of the whole prompt; None if they are not known.
        """
        if prompt_tokens is None:
            return [(part.key, self.tokens(part)) for part in parts]
        left = prompt_tokens - sum(self._counted.get(part.key, 0) for part in parts)
        open_chars = chars + sum(part.chars for part in parts if part.key not in self._counted)
        if left <= 0 or not open_chars:
            return [(part.key, self.tokens(part)) for part in parts]
        if not any(part.key in self._counted for part in parts):
            learnt = self._chars_a_token + WEIGHT * (open_chars / left - self._chars_a_token)
            self._chars_a_token = max(learnt, LEAST_CHARS)
        return [(part.key, self._counted.get(part.key) or round(part.chars * left / open_chars)) for part in parts]


def leading(path: Iterable[tuple[str, int]], cached_tokens: int) -> int:
    """Return how many leading parts of a prompt were cached. A part counts as cached if at least half of its tokens were.

    Exact sums are not possible: engines round cached tokens down to whole blocks, and parts that are tokenised separately
    have a few tokens more or less.
    """
    number, left = 0, float(cached_tokens)
    for _, tokens in path:
        if left < tokens / 2 or left <= 0:
            break
        number, left = number + 1, left - tokens
    return number
