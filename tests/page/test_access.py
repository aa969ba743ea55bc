"""Whoever uses the page: axe-core's rules, the keyboard, narrow screens, both colours."""

import pytest

from .conftest import AXE, LONG, act, ask, attach, say

SIZES = {"wide": (1280, 860), "middle": (820, 1000), "narrow": (360, 740)}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SERIOUS = ("serious", "critical")
WIDER = """() => [...document.querySelectorAll("main *, aside *")]
    .filter(one => !one.closest(".wide, pre, .unseen, .frame, .sidebar, [hidden]"))
    .filter(one => getComputedStyle(one).overflow === "visible")
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 120))"""


def violations(page):
    """axe-core's, of those that count."""
    if not AXE.is_file():
        pytest.skip("no axe-core")
    page.evaluate(AXE.read_text("utf-8") + ";0")  # as the browser's own tools do it: the policy holds for the page only
    found = page.evaluate("rules => axe.run(document, { runOnly: rules })", RULES)["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS]


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request):
    return request.param


def test_no_rule_is_seriously_broken(folder_index, open_page, corpus, scheme):
    page = open_page(folder_index, color_scheme=scheme)
    page.wait_for_selector(".switch")
    found = {"welcome": violations(page)}
    question = corpus.questions[0]
    attach(page, {"A document": corpus.documents[question.document].text})
    say(page, question.answer)
    ask(page, question.question)
    page.locator(".account summary").click()
    page.locator(".cite").click()
    page.wait_for_selector("#drawer mark")
    found["chat"] = violations(page)
    page.keyboard.press("Escape")
    page.click(".folder .plain")
    page.wait_for_selector(".files li")
    found["folder"] = violations(page)
    page.keyboard.press("Escape")
    page.click("#open-settings")
    page.set_input_files("input.import", {"name": "x.json", "mimeType": "application/json", "buffer": b"{"})
    page.wait_for_selector("dialog .notice:not(:empty)")
    found["settings"] = violations(page)
    page.keyboard.press("Escape")
    page.click(".under >> text=System prompt")
    found["system prompt"] = violations(page)
    page.keyboard.press("Escape")
    page.click("[aria-label='Edit the answer']")
    found["edited answer"] = violations(page)
    page.keyboard.press("Escape")
    page.fill(".search", question.question.split()[-1])
    page.wait_for_selector(".sidebar h2:has-text('1 chat has')")
    found["search"] = violations(page)
    act(page, "Pin")
    page.wait_for_selector(".act >> text=Unpin")
    found["actions"] = violations(page)
    act(page, "Rename")
    found["name"] = violations(page)
    page.keyboard.press("Escape")
    page.fill(".search", "")
    page.wait_for_selector(".sidebar h2:text-is('Pinned')")
    found["pinned"] = violations(page)
    page.click("[aria-label='Remove from the chat']")
    page.wait_for_selector(".welcome")
    found["removed"] = violations(page)
    page.click("#deleted >> text=Take back")
    page.wait_for_selector(".turn")
    page.set_viewport_size({"width": 640, "height": 320})
    page.locator(".scroller").evaluate("one => one.scrollTo(0, 0)")
    page.wait_for_selector("[aria-label='To the end']:visible")
    found["scrolled up"] = violations(page)
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("#menu")
    found["menu"] = violations(page)
    act(page, "Delete")
    page.wait_for_selector("#deleted button")
    found["deleted"] = violations(page)
    page.click("#deleted button")
    page.keyboard.press("Escape")
    page.click("#to-live")
    page.locator(".run").first.click()
    found["live"] = violations(page)
    assert {name: broken for name, broken in found.items() if broken} == {}


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_screen(folder_index, open_page, corpus, size):
    width, height = SIZES[size]
    page = open_page(folder_index)
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_selector(".switch")
    check_width(page, width)
    question = corpus.questions[1]
    attach(page, {LONG: corpus.documents[question.document].text})
    say(page, f"The {LONG} is endless.")
    turn = ask(page, f"{question.question} {LONG} {'w' * 200}")
    turn.locator(".account summary").click()
    assert LONG in turn.locator(".sources").inner_text()
    check_width(page, width)
    turn.locator(".cite").click()
    page.wait_for_selector("#drawer .passage")
    check_width(page, width)
    page.keyboard.press("Escape")
    page.click(".folder .plain")
    page.wait_for_selector(".files li")
    check_width(page, width)
    page.keyboard.press("Escape")
    page.click("#to-live")
    page.wait_for_selector(".run")
    check_width(page, width)


def check_width(page, width):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(WIDER) == []


def test_all_of_it_works_by_the_keyboard(folder_index, open_page, corpus):
    page = open_page(folder_index)
    page.wait_for_selector(".switch")
    say(page, corpus.questions[2].answer)
    page.locator("body").click(position={"x": 5, "y": 400})
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type(corpus.questions[2].question)
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Copy the answer']")
    page.locator(".account summary").focus()
    page.keyboard.press("Enter")
    assert page.locator(".account[open]").count() == 1
    page.locator(".cite").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#drawer mark")
    assert page.evaluate("document.activeElement.ariaLabel") == "Close"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "text", "it can be scrolled"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "cite"
    page.focus("#to-live")
    page.keyboard.press("Enter")
    page.wait_for_selector(".run")
    page.locator(".run[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".about h3")
    assert page.locator(".run[aria-selected='true']").evaluate("one => one === document.activeElement")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".welcome")
    assert page.locator("#status").inner_text() == "The answer is complete."
