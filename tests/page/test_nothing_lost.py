"""What a reader must not lose: an answer whose page goes, the turns of two tabs, a chat that was deleted by mistake."""

import json
import threading
from contextlib import contextmanager

from server.conftest import DEADLINE, blocked, until

from .conftest import act, ask, ended


@contextmanager
def slow(server):
    """Let each step of the engine wait, so that an answer is still on its way when its first words are seen."""
    end = threading.Event()

    def pace():
        while not end.is_set():
            waited = threading.Event()
            server.service.engine.inbox.ask(lambda waited=waited: (end.wait(0.05), waited.set()))
            waited.wait(DEADLINE)

    pacing = threading.Thread(target=pace)
    pacing.start()
    try:
        yield
    finally:
        end.set()
        pacing.join()


def begin(page):
    """Ask for an answer of 400 tokens, and wait for its first words."""

    def send(route):
        added = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
        route.continue_(post_data=json.dumps(route.request.post_data_json | added))

    page.route("**/v1/chat/completions", send)
    page.fill("#question", "Tell a story.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn:last-child .answer[aria-busy] > *")


def turns_in(page):
    """The turns that the browser keeps of the only chat."""
    (chat,) = page.evaluate(
        """() => new Promise((resolve) => {
            indexedDB.open("slotcache").onsuccess = ({ target: { result: base } }) => {
                base.transaction("chats").objectStore("chats").getAll().onsuccess = ({ target }) => resolve(target.result);
            };
        })"""
    )
    return chat["turns"]


def check_whole(server, page):
    """The only answer is on the page, and kept, as the server has it."""
    turn = ended(page)
    assert turn.locator(".account").count() == 1 and turn.locator(".answer").inner_text().strip()
    assert "Stopped here." not in turn.inner_text() and turn.locator(".notice").count() == 0
    (kept,) = turns_in(page)
    reported = server.http.get(f"/v1/chat/completions/{kept['answerId']}").json()
    assert kept["state"] == "done" and kept["answer"] == reported["choices"][0]["message"]["content"]
    assert reported["usage"]["completion_tokens"] == 400


def second_tab(page):
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".turn")
    return other


def test_an_answer_whose_page_is_loaded_again_comes_to_its_end(server, open_page):
    page = open_page(server)
    with slow(server):  # it is not complete before the page is back
        begin(page)
        page.reload()
        page.wait_for_selector(".turn .answer[aria-busy] > *")
        assert "The server finishes this answer" in page.locator(".turn").inner_text()
    check_whole(server, page)
    page.unroute_all()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And then?")
    assert sent.value.post_data_json["previous_response_id"]


def test_an_answer_that_ends_while_no_page_is_there_is_fetched(server, open_page):
    page = open_page(server)
    with slow(server):
        begin(page)
        address = page.url
        page.goto("about:blank")
        until(lambda: any(one.is_unattended for one in server.service.open))
    until(lambda: not server.service.open)
    page.goto(address)
    check_whole(server, page)


def unattended(server, page):
    """Leave an answer to the server; return the address of its chat."""
    with slow(server):
        begin(page)
        address = page.url
        page.goto("about:blank")
        until(lambda: any(one.is_unattended for one in server.service.open))
    until(lambda: not server.service.open)
    page.unroute_all()
    return address


def test_a_server_that_gives_no_answer_is_asked_less_and_less_and_then_no_more(server, open_page):
    page = open_page(server)
    address, looks = unattended(server, page), []
    page.watch.expected = ("503",)

    def refuse(route):
        looks.append(route.request.url)
        route.fulfill(status=503, json={"error": {"message": "This model is not loaded.", "code": 503}})

    page.route("**/v1/chat/completions/*", refuse)
    page.clock.install()
    page.goto(address)
    page.wait_for_selector("text=This model is not loaded.")
    while not page.locator(".notice").count():
        page.clock.run_for(2000)
    assert "does not give it: This model is not loaded." in page.locator(".notice").inner_text() and len(looks) == 7
    page.clock.run_for(600_000)
    assert len(looks) == 7
    page.unroute_all()
    page.click("text=Look again")
    page.wait_for_selector(".turn .account")
    check_whole(server, page)


def test_a_reader_who_gives_no_key_for_an_answer_is_asked_once(server, open_page):
    page = open_page(server)
    address = unattended(server, page)
    page.watch.expected = ("401",)
    error = {"error": {"message": "No API key.", "code": 401}}
    page.route("**/v1/chat/completions/*", lambda route: route.fulfill(status=401, json=error))
    page.goto(address)
    page.click("dialog >> text=Cancel")
    page.wait_for_selector(".notice:has-text('does not give it: No API key.')")
    assert page.locator("dialog").count() == 0
    page.unroute_all()
    page.reload()  # looks again, too
    page.wait_for_selector(".turn .account")
    check_whole(server, page)


