"""TextStream against the plain reading of the whole answer, however its bytes are cut into tokens."""

from itertools import pairwise
from time import process_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slotcache.models.detokenizer import TextStream


def stream(chunks: list[bytes], stop: list[str] | None = None) -> tuple[list[str], str | None]:
    text = TextStream(stop or [], chunks.__getitem__)
    out = [text.push(token) for token in range(len(chunks))]
    out.append(text.finish())
    return out, text.stopped


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Return the earliest stop string that begins in the text; of several at one place, the shortest."""
    found = [(text.find(word), len(word), word) for word in stop if word and word in text]
    if not found:
        return text, None
    start, _, word = min(found)
    return text[:start], word


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(edge, len(data)) for edge in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


edges = st.lists(st.integers(0, 60), max_size=12)
# Bytes that open, continue and break UTF-8 sequences of each length, surrogates and overlong forms included.
edge_bytes = [*b"a\n", 0x80, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]
broken = st.lists(st.sampled_from(edge_bytes)).map(bytes)


@given(st.one_of(st.binary(max_size=60), st.text(max_size=20).map(str.encode), broken), edges)
@example(b"\xed\xa0\x80", [1, 2])
@example(b"\xf0\x9f\x92", [1, 2])
def test_any_split_decodes_like_the_whole(data: bytes, at: list[int]) -> None:
    pieces, stopped = stream(cut(data, at))
    assert "".join(pieces) == data.decode("utf-8", "replace")
    assert stopped is None


few = st.text(alphabet="abé", max_size=24)
stops = st.lists(st.text(alphabet="abé", max_size=4), max_size=4)


@given(few, edges, stops)
@example("abé", [1, 2], ["abéa", "bé"])
@example("abab", [1], ["b", "bab", "ba"])
def test_stop_strings_are_found_in_any_split(text: str, at: list[int], stop: list[str]) -> None:
    pieces, stopped = stream(cut(text.encode(), at), stop)
    assert ("".join(pieces), stopped) == expected(text, stop)


@given(few, st.text(alphabet="abé", min_size=1, max_size=3))
def test_one_stop_string_is_str_partition(text: str, stop: str) -> None:
    pieces, stopped = stream([bytes([byte]) for byte in text.encode()], [stop])
    before, found, _ = text.partition(stop)
    assert "".join(pieces) == before
    assert (stopped or "") == found


def test_text_is_sent_as_soon_as_it_is_settled() -> None:
    pieces, _ = stream([b"caf", b"\xc3", b"\xa9 <", b"/s", b"x"], ["</s>"])
    assert pieces == ["caf", "", "é ", "", "</sx", ""]


def test_nothing_comes_after_a_stop_string() -> None:
    pieces, stopped = stream([b"one", b"\n\n", b"two"], ["\n\n", "two"])
    assert pieces == ["one", "", "", ""]
    assert stopped == "\n\n"


def test_a_stop_string_waits_for_one_that_may_have_started_before_it() -> None:
    assert stream([b"x", b"abc", b"d"], ["abcd", "bc"]) == (["x", "", "", ""], "abcd")
    assert stream([b"x", b"abc", b"e"], ["abcd", "bc"]) == (["x", "", "a", ""], "bc")
    assert stream([b"x", b"abc"], ["abcd", "bc"]) == (["x", "", "a"], "bc")


def test_an_empty_stop_string_stops_nothing() -> None:
    assert stream([b"text"], [""]) == (["text", ""], None)


@pytest.mark.parametrize("stop", [[], ["\n\nUser:"]])
def test_what_is_kept_does_not_grow_with_the_text(stop: list[str]) -> None:
    text = TextStream(stop, lambda token: b"\n\nUse" if token % 2 else b"more words ")
    for token in range(1000):
        text.push(token)
        assert len(text._unsettled) <= len("\n\nUser:")


def test_long_stop_strings_cost_no_more_than_their_length() -> None:
    # They are looked for at every token, in the thread that all requests share.
    def seconds(length: int) -> float:
        stop = ["a" * length + "!", *("a" * (length // 2) + f"{number:02}" + "b" * length for number in range(15))]
        text = TextStream(stop, lambda token: b"a")
        for token in range(2 * length):
            text.push(token)
        began = process_time()
        for token in range(200):
            text.push(token)
        return process_time() - began

    assert min(seconds(1000) for _ in range(3)) < 20 * min(seconds(20) for _ in range(3))
