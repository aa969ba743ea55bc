"""A folder of the server in the page: its switch, the search while one types, citations, a source at its place."""

from dataclasses import replace

import pytest
from server.conftest import running, until
from slotcache.models.demo import FILE
from support.notes import write

from .conftest import LAMPS, ask, ended, figures, say

TIDES = "# Tides\n\n" + "\n\n".join(
    f"## {heading}\n\n" + f"{text} " * 6
    for heading, text in (
        ("The moon", "The moon raises the tides of the sea each day."),
        ("Why are there two?", "The sea rises below the moon, and on the other side."),
    )
)
QUOTE = "lamp of Sundrift is green, and it turns once"


def search(server, query):
    found = server.http.post("/v1/search", json={"query": query, "top_k": 1}).json()["results"]
    return found[0] if found else {"text": ""}


@pytest.fixture
def open_folder(folder_index, open_page):
    """A function that opens the page and waits until it knows of the folder: a question before that goes without."""

    def open_folder():
        page = open_page(folder_index)
        page.wait_for_selector(".switch input:checked")
        return page

    return open_folder


def test_answers_from_the_folder_cite_their_places(folder_index, open_folder):
    id = search(folder_index, "lamp of Sundrift")["id"]
    page = open_folder()
    say(page, f"😀 So [{id}]: it is **green**, the {QUOTE} [{id}]. The {QUOTE}, yes.")
    answer = ask(page, "Which colour has the lamp of Sundrift?").locator(".answer")
    page.wait_for_selector(".cite")
    assert answer.inner_text() == f"😀 So 1: it is green, the {QUOTE} 1. The {QUOTE}1, yes."
    assert page.locator(".sources li").first.inner_text().split("\n") == ["1", "Lighthouses > Sundrift", "coast/lights.md"]
    for at, mark in ((0, None), (1, "The " + QUOTE), (2, "The " + QUOTE)):
        page.locator(".cite").nth(at).click()
        page.wait_for_selector("#drawer .passage.here")
        marks = page.locator("#drawer mark").all_inner_texts()
        assert [text.replace("\n", " ") for text in marks] == ([mark] if mark else [])
        assert page.locator("#drawer .where").inner_text() == "coast/lights.md"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.className") == "cite"


def test_words_of_the_question_are_no_evidence(folder_index, open_folder):
    page = open_folder()
    say(page, "The lamp of Sundrift is blue.")
    assert ask(page, "What is the lamp of Sundrift?").locator(".cite").count() == 0


def test_a_source_stands_between_its_neighbours(folder_index, open_folder):
    for at, name in enumerate(LAMPS):
        page = open_folder()
        say(page, f"[{search(folder_index, f'lamp of {name}')['id']}]")
        ask(page, f"lamp of {name}").locator(".cite").click()
        page.wait_for_selector("#drawer .passage.here")
        passages = page.locator("#drawer .passage")
        heads = [one.evaluate("one => one.querySelector('h3')?.innerText ?? ''") for one in passages.all()]
        assert heads == [f"Lighthouses > {other}" if other != name else "" for other in LAMPS]
        assert passages.nth(at).inner_text().startswith(f"The lamp of {name} is")


def test_a_source_names_its_page(folder_index, open_folder):
    found = search(folder_index, "crane granite")
    page = open_folder()
    say(page, "It lifts nine tons of granite.")
    turn = ask(page, "What does the crane lift?")
    assert int(found["page"]) > 1 and f"coast/report.pdf, page {found['page']}" in turn.locator(".sources").inner_text()
    turn.locator(".cite").click()
    page.wait_for_selector("#drawer mark")
    assert page.locator("#drawer mark").inner_text() == "lifts nine tons of granite"
    assert page.locator("#drawer .where").inner_text() == f"coast/report.pdf, page {found['page']}"


def test_what_is_found_while_one_types_is_read_before_the_question(folder_index, open_folder):
    page = open_folder()
    page.click("#open-settings")
    page.fill("#setting-system", "Answer in one sentence.")
    page.click("text=Done")
    with page.expect_request(lambda request: request.url.endswith("/v1/search")) as sent:
        page.type("#question", "When is the entrance of the Clock", delay=20)
        page.wait_for_selector(".note:has-text('Clock Museum')")
    assert sent.value.post_data_json["chat"]["messages"] == [{"role": "system", "content": "Answer in one sentence."}]
    until(lambda: folder_index.metric("slotcache_requests_background") == 0 and not folder_index.service.open)
    page.type("#question", " Museum free?")
    page.keyboard.press("Enter")
    turn = ended(page)
    turn.locator(".account summary").click()
    assert "on the device" in turn.locator("tr", has_text="Clock Museum").first.inner_text(), "it was read while one typed"


