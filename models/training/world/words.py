"""The lists of everyday words in words.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random


class Words:
    """Word lists by name. An entry is a word, a phrase or a whole line."""

    def __init__(self, lists: dict[str, tuple[str, ...]]) -> None:
        self._lists = lists

    @classmethod
    def load(cls) -> Words:
        """Read the file beside this module."""
        texts = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
        return cls({name: tuple(_items(text)) for name, text in texts.items()})

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._lists[name]

    def __contains__(self, name: str) -> bool:
        return name in self._lists

    def pick(self, rng: Random, name: str) -> str:
        """Return a random entry of a list, all equally likely."""
        words = self._lists[name]
        return words[int(rng.random() * len(words))]


def _items(text: str) -> list[str]:
    return text.strip("\n").split("\n") if "\n" in text else text.split(", ")
