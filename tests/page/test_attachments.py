"""Files in the browser: read by the server, small ones sent with a question, large ones searched for each."""

import json
import re

import pytest
from server.conftest import running
from slotcache.models.demo import FILE
from support.office import REPORT, pdf

from .conftest import READ, ask, attach, ended
from .test_access import violations

SHORT = pdf([*REPORT[:3], *REPORT[-2:]])[0]
BOOK = "\n\n".join(
    f"# Chapter {number}\n\n" + f"The keeper of lamp {number} counts ships and writes them down. " * 40
    for number in range(40)
)
BOOK += "\n\n# The crane\n\nThe old crane of the harbour lifts nine tons of granite.\n"
QUESTION = "How many tons of granite does the crane lift?"


def bring(page, name, data):
    page.set_input_files("input[type=file]", [{"name": name, "mimeType": "application/octet-stream", "buffer": data}])


def asked(page, question):
    """Ask; return the request and the turn."""
    with page.expect_request("**/v1/chat/completions") as sent:
        turn = ask(page, question)
    return sent.value.post_data_json, turn


def test_a_pdf_becomes_a_document_of_the_question(server, open_page):
    page = open_page(server)
    bring(page, "report.pdf", SHORT)
    page.wait_for_selector(READ)
    body, turn = asked(page, QUESTION)
    (document,) = body["messages"][-1]["documents"]
    assert document["id"] == "report" and document["text"].startswith("# Harbour report\n\n")
    assert "nine tons of granite" in document["text"] and document["text"].count("# Harbour report\n") == 1
    assert turn.locator(".question .chip").inner_text() == "report.pdf" and "retrieval" not in body


def test_a_question_waits_for_files_that_are_read(server, open_page):
    page = open_page(server)
    page.route(
        "**/v1/documents/read*", lambda route: (page.wait_for_selector(".chip[data-state=reading]"), route.continue_())
    )
    bring(page, "report.pdf", SHORT)
    body, _ = asked(page, QUESTION)
    assert body["messages"][-1]["documents"][0]["id"] == "report"


def test_a_file_that_is_read_can_be_taken_back(server, open_page):
    page = open_page(server)
    page.watch.expected = ("ERR_",)
    page.route("**/v1/documents/read*", lambda route: None)
    bring(page, "report.pdf", SHORT)
    page.wait_for_selector(".chip[data-state=reading]")
    page.click("[aria-label='Remove report.pdf']")
    assert page.locator(".composer .chip").count() == 0 and page.evaluate("document.activeElement.id") == "question"
    body, _ = asked(page, "Hello?")
    assert "documents" not in body["messages"][-1]


def test_a_question_that_its_file_makes_too_long_is_asked_again_without_it_by_one_click(server, open_page):
    page = open_page(server)
    page.watch.expected = ("400",)
    attach(page, {"small": "The lamp is green.", "large": "The keeper of the lamp counts ships. " * 9})
    page.route("**/v1/chat/completions", more_text)
    turn = ask(page, "Which colour has the lamp?")
    assert re.fullmatch(r"Too long for this model: (about )?[\d,]+ of [\d,]+ tokens\.", turn.locator(".notice").inner_text())
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        turn.get_by_role("button", name="Remove large.txt and ask again").click()
    turn = ended(page)
    assert len(sent.value.post_data_json["messages"][-1]["documents"]) == 1
    assert turn.locator(".notice").count() == 0 and turn.locator(".question .chip").count() == 1


def more_text(route):
    """Send the question with a text that no context holds."""
    body = route.request.post_data_json
    body["messages"][-1]["content"] += " word" * 60_000
    route.continue_(post_data=json.dumps(body))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_is_seriously_broken_at_attached_files(own_server, open_page, scheme):
    page = open_page(own_server, color_scheme=scheme)
    page.watch.expected = ("400", "404")
    attach(page, {"small": "The lamp is green."})
    bring(page, "book.md", BOOK.encode())
    page.wait_for_selector(f"{READ}:has-text('searched')")
    bring(page, "picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\xff")
    page.wait_for_selector(".composer .chip[data-state=failed]")
    assert page.locator(".composer .chip").count() == 3
    assert violations(page) == []
    ask(page, QUESTION)
    assert violations(page) == []


@pytest.fixture
def own_server(browser):
    with running(FILE, flash_attn="auto", predict=30) as up:
        yield up


def test_a_large_file_is_searched_for_each_question_until_it_is_removed(server, open_page):
    page = open_page(server)
    bring(page, "book.md", BOOK.encode())
    page.wait_for_selector(READ)
    chip = page.locator(".composer .chip")
    assert "searched" in chip.inner_text()
    body, turn = asked(page, QUESTION)
    (id,) = body["retrieval"]["documents"]
    assert "documents" not in body["messages"][-1] and "searched by words" in turn.locator(".question .chip").inner_text()
    turn.locator("footer button", has_text="The crane").click()
    assert "nine tons of granite" in page.locator("#drawer").inner_text()
    page.keyboard.press("Escape")
    body, _ = asked(page, "What does the keeper of lamp 17 write?")
    assert body["retrieval"]["documents"] == [id]
    page.reload()
    page.wait_for_selector(READ)
    body, _ = asked(page, "And lamp 18?")
    assert body["retrieval"]["documents"] == [id]
    page.click("[aria-label='Remove book.md']")
    body, _ = asked(page, "And lamp 19?")
    assert "retrieval" not in body
    page.reload()
    page.wait_for_selector(".turn")
    assert page.locator(".composer .chip").count() == 0


def test_a_file_that_the_server_has_forgotten_says_so_and_comes_back_when_it_is_dropped_again(own_server, open_page):
    page = open_page(own_server)
    page.watch.expected = ("404",)
    bring(page, "book.md", BOOK.encode())
    page.wait_for_selector(READ)
    (id,) = asked(page, QUESTION)[0]["retrieval"]["documents"]
    own_server.http.delete(f"/v1/documents/{id}")
    turn = ask(page, QUESTION)
    assert "book.md is no longer on the server" in turn.locator(".notice").inner_text()
    assert "no longer on the server" in page.locator(".composer .chip").inner_text()
    bring(page, "book.md", BOOK.encode())
    page.wait_for_selector(READ)
    assert page.locator(".composer .chip").count() == 1
    with page.expect_request("**/v1/chat/completions") as sent:
        turn.locator("[aria-label='Answer again']").click()
    (again,) = sent.value.post_data_json["retrieval"]["documents"]
    assert again != id
    ended(page)
    own_server.http.delete(f"/v1/documents/{again}")
    page.reload()
    page.wait_for_selector(".composer .chip[data-state=failed]")
    body, turn = asked(page, "Hello?")
    assert "retrieval" not in body and turn.locator(".notice").count() == 0
