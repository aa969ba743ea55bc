"""The prompt that fills a gap in a text, with other files of its project in front (Hui et al. 2024, section 3.1.2).

The other files stand first and as a whole, so that their KV is reused while the text around the gap changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...models.infill import InfillTokens
from ...models.tokenizer import Tokenizer
from ..wire.infill import InfillRequest, OtherFile
from .parts import Fixed, Tokenize
from .texts import Texts

WINDOW = 2048  # tokens around the gap, as llama-server's default: three quarters in front of it
REPOSITORY, FILE = "myproject\n", "filename\n"  # requests name neither their project nor their file
SNIPPET = "\n\n--- snippet ---\n\n"  # in front of a file, in a vocabulary without a token for that


class Infill:
    """Makes the prompts of one model. Safe from several threads.

    limit: tokens that a prompt and its answer may have. suffix_first: the order that some models were trained with.
    """

    def __init__(self, special: InfillTokens, tokenizer: Tokenizer, texts: Texts, *, limit: int, suffix_first: bool) -> None:
        self._special, self._texts, self._suffix_first = special, texts, suffix_first
        self._begin, self._longest = tokenizer.begin, tokenizer.longest
        self._limit, self._window = limit, min(WINDOW, limit // 2)

    def parts(self, request: InfillRequest, tokenize: Tokenize) -> list[Fixed]:
        """Return the parts of a prompt. tokenize: a text in which control tokens are only text. Raises RequestError."""
        around = self._around(request, tokenize(request.prompt))
        room = self._limit - self._window - 2 * max(request.limit(), 0)
        begin = Fixed(self._begin, "the start", ends=False)
        return [begin, *self._project(request.input_extra, tokenize, room), *around]

    def _around(self, request: InfillRequest, start: np.ndarray) -> list[Fixed]:
        """Return the text around the gap, cut to the window: the end of what is in front, the start of what is behind."""
        most = self._window * self._longest  # characters that can count
        before = self._tokens(request.input_prefix, "input_prefix", slice(-most, None))
        behind = self._tokens(request.input_suffix, "input_suffix", slice(most))
        before = before[max(len(before) - self._window * 3 // 4, 0) :]
        behind = behind[: max(self._window // 4 - 2 - len(start), 0)]
        prefix = Fixed(_after(self._special.prefix, before, start), "the text in front of the gap")
        suffix = Fixed(_after(self._special.suffix, behind), "the text behind the gap")
        middle = Fixed(_after(self._special.middle), "the gap", ends=False)
        return [suffix, prefix, middle] if self._suffix_first else [prefix, suffix, middle]

    def _tokens(self, given: str | list[object], where: str, counts: slice) -> np.ndarray:
        part = given[counts] if isinstance(given, str) else given
        return self._texts.tokens(part, where, special=False, begin=False)

    def _project(self, files: Sequence[OtherFile], tokenize: Tokenize, room: int) -> Iterator[Fixed]:
        """Yield the project, as many of its last files as have room, and the name of the one with the gap."""
        if self._special.repository >= 0:
            yield Fixed(_after(self._special.repository, tokenize(REPOSITORY)), "the project", ends=False)
        yield from reversed(list(self._last_files(files, tokenize, room)))
        if self._special.file >= 0:
            yield Fixed(_after(self._special.file, tokenize(FILE)), "the file's name", ends=False)

    def _last_files(self, files: Sequence[OtherFile], tokenize: Tokenize, room: int) -> Iterator[Fixed]:
        """Yield the last file first. Whole files only: a cut one would be another prefix for each request."""
        for file in reversed(files):
            if len(file.text) > room * self._longest or (part := self._file(file, tokenize)).num_tokens > room:
                return
            room -= part.num_tokens
            yield part

    def _file(self, file: OtherFile, tokenize: Tokenize) -> Fixed:
        named = self._special.file >= 0
        head = _after(self._special.file, tokenize(f"{file.filename}\n")) if named else tokenize(SNIPPET)
        return Fixed(np.concatenate([head, tokenize(file.text)]), f"the file {file.filename}")


def _after(token: int, *runs: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([token], np.int32), *runs])
