"""What can be done with turns: go on with an answer, edit it, remove a turn or a document; and the system prompt."""

import json

import pytest
from server.conftest import until

from .conftest import ask, attach, ended, say
from .test_nothing_lost import begin, second_tab, slow, turns_in

STORY = "Tell a story of a lighthouse."


def limit(page, most):
    """Answers of so many tokens, the same each time."""

    def send(route):
        added = {"max_tokens": most, "ignore_eos": True, "temperature": 0}
        route.continue_(post_data=json.dumps(route.request.post_data_json | added))

    page.route("**/v1/chat/completions", send)


def go_on(page):
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("text=Continue")
    page.wait_for_selector(".turn:last-child .answer[aria-busy]", state="attached")
    return sent.value.post_data_json, ended(page)


def focused(page):
    return page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent")


def roles(request):
    return [message["role"] for message in request.post_data_json["messages"]]


def test_an_answer_that_reached_its_limit_goes_on_as_if_it_had_none(server, open_page):
    page = open_page(server)
    limit(page, 12)
    turn = ask(page, STORY)
    assert "The answer reached its limit of tokens." in turn.inner_text()
    (cut,) = turns_in(page)
    body, turn = go_on(page)
    (whole,) = turns_in(page)
    said = {"role": "assistant", "content": cut["answer"]}
    assert body["messages"][-1] == said and body["continue_final_message"] is True and body["echo"] is True
    asked = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "ignore_eos": True, "max_tokens": 24}
    uncut = server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert whole["answer"] == uncut and whole["answer"].startswith(cut["answer"]) and len(uncut) > len(cut["answer"])
    assert turn.locator(".branches").count() == 0 and turn.locator(".account").count() == 1
    shown = turn.locator(".answer").inner_text()
    page.reload()
    page.wait_for_selector(".turn")
    assert ended(page).locator(".answer").inner_text() == shown
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And then?")
    assert roles(sent.value) == ["user"] and sent.value.post_data_json["previous_response_id"] == whole["answerId"]
    assert page.locator("text=Continue").count() == 1, "only the last answer can go on"


def test_an_answer_of_the_folder_goes_on_with_its_sources(folder_index, open_page):
    page = open_page(folder_index)
    page.wait_for_selector(".switch input:checked")
    limit(page, 9)
    ask(page, "Who is the mayor of Tarnwick?")
    (cut,) = turns_in(page)
    body, turn = go_on(page)
    (whole,) = turns_in(page)
    assert body["retrieval"] is True and whole["answer"].startswith(cut["answer"]) and whole["answer"] != cut["answer"]
    assert whole["report"]["retrieved"] == cut["report"]["retrieved"] and turn.locator(".sources, .read").count() > 0


def test_an_answer_that_cannot_go_on_is_as_before_and_says_why(server, open_page):
    page = open_page(server)
    limit(page, 12)
    shown = ask(page, STORY).locator(".answer > p").first.inner_text()
    (before,) = turns_in(page)
    page.unroute_all()
    page.watch.expected = ("503",)
    error = {"error": {"message": "The queue is full.", "code": 503}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=error))
    page.click("text=Continue")
    page.wait_for_selector(".notice:has-text('The queue is full.')")
    assert page.locator(".answer > p").first.inner_text() == shown and page.locator("text=Continue").count() == 1
    (after,) = turns_in(page)
    kept = ("state", "answer", "answerId", "finish", "remembered")
    assert [after[name] for name in kept] == [before[name] for name in kept]


def test_a_continuation_that_is_too_long_says_so_until_it_is_not(server, open_page):
    page = open_page(server)
    limit(page, 12)
    ask(page, STORY)
    page.unroute_all()
    page.watch.expected = ("400",)
    error = {"error": {"message": "It is full.", "code": "context_length_exceeded"}}  # of a server that counts nothing
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    page.click("text=Continue")
    page.wait_for_selector(".notice:has-text('It is full.')")
    page.unroute_all()
    limit(page, 12)
    _, turn = go_on(page)
    assert turn.locator(".notice").count() == 0 and turn.locator("text=Shorten the question").count() == 0


def test_an_answer_that_goes_on_outlives_its_page(server, open_page):
    page = open_page(server)
    limit(page, 12)
    ask(page, STORY)
    (cut,) = turns_in(page)
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: None)  # the page goes before it has begun
    page.click("text=Continue")
    page.wait_for_selector(".turn .answer[aria-busy]", state="attached")
    page.reload()
    page.wait_for_selector("text=Continue")
    (kept,) = turns_in(page)
    assert kept["answer"] == cut["answer"] and kept["answerId"] == cut["answerId"]


