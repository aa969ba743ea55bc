"""The prompts of text completions: texts, token ids, or both mixed, in the forms that llama-server takes."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator

import numpy as np

from ...models.model import Model
from ...slots.radix import NO_TOKENS
from ..errors import RequestError


def split_prompts(given: object, where: str = "prompt") -> Iterator[tuple[str, object]]:
    """Yield each single prompt of a request with its path: a list without a number in it is a list of prompts.

    Raises RequestError for an empty list.
    """
    if not isinstance(given, list) or any(_is_number(part) for part in given):
        yield where, given
        return
    if not given:
        raise RequestError(f"{where} is an empty list: expected at least one prompt", param=where)
    for at, prompt in enumerate(given):
        yield f"{where}[{at}]", prompt


class Texts:
    """Turns a text, token ids or a list of both into tokens. Safe from several threads."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def tokens(self, given: object, where: str, *, special: bool = True, begin: bool = True) -> np.ndarray:
        """Return the ids, int32. Raises RequestError that names the wrong part.

        special: control tokens count in texts. begin: add BOS in front of a text if the model wants it; in front of ids
        it is never added.
        """
        runs, at = [NO_TOKENS], 0
        for is_text, group in itertools.groupby(_parts(given, where), lambda part: isinstance(part, str)):
            run = list(group)
            runs += self._texts(run, special, begin and at == 0) if is_text else [self._ids(run, where, at)]
            at += len(run)
        return np.concatenate(runs)

    def _texts(self, texts: list[object], special: bool, begin: bool) -> Iterator[np.ndarray]:
        for at, text in enumerate(texts):
            yield self._model.tokenize(str(text), special=special, begin=begin and at == 0)

    def _ids(self, ids: list[object], where: str, start: int) -> np.ndarray:
        most = self._model.num_vocab - 1
        for at, token in enumerate(ids, start):
            if type(token) is not int or not 0 <= token <= most:
                raise RequestError(
                    f"{where}[{at}] is {reprlib.repr(token)}: expected a text or a token id from 0 to {most}",
                    param=f"{where}[{at}]",
                )
        return np.array(ids, np.int32)


def texts_of(given: object, where: str) -> Iterator[str]:
    """Yield the texts of a prompt. Raises RequestError."""
    return (part for part in _parts(given, where) if isinstance(part, str))


def _parts(given: object, where: str) -> list[object]:
    """Return the texts and ids of a single prompt; `{"prompt_string": text}` is a prompt, too."""
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