def test_the_next_question_is_searched_after_the_chat(folder_index, open_folder):
    page = open_folder()
    ask(page, "Who is the mayor of Osselby?")
    with page.expect_request(lambda request: request.url.endswith("/v1/search")) as sent:
        page.type("#question", "Where is the Gallowmere Ferry")
        page.wait_for_selector(".note:has-text('Gallowmere')")
    chat = sent.value.post_data_json["chat"]
    assert chat["previous_response_id"].startswith("chatcmpl-") and chat["messages"] == []


def test_a_chat_that_the_server_forgot_is_sent_with_what_was_found(folder_index, open_folder):
    page = open_folder()
    ask(page, "Who is the mayor of Tarnwick?")
    folder_index.http.delete(f"/v1/conversations/{page.url.rpartition('/')[2]}")
    page.watch.expected = ("404",)
    with page.expect_request(lambda request: "history" in (request.post_data or "")) as sent:
        turn = ask(page, "What is the speciality of Tarnwick?")
    first, answer, question = sent.value.post_data_json["messages"]
    assert first["documents"] and answer["role"] == "assistant" and "documents" not in question
    cost = figures(turn)
    assert sum(cost.values()) > 2 * cost["computed"]


def test_after_a_stop_the_chat_goes_on_from_the_last_answer(folder_index, open_folder):
    page = open_folder()
    ask(page, "Who is the mayor of Tarnwick?")
    say(page, "And so on. " * 200)
    page.fill("#question", "What is the speciality of Tarnwick?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn:last-child .answer:has-text('so on')")
    page.keyboard.press("Escape")
    assert "Stopped here." in ended(page).inner_text()
    page.unroute_all()
    with page.expect_request(lambda request: request.url.endswith("/v1/chat/completions")) as sent:
        ask(page, "When is the market in Tarnwick?")
    body = sent.value.post_data_json
    assert body["previous_response_id"] and [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]


def test_the_folder_is_searched_only_where_the_reader_wants_it(folder_index, open_folder):
    page = open_folder()
    page.click(".switch")
    searches = folder_index.folder_index.num_searches
    with page.expect_request(lambda request: request.url.endswith("/v1/chat/completions")) as sent:
        turn = ask(page, "Who is the mayor of Tarnwick?")
    assert "retrieval" not in sent.value.post_data_json and folder_index.folder_index.num_searches == searches
    assert turn.locator(".sources").count() == 0 and figures(turn)["computed"] > 0
    page.reload()
    page.wait_for_selector(".switch input:not(:checked)")


def test_the_folder_shows_its_files_and_their_errors(folder_index, open_folder):
    root = folder_index.folder_index.folders[0].root
    page = open_folder()
    page.click(".folder .plain")
    page.wait_for_selector(".files li")
    rows = dict(row.split("\n") for row in page.locator(".files li").all_inner_texts())
    assert rows["coast/lights.md"] == "3 parts" and rows["tarnwick.md"] == "1 part"
    assert len(rows) == 64 and "PDF" in rows["coast/broken.pdf"]
    assert next(iter(rows)) == "coast/broken.pdf"
    assert page.locator("#drawer [role=status]").inner_text() == "64 files, 1 not read"
    assert page.locator("#drawer h3").inner_text() == str(root)
    write(root, {"coast/new.md": "# New\n\nA river of stone."})
    page.click("text=Look for changes")
    page.wait_for_selector(".files li:has-text('coast/new.md')")
    page.wait_for_selector(".folder .plain:has-text('65 files')")
    (root / "coast/new.md").unlink()


def test_questions_about_the_folder_s_own_headings_are_offered_once_it_is_read(open_page, tmp_path):
    folder = write(tmp_path / "notes", {"tides.md": TIDES, "plain.txt": "No heading at all."})
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    with running(FILE, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False, chunk_tokens=40, predict=40) as up:
        watcher = up.folder_index.watcher
        until(lambda: watcher.state == "ready")
        watcher.state = "reading"
        page = open_page(up)
        page.wait_for_selector(".folder .plain:has-text('files read')")
        assert page.locator(".questions button:visible").count() == 0
        watcher.state = "ready"
        page.wait_for_selector(".questions button")
        assert page.locator(".folder .plain").inner_text() == "3 files, 1 not read"
        offered = page.locator(".questions button").all_inner_texts()
        assert offered == ["What is “Tides” about?", "What is “The moon” about?", "Why are there two?"]
        with page.expect_request(lambda request: request.url.endswith("/v1/chat/completions")) as sent:
            page.click("text=Why are there two?")
        assert sent.value.post_data_json["retrieval"] is True
        assert "tides.md" in ended(page).locator(".sources, .read").first.evaluate("one => one.outerHTML")
        assert page.locator(".questions button:visible").all_inner_texts() == offered[:2]


