"""Scripts without spaces between words, Chinese and Japanese: each letter is a word, and two neighbours are a phrase."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

RUN = re.compile(
    "[\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]+"
)
"""Letters of Han, Hiragana and Katakana."""


def spaced(text: str) -> str:
    """Return a text with a space around each letter of these scripts, for a tokenizer that looks for spaces."""
    return RUN.sub(lambda run: f" {' '.join(run[0])} ", text)


def phrases(word: str) -> Iterator[str]:
    """Yield what to look for in spaced texts for a word of a query: two neighbours each, and other letters as they are.

    >>> list(phrases("東京都")), list(phrases("ragとは")), list(phrases("月"))
    (['東 京', '京 都'], ['rag', 'と は'], ['月'])
    """
    at = 0
    for run in RUN.finditer(word):
        if run.start() > at:
            yield word[at : run.start()]
        letters, at = run[0], run.end()
        yield from map(" ".join, pairwise(letters)) if len(letters) > 1 else letters
    if at < len(word):
        yield word[at:]
