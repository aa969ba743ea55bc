"""Who may ask: keys, the server's names, and pages in a browser."""

import re
from urllib.parse import unquote

import httpx
import pytest
import uvicorn
from slotcache.server.cli import main
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.http.security import guards
from slotcache.server.serve import make_server

from server.conftest import DEADLINE, running, until

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


def test_a_key_comes_as_llama_server_and_anthropic_s_clients_send_it(guarded):
    assert status(guarded, authorization="sécret") == status(guarded, x_api_key="sécret") == 200
    assert status(guarded, authorization="Bearer none", x_api_key="sécret") == 200
    assert status(guarded, x_api_key="secret") == 401


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer secret", "Basic sécret", "Bearersécret"])
def test_a_wrong_key_and_a_wrong_scheme_are_refused(guarded, header):
    answer = guarded.http.post(TOKENIZE, content=TEXT, headers={b"authorization": header.encode()})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert (b"WWW-Authenticate", b"Bearer") in answer.headers.raw


def test_each_of_several_keys_opens_everything(tiny, tmp_path):
    (file := tmp_path / "keys").write_text("# of the team\n\nthree \n#four\n")
    with running(tiny, api_key="one, two", api_key_file=str(file)) as server:
        assert [status(server, x_api_key=key) for key in ("one", "two", "three")] == [200] * 3
        assert [status(server, x_api_key=key) for key in ("one, two", "#four", "# of the team", "o", "")] == [401] * 5
        assert [status(server, "GET", path) for path in ("/health", "/v1/health")] == [200] * 2
        assert [status(server, "GET", path) for path in ("/v1/models", "/props", "/metrics", "/none")] == [401] * 4


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", b"\xff"])
def test_a_file_without_keys_starts_no_open_server(tiny, tmp_path, content):
    if content is not None:
        (tmp_path / "keys").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SettingsError, match="--api-key-file"):
        make_server(Settings(api_key_file=str(tmp_path / "keys")))


SERVE, ORDER = ["serve"], ["order", "--upstream", "http://127.0.0.1:1"]
EMPTY = [(["--api-key", ""], {}), (["--api-key", " , "], {}), ([], {"SLOTCACHE_API_KEY": ""})]
EMPTY += [(["--api-key-file", ""], {}), ([], {"SLOTCACHE_API_KEY_FILE": " "})]


@pytest.mark.parametrize(
    ("command", "flags", "variables"),
    [*((command, *empty) for command in (SERVE, ORDER) for empty in EMPTY), (SERVE, [], {"LLAMA_API_KEY": ","})],
)
def test_an_empty_key_starts_no_open_server(monkeypatch, capsys, command, flags, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uvicorn.Server, "serve", lambda server: pytest.fail("it serves"))
    assert main([*command, *flags, "--port", "1"]) == 2
    assert "is given but empty: expected one or more keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"host": "0.0.0.0"}, "any address of this machine"),
        ({"host": "127.0.0.1,::"}, "any address of this machine"),
        ({"host": "192.0.2.7,box.lan"}, "reach 192.0.2.7 or box.lan"),
        ({"host": "127.0.0.1,::1,localhost"}, ""),
        ({"host": "0.0.0.0", "api_key": "secret"}, ""),
    ],
)
def test_a_server_without_a_key_says_who_can_reach_it(caplog, changed, says):
    make_server(Settings(**changed))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == bool(says) and all(line.startswith("NO API KEY") and says in line for line in warned)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_health_is_open_to_those_who_read_it_only(guarded, method):
    for path in ("/health", "/v1/health"):
        assert status(guarded, "HEAD", path) == status(guarded, "GET", path, host="evil.example") == 200
        assert status(guarded, method, path) == 401
        assert status(guarded, method, path, x_api_key="sécret") == 405
        assert status(guarded, method, path, host="evil.example") == status(guarded, method, path, origin="http://x") == 403


def test_a_wrong_method_is_refused_with_those_there_are(server):
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


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}


