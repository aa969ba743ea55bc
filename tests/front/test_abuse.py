"""Requests that a well-behaved client never sends: none of them reaches another host, or other parts of the upstream's."""

import socket

import pytest

from front.conftest import ordering
from front.upstreams import response, scripted

ANSWER = response("200 OK", b'{"choices": []}')


def raw(front, data):
    """The bytes that come back for some bytes on a connection, up to its end."""
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=5) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def get(target):
    return f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer mine\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    "path", ["%2F@{host}/x", "%2f%2f{host}/x", "%2F:1/x", "%2F[::x]/x", "/a/../x", "/%2e%2E/x", "/..%5Cx", "/a#b"]
)
def test_a_path_leads_to_the_upstream_alone(path):
    with (
        scripted(answer=lambda body: ANSWER) as other,
        scripted(answer=lambda body: ANSWER) as upstream,
        ordering(f"{upstream.url}/engine/v1", dialect="openai") as front,
    ):
        refused = raw(front, get(path.format(host=other.url.removeprefix("http://"))))
        assert refused.startswith(b"HTTP/1.1 400") and b"is no path of the upstream" in refused
        assert not other.requests and not upstream.requests
        assert raw(front, get("//v1/a..b/%2E/x?y=../z")).startswith(b"HTTP/1.1 200")
        assert upstream.requests[0][0].startswith(b"GET /engine//v1/a..b/%2E/x?y=../z HTTP/1.1\r\n")
