"""A chat in the browser: documents, streams, branches, history, keys."""

import re

from server.conftest import running, until
from slotcache.models.demo import FILE

from .conftest import READ, act, ask, attach, ended, figures


def documents_of(corpus, question):
    return {corpus.documents[id].title: corpus.documents[id].text for id in question.ranked}


def test_documents_are_read_once_and_the_bar_shows_it(server, open_page, corpus):
    question, other = corpus.questions[:2]
    page = open_page(server)
    attach(page, documents_of(corpus, question))
    turn = ask(page, question.question)
    assert turn.locator(".answer").inner_text().strip()
    assert turn.locator(".question .chip").count() == 5
    again = figures(ask(page, other.question))
    assert again["on the device"] + again.get("from host memory", 0) > 10 * again["computed"] > 0
    summary = page.locator(".account summary").last
    summary.focus()
    page.keyboard.press("Enter")
    rows = page.locator(".account").last.locator("tbody tr")
    assert rows.count() >= 8 and other.question in rows.nth(rows.count() - 2).inner_text()
    widths = page.locator(".account .bar").last.locator(".segment").evaluate_all("all => all.map(one => one.clientWidth)")
    assert len(widths) == rows.count() and max(widths[:5]) > 4 * widths[-1]


def test_the_server_reads_dropped_documents_before_the_question(server, open_page, corpus):
    page = open_page(server)
    with page.expect_response(lambda answer: answer.url.endswith("/v1/speculate")) as read:
        drop(page, {"lighthouse.txt": "The lamp of the lighthouse of Sundrift is green. " * 20})
    assert read.value.json()["state"] == "started"
    turn = ask(page, "Which colour has the lamp?")
    reused = figures(turn)
    assert reused.get("on the device", 0) + reused.get("from host memory", 0) > 100