def test_any_name_and_any_origin(tiny):
    with running(tiny, allowed_hosts="*", cors_origins="*", api_key="secret") as server:
        asked = {"host": "any.example", "origin": "http://x", "content_type": "application/json"}
        assert status(server, **asked) == 401 and status(server, **asked, x_api_key="secret") == 200
        for origin in ("http://x", "localhost", "null"):
            asks = PREFLIGHT | {"Origin": origin, "Access-Control-Request-Private-Network": "true"}
            headers = server.http.options(CHAT, headers=asks).raise_for_status().headers
            assert headers["access-control-allow-origin"] == origin and "Origin" in headers["vary"]
            assert headers["access-control-allow-credentials"] == "true"
            assert headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
            assert headers["access-control-allow-headers"] == "Authorization", "no browser takes * for that one"
            assert headers["access-control-allow-private-network"] == "true"
            names = {name.decode() for name, _ in headers.raw}
            assert {"Access-Control-Allow-Origin", "Vary", "X-Request-Id", "Content-Length"} <= names
        readable = server.http.get("/health", headers={"Origin": "http://x"}).headers["access-control-expose-headers"]
        assert {"Retry-After", "X-Request-Id"} <= set(readable.split(", "))
        refused = server.http.get("/v1/models", headers={"Origin": "http://x"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://x"
        assert "access-control-allow-origin" not in server.http.get("/health").headers


def test_an_entry_that_no_browser_sends_is_refused():
    assert guards(Settings(cors_origins="https://app.example/, *, null, localhost, app://notes.md"))
    for wrong in ("app.example", "localhost:3000", "https://app.example/page"):
        with pytest.raises(SettingsError, match=f"--cors-origins {wrong}: expected an origin"):
            guards(Settings(cors_origins=f"*, {wrong}"))


def test_localhost_stands_for_the_pages_of_this_machine(tiny):
    with running(tiny, cors_origins="localhost") as server:
        for origin in ("http://localhost", "http://localhost:8080", "https://127.0.0.1:3000", "http://[::1]"):
            headers = server.http.options(CHAT, headers=PREFLIGHT | {"Origin": origin}).headers
            assert headers["access-control-allow-origin"] == origin
            assert status(server, origin=origin, content_type="application/json") == 200
        for origin in ("http://evil.com", "http://notlocalhost", "http://localhost.evil.com", "http://[", "null", ""):
            answer = server.http.options(CHAT, headers=PREFLIGHT | {"Origin": origin})
            assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
            assert status(server, origin=origin, content_type="application/json") == 403


def test_a_server_for_the_network_is_asked_by_its_addresses_and_the_machine_s_name(tiny):
    with running(tiny, host="0.0.0.0") as server:
        assert status(server, host="10.0.0.1:80") == status(server, host="[fe80::1]") == 200
        assert status(server, host="evil.example") == 403


def test_a_server_listens_on_several_addresses(tiny, caplog):
    with caplog.at_level("INFO", "slotcache"), running(tiny, host="127.0.0.1, 127.0.0.2", api_key="k") as server:
        port = httpx.URL(server.url).port
        for address in ("127.0.0.1", "127.0.0.2"):
            url = f"http://{address}:{port}"
            assert httpx.get(f"{url}/health", timeout=DEADLINE).status_code == 200
            assert httpx.post(url + TOKENIZE, content=TEXT, timeout=DEADLINE).status_code == 401
            assert httpx.post(url + TOKENIZE, content=TEXT, headers={"X-Api-Key": "k"}, timeout=DEADLINE).status_code == 200
        assert f"ready on http://127.0.0.1:{port}, http://127.0.0.2:{port} after" in caplog.text


def test_a_server_whose_port_the_system_chooses_says_which(tiny, caplog):
    with caplog.at_level("INFO", "slotcache"), running(tiny, host="127.0.0.1, 127.0.0.2", port=0, api_key="k"):
        until(lambda: "ready on" in caplog.text)
        urls = re.findall(r"http://127.0.0.[12]:\d+", caplog.text.partition("ready on")[2])
        assert len({httpx.URL(url).host for url in urls}) == 2
        for url in urls:
            assert httpx.get(f"{url}/health", timeout=DEADLINE).status_code == 200


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


def test_options_without_an_origin_says_what_may_be_asked(server, guarded):
    answer = server.http.options(CHAT)
    assert answer.status_code == 200 and answer.headers["allow"] == "POST" and not answer.content
    assert (status(guarded, "OPTIONS", CHAT), status(guarded, "OPTIONS", CHAT, x_api_key="sécret")) == (401, 200)
    assert server.http.options("/none").status_code == 404


def test_a_foreign_name_is_refused_with_the_flag_that_allows_it(server):
    answer = server.http.get("/v1/models", headers={"Host": "host.docker.internal:8080"})
    assert answer.status_code == 403 and "--allowed-hosts host.docker.internal " in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "host"),
    [("/none", "own/v1/messages/"), ("/none", "own/api/"), ("/v1/mess%0Aages/none", "own"), ("/ap%0Di/none", "own")],
)
def test_an_error_is_of_the_path_s_api_whatever_host_and_line_breaks_make_of_its_url(tiny, path, host):
    """A URL of both is another one: `Host` may have a path of its own, and a URL loses its line breaks."""
    with running(tiny, allowed_hosts="*") as server:
        answer = server.http.get(path, headers={"Host": host})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(f"no such route: {unquote(path)}")
        assert set(answer.json()) == {"error"}, "the shape of OpenAI's API, not of Anthropic's or Ollama's"


def test_a_preflight_names_the_header_of_a_key(tiny):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    with running(tiny, cors_origins="*", api_key="key") as up:
        for wanted in ({}, {"Access-Control-Request-Headers": "authorization,content-type"}):
            answer = up.http.options(CHAT, headers=asks | wanted)
            assert answer.status_code == 200
            assert "authorization" in answer.headers["access-control-allow-headers"].lower()
