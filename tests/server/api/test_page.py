"""The page's files and their headers. `make page-test` opens them in a browser."""

import re
import tomllib
from pathlib import Path

import pytest
from slotcache.slots.request import Segment

from server.conftest import running

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "server/page"
IMPORT = re.compile(r'(?:^import |^} from |from )"(\./[^"]+)";$', re.M)
REFERENCE = re.compile(r'(?:src|href)="(page/[^"]+)"')
MOST_LINES = 300
OWN = sorted(FOLDER.glob("*.js"))


@pytest.fixture(scope="module")
def guarded(tiny):
    with running(tiny, api_key="secret") as up:
        yield up


def test_the_page_is_served_with_a_strict_policy(server):
    answer = server.http.get("/")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert policy["default-src"] == "'self'" and policy["img-src"] == "'self' data:"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not {"script-src", "style-src", "connect-src"} & set(policy), "these fall back to default-src"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<style" not in answer.text and not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|https?://", answer.text)


def test_each_file_that_is_referred_to_exists_and_has_its_kind(server):
    first = server.http.get("/").text
    found = {f"/{path}" for path in REFERENCE.findall(first)}
    for module in OWN:
        for name in IMPORT.findall(module.read_text("utf-8")):
            found.add(f"/page/{(module.parent / name).resolve().relative_to(FOLDER)}")
    kinds = {path: server.http.get(path).headers["content-type"].partition(";")[0] for path in sorted(found)}
    wanted = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    wanted[".webmanifest"] = "application/manifest+json"
    assert kinds == {path: wanted[Path(path).suffix] for path in kinds}
    unused = {f"/page/{module.name}" for module in OWN} - found
    assert len(kinds) > 20 and not unused


@pytest.mark.parametrize("segment", [Segment(1, "document a is not cached here"), Segment(1, "the hints", "are")])
def test_it_reads_the_reason_of_a_miss(segment):
    (pattern,) = re.findall(r"/(\^.*\$)/s\.exec\(miss\.why\)", (FOLDER / "names.js").read_text("utf-8"))
    for reason, differs in ((segment.miss, None), (f"{segment.miss}: a date (1.1.2026) differs", "a date (1.1.2026)")):
        found = re.search(pattern, reason, re.S)
        assert found and found.groups() == (segment.label, differs)


def test_it_has_the_words_of_the_report():
    """Tokens are cached or computed, documents are retrieved and moved: no second name for what a report counts."""
    texts = {module.name: re.sub(r"(?m)^ *(/?\*|//).*$", "", module.read_text("utf-8")) for module in OWN}
    second = re.compile(r"\breused?\b(?! ended)|in another order|Also read\b", re.I)
    assert {name: found for name, text in texts.items() if (found := second.findall(text))} == {}
    words = ("% cached", "computed", "saved", "documents moved", "gained", "rank ", "prompt order", "Prefill")
    assert [word for word in words if word not in texts["bar.js"]] == [] and "Retrieved" in texts["turn.js"]


def test_a_browser_that_has_a_file_gets_no_second_copy(server):
    first = server.http.get("/page/app.js")
    again = server.http.get("/page/app.js", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert b"ETag" in dict(again.headers.raw)
    assert server.http.get("/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["none.js", "__init__.py", "../routes/page.py", "%2e%2e/app.py", "vendor", ""])
def test_nothing_but_the_files_of_the_page_is_served(server, path):
    assert server.http.get(f"/page/{path}").status_code == 404


def test_the_page_needs_no_key_but_the_server_does(guarded):
    assert [guarded.http.get(path).status_code for path in ("/", "/page/app.js")] == [200, 200]
    assert [guarded.http.get(path).status_code for path in ("/props", "/page", "/slots")] == [401] * 3
    assert guarded.http.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert guarded.http.post("/").status_code == 405


def test_a_server_without_a_page(tiny):
    with running(tiny, ui=False, api_key="secret") as up:
        assert up.http.get("/").status_code == 401
        answers = [up.http.get(path, headers={"X-Api-Key": "secret"}) for path in ("/", "/page/app.js", "/props")]
        assert [answer.status_code for answer in answers] == [404, 404, 200] and answers[2].json()["ui"] is False


def test_the_wheel_holds_each_file():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["slotcache.server"]
    packed = {path for pattern in data for path in (ROOT / "server").glob(pattern)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= packed


def test_the_page_is_made_of_small_modules_without_html_in_strings():
    for module in OWN:
        text = module.read_text("utf-8")
        assert len(text.splitlines()) <= MOST_LINES, module.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            module.name
        )
        exported = re.findall(r"^(.*)\nexport (?:async )?(?:function|const|class)", text, re.M)
        assert all(line.endswith("*/") for line in exported), f"{module.name}: an export without a description"
