"""The list of chats: search, names, pins, files of chats, and what another tab sees of that."""

import json
from pathlib import Path

import pytest
from server.conftest import blocked

from .conftest import act, ask, ended
from .test_nothing_lost import second_tab
from .test_speed import long_tasks

FILL = """count => new Promise((resolve) => {
    indexedDB.open("slotcache").onsuccess = ({ target: { result: base } }) => {
        const change = base.transaction(["heads", "chats"], "readwrite");
        const words = "The keeper of the lighthouse counts the ships that pass, and writes their names down. ".repeat(20);
        for (let at = 0; at < count; at += 1) {
            const id = `chat-${at}`;
            const head = { id, title: `Notes ${at}`, updated: 1e12 + at };
            const told = (number) => (at === 500 && number === 2 ? "A café on the pier. " : "");
            const turn = (number) => ({ id: `${id}-${number}`, parent: number ? `${id}-${number - 1}` : null,
                question: `Question ${number}?`, answer: `${words} ${told(number)}${words}`,
                documents: [], thought: "", retrieval: false, state: "done" });
            const turns = [0, 1, 2, 3].map(turn);
            change.objectStore("heads").put(head);
            change.objectStore("chats").put({ ...head, created: 1e12, system: "", head: `${id}-3`, turns });
        }
        change.oncomplete = () => resolve(true);
    };
})"""
CHATS = """() => new Promise((resolve) => {
    indexedDB.open("slotcache").onsuccess = ({ target: { result: base } }) => {
        base.transaction("chats").objectStore("chats").getAll().onsuccess = ({ target }) => resolve(target.result);
    };
})"""


def chats_in(page):
    """The chats that the browser keeps, by their ids."""
    return {chat["id"]: chat for chat in page.evaluate(CHATS)}


def titles(page):
    return [text.split("\n")[0] for text in page.locator(".sidebar li > a").all_inner_texts()]


def begin_chats(page, *questions):
    for question in questions:
        page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".welcome")
        ask(page, question)


def saved(page, name):
    """The file that an act on the first chat gives."""
    with page.expect_download() as file:
        act(page, name)
    return file.value.suggested_filename, Path(file.value.path()).read_text("utf-8")


def bring(page, text, name="chats.json"):
    page.click("#open-settings")
    page.set_input_files("input.import", {"name": name, "mimeType": "application/json", "buffer": text.encode()})


def test_words_find_chats_by_titles_and_answers_among_a_thousand(browser, server, open_page):
    page = open_page(server)
    page.evaluate(FILL, 1000)
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('.sidebar li[data-chat]').length === 1000")
    browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
    page.keyboard.press("Control+k")
    page.keyboard.type("pier CAFE", delay=20)
    page.wait_for_function("() => document.querySelectorAll('.sidebar li[data-chat]').length === 1")
    assert long_tasks(browser.stop_tracing()) == []
    assert titles(page) == ["Notes 500"] and page.locator(".excerpt mark").inner_text() == "pier"
    page.fill(".search", "notes 77")
    page.wait_for_selector(".sidebar h2:has-text('19 chats have')")
    assert "Notes 77" in titles(page) and "Notes 779" in titles(page)
    page.fill(".search", "rhododendron")
    page.wait_for_selector(".sidebar h2:has-text('No chat has “rhododendron”')")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.querySelectorAll('.sidebar li[data-chat]').length === 1000")


def test_an_answer_is_found_as_soon_as_it_is_there(server, open_page):
    page = open_page(server)
    page.fill(".search", "zebra")
    page.wait_for_selector(".sidebar h2:has-text('No chat has')")
    ask(page, "What is a zebra?")
    page.wait_for_selector(".sidebar li:has-text('What is a zebra?')")


def test_the_list_marks_a_chat_while_its_answer_is_on_its_way(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    with blocked(server):
        page.fill("#question", "And a keeper?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sidebar a.answering:text-is('What is a lamp?')")
        page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".welcome")
        assert page.locator(".answering").get_attribute("title") == "An answer is on its way"
    page.wait_for_selector(".sidebar:not(:has(.answering))")
    assert titles(page) == ["What is a lamp?"] and not page.locator(".turn").count()


