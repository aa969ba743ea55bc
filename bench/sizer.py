"""Prompts of a given length in tokens, for servers that are only reachable over HTTP."""

from dataclasses import replace

from .client import Client
from .error import BenchError
from .text import prose
from .trace import Query

PROBES = (100, 400)
"""Words of two prompts. Their lengths in tokens give the tokens of a word, and of system prompt and template."""


class PromptSizer:
    """Makes queries whose whole prompt has a given number of tokens, to within one or two percent."""

    def __init__(self, per_word: float, fixed: float) -> None:
        self.per_word, self.fixed = per_word, fixed

    @classmethod
    async def of(cls, client: Client) -> "PromptSizer":
        """Measure two prompts on the server. Raises BenchError if it fails or reports no prompt length."""
        once = replace(client.sampling, max_tokens=1, cache_prompt=False)
        lengths: list[int] = []
        for words in PROBES:
            result = await client.ask(Query("probe", 1, _text(f"probe {words}", words)), sampling=once)
            if result.error or not result.prompt_tokens:
                raise BenchError(f"the server does not tell the length of a prompt: {result.error or 'no usage'}")
            lengths.append(result.prompt_tokens)
        per_word = (lengths[1] - lengths[0]) / (PROBES[1] - PROBES[0])
        return cls(per_word, lengths[0] - per_word * PROBES[0])

    def query(self, seed: str, tokens: int) -> Query:
        """Return a query of about `tokens` prompt tokens in all. Queries of different seeds share no beginning."""
        words = max(1, round((tokens - self.fixed) / self.per_word))
        return Query(seed, 1, _text(seed, words))


def _text(seed: str, words: int) -> str:
    return " ".join([f"{seed}:", *prose(seed, words).split()[:words]])
