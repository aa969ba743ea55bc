"""The bodies of requests for vectors and for scores."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from msgspec import UNSET, Meta, Struct

from ..errors import RequestError
from .requests import Json

MAX_TEXTS = 2048  # of a request, as in OpenAI's API
MAX_PAIRED = 1 << 25  # characters of the query, once for each document: it is tokenised with each of them
Norm = Annotated[int, Meta(ge=-1, le=16)]
Truncation = bool | Literal["none", "start", "end", "NONE", "START", "END"]


class EmbeddingRequest(Struct, frozen=True):
    """`POST /v1/embeddings` and llama-server's `POST /embedding`. input, content: a text, token ids, or a list of these."""

    input: Json = UNSET
    content: Json = UNSET
    model: str | None = None
    user: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    embd_normalize: Norm | None = None
    truncate: Truncation | None = None

    def given(self) -> tuple[str, Json]:
        """Return the field that holds the texts, and its value. Raises RequestError: neither is there."""
        for name in ("input", "content"):
            if (value := getattr(self, name)) is not UNSET:
                return name, value
        raise RequestError("input is missing: expected a text or a list of texts", param="input")

    @property
    def cut(self) -> Literal["start", "end"] | None:
        """Which end of a text that is too long is cut off; None: such a text is refused."""
        side = self.truncate.lower() if isinstance(self.truncate, str) else ("end" if self.truncate else "none")
        return None if side == "none" else cast(Literal["start", "end"], side)


class RerankDocument(Struct, frozen=True):
    """A document of a `RerankRequest` with its text in a field."""

    text: str


class RerankRequest(Struct, frozen=True):
    """`POST /v1/rerank`: the documents in Jina's and Cohere's shape, or the texts in TEI's."""

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False

    def passages(self) -> list[str]:
        """Return the texts of the documents. Raises RequestError."""
        if self.documents is not None and self.texts is not None:
            raise RequestError("documents and texts are both there: expected one of them", param="texts")
        name, given = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        check_number(len(given or []), name)
        found = [text.text if isinstance(text, RerankDocument) else text for text in given or []]
        if len(found) * len(self.query) > MAX_PAIRED:
            raise RequestError(f"the query is too long for {len(found)} documents: shorten it", param="query")
        return found


def check_number(num_texts: int, name: str) -> None:
    """Raise RequestError for no text, or for more than a request may have. name: of the field that holds them."""
    if not num_texts:
        raise RequestError(f"{name} is empty: expected at least one text", param=name)
    if num_texts > MAX_TEXTS:
        raise RequestError(f"{name} has {num_texts:,} texts: expected at most {MAX_TEXTS:,}", param=name)