def test_an_edited_answer_is_a_branch_that_the_next_question_goes_on_from(server, open_page):
    page = open_page(server)
    first = ask(page, "What is a lamp?").locator(".answer").inner_text()
    other = second_tab(page)
    page.click("[aria-label='Edit the answer']")
    page.keyboard.press("Escape")
    assert focused(page) == "Edit the answer" and page.locator(".answer").inner_text() == first
    page.keyboard.press("Enter")
    page.fill("[aria-label='Edited answer']", "A lamp is **blue**.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer:has-text('A lamp is blue.')")
    assert page.locator(".branches").inner_text().strip() == "2 / 2" and focused(page) == "Edit the answer"
    other.wait_for_selector(".answer:has-text('A lamp is blue.')")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And a keeper?")
    assert [one["content"] for one in sent.value.post_data_json["messages"]] == [
        "What is a lamp?",
        "A lamp is **blue**.",
        "And a keeper?",
    ]
    other.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    for tab in (page, other):
        tab.locator("[aria-label='Earlier version']").click()
        tab.wait_for_function("() => document.querySelectorAll('.turn').length === 1")
        assert tab.locator(".answer").inner_text() == first


def test_a_removed_turn_can_be_taken_back_and_leaves_both_tabs(server, open_page):
    page = open_page(server)
    for question in ("What is a lamp?", "What is a tide?", "What is a keeper?"):
        ask(page, question)
    other = second_tab(page)
    chat = page.url.rpartition("/")[2]
    for taken_back in (True, False):
        page.locator("[aria-label='Remove from the chat']").nth(1).click()
        for tab in (page, other):
            tab.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
            assert tab.locator(".question h2").all_inner_texts() == ["What is a lamp?", "What is a keeper?"]
        if taken_back:
            page.click("#deleted >> text=Take back")
            for tab in (page, other):
                tab.wait_for_function("() => document.querySelectorAll('.turn').length === 3")
    with other.expect_request("**/v1/chat/completions") as sent:
        ask(other, "And a ship?")
    reported = sent.value.post_data_json
    assert [one["content"] for one in reported["messages"] if one["role"] == "user"][-2:] == [
        "What is a keeper?",
        "And a ship?",
    ]
    assert "What is a tide?" not in json.dumps(reported)
    gone = [turn["answerId"] for turn in turns_in(page) if turn["question"] == "What is a tide?"]
    page.goto("about:blank")  # the page goes before the time is over
    until(lambda: all(server.http.get(f"/v1/chat/completions/{id}").status_code == 404 for id in gone))
    other.reload()
    other.wait_for_selector(".turn")
    assert "What is a tide?" not in json.dumps(turns_in(other))
    stored = server.http.get(f"/v1/conversations/{chat}").json()
    assert "What is a tide?" not in json.dumps(stored)


def test_a_turn_that_was_taken_back_costs_nothing(server, open_page):
    page = open_page(server)
    ask(page, "What is a lamp?")
    page.click("[aria-label='Remove from the chat']")
    page.wait_for_selector(".welcome")
    page.click("#deleted >> text=Take back")
    page.wait_for_selector(".turn")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And a keeper?")
    assert roles(sent.value) == ["user"] and sent.value.post_data_json["previous_response_id"]


def test_a_document_is_removed_from_the_chat(server, open_page):
    page = open_page(server)
    attach(page, {"Lamps": "The lamp of Sundrift is green.", "Tides": "The tide of Sundrift is high."})
    ask(page, "Which colour has the lamp?")
    other = second_tab(page)
    page.click("[aria-label='Remove Tides.txt from the chat']")
    for tab in (page, other):
        tab.wait_for_function("() => document.querySelectorAll('.question .chip').length === 1")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And the tide?")
    first, *_ = sent.value.post_data_json["messages"]
    assert [one["id"] for one in first["documents"]] == ["Lamps"] and "tide of Sundrift" not in sent.value.post_data
    page.click("[aria-label='Remove Lamps.txt from the chat']")
    page.wait_for_function("() => document.querySelectorAll('.question .chip').length === 0")
    with page.expect_request("**/v1/chat/completions") as sent:
        turn = ask(page, "And the lamp?")
    assert sent.value.post_data_json["messages"][0]["documents"] == []
    assert turn.locator(".account tbody th:has-text('Lamps')").count() == 0
    page.locator("#deleted p:has-text('Lamps.txt')").locator("text=Take back").click()
    page.wait_for_function("() => document.querySelectorAll('.question .chip').length === 1")


@pytest.mark.parametrize("act", ["Answer again", "Edit the question"])
def test_a_removed_document_does_not_come_back_where_its_question_is_asked_again(server, open_page, act):
    page = open_page(server)
    attach(page, {"Lamps": "The lamp of Sundrift is green."})
    ask(page, "Which colour has the lamp?")
    page.click("[aria-label='Remove Lamps.txt from the chat']")
    page.wait_for_function("() => document.querySelectorAll('.question .chip').length === 0")
    page.click(f"[aria-label='{act}']")
    if act == "Edit the question":
        page.keyboard.press("Enter")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    assert ended(page).locator(".account tbody th:has-text('Lamps')").count() == 0
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And the tide?")
    chat = page.url.rpartition("/")[2]
    assert "lamp of Sundrift" not in sent.value.post_data
    assert "lamp of Sundrift" not in json.dumps(server.http.get(f"/v1/conversations/{chat}").json())


