"""Tokens that are told beside their text, however the bytes of an answer are cut into tokens and where it stops."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from slotcache.models.detokenizer import TextStream
from slotcache.models.sampling import Logprobs
from slotcache.server.api.reply import Probabilities
from slotcache.server.engine.generation import Delta, Pending

pieces_of = st.lists(st.one_of(st.text("abé漢", max_size=4).map(str.encode), st.binary(max_size=2)), min_size=1, max_size=10)
stops_of = st.lists(st.text("abé漢", min_size=1, max_size=4), max_size=3)


def deltas_of(pieces, stops) -> Iterator[tuple[str, Any]]:
    """Yield the text and the told tokens of each event, as the engine sends them."""
    text, pending = TextStream(stops, pieces.__getitem__), Pending(shows_logprobs=True)
    probabilities, kept = Probabilities(pieces.__getitem__), None
    for token in range(len(pieces)):
        pending.push(token, Logprobs.certain(token))
        settled = text.push(token)
        if text.stopped is not None or token == len(pieces) - 1:
            pending.text += settled + text.finish()
            kept = pending.cut() if text.stopped is not None else None
            last = Delta(pending.text, tuple(pending.tokens), tuple(pending.logprobs), is_last=True, kept=kept)
            yield last.text, [json.loads(bytes(entry)) for entry in probabilities.entries(last)]
            return
        pending.settle(settled, text.num_unsettled)
        sent, tokens, logprobs = pending.take()
        assert len(tokens) == len(logprobs) and bool(tokens) == bool(sent)
        yield sent, [json.loads(bytes(entry)) for entry in probabilities.entries(Delta(sent, tokens, logprobs))]


@given(pieces_of, stops_of)
@example([b"ab"], ["b"])
@example([b"aab", b"a", b"b"], ["bab"])
@example(["漢".encode()[:1], "漢".encode()[1:] + b"a"], ["漢"])
@example([b"a\xe6", "漢".encode()[1:]], ["漢"])
@example([b"\xe6ab"], ["ab"])
def test_the_texts_of_the_reported_tokens_are_the_text(pieces, stops):
    expected = TextStream(stops, pieces.__getitem__)
    answer = "".join(map(expected.push, range(len(pieces)))) + expected.finish()
    events = list(deltas_of(pieces, stops))
    assert "".join(text for text, _ in events) == answer
    for text, tokens in events:
        assert "".join(str(token["token"]) for token in tokens) == text
    tokens = [token for _, each in events for token in each]
    assert [token["id"] for token in tokens] == list(range(len(tokens)))
    if "\ufffd" not in answer:
        token_bytes: list[Any] = [token["bytes"] for token in tokens]
        assert b"".join(map(bytes, token_bytes)).decode("utf-8", "ignore") == answer


def test_without_chances_text_is_sent_as_soon_as_it_is_known():
    pending = Pending(shows_logprobs=False)
    pending.push(1, None)
    pending.settle("a", 1)
    assert pending.take() == ("a", (1,), ())