def test_a_chat_gets_another_name_in_both_tabs_and_in_the_title(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    page.wait_for_function("() => document.title === 'What is a lamp? · slotcache'")
    other = second_tab(page)
    act(page, "Rename")
    assert page.evaluate("document.activeElement.value") == "What is a lamp?"
    page.keyboard.type("About lamps")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.title === 'About lamps · slotcache'")
    page.wait_for_function("() => document.activeElement.ariaLabel === 'Actions for About lamps'")
    other.wait_for_function("() => document.title === 'About lamps · slotcache'")
    ask(other, "And a keeper?")
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    page.reload()
    page.wait_for_selector(".turn")
    assert titles(page) == titles(other) == ["About lamps"]
    page.click("#to-live")
    page.wait_for_function("() => document.title === 'Live · slotcache'")


def test_a_pinned_chat_stands_first_in_both_tabs_until_it_is_unpinned(server, open_page):
    page = open_page(server)
    begin_chats(page, "What is a lamp?", "What is a tide?")
    other = second_tab(page)
    act(page, "Pin", at=1)
    for tab in (page, other):
        tab.wait_for_selector(".sidebar section:first-child h2:text-is('Pinned')")
        assert titles(tab) == ["What is a lamp?", "What is a tide?"]
    assert page.evaluate("document.activeElement.textContent") == "Unpin", "the focus stays at the act"
    page.keyboard.press("Enter")
    for tab in (page, other):
        tab.wait_for_selector(".sidebar:not(:has(h2:text-is('Pinned')))")
        assert titles(tab) == ["What is a tide?", "What is a lamp?"]


def test_two_tabs_change_a_chat_at_once_and_nothing_is_lost(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    other = second_tab(page)
    act(page, "Rename")
    act(other, "Pin")
    page.wait_for_selector(".renaming")
    page.keyboard.type("About lamps")
    page.keyboard.press("Enter")
    for tab in (page, other):
        tab.wait_for_selector(".sidebar section:has(h2:text-is('Pinned')) a:text-is('About lamps')")


def test_a_chat_is_saved_as_markdown_and_as_json_that_comes_back(server, open_page):
    page = open_page(server)
    answer = ask(page, "What is a lamp?").locator(".answer").inner_text()
    name, text = saved(page, "Save as Markdown")
    assert name == "What-is-a-lamp.md" and text.startswith("# What is a lamp?\n\n## What is a lamp?\n\n")
    name, text = saved(page, "Save as JSON")
    assert name == "What-is-a-lamp.json"
    (chat,) = json.loads(text)["chats"]
    bring(page, text)
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")
    page.wait_for_function("() => document.querySelectorAll('.sidebar li[data-chat]').length === 2")
    kept = chats_in(page)
    assert len(kept) == 2 and kept[chat["id"]]["turns"][0]["answerId"], "the chat that was there is as it was"
    (copy,) = [one for id, one in kept.items() if id != chat["id"]]
    assert copy["turns"][0]["id"] != chat["turns"][0]["id"] and copy["head"] == copy["turns"][0]["id"]
    page.goto(f"{server.url}/#/chat/{copy['id']}")
    page.wait_for_function("id => document.querySelector('.turn')?.dataset.turn === id", arg=copy["head"])
    assert page.locator(".answer").inner_text() == answer
    with page.expect_request("**/v1/chat/completions") as sent:
        assert ask(page, "And now?").locator(".notice").count() == 0
    assert [one["role"] for one in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]


def test_all_chats_go_to_another_browser_and_back(server, open_page):
    page = open_page(server)
    begin_chats(page, "What is a lamp?", "What is a tide?")
    page.click("#open-settings")
    with page.expect_download() as file:
        page.click("text=Save all chats")
    text = Path(file.value.path()).read_text("utf-8")
    other = open_page(server)
    bring(other, text)
    other.wait_for_selector("#deleted:has-text('2 chats are imported.')")
    assert titles(other) == ["What is a tide?", "What is a lamp?"]
    assert set(chats_in(other)) == set(chats_in(page))
    other.click("#deleted >> text=Take back")
    other.wait_for_selector(".sidebar:not(:has(li))")
    assert chats_in(other) == {}


def damaged(change):
    turn = {"id": "t", "parent": None, "question": "What?", "answer": "That.", "documents": [], "state": "done"}
    chat = {"id": "c", "title": "What?", "created": 1, "updated": 1, "system": "", "head": "t", "turns": [turn]}
    file = {"format": "slotcache.chats", "version": 1, "chats": [chat]}
    change(file, chat, turn)
    return json.dumps(file)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("%PDF-1.4", "it is no JSON"),
        (damaged(lambda *_: None)[:-9], "its end is missing"),
        ('{"messages": []}', 'no "format"'),
        ("null", 'no "format"'),
        (damaged(lambda file, *_: file.update(version=2)), "has the version 2"),
        (damaged(lambda file, chat, turn: turn.pop("answer")), "chats[0].turns[0].answer is not a text"),
        (damaged(lambda file, chat, turn: turn.update(parent="x")), "chats[0].turns[0].parent is not the id of an earlier"),
        (damaged(lambda file, chat, turn: chat.update(turns=[turn, turn])), "chats[0].turns[1].id is not an id that no"),
        (damaged(lambda file, chat, turn: turn.update(documents=[{"id": "d"}])), "documents[0].text is not a text"),
        (damaged(lambda file, chat, turn: chat.update(created="now")), "chats[0].created is not a number"),
        (damaged(lambda file, *_: file.update(chats=[[]])), "chats[0] is not an object"),
    ],
    ids=["pdf", "cut", "foreign", "null", "version", "answer", "parent", "twice", "document", "number", "list"],
)
def test_a_file_that_is_no_export_says_why_and_changes_nothing(server, open_page, text, reported):
    page = open_page(server)
    ask(page, "What is a lamp?")
    before = chats_in(page)
    bring(page, text, "some.json")
    page.wait_for_selector("dialog .notice:not(:empty)")
    assert (
        reported in page.locator("dialog .notice").inner_text()
        and "some.json" in page.locator("dialog .notice").inner_text()
    )
    assert chats_in(page) == before
    bring_again = damaged(lambda *_: None)
    page.set_input_files(
        "input.import", {"name": "good.json", "mimeType": "application/json", "buffer": bring_again.encode()}
    )
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")