def drop(page, files):
    """Drop files on the page, as a mouse does."""
    transfer = page.evaluate_handle(
        """files => {
            const transfer = new DataTransfer();
            const add = ([name, text]) => transfer.items.add(new File([text], name, { type: "text/plain" }));
            Object.entries(files).forEach(add);
            return transfer;
        }""",
        files,
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    assert page.locator("body.dropping").count() == 1
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    page.wait_for_selector(READ)


def test_files_that_cannot_be_read_say_why_at_their_chip(server, open_page):
    page = open_page(server)
    page.watch.expected = ("400",)
    files = [
        {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\xff"},
        {"name": "empty.txt", "mimeType": "text/plain", "buffer": b" "},
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": "Grüße".encode()},
    ]
    page.set_input_files("input[type=file]", files)
    page.wait_for_selector(READ)
    picture, empty, notes = page.locator(".composer .chip").all()
    assert "it is a picture" in picture.inner_text() and "it has no text" in empty.inner_text()
    assert notes.inner_text() == "notes.txt"
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What do they say?")
    (question,) = sent.value.post_data_json["messages"]
    assert [document["text"] for document in question["documents"]] == ["Grüße"]
    assert page.locator(".composer .chip").count() == 0


def test_an_edited_question_is_a_branch_that_costs_little(server, open_page, corpus):
    first, second, third = corpus.questions[:3]
    page = open_page(server)
    attach(page, documents_of(corpus, first))
    ask(page, first.question)
    before = ask(page, second.question).locator(".answer").inner_text()
    page.locator("[aria-label='Edit the question']").last.click()
    page.fill(".editing textarea", third.question)
    page.keyboard.press("Enter")
    page.wait_for_selector(".branches")
    turn = ended(page)
    assert turn.locator(".branches").inner_text().strip() == "2 / 2" and third.question in turn.inner_text()
    cost = figures(turn)
    assert sum(cost.values()) - cost["computed"] > 10 * cost["computed"]
    turn.locator(".account summary").click()
    assert "The edited question cost" in turn.inner_text()
    turn.locator("[aria-label='Earlier version']").click()
    assert page.locator(".turn").last.locator(".answer").inner_text() == before
    page.locator("[aria-label='Answer again']").first.click()
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 1")
    assert ended(page).locator(".branches").inner_text().strip() == "2 / 2"
    page.locator("[aria-label='Earlier version']").click()
    assert page.locator(".turn").count() == 2


def test_an_answer_can_be_stopped_and_the_chat_goes_on(server, open_page):
    page = open_page(server)
    settings(page, maxTokens="4000", temperature="2")
    page.fill("#question", "Tell a very long story.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".send[aria-label='Stop']:visible")
    page.keyboard.press("Escape")
    stopped = ended(page)
    assert page.locator(".send[aria-label='Ask']").is_visible()
    settings(page, maxTokens="8", temperature="0")
    with page.expect_request(lambda request: request.url.endswith("/v1/chat/completions")) as sent:
        ask(page, "And now?")
    body = sent.value.post_data_json
    if "Stopped here." in stopped.inner_text():
        assert len(body["messages"]) == 3 and body["conversation"]["history"] == "whole"
    assert page.locator(".turn").count() == 2 and page.locator(".notice").count() == 0


def settings(page, **fields):
    page.click("#open-settings")
    for name, value in fields.items():
        page.fill(f"#setting-{name}", value)
    page.click("text=Done")


def test_chats_outlive_a_reload_and_the_server(open_page, corpus):
    question, other = corpus.questions[:2]
    with running(FILE, flash_attn="auto") as up:
        page = open_page(up)
        attach(page, documents_of(corpus, question))
        answer = ask(page, question.question).locator(".answer").inner_text()
        page.reload()
        page.wait_for_selector(".turn")
        assert page.locator(".answer").inner_text() == answer and page.locator(".account").count() == 1
        chat = page.url.rpartition("/")[2]
        stored = up.http.get(f"/v1/conversations/{chat}").json()
        assert stored["turns"] == 1
        up.http.delete(f"/v1/conversations/{chat}")
        page.watch.expected = ("404",)
        turn = ask(page, other.question)
        assert figures(turn)["computed"] < 50, "the whole chat was sent, and its beginning was cached"
        assert up.http.get(f"/v1/conversations/{chat}").json()["turns"] == 2
        act(page, "Delete")
        page.wait_for_selector(".welcome")
        assert page.locator(".sidebar li").count() == 0
        until(lambda: up.http.get(f"/v1/conversations/{chat}").status_code == 404)


def test_the_key_is_asked_for_where_the_server_wants_one(open_page):
    with running(FILE, flash_attn="auto", api_key="the key") as up:
        page = open_page(up)
        page.watch.expected = ("401",)
        page.fill("#key", "a wrong one")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog .notice")
        page.fill("#key", "the key")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.getElementById('model').textContent")
        settings(page, maxTokens="8")
        assert ask(page, "Hello?").locator(".notice").count() == 0
        page.reload()
        page.wait_for_selector(".turn")
        assert page.locator("dialog").count() == 0


def test_an_error_is_reported_and_the_question_can_be_asked_again(server, open_page):
    page = open_page(server)
    page.watch.expected = ("400",)
    turn = ask(page, "word " * 6000)
    assert re.fullmatch(r"Too long for this model: (about )?[\d,]+ of [\d,]+ tokens\.", turn.locator(".notice").inner_text())
    assert "Shorten the question" in turn.inner_text() and turn.locator(".account").count() == 0
    assert turn.locator("[aria-label='Answer again']").is_visible()


def test_documents_that_were_read_in_another_order_show_their_ranks(server, open_page):
    names = ["reef", "quay", "mole"]
    texts = {name: f"The {name} of the harbour is kept by its own keeper. " * 9 for name in names}
    for order in (names, names[::-1]):
        page = open_page(server)
        attach(page, {name: texts[name] for name in order})
        turn = ask(page, f"Who keeps the {order[0]}?")
        assert turn.locator(".ranks").count() == (order != names)
    turn.locator(".account summary").click()
    read = re.findall(r"“(\w+)[^”]*” \(rank (\d)\)", turn.locator(".ranks").inner_text())
    assert read == [("reef", "3"), ("quay", "2"), ("mole", "1")]
