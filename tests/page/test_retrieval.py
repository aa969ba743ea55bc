"""A folder of the server in the page: its switch, the search while one types, citations, a source at its place."""

import json

import pytest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from .conftest import ask
from .stand_in import PROPS, event, standing_in

CHUNK = {
    "id": "1a2b3c4d5e",
    "title": "Lighthouses > Sundrift",
    "path": "coast/lights.md",
    "page": 3,
    "text": "The lamp of Sundrift is green,\nand it turns once a minute.",
    "neighbours": [
        {"id": "f", "title": "Before", "text": "What stands before."},
        {"id": "9", "title": "After", "text": "After."},
    ],
}
FILES = [
    {"path": "coast/lights.md", "state": "ready", "chunks": 3},
    {"path": "b.pdf", "state": "failed", "error": "it is damaged"},
]
SOURCES = {"collections": [{"path": "/notes", "state": "ready", "questions": ["Which lamp is green?"], "files": FILES}]}
ANSWER = "😀 It is green [1a2b3c4d5e]: lamp of Sundrift is green and it turns. Yes."


@pytest.fixture
def folder():
    searched = []

    async def search(request):
        searched.append(await request.json())
        stages = [{"stage": stage, "results": [CHUNK]} for stage in ("lexical", "fused")]
        return StreamingResponse(map(event, stages), media_type="text/event-stream")

    routes = [
        Route("/v1/sources", lambda request: JSONResponse(SOURCES)),
        Route("/v1/sources/refresh", lambda request: JSONResponse({}), methods=["POST"]),
        Route("/v1/sources/{id}", lambda request: JSONResponse(CHUNK)),
        Route("/v1/search", search, methods=["POST"]),
    ]
    with standing_in(PROPS | {"ui_settings": {"sources": True}}, routes) as up:
        named, quoted = ANSWER.index("["), ANSWER.index("lamp")
        up.answer = (ANSWER,)
        up.report = {
            "retrieved": [{name: CHUNK[name] for name in ("id", "title", "path", "page")}],
            "citations": [
                {"id": CHUNK["id"], "start": named, "stop": named + 12},
                {"id": CHUNK["id"], "start": quoted, "stop": ANSWER.index(". Yes"), "quote": True},
            ],
        }
        up.searched = searched
        yield up


def test_answers_from_the_folder_cite_their_places(folder, open_page):
    page = open_page(folder)
    page.click("text=Which lamp is green?")
    page.wait_for_selector(".cite")
    assert folder.asked[-1]["retrieval"] is True
    answer = page.locator(".answer").inner_text()
    assert answer == "😀 It is green 1: lamp of Sundrift is green and it turns1. Yes."
    assert page.locator(".sources").inner_text().split("\n") == ["1", CHUNK["title"], "coast/lights.md, p. 3"]
    page.locator(".cite").last.click()
    page.wait_for_selector("#drawer mark")
    assert page.locator("#drawer mark").inner_text() == "lamp of Sundrift is green,\nand it turns"
    assert page.locator("#drawer .passage").count() == 3 and "page 3" in page.locator("#drawer .where").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "cite"


def test_the_server_searches_while_one_types(folder, open_page):
    page = open_page(folder)
    page.wait_for_selector(".switch input:checked")
    page.type("#question", "Which lamp", delay=20)
    page.wait_for_selector(f".note:has-text('{CHUNK['title'].split()[0]}')")
    assert [(one["query"], one["stream"]) for one in folder.searched] == [("Which lamp", True)] and folder.searched[0][
        "speculate"
    ]
    page.click(".switch")
    ask(page, "Which lamp is green?")
    assert "retrieval" not in folder.asked[-1] and len(folder.searched) == 1


def test_the_folder_shows_its_files_and_their_errors(folder, open_page):
    page = open_page(folder)
    page.click(".folder .plain")
    page.wait_for_selector(".files")
    assert page.locator(".files li").all_inner_texts() == ["coast/lights.md\nready, 3 parts", "b.pdf\nit is damaged"]
    with page.expect_request(lambda request: request.url.endswith("/refresh")) as sent:
        page.click("text=Look for changes")
    assert json.loads(sent.value.post_data) == {}


def test_a_server_without_a_folder_shows_nothing_of_it(server, open_page):
    page = open_page(server)
    assert page.locator(".switch").count() == 0
    ask(page, "Hello?")
    assert page.locator(".sources").count() == 0