def test_ids_of_a_file_lead_nowhere_else(server, open_page):
    page = open_page(server)
    page.watch.expected = ("404",)  # the server never had this chat

    def hostile(file, chat, turn):
        chat.update(id="../files/x?a=", head='"]')
        turn.update(id='"]')

    bring(page, damaged(hostile))
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")
    page.click(".sidebar li > a")
    page.wait_for_selector(".turn .answer:has-text('That.')")
    page.click("[aria-label='Edit the answer']")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    (id,) = chats_in(page)
    page.clock.install()
    act(page, "Delete")
    page.wait_for_selector("#deleted:has-text('is deleted.')")
    with page.expect_request(lambda request: request.method == "DELETE") as sent:
        page.clock.run_for(9000)
    assert sent.value.url == f"{server.url}/v1/conversations/{id}"


@pytest.mark.parametrize("quote", [False, True])
@pytest.mark.parametrize("place", [(0, 1e9), (1e9, 2e9), (3, 1), (0.5, 1.5)], ids=str)
@pytest.mark.parametrize("answer", ["That.", "That is \U0001f600."], ids=["plain", "pairs"])
def test_citations_of_a_file_may_stand_anywhere(server, open_page, quote, place, answer):
    page = open_page(server)
    start, stop = place
    report = {"retrieved": [{"id": "d"}], "citations": [{"id": "d", "start": start, "stop": stop, "quote": quote}]}
    bring(page, damaged(lambda file, chat, turn: turn.update(report=report, answer=answer)))
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")
    page.click(".sidebar li > a")
    page.wait_for_selector(".turn [aria-label='Copy the answer']")


def test_an_imported_chat_that_is_open_is_left_where_the_import_is_taken_back(server, open_page):
    page = open_page(server)
    bring(page, damaged(lambda *_: None))
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")
    page.click(".sidebar li > a")
    page.wait_for_selector(".turn")
    page.click("#deleted >> text=Take back")
    page.wait_for_selector(".welcome")
    ask(page, "What is a lamp?")
    assert [len(chat["turns"]) for chat in chats_in(page).values()] == [1]


def test_a_chat_whose_last_turn_was_removed_comes_back_as_it_was_seen(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    page.click("[aria-label='Answer again']")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    ended(page)
    page.click("[aria-label='Earlier version']")
    page.wait_for_selector(".branches:has-text('1 / 2')")
    ask(page, "And a tide?")
    page.locator("[aria-label='Remove from the chat']").last.click()
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 1")
    _, text = saved(page, "Save as JSON")
    (chat,) = json.loads(text)["chats"]
    assert len(chat["turns"]) == 2 and chat["head"] == chat["turns"][0]["id"]


def test_a_chat_is_deleted_by_the_keyboard_and_the_focus_goes_to_the_next(server, open_page):
    page = open_page(server)
    begin_chats(page, "What is a lamp?", "What is a tide?")
    page.locator(".sidebar li > button.icon").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaExpanded") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Rename"
    page.keyboard.press("Escape")
    assert page.locator(".acts").count() == 0
    assert page.evaluate("document.activeElement.ariaLabel") == "Actions for What is a lamp?"
    act(page, "Delete", at=1)
    page.wait_for_function("() => document.querySelectorAll('.sidebar li[data-chat]').length === 1")
    assert page.evaluate("document.activeElement.ariaLabel") == "Actions for What is a tide?"
    assert ended(page).locator(".answer").inner_text()
