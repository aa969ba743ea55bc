"""A byte-level BPE vocabulary (GGUF's `gpt2` tokenizer), trained offline on the English text in Python itself."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

PRE_TOKENIZER = "qwen2"
"""GGUF's tokenizer.ggml.pre: how llama.cpp cuts text into words, within which it merges."""

# The same cut for Python's `re`, which has no \p{L}: letters are word characters that are no digit and no underscore.
_WORD = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)

# Much plain English in little code; read from the source, never imported.
_MODULES = (
    "_pydecimal", "cmd", "configparser", "contextlib", "difflib", "doctest", "email.message", "fileinput", "fractions",
    "http.server", "ipaddress", "logging", "lzma", "queue", "random", "sched", "shelve", "shutil", "smtplib", "socket",
    "socketserver", "statistics", "textwrap", "threading", "timeit", "turtle", "typing", "uuid", "xmlrpc.server",
)  # fmt: skip

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything GGUF's tokenizer keys ask for; a token's id is its place in `tokens`."""

    tokens: tuple[str, ...]
    """In GPT-2's byte alphabet (a space is `Ġ`), special tokens as they are."""
    merges: tuple[str, ...]
    """`left right`, the one to apply first in front."""
    types: tuple[int, ...]
    """One `gguf.TokenType` a token."""
    bos: int
    eos: int


def train(size: int, merges: int) -> Vocabulary:
    """Train a vocabulary of `size` tokens: 256 bytes, up to `merges` merges, ChatML's special tokens, padding up to `size`.

    The same Python gives the same vocabulary. Raises ValueError if `size` is too small for the rest.
    """
    from gguf import TokenType  # here, so that text can be split without gguf, as in training

    if size < 256 + merges + len(SPECIAL):
        raise ValueError(f"{size} tokens are too few for 256 bytes, {merges} merges and {len(SPECIAL)} special tokens")
    pairs = learn_merges(count_words(corpus()), merges)
    # Two merges can spell the same token ("a"+"bc", "ab"+"c"): it stands once.
    words = dict.fromkeys([*byte_alphabet(), *("".join(pair) for pair in pairs)])
    used = [*words, *SPECIAL]
    padding = [f"<|unused_{number}|>" for number in range(size - len(used))]
    types = [TokenType.NORMAL] * len(words) + [TokenType.CONTROL] * len(SPECIAL) + [TokenType.UNUSED] * len(padding)
    return Vocabulary(
        tokens=(*used, *padding),
        merges=tuple(" ".join(pair) for pair in pairs),
        types=tuple(map(int, types)),
        bos=used.index(END_OF_TEXT),
        eos=used.index(IM_END),
    )


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, in order: itself if it is printable Latin-1, else U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def corpus() -> Iterator[str]:
    """Python's own language reference and the docstrings of its standard library: 0.9 MB."""
    for name in sorted(topics):
        yield topics[name]
    for module in _MODULES:
        spec = find_spec(module)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield from _docstrings(Path(spec.origin).read_text(encoding="utf-8"))


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Count each word in the texts, spelt in the byte alphabet.

    Words that occur once are left out: they are two in five and say nothing about other texts.
    """
    counts = Counter(word for text in texts for word in split(text))
    return Counter({word: count for word, count in counts.items() if count > 1})


def split(text: str) -> Iterator[str]:
    """Yield the words within which tokens are merged, in order, their UTF-8 spelt in the byte alphabet."""
    alphabet = dict(enumerate(byte_alphabet()))
    return (word.encode().decode("latin-1").translate(alphabet) for word in _WORD.findall(text))


def learn_merges(words: Counter[str], limit: int) -> list[Pair]:
    """Return the `limit` most useful merges, in order: each merges the pair that is then the most frequent.

    After Sennrich et al. 2016, algorithm 1. Fewer if no pair is left that occurs twice. Ties: the pair that is first
    in the alphabet, so that the result does not depend on the hash seed.
    """
    return _Trainer(words).run(limit)


class _Trainer:
    """Pair counts that are corrected, merge by merge, only for the words that hold the pair."""

    def __init__(self, words: Counter[str]) -> None:
        self.words = [list(word) for word in words]
        self.weight = list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.holders: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, word in enumerate(self.words):
            self._count(index, word, +1)
        # Holds outdated entries, too: one whose count is no longer true is put right when it comes up.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapify(self.heap)

    def run(self, limit: int) -> list[Pair]:
        merges: dict[Pair, None] = {}  # a pair can come up again, once another merge spells one of its halves anew
        while self.heap and len(merges) < limit:
            count, pair = heappop(self.heap)
            if -count != self.counts[pair]:
                heappush(self.heap, (-self.counts[pair], pair))
            elif -count < 2:
                break
            else:
                self._merge(pair)
                merges[pair] = None
        return list(merges)

    def _merge(self, pair: Pair) -> None:
        changed: set[Pair] = set()
        for index in self.holders.pop(pair):
            old, new = self.words[index], _joined(self.words[index], pair)
            self._count(index, old, -1)
            self._count(index, new, +1)
            self.words[index] = new
            changed.update(pairwise(new))
        for grown in changed:
            heappush(self.heap, (-self.counts[grown], grown))

    def _count(self, index: int, word: list[str], sign: int) -> None:
        for pair in pairwise(word):
            self.counts[pair] += sign * self.weight[index]
            if sign > 0:
                self.holders[pair].add(index)


def _joined(word: list[str], pair: Pair) -> list[str]:
    """The word with every occurrence of the pair, from the left, made one symbol."""
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out
