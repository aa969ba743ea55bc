"""Who may ask: keys, the server's names, and pages in a browser."""

import httpx
import pytest

from server.conftest import running

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TEXT = '{"content": "Hello"}'
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def guarded(tiny):
    with running(tiny, api_key="sécret") as up:
        yield up


def status(server, method="POST", path=TOKENIZE, content=TEXT, **headers):
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    answer = server.http.request(method, path, content=content, headers=named)
    assert answer.status_code < 400 or answer.json()["error"]["type"] != "server_error", answer.text
    return answer.status_code


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_key_may_be_written_in_any_case(guarded, scheme):
    assert status(guarded, authorization=f"{scheme} sécret") == 200


@pytest.mark.parametrize("header", ["", "sécret", "Bearer", "Bearer secret", "Basic sécret", "Bearersécret"])
def test_a_key_without_its_scheme_and_a_wrong_one_are_refused(guarded, header):
    answer = guarded.http.post(TOKENIZE, content=TEXT, headers={b"authorization": header.encode()})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"


def test_a_wrong_method_is_told_which_there_are(server):
    answer = server.http.get(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert set(server.http.put("/v1/models").headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:80", "[::1]", "[::1]:8080"])
def test_names_of_this_machine_are_answered(server, name):
    assert status(server, host=name) == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "[::2]", "[", ":"]
)
def test_other_names_are_refused(server, name):
    assert status(server, host=name) == 403
    assert status(server, "GET", "/v1/models", host=name) == 403
    assert status(server, "GET", "/health", host=name) == 200


def test_other_names_and_origins_can_be_allowed(tiny):
    with running(tiny, allowed_hosts="chat.example, box", cors_origins=PAGE) as server:
        assert status(server, host="chat.example:443") == status(server, host="box") == 200
        assert status(server, host="evil.example") == 403
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = server.http.options(CHAT, headers=asked)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = server.http.post(TOKENIZE, json={"content": "x"}, headers={"Origin": PAGE})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        refused = server.http.post(TOKENIZE, json={"content": 7}, headers={"Origin": PAGE})
        assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-origin" not in server.http.options(CHAT, headers=asked | {"Origin": "http://x"}).headers
        assert status(server, origin="http://x", content_type="application/json") == 403


def test_any_name_and_any_origin(tiny):
    with running(tiny, allowed_hosts="*", cors_origins="*") as server:
        assert status(server, host="any.example", origin="http://x", content_type="application/json") == 200


def test_a_server_for_the_network_is_asked_by_its_addresses_and_the_machine_s_name(tiny):
    with running(tiny, host="0.0.0.0") as server:
        assert status(server, host="10.0.0.1:80") == status(server, host="[fe80::1]") == 200
        assert status(server, host="evil.example") == 403


@pytest.mark.parametrize("origin", ["http://evil.example", PAGE, "null", "https://localhost"])
def test_pages_of_other_origins_are_refused(server, origin):
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        assert status(server, origin=origin, content_type=kind) == 403
    assert status(server, "DELETE", "/v1/cache", origin=origin) == 403
    assert status(server, "GET", "/v1/models", origin=origin) == 403
    assert status(server, "OPTIONS", CHAT, origin=origin, access_control_request_method="POST") == 403


def test_a_page_of_the_server_s_own_origin_sends_json(server):
    own = httpx.URL(server.url)
    assert status(server, origin=server.url, content_type="application/json; charset=utf-8") == 200
    assert status(server, origin=server.url, content_type="text/plain") == 415
    assert status(server, host=f"localhost:{own.port}", origin=server.url, content_type="application/json") == 403


def test_browsers_that_send_no_origin_show_themselves_otherwise(server):
    assert status(server, sec_fetch_site="cross-site", content_type="text/plain") == 403
    assert status(server, sec_fetch_site="same-origin", content_type="text/plain") == 415
    assert status(server, sec_fetch_site="same-origin", content_type="application/json") == 200
    assert status(server, "GET", "/v1/models", sec_fetch_site="cross-site") == 200, "a link"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "application/json", ""])
def test_a_program_may_say_anything_of_its_body(server, kind):
    assert status(server, **({"content_type": kind} if kind else {})) == 200
