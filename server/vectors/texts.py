"""The texts of a request for vectors, as tokens."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator

import numpy as np

from ...models.embedding import Embedder
from ..chat.texts import Texts, split_prompts
from ..errors import RequestError
from ..wire.embedding import check_number


def tokens_of(embedder: Embedder, given: object, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tokens of each text, int32, with its place in the body. Raises RequestError.

    given: a text, a list of token ids or of both mixed, `{"prompt_string": text}`, `{"content": [parts]}`, or a list of
    these. name: of the field. Only a text alone gets the tokens that the model expects around it; ids stay as they are.
    """
    if isinstance(given, list):
        check_number(len(given), name)
    texts = Texts(embedder.model)
    for where, one in split_prompts(given, name):
        text = _plain(one, where)
        alone = isinstance(text, str)
        yield where, embedder.tokens(text) if alone else texts.tokens(text, where, special=False, begin=False)


def _plain(one: object, where: str) -> object:
    """Return the text of an object with a text, else the object."""
    match one:
        case {"content": list(parts)}:
            return "".join(_text(part, f"{where}.content[{at}]") for at, part in enumerate(parts))
        case {"prompt_string": str(text), **rest} if not rest:
            return text
    return one


def _text(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise RequestError(f"{where} is {reprlib.repr(part)}: expected a part of type text", param=where)
