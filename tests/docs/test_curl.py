"""Each curl of the API's pages is sent to a real server, and the JSON beside it has the shape of the real answer."""

import json
import shlex

import pytest
from server.conftest import running, until
from slotcache.models.demo import FILE

from docs.markdown import DOCUMENTS, FENCE, ROOT, blocks, read

PAGES = ("docs/api.md", "docs/ollama.md")
ADDRESS = "localhost:8080"  # of the pages' server
OF_OTHER_MODELS = {"/v1/rerank": 501}
"""Paths that need another model than the built-in one, and their statuses without it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, own = tmp_path_factory.mktemp("curl"), tmp_path_factory.mktemp("own")
    (folder / "notes.md").write_text("# Report\n\nA report says it all.")
    beside = {"embeddings": True, "pooling": "mean", "docs": str(folder), "docs_db": str(own), "slot_save_path": str(own)}
    with running(FILE, flash_attn="auto", **beside) as up:
        until(lambda: up.http.get("/v1/sources").json()["collections"][0]["state"] == "ready")
        yield up


def curls(page):
    """Each command of a page, with the JSON that follows it or None."""
    text = read(page)
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        commands = [line for line in fence["text"].splitlines() if line.startswith("curl ")]
        answer = None
        if after and after["language"] == "json" and not text[fence.end() : after.start()].strip():
            answer = json.loads(after["text"])
        yield from zip(commands, [*[None] * (len(commands) - 1), answer], strict=False)


def send(server, command):
    """Send what a command would: curl calls every body a form."""
    _, url, *words = shlex.split(command)
    assert url.startswith(ADDRESS) and (not words or (words[0] == "-d" and len(words) == 2)), command
    kind = {"Content-Type": "application/x-www-form-urlencoded"} if words else {}
    path = url.removeprefix(ADDRESS)
    return path, server.http.request("POST" if words else "GET", path, content=words[1] if words else None, headers=kind)


def check_shape(shown, real, where):
    """Raise AssertionError for a field that the real answer lacks, or one of another kind. Lists: by their places."""
    if isinstance(shown, dict):
        assert isinstance(real, dict) and shown.keys() <= real.keys(), f"{where}: {shown.keys() - real.keys()}"
        for name, value in shown.items():
            check_shape(value, real[name], f"{where}.{name}")
    elif isinstance(shown, list):
        assert isinstance(real, list) and bool(shown) <= bool(real), f"{where}: {real}"
        for one, other in zip(shown, real, strict=False):
            check_shape(one, other, where)
    elif shown is not None and real is not None:
        kinds = [kind for kind in (bool, int | float, str) if isinstance(shown, kind)]
        assert isinstance(real, kinds[0]), f"{where}: {real!r}"


@pytest.mark.parametrize("page", PAGES)
def test_each_curl_gets_an_answer_of_the_shape_beside_it(page, server):
    for command, shown in curls(page):
        path, answer = send(server, command)
        assert answer.status_code == OF_OTHER_MODELS.get(path, 200), f"{command}: {answer.text}"
        if shown is not None and answer.status_code == 200:
            check_shape(shown, answer.json(), command)


def test_curls_stand_on_these_pages_alone():
    commands = {path: [line for block in blocks(path, "sh") for line in block.text.splitlines()] for path in DOCUMENTS}
    assert {path for path, lines in commands.items() if any(line.startswith("curl ") for line in lines)} == {
        ROOT / page for page in PAGES
    }
