"""Text to tokens without llama.cpp: byte-level BPE with the merges of vocabulary.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from ..vocabulary import SPECIAL, byte_alphabet, count_words, learn_merges, split

FILE = Path(__file__).with_name("vocabulary.json")
MAX_REMEMBERED = 200_000  # words


class Encoder:
    """Encodes like llama.cpp with the `gpt2` tokenizer and the same merges. merges: pairs, the first has priority."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self.merges = tuple(merges)
        self.tokens = (*dict.fromkeys([*byte_alphabet(), *(left + right for left, right in merges)]), *SPECIAL)
        """A token's id is its index; special tokens come last."""
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._words: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls) -> Encoder:
        """Return the encoder with the merges of the embedded model."""
        return cls([tuple(line.split(" ")) for line in json.loads(FILE.read_text(encoding="utf-8"))])

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Encoder:
        """Return an encoder with the most useful merges for these texts, `size` tokens in all."""
        return cls(learn_merges(count_words(texts), size - 256 - len(SPECIAL)))

    def save(self) -> None:
        """Write the merges to the file that `load` reads."""
        FILE.write_text(
            json.dumps([" ".join(pair) for pair in self.merges], ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
        )

    def special(self, token: str) -> int:
        """Return the id of a special token."""
        return self._ids[token]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text."""
        out: list[int] = []
        for word in split(text):
            ids = self._words.get(word)
            if ids is None:
                if len(self._words) >= MAX_REMEMBERED:
                    self._words.clear()
                ids = self._words[word] = self._encode_word(word)
            out += ids
        return out

    def encode_template(self, text: str) -> list[int]:
        """Return the tokens of text with special tokens in it."""
        for token in SPECIAL:
            before, found, after = text.partition(token)
            if found:
                return [*self.encode_template(before), self._ids[token], *self.encode_template(after)]
        return self.encode(text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        parts = list(word)
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            rank, at = min((self._ranks.get(pair, len(self._ranks)), at) for at, pair in enumerate(pairs))
            if rank == len(self._ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self._ids[part] for part in parts)
