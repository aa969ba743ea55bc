"""Bodies that a client has packed: what is unpacked, and what it may cost."""

import asyncio
import gzip
import json
import zlib

import pytest
from backports import zstd
from slotcache.server.http import encodings
from slotcache.server.http.api_errors import RequestError
from slotcache.server.http.bodies import LARGEST, Bodies
from slotcache.server.http.encodings import BITE, MOST_MEMBERS, PIECE, STREAMS, Unpacking
from starlette.requests import Request
from support.dialects import ALL

TEXT = b"".join(b"%d, " % number for number in range(200_000))
HUGE = 1 << 28


def raw(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS = {
    "gzip": (gzip.compress, "gzip"),
    "x-gzip": (gzip.compress, "x-gzip"),
    "zstd": (zstd.compress, "zstd"),
    "deflate": (zlib.compress, "deflate"),
    "deflate without a frame": (raw, "deflate"),
}


def read(body, *encodings, most=8 << 20, bite=100_000):
    """The unpacked body, as the server reads it, and the most room that it took."""
    bodies, taken = Bodies.up_to(most), 0
    pieces = [body[at : at + bite] for at in range(0, len(body), bite)] or [b""]

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    class Noting(Bodies):
        def __setattr__(self, name, value):
            nonlocal taken
            if name == "room":
                taken = max(taken, LARGEST * most - value)
            super().__setattr__(name, value)

    bodies = Noting(most, LARGEST * most)
    headers = [(b"content-encoding", encoding.encode()) for encoding in encodings]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    try:
        return asyncio.run(bodies.read(request)), taken
    finally:
        assert bodies.room == LARGEST * most


def refused(status, body, *encodings, **named):
    with pytest.raises(RequestError) as error:
        read(body, *encodings, **named)
    assert error.value.status == status, error.value.message
    return error.value


@pytest.mark.parametrize("data", [b"", b"{}", TEXT, bytes(3 << 20)], ids=["nothing", "little", "text", "zeros"])
@pytest.mark.parametrize(("pack", "encoding"), PACKERS.values(), ids=PACKERS)
def test_what_was_packed_is_read(pack, encoding, data):
    for named in (encoding, encoding.upper(), f" identity, {encoding}"):
        assert read(pack(data), named)[0] == data


@pytest.mark.parametrize("encodings", [(), ("",), ("identity",), ("Identity", "")])
def test_a_body_in_no_encoding_stays_as_it_is(encodings):
    packed = gzip.compress(TEXT)
    assert read(packed, *encodings)[0] == packed


def test_no_body_is_no_damaged_one():
    assert [read(b"", encoding)[0] for encoding in STREAMS] == [b""] * len(STREAMS)


@pytest.mark.parametrize(("pack", "encoding"), [PACKERS["gzip"], PACKERS["zstd"]])
def test_members_follow_one_another(pack, encoding):
    parts = [b"", b'{"content": "', TEXT, b"", b'"}', b""]
    assert read(b"".join(map(pack, parts)), encoding, bite=1000)[0] == b"".join(parts)
    assert read(pack(b"") * MOST_MEMBERS, encoding)[0] == b""
    assert f"more than {MOST_MEMBERS:,} members" in refused(400, pack(b"") * (MOST_MEMBERS + 1), encoding).message


def test_a_frame_of_zstd_that_is_skipped_says_nothing():
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    assert read(skipped + zstd.compress(TEXT) + skipped, "zstd")[0] == TEXT


@pytest.mark.parametrize(("pack", "encoding"), PACKERS.values(), ids=PACKERS)
def test_a_body_that_was_cut_is_refused_wherever_it_was(pack, encoding):
    packed = pack(TEXT)
    for length in (1, 5, len(packed) // 2, len(packed) - 1):
        error = refused(400, packed[:length], encoding)
        assert "it is incomplete" in error.message and "Content-Encoding: " in error.message
    assert "it is incomplete" in refused(400, pack(b"{}")[:-1], encoding).message


@pytest.mark.parametrize("rest", [b"x", b"\0", b"{}" * BITE, gzip.compress(b"{}", mtime=0)[:5]])
@pytest.mark.parametrize(("pack", "encoding"), PACKERS.values(), ids=PACKERS)
def test_what_stands_after_the_end_is_refused(pack, encoding, rest):
    assert "cannot be unpacked" in refused(400, pack(TEXT) + rest, encoding).message


@pytest.mark.parametrize("encoding", STREAMS)
@pytest.mark.parametrize("body", [b"{}", b'{"content": "Hello"}', b"\x1f\x8b\x08", b"\xff" * BITE * 3, TEXT])
def test_a_body_that_is_not_what_its_header_says_is_refused(encoding, body):
    assert f"Content-Encoding: {encoding}: " in refused(400, body, encoding).message


@pytest.mark.parametrize("encodings", [("br",), ("gzip, zstd",), ("gzip", "gzip"), ("gzip, br",), ("x" * 10_000,), ("*",)])
def test_another_encoding_and_more_than_one_are_refused_with_the_header_s_name(encodings):
    error = refused(415, b"{}", *encodings)
    assert error.message.startswith("Content-Encoding: ") and len(error.message) < 200
    assert error.headers["Accept-Encoding"] == "gzip, deflate, zstd"


def bomb(encoding):
    """A quarter of a gigabyte of zeros, packed: 8 kB of zstd, and 260 kB of the others."""
    if encoding == "zstd":
        packer = zstd.ZstdCompressor()
        pack, flush = packer.compress, packer.flush
    else:
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS + 16 * (encoding == "gzip"))
        pack, flush = packer.compress, packer.flush
    zeros = bytes(16 << 20)
    return b"".join([*(pack(zeros) for _ in range(HUGE // len(zeros))), flush()])


@pytest.mark.parametrize("encoding", STREAMS)
def test_a_bomb_costs_no_more_than_a_body_of_the_largest_size(monkeypatch, encoding):
    made = 0

    class Counted(Unpacking):
        def piece(self):
            nonlocal made
            piece = super().piece()
            assert len(piece) <= PIECE
            made += len(piece)
            return piece

    monkeypatch.setattr("slotcache.server.http.bodies.Unpacking", Counted)
    most = 2 << 20
    assert "larger than 2,097,152 bytes when it is unpacked" in refused(413, bomb(encoding), encoding, most=most).message
    assert most < made <= most + PIECE


def test_the_unpacked_bytes_are_counted_among_those_of_all_bodies():
    body, taken = read(gzip.compress(TEXT), "gzip")
    assert len(body) == len(TEXT) and taken >= len(TEXT)
    assert taken < len(TEXT) * 1.5


def test_a_window_is_no_larger_than_the_standard_has_it():
    def packed(log):
        packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
        return packer.compress(TEXT) + packer.flush()

    assert read(packed(encodings.WINDOW_LOG), "zstd")[0] == TEXT
    assert "too much memory" in refused(400, packed(encodings.WINDOW_LOG + 1), "zstd").message


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/lora-adapters", "/slots/0?action=erase"])
def test_each_route_reads_them(server, path):
    """What the answer is to the body as it is, it is to the packed one."""
    body = b'{"content": "Hello", "input": "Hello", "adapters": []}'
    plain = server.http.post(path, content=body)
    for pack, encoding in PACKERS.values():
        answer = server.http.post(path, content=pack(body), headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.text) == (plain.status_code, plain.text)


def test_large_chats_come_packed_as_codex_sends_them(server):
    asked = {"model": "any", "input": "word " * 1000, "max_output_tokens": 1, "temperature": 0, "store": False}
    body = json.dumps(asked | {"instructions": "x" * 300_000}).encode()
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    answer = server.http.post("/v1/responses/input_tokens", content=zstd.compress(body), headers=headers)
    assert answer.json() == server.http.post("/v1/responses/input_tokens", content=body).json()


@pytest.mark.parametrize("api", ALL, ids=str)
def test_an_error_has_the_shape_of_its_api(server, api):
    answer = server.http.post(api.path, content=b"{}", headers={"Content-Encoding": "br"})
    assert api.refused(answer, 415).startswith("Content-Encoding: br is not supported")
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    answer = server.http.post(api.path, content=b"{}", headers={"Content-Encoding": "gzip"})
    assert "cannot be unpacked" in api.refused(answer)
