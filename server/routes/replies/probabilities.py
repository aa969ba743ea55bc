"""The tokens of an answer with their probabilities, as OpenAI and llama-server write them."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Callable

from ...engine.view import Chances, Delta, Fields

Piece = Callable[[int], bytes]


class Probabilities:
    """Writes the tokens of one choice. The texts of its tokens joined are the answer.

    piece: the bytes of a token. after: probabilities are as the samplers left them, and written as such, not as logarithms.
    A token that ends within a character has no text; the one that completes the character has it whole.
    """

    def __init__(self, piece: Piece, after: bool = False) -> None:
        self._piece, self._after, self._offset = piece, after, 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def entries(self, delta: Delta) -> list[Fields]:
        """Return the next tokens, an object each: OpenAI's fields for chats, and llama-server's `id`."""
        last = len(delta.chances) - 1 if delta.is_last else -1
        return [self._entry(chances, final=at == last) for at, chances in enumerate(delta.chances)]

    def _entry(self, chances: Chances, final: bool) -> Fields:
        text = self._decoder.decode(self._piece(chances.token), final)
        best = zip(chances.tokens.tolist(), chances.logprobs.tolist(), strict=True)
        top = [self._token(token, spelt(self._piece(token)), logprob) for token, logprob in best]
        return self._token(chances.token, text, chances.logprob) | {"top_probs" if self._after else "top_logprobs": top}

    def _token(self, token: int, text: str, logprob: float) -> Fields:
        name, value = ("prob", math.exp(logprob)) if self._after else ("logprob", logprob)
        return {"id": token, "token": text, "bytes": list(self._piece(token)), name: value}

    def of_text(self, delta: Delta) -> Fields:
        """Return the next tokens as OpenAI's object for text completions, with llama-server's `content` in it."""
        entries, chances = self.entries(delta), delta.chances
        texts = [str(entry["token"]) for entry in entries]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in chances],
            "top_logprobs": [self._top(each) for each in chances],
            "text_offset": offsets,
            "content": entries,
        }

    def _top(self, chances: Chances) -> Fields:
        """Return the most probable tokens by their texts; of two with the same text, the more probable one."""
        best = reversed(list(zip(chances.tokens.tolist(), chances.logprobs.tolist(), strict=True)))
        return {spelt(self._piece(token)): logprob for token, logprob in best}


def of_chat(entries: list[Fields]) -> Fields | None:
    """Return `logprobs` of a chat's choice."""
    return {"content": entries, "refusal": None} if entries else None


def spelt(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