def test_a_source_that_is_gone_is_reported(folder_index, open_folder):
    root = folder_index.folder_index.folders[0].root
    write(root, {"soon.md": "# Soon\n\nThe mill of Soonby grinds barley on Sundays."})
    folder_index.folder_index.watcher.refresh()
    until(lambda: "Soonby" in search(folder_index, "mill of Soonby")["text"])
    page = open_folder()
    say(page, "The mill of Soonby grinds barley")
    turn = ask(page, "mill of Soonby")
    (root / "soon.md").unlink()
    folder_index.folder_index.watcher.refresh()
    until(lambda: "Soonby" not in search(folder_index, "mill of Soonby")["text"])
    page.watch.expected = ("404",)
    turn.locator(".cite").click()
    page.wait_for_selector("#drawer .notice")
    assert "its file may have changed" in page.locator("#drawer .notice").inner_text()


def test_a_question_that_nothing_matches_is_reported(folder_index, open_folder):
    page = open_folder()
    turn = ask(page, "Zyzzyva?")
    assert "Nothing in the folder matches" in turn.inner_text() and turn.locator(".sources, .read").count() == 0


def test_an_answer_from_a_folder_that_is_still_read_says_so(folder_index, open_folder):
    page, watcher = open_folder(), folder_index.folder_index.watcher
    index = folder_index.folder_index.index
    watcher.state, index.progress = "reading", replace(index.progress, files_left=3)  # as while it reads
    turn = ask(page, "Zyzzyva?")
    reported = turn.inner_text()
    watcher.refresh()
    assert "still being read" in reported and "(61 of 64 files)" in reported


def test_a_folder_of_another_scope_is_shown_to_its_readers(open_page, tmp_path):
    folder = write(tmp_path / "notes", {"tides.md": "# Tides\n\nThe moon raises two tides a day."})
    with running(FILE, docs=str(folder), docs_db=str(tmp_path / "db"), docs_scope="readers", predict=20) as up:
        page = open_page(up)
        page.watch.expected = ("403",)
        page.wait_for_function("() => document.getElementById('model').textContent")
        assert not page.locator(".folder").is_visible()
        page.click("#open-settings")
        page.fill("#setting-scope", "readers")
        page.click("text=Done")
        page.wait_for_selector(".folder .plain:text-is('1 file')")
        source = ask(page, "How many tides?").locator(".read li, .sources li").first
        assert "tides.md" in source.evaluate("one => one.outerHTML")


def test_a_server_without_a_folder_shows_nothing_of_it(server, open_page):
    page = open_page(server)
    assert not page.locator(".folder").is_visible() and not page.locator(".questions").is_visible()
    assert ask(page, "Hello?").locator(".sources").count() == 0


def test_a_source_without_a_title_has_the_name_of_its_file(open_page, tmp_path):
    folder = write(tmp_path / "notes", {"tides.txt": "The moon raises two tides a day, and the sun one."})
    with running(FILE, docs=str(folder), docs_db=str(tmp_path / "db"), predict=60) as up:
        page = open_page(up)
        page.wait_for_selector(".folder .plain:text-is('1 file')")
        id = search(up, "two tides")["id"]
        say(page, f"Two [{id}].")
        turn = ask(page, "How many tides does the moon raise?")
        assert turn.locator(".sources button").inner_text() == "tides.txt" and id not in turn.inner_text()
        turn.locator(".account summary").click()
        assert id not in turn.inner_text()
        turn.locator(".sources button").click()
        page.wait_for_selector("#drawer .passage.here")
        assert page.locator("#drawer h2").inner_text() == "tides.txt"


def test_an_empty_folder_explains_itself(open_page, tmp_path):
    (tmp_path / "notes").mkdir()
    with running(FILE, docs=str(tmp_path / "notes"), docs_db=str(tmp_path / "db")) as up:
        page = open_page(up)
        page.click(".folder .plain:text-is('no files yet')")
        page.wait_for_selector("#drawer:has-text('There is no file here that the server reads.')")
