"""Prompts of a wanted length in tokens, for servers that can only be asked over HTTP."""

from dataclasses import replace

from .client import Client
from .error import BenchError
from .text import prose
from .trace import Query

PROBES = (100, 400)
"""Words of the two prompts that show how many tokens a word takes, and how many the system prompt and template."""


class PromptSizer:
    """Makes queries whose whole prompt has about a wanted number of tokens, within a percent or two."""

    def __init__(self, per_word: float, fixed: float) -> None:
        self.per_word, self.fixed = per_word, fixed

    @classmethod
    async def of(cls, client: Client) -> "PromptSizer":
        """Asks the server what two prompts take. Raises BenchError when it does not answer or does not count."""
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
        """A query of about `tokens` prompt tokens altogether, different from its first word on for every seed."""
        words = max(1, round((tokens - self.fixed) / self.per_word))
        return Query(seed, 1, _text(seed, words))


def _text(seed: str, words: int) -> str:
    return " ".join([f"{seed}:", *prose(seed, words).split()[:words]])
