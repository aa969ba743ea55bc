"""TLS with a real certificate, and socket files: the same answers, and the same limits below them."""

import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import ExitStack, closing

import httpx
import pytest
from slotcache.front.cli import make_server as make_front
from slotcache.front.settings import FrontSettings
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.http.connection import Connection, Shortcut
from slotcache.server.http.ports import why_taken
from slotcache.server.http.security import open_to
from slotcache.server.http.tls import tls_context

from server.conftest import DEADLINE, running, until
from server.http.test_stalls import connected, connections, head, narrow
from server.test_cli import command

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
CHAT = {"messages": [{"role": "user", "content": "Who keeps the mill?"}], "max_tokens": 24, "ignore_eos": True}
CHAT |= {"temperature": 0, "cache_prompt": False}
PLACES = 8
narrow = narrow


def make_certificate(folder, name):
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", *kind, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    return {"ssl_key_file": str(key), "ssl_cert_file": str(certificate)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return make_certificate(tmp_path_factory.mktemp("tls"), "own")


@pytest.fixture
def server(tiny, files):
    with running(tiny, max_body=16, **files) as up:
        yield up


@pytest.fixture
def client(server, files):
    with secure(server, files) as http:
        yield http


def trusting(files):
    return ssl.create_default_context(cafile=files["ssl_cert_file"])


def secure(server, files):
    return httpx.Client(base_url=server.url.replace("http:", "https:"), verify=trusting(files), timeout=DEADLINE)


def text_of(lines):
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_an_answer_is_the_same_whole_streamed_and_past_the_layers(client, monkeypatch):
    written, write = [], Shortcut.write
    monkeypatch.setattr(Shortcut, "write", lambda self, data: (written.append(data), write(self, data))[1])
    whole = client.post("/v1/chat/completions", json=CHAT).json()
    with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        reported = text_of(answer.iter_lines())
    assert reported == whole["choices"][0]["message"]["content"] != ""
    assert len(written) > CHAT["max_tokens"] // 2, "most events went the short way"
    assert client.get("/health").json() == {"status": "ok"}


def test_large_bodies_come_whole_in_both_directions(client):
    text = "Hello " * 200_000
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"].strip() == text.strip()


def test_a_slow_reader_gets_all_of_a_large_answer_and_a_clean_end(server, files, narrow):
    body = json.dumps({"content": "Hello " * 40_000}).encode()
    asked = head("/tokenize", len(body)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    wrap, received = trusting(files).wrap_socket, bytearray()
    with connected(server) as raw, wrap(raw, server_hostname="localhost", suppress_ragged_eofs=False) as client:
        client.sendall(asked + body)
        while piece := client.recv(2000):
            received += piece
    top, _, rest = bytes(received).partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", top, re.I)
    assert length and len(rest) == int(length[1]) and json.loads(rest)["tokens"]


def test_a_client_of_plain_http_is_reported_once_and_hurts_nobody(server, client, caplog):
    with caplog.at_level(logging.WARNING, "slotcache"):
        for _ in range(3):
            with connected(server) as plain:
                plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with closing(plain.makefile("rb")) as answer:
                    assert not answer.read().startswith(b"HTTP")
    logged = [line for line in caplog.messages if line.startswith("TLS with a client failed: ")]
    assert len(logged) == 1 and "HTTP_REQUEST" in logged[0] and "Traceback" not in caplog.text
    assert client.get("/health").status_code == 200


@pytest.fixture
def hello(files):
    """The first bytes of a client's handshake."""
    outgoing = ssl.MemoryBIO()
    client = trusting(files).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_handshake_that_never_ends_closes_the_connection(server, client, hello, monkeypatch, share):
    monkeypatch.setattr(Connection, "head", 0.05)
    with connected(server) as raw:
        raw.sendall(hello[: round(share * len(hello))])
        with closing(raw.makefile("rb")) as answer:
            answer.read()  # up to its end
    monkeypatch.undo()
    assert client.get("/health").status_code == 200


def test_handshakes_that_stall_make_room_for_others(server, files, hello):
    server.uvicorn.server_state.most = PLACES
    with ExitStack() as stalled:
        for _ in range(3 * PLACES):
            stalled.enter_context(connected(server)).sendall(hello)
        until(lambda: connections(server) == PLACES)
        with secure(server, files) as client:
            assert client.get("/health").status_code == 200
        assert connections(server) <= PLACES


def test_an_answer_that_nobody_reads_is_let_go(server, files, narrow, monkeypatch):
    monkeypatch.setattr(Connection, "patience", 0.2)
    body = json.dumps({"content": "Hello " * 40_000}).encode()
    with connected(server) as raw, trusting(files).wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(head("/tokenize", len(body)) + body)
        client.recv(1)
        until(lambda: connections(server) == 0)


def test_a_front_speaks_tls_too(files):
    hosting = Settings(port=0, ui=False, **files)
    front, _ = make_front(FrontSettings(upstream="http://127.0.0.1:1", port=0), hosting)
    assert front.server_state.tls is not None  # type: ignore[attr-defined]


@needs_openssl
def test_a_key_that_cannot_be_used_is_a_line_before_anything_is_loaded(tmp_path, files):
    other, locked = make_certificate(tmp_path, "other"), tmp_path / "locked.key"
    sealed = ["openssl", "ec", "-in", files["ssl_key_file"], "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(sealed, check=True, capture_output=True)
    for changed, line in (
        ({"ssl_key_file": ""}, "--ssl-key-file is missing: TLS needs the key and its certificate"),
        ({"ssl_cert_file": ""}, "--ssl-cert-file is missing: TLS needs the key and its certificate"),
        ({"ssl_key_file": str(tmp_path / "none")}, f"--ssl-key-file {tmp_path}/none: No such file or directory"),
        ({"ssl_key_file": other["ssl_key_file"]}, "KEY_VALUES_MISMATCH: expected PEM files that belong together"),
        ({"ssl_key_file": str(locked)}, "the key without a password"),
        ({"ssl_cert_file": files["ssl_key_file"]}, "expected PEM files that belong together"),
    ):
        with pytest.raises(SettingsError, match=re.escape(line)):
            tls_context(Settings(**(files | changed)))
    ran = subprocess.run(
        command("serve", "-m", "none.gguf", "--port", 0, "--ssl-key-file", files["ssl_key_file"]),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 2
    assert ran.stderr == "slotcache: --ssl-cert-file is missing: TLS needs the key and its certificate\n"


# ---- Socket files -------------------------------------------------------------------------------------------------------

needs_files = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no socket files")


def over(path, **fields):
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path), **fields), base_url="http://localhost")