def test_of_two_removed_documents_one_comes_back_alone(server, open_page):
    page = open_page(server)
    attach(page, {"Lamps": "The lamp of Sundrift is green.", "Tides": "The tide of Sundrift is high."})
    ask(page, "Which colour has the lamp?")
    page.click("[aria-label='Remove Tides.txt from the chat']")
    page.click("[aria-label='Remove Lamps.txt from the chat']")
    page.wait_for_function("() => document.querySelectorAll('.question .chip').length === 0")
    page.locator("#deleted p:has-text('Tides.txt')").locator("text=Take back").click()
    page.wait_for_selector(".question .chip")
    assert page.locator(".question .chip").all_inner_texts() == ["Tides.txt"]
    page.locator("#deleted p:has-text('Lamps.txt')").locator("text=Take back").click()
    page.wait_for_function("() => document.querySelectorAll('.question .chip').length === 2")
    assert page.locator(".question .chip").all_inner_texts() == ["Lamps.txt", "Tides.txt"]


def test_what_is_edited_stays_where_a_removal_becomes_final(server, open_page):
    page = open_page(server)
    for question in ("What is a lamp?", "What is a tide?"):
        ask(page, question)
    page.clock.install()
    page.locator("[aria-label='Remove from the chat']").last.click()
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 1")
    page.click("[aria-label='Edit the answer']")
    page.fill("[aria-label='Edited answer']", "A lamp is blue.")
    page.clock.run_for(9000)
    page.wait_for_selector("#deleted:not(:has(p))", state="attached")
    assert page.input_value("[aria-label='Edited answer']") == "A lamp is blue."
    until(lambda: [turn["question"] for turn in turns_in(page)] == ["What is a lamp?", ""])


def test_another_version_is_seen_where_the_last_one_is_removed(server, open_page):
    page = open_page(server)
    first = ask(page, "What is a lamp?").locator(".answer").inner_text()
    page.click("[aria-label='Edit the answer']")
    page.fill("[aria-label='Edited answer']", "A lamp is blue.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer:has-text('A lamp is blue.')")
    page.click("[aria-label='Remove from the chat']")
    page.wait_for_selector(".turn:not(:has(.branches))")
    assert page.locator(".answer").inner_text() == first
    page.click("#deleted >> text=Take back")
    page.wait_for_selector(".answer:has-text('A lamp is blue.')")


def test_a_question_that_another_tab_waits_for_is_not_removed_here(server, open_page):
    page = open_page(server)
    page.route("**/v1/chat/completions", lambda route: None)
    attach(page, {"Lamps": "The lamp of Sundrift is green."})
    page.fill("#question", "What is a lamp?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .answer[aria-busy]", state="attached")
    other = second_tab(page)
    other.wait_for_selector("text=Another page waits for this answer")
    assert other.locator("[aria-label^='Remove']").count() == 0


def test_an_answer_that_comes_while_a_turn_before_it_is_removed_is_forgotten_too(server, open_page):
    page = open_page(server)
    ask(page, "What is a tide?")
    with slow(server):
        begin(page)
        page.locator("[aria-label='Remove from the chat']").first.click()
        page.wait_for_function("() => document.querySelectorAll('.turn').length === 1")
    ended(page)
    answers = [turn["answerId"] for turn in turns_in(page)]
    assert len(answers) == 2 and all(answers)
    page.goto("about:blank")
    until(lambda: all(server.http.get(f"/v1/chat/completions/{id}").status_code == 404 for id in answers))


def test_a_chat_has_a_system_prompt_of_its_own(server, open_page):
    page = open_page(server)
    page.click("text=System prompt")
    page.fill("#system", "Answer as a keeper.")
    page.click("dialog >> text=Use it")
    page.wait_for_selector(".under >> text=System prompt: set")
    assert focused(page) == "System prompt: set"
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is a lamp?")
    assert sent.value.post_data_json["messages"][0] == {"role": "system", "content": "Answer as a keeper."}
    other = second_tab(page)
    page.click("text=System prompt: set")
    assert page.input_value("#system") == "Answer as a keeper."
    page.fill("#system", "Answer as a captain.")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="detached")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And a keeper?")
    reported = sent.value.post_data_json["messages"]
    assert reported[0] == {"role": "system", "content": "Answer as a captain."} and len(reported) == 4
    other.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    other.click("text=System prompt: set")
    assert other.input_value("#system") == "Answer as a captain."
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".welcome")
    assert page.locator(".under button:visible").last.inner_text() == "System prompt", "a new chat has that of the settings"


def test_a_button_leads_to_the_end_while_one_has_scrolled_up(server, open_page):
    page = open_page(server)
    say(page, "\n\n".join(f"Line {number}" for number in range(60)))
    ask(page, "Count.")
    assert page.locator("[aria-label='To the end']").is_hidden()
    page.locator(".scroller").evaluate("one => one.scrollTo(0, 0)")
    page.wait_for_selector("[aria-label='To the end']:visible")
    page.focus("[aria-label='To the end']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='To the end']", state="hidden")
    assert page.evaluate("document.activeElement.id") == "question"
