"""The prompts of the completion APIs: texts, token ids, infill."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Sequence

import numpy as np

from ...models.model import InfillTokens, Model
from ...models.tokenizer import Tokenizer
from ...slots.radix import NO_TOKENS
from ..http.api_errors import RequestError
from .body import InfillRequest, OtherFile
from .chat_prompt import Fixed, Tokenize
from .prompt_length import PromptLength


def split_prompts(given: object, where: str = "prompt") -> Iterator[tuple[str, object]]:
    """Yield each prompt of a request, with its path in the body. Raises RequestError for an empty list.

    A list that contains a number is one prompt. Any other list is a list of prompts.
    """
    if not isinstance(given, list) or any(_is_number(part) for part in given):
        yield where, given
        return
    if not given:
        raise RequestError(f"{where} is an empty list: expected at least one prompt", param=where)
    for at, prompt in enumerate(given):
        yield f"{where}[{at}]", prompt


MOST_TEXTS = 10_000  # most texts of one prompt: each text is a call of llama.cpp, which takes as long as hundreds of ids


class TextTokens:
    """Turns a text, token ids, or a list of both into tokens. Safe from several threads."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def tokens(
        self, given: object, where: str, *, special: bool = True, begin: bool = True, limit: int | None = None
    ) -> np.ndarray:
        """Return the ids (int32) of a prompt.

        Raises RequestError if a part is neither a text nor a known id, if there are more than `MOST_TEXTS` texts, or if
        the prompt is too long.

        where: the name of the field, for the error.
        special: whether texts may contain control tokens.
        begin: whether to put BOS before a text at the start, if the model wants BOS. Ids at the start never get BOS.
        limit: the most tokens of the prompt and its answer together (see `PromptLength`); None: no limit.
        """
        parts = _parts(given, where)
        texts = [part for part in parts if isinstance(part, str)]
        length = PromptLength(self._model, limit)
        length.extend(texts, len(parts) - len(texts))
        if len(texts) > MOST_TEXTS:
            wrong = f"{where} has {len(texts):,} texts among its ids: expected at most {MOST_TEXTS:,}"
            raise RequestError(wrong, param=where)
        runs, at = [NO_TOKENS], 0
        for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
            run = list(group)
            runs += self._texts(run, length, special, begin and at == 0) if is_text else [self._ids(run, where, at)]
            at += len(run)
        return np.concatenate(runs)

    def _texts(self, texts: list[object], length: PromptLength, special: bool, begin: bool) -> Iterator[np.ndarray]:
        for at, text in enumerate(texts):
            tokens = length.tokenise(str(text), special, begin and at == 0)
            length.add(len(tokens))
            yield tokens

    def _ids(self, ids: list[object], where: str, start: int) -> np.ndarray:
        most = self._model.num_vocab - 1
        for at, token in enumerate(ids, start):
            if type(token) is not int or not 0 <= token <= most:
                raise RequestError(
                    f"{where}[{at}] is {reprlib.repr(token)}: expected a text or a token id from 0 to {most}",
                    param=f"{where}[{at}]",
                )
        return np.array(ids, np.int32)


def _parts(given: object, where: str) -> list[object]:
    """Return the texts and ids of a single prompt, which may also be `{"prompt_string": text}`. Raises RequestError."""
    if isinstance(given, dict):
        if "multimodal_data" in given:
            raise RequestError(f"{where}.multimodal_data: this server reads no images", param=f"{where}.multimodal_data")
        given, where = given.get("prompt_string"), f"{where}.prompt_string"
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise RequestError(
            f"{where} is {reprlib.repr(given)}: expected a text, a list of token ids, or both mixed", param=where
        )
    return given


def _is_number(part: object) -> bool:
    return isinstance(part, int | float) and not isinstance(part, bool)


# ---- Infill -------------------------------------------------------------------------------------------------------------
# The prompt that fills a gap in a text, with other files of the project before it (Hui et al. 2024, section 3.2.2).
#
# The other files come first and are never cut, so that their KV is reused while the text around the gap changes.