@needs_files
def test_a_server_listens_on_a_socket_file_and_removes_it(tiny, tmp_path, caplog):
    path = tmp_path / "server.sock"
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(path))  # as by a server that was killed
    with caplog.at_level(logging.INFO, "slotcache"), running(tiny, host=str(path)) as server:
        until(lambda: any(f"ready on unix:{path} after" in line for line in caplog.messages))
        with over(path) as client:
            assert client.post("/v1/chat/completions", json=CHAT, timeout=DEADLINE).json()["choices"]
            assert client.get("/health", headers={"Host": "elsewhere"}).status_code == 200
            assert client.get("/props", headers={"Host": "elsewhere"}).status_code == 403
        assert not server.uvicorn.servers, "it has no port"
        taken = f"--host {path}: another server listens there: expected an unused name"
        assert why_taken(Settings(host=str(path))) == taken
        assert "NO API KEY" not in caplog.text
    assert not path.exists()


@needs_files
def test_an_address_and_a_socket_file_serve_side_by_side_under_tls(tiny, tmp_path, files):
    path = tmp_path / "server.sock"
    with running(tiny, host=f"127.0.0.1,{path}", **files) as server:
        with over(path, verify=trusting(files)) as client, secure(server, files) as other:
            client.base_url = "https://localhost"
            assert client.get("/health").status_code == other.get("/health").status_code == 200
        assert server.uvicorn.addresses == [server.url.replace("http:", "https:"), f"unix:{path}"]


@needs_files
def test_what_is_no_place_for_a_socket_file_is_said(tmp_path):
    (tmp_path / "file.sock").write_text("something else")
    for name, line in (
        ("file.sock", "the file is not a socket: expected an unused name"),
        ("none/a.sock", f"{tmp_path}/none is not a folder that this user may write to"),
        ("a" * 200 + ".sock", "AF_UNIX path too long"),
        ("free.sock", ""),
    ):
        host = str(tmp_path / name)
        assert why_taken(Settings(host=host)) == (line and f"--host {host}: {line}")


def test_an_empty_entry_of_host_is_no_address():
    settings = Settings(host="127.0.0.1, ", port=0)
    assert settings.hosts == ["127.0.0.1"] and not why_taken(settings) and not open_to(settings)


# ---- The port that the system chooses -----------------------------------------------------------------------------------


def test_order_names_the_port_that_the_system_has_chosen():
    asked = command("order", "--upstream", "http://127.0.0.1:1", "--port", 0)
    process = subprocess.Popen(asked, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        line = process.stderr.readline()
        found = re.search(r"documents that come to http://127\.0\.0\.1:(\d+) are ordered for http://127\.0\.0\.1:1", line)
        assert found and int(found[1]) > 0, line
        httpx.get(f"http://127.0.0.1:{found[1]}/metrics", timeout=DEADLINE).raise_for_status()
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE)