def test_a_question_whose_page_goes_before_the_answer_begins_is_asked_again(server, open_page):
    page = open_page(server)
    page.route("**/v1/chat/completions", lambda route: None)
    page.fill("#question", "What is a lamp?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .answer[aria-busy]", state="attached")
    other = second_tab(page)
    other.wait_for_selector("text=Another page waits for this answer")
    assert "Stopped here." not in other.locator(".turn").inner_text()
    page.close()
    turn = ended(other)
    assert turn.locator(".account").count() == 1 and "Stopped here." not in turn.inner_text()
    (kept,) = turns_in(other)
    assert kept["state"] == "done" and kept["answer"]


def test_a_page_that_is_loaded_again_before_the_answer_begins_asks_again(server, open_page):
    page, asked = open_page(server), []

    def lose_first(route):
        asked.append(route.request.url)
        if len(asked) > 1:
            route.continue_()

    page.route("**/v1/chat/completions", lose_first)
    page.fill("#question", "What is a lamp?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .answer[aria-busy]", state="attached")
    page.reload()
    page.wait_for_selector(".turn .account")
    assert len(asked) == 2
    assert "Stopped here." not in ended(page).inner_text() and turns_in(page)[0]["state"] == "done"


def test_an_answer_that_the_server_finishes_can_be_stopped(server, open_page):
    page = open_page(server)
    with slow(server):
        begin(page)
        page.reload()
        page.wait_for_selector(".turn .answer[aria-busy] > *")
        with page.expect_response(lambda answer: answer.request.method == "DELETE") as reported:
            page.keyboard.press("Escape")
        assert reported.value.ok
        assert "Stopped here." in ended(page).inner_text()
        until(lambda: not server.service.open)
    page.reload()
    page.wait_for_selector(".turn .answer > *")
    assert "Stopped here." in ended(page).inner_text()


def test_a_stop_ends_the_answer_on_the_server(server, open_page):
    page = open_page(server)
    with slow(server):
        begin(page)
        page.keyboard.press("Escape")
        assert "Stopped here." in ended(page).inner_text()
        until(lambda: not server.service.open)


def test_two_tabs_keep_the_turns_of_both(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    other = second_tab(page)
    with blocked(server):
        for tab, question in ((page, "And in the first tab?"), (other, "And in the second tab?")):
            tab.fill("#question", question)
        page.keyboard.press("Enter")
        other.keyboard.press("Enter")
    ended(page)
    ended(other)
    page.reload()
    page.wait_for_selector(".turn")
    turns = turns_in(page)
    assert sorted(turn["question"] for turn in turns) == [
        "And in the first tab?",
        "And in the second tab?",
        "What is a lamp?",
    ]
    assert all(turn["state"] == "done" and turn["answer"] for turn in turns)


def test_a_tab_that_only_looks_sees_the_turns_of_the_other(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    other = second_tab(page)
    answer = ask(page, "And a keeper?").locator(".answer").inner_text()
    other.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    assert ended(other).locator(".answer").inner_text() == answer


def test_a_deleted_chat_can_be_taken_back(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    chat = page.url.rpartition("/")[2]
    act(page, "Delete")
    page.wait_for_selector(".sidebar:not(:has(li))")
    assert "What is a lamp?" in page.locator("#deleted").inner_text()
    page.click("#deleted >> text=Take back")
    page.click(".sidebar li a")
    page.wait_for_selector(".turn")
    assert page.locator("#deleted").inner_text() == "" and page.locator(".account").count() == 1
    assert server.http.get(f"/v1/conversations/{chat}").status_code == 200


def test_all_deleted_chats_can_be_taken_back_and_are_forgotten_else(server, open_page):
    page = open_page(server)
    chats = []
    for question in ("What is a lamp?", "What is a tide?"):
        page.keyboard.press("Control+Shift+O")
        ask(page, question)
        chats.append(page.url.rpartition("/")[2])
    for taken in ("Take back", None):
        page.click("#open-settings")
        page.click("text=Delete all chats")
        page.click("text=Delete them all")
        page.wait_for_selector("#deleted:has-text('2 chats are deleted.')")
        if taken:
            page.click(f"#deleted >> text={taken}")
            page.wait_for_function("() => document.querySelectorAll('.sidebar li').length === 2")
    page.goto("about:blank")  # the page goes before the time is over
    until(lambda: all(server.http.get(f"/v1/conversations/{chat}").status_code == 404 for chat in chats))