WINDOW = 2048  # most tokens around the gap, three quarters of them before it; llama-server's default
REPOSITORY, FILE = "myproject\n", "filename\n"  # requests name neither their project nor their file
SNIPPET = "\n\n--- snippet ---\n\n"  # before a file, in a vocabulary without a token for files


class Infill:
    """Makes the infill prompts of one model. Safe from several threads.

    limit: the most tokens of a prompt and its answer together. suffix_first: whether the suffix stands before the prefix,
    as in the training of some models.
    """

    def __init__(
        self, special: InfillTokens, tokenizer: Tokenizer, texts: TextTokens, *, limit: int, suffix_first: bool
    ) -> None:
        self._special, self._texts, self._suffix_first = special, texts, suffix_first
        self._begin, self._longest = tokenizer.begin, tokenizer.longest
        self._limit, self._window = limit, min(WINDOW, limit // 2)

    def parts(self, request: InfillRequest, tokenize: Tokenize) -> list[Fixed]:
        """Return the parts of a prompt. Raises RequestError.

        tokenize: tokenises a text, with control tokens as ordinary text.
        """
        around = self._around(request, tokenize(request.prompt))
        room = self._limit - self._window - 2 * max(request.limit(), 0)
        begin = Fixed(self._begin, "the start", ends=False)
        return [begin, *self._project(request.input_extra, tokenize, room), *around]

    def _around(self, request: InfillRequest, start: np.ndarray) -> list[Fixed]:
        """Return the end of the prefix, the start of the suffix, and the gap, as far as they fit into the window.

        start: the tokens of the text at the start of the gap.
        """
        most = self._window * self._longest  # the window cannot have more characters
        before = self._tokens(request.input_prefix, "input_prefix", slice(-most, None))
        tail = self._tokens(request.input_suffix, "input_suffix", slice(most))
        before = before[max(len(before) - self._window * 3 // 4, 0) :]
        tail = tail[: max(self._window // 4 - 2 - len(start), 0)]
        prefix = Fixed(_after(self._special.prefix, before, start), "the text in front of the gap")
        suffix = Fixed(_after(self._special.suffix, tail), "the text behind the gap")
        middle = Fixed(_after(self._special.middle), "the gap", ends=False)
        return [suffix, prefix, middle] if self._suffix_first else [prefix, suffix, middle]

    def _tokens(self, given: str | list[object], where: str, counts: slice) -> np.ndarray:
        part = given[counts] if isinstance(given, str) else given
        return self._texts.tokens(part, where, special=False, begin=False)

    def _project(self, files: Sequence[OtherFile], tokenize: Tokenize, room: int) -> Iterator[Fixed]:
        """Yield the project's name, the other files, and the name of the file with the gap.

        If not all other files fit, the first ones are left out. room: the most tokens of the other files.
        """
        if self._special.repository >= 0:
            yield Fixed(_after(self._special.repository, tokenize(REPOSITORY)), "the project", ends=False)
        yield from reversed(list(self._last_files(files, tokenize, room)))
        if self._special.file >= 0:
            yield Fixed(_after(self._special.file, tokenize(FILE)), "the file's name", ends=False)

    def _last_files(self, files: Sequence[OtherFile], tokenize: Tokenize, room: int) -> Iterator[Fixed]:
        """Yield files, beginning with the last one, until one does not fit. room: the most tokens of all yielded files.

        Files are never cut: the place of a cut would change with each request, so the prefix of the prompt would change,
        too.
        """
        for file in reversed(files):
            if len(file.filename) + len(file.text) > room * self._longest:
                return
            if (part := self._file(file, tokenize)).num_tokens > room:
                return
            room -= part.num_tokens
            yield part

    def _file(self, file: OtherFile, tokenize: Tokenize) -> Fixed:
        named = self._special.file >= 0
        head = _after(self._special.file, tokenize(f"{file.filename}\n")) if named else tokenize(SNIPPET)
        return Fixed(np.concatenate([head, tokenize(file.text)]), f"the file {file.filename}")


def _after(token: int, *runs: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([token], np.int32), *runs])
