"""How answers are shown: formulas, code, tasks, footnotes. What is wrong or hostile stays text; copies work everywhere."""

import pytest

from .conftest import DEADLINE, ended
from .player import playing
from .test_access import violations
from .test_chat_list import bring, damaged

RUN = "window.hacked=1"
FORMULAS = {
    "$x^2$": "x2",
    r"\(\frac{a}{b}\)": "ab",
    r"$$\sum_{i=1}^n i$$": "∑i=1ni",
    "\\[\nx\n= 1\n\\]": "x=1",
    "$$\na\n- b\n+ c\n$$": "a−b+c",
    r"$\begin{aligned} a &= b \\ c &= d \end{aligned}$": "a=bc=d",
}
TEXTS = {
    "money": "It costs $5 and $10, or $5/$6.",
    "a shell": "It is in $HOME/$USER.",
    "one sign": "Only $5.",
    "no end": "The formula $x",
    "unknown": r"So $\nothing{x}$ is.",
    "a brace": "So $\\frac{1}{$ is.",
    "too large": f"So ${'x' * 3000}$ is.",
    "too deep": "So $" + r"\sqrt{" * 180 + "x" + "}" * 180 + "$ is.",
    "endless": r"So $\def\a{\a\a}\a$ is.",
    "blank": "So $$ $$ is.",
    "code": "`$x$`",
    "code across": "So $5 `a$b` is.",
    "block of code": "```\n$x$ and \\(y\\)\n```",
}
WORD = r"\(\text{%s}\)"
HOSTILE = {
    "href": rf"$\href{{javascript:{RUN}}}{{x}}$",
    "url": rf"$\url{{javascript:{RUN}}}$",
    "htmlData": rf"$\htmlData{{onclick={RUN}}}{{x}}$",
    "htmlStyle": r"$\htmlStyle{position:fixed}{x}$",
    "htmlClass": r"$\htmlClass{notice}{x}$",
    "htmlId": r"$\htmlId{question}{x}$",
    "class": r"$\class{notice}{x}$",
    "picture": r"$\includegraphics{https://evil.example/a.png}$",
    "mglyph": WORD % f"<mglyph><style><img src=x onerror={RUN}>",
    "mtext": f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    "annotation-xml": WORD % f"<annotation-xml encoding=text/html><img src=x onerror={RUN}></annotation-xml>",
    "svg": WORD % f"</mtext></math><svg><script>{RUN}</script></svg>",
    "label": r"$$x \label{question} \tag{main}$$",
    "unicode": rf"$\unicode{{x3c}}img src=x onerror={RUN}>$",
    "macro": rf"$\def\x{{\href{{javascript:{RUN}}}{{x}}}}\x$",
    "colour": r'$\color{red" onclick="window.hacked=1}{x}$',
    "far away": r"$\raisebox{-900em}{x} \kern{-900em} y \rule{900em}{900em}$",
    "code": f"```html\n<img src=x onerror={RUN}><script>{RUN}</script>\n```",
    "code's name": f'```js"><img/src=x/onerror={RUN}>\nlet a = 1;\n```',
    "footnote": f"a[^<img/src=x/onerror={RUN}>]\n\n[^<img/src=x/onerror={RUN}>]: b",
    "task": f"- [ ] <img src=x onerror={RUN}>",
}
FOREIGN = """() => {
    const known = new Set(`math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable
        mtr mtd mpadded mphantom mstyle menclose p span pre code div button ul li sup input br`.split(/\\s+/));
    const all = [...document.querySelectorAll(".answer *")];
    return {
        elements: all.map(one => one.localName).filter(name => !known.has(name)),
        attributes: all.flatMap(one => one.getAttributeNames())
            .filter(name => /^on|^(href|src|style|id|xlink:href|data-.*)$/.test(name)),
        classes: document.querySelectorAll(".answer .notice").length,
        hacked: window.hacked ?? null,
    };
}"""
PYTHON = "```python\ndef work(items):\n    return 'done'  # a comment\n```"
TASKS = "- [x] wash *the* cup\n- [ ] dry it\n- [y] no task"
NOTES = "A claim[^1] and another[^long].\n\nMore text.\n\n[^1]: It is so, $x$.\n[^long]: And so."


@pytest.fixture
def shown(open_page):
    """A function that shows an answer, and returns its page."""
    players = []

    def shown(text, **context):
        player = playing([text[at : at + 200] for at in range(0, len(text), 200)] if len(text) < 5000 else [text], 0)
        players.append(player)
        page = open_page(player.__enter__(), **context)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        ended(page)
        return page

    yield shown
    for player in players:
        player.__exit__(None, None, None)


def settled(page):
    """Wait until what waits for its library is drawn, or is known to stay text: a formula and a code behind it are."""
    page.wait_for_selector(".answer > p:last-child math")


@pytest.mark.parametrize("source", FORMULAS)
def test_formulas_are_drawn(shown, source):
    page = shown(f"So\n{source}")
    page.wait_for_selector(".answer math")
    drawn = page.locator(".answer math").text_content()
    assert "".join(drawn.split()).replace("\u2062", "") == FORMULAS[source]
    assert page.locator(".answer li").count() == 0, "a line of a formula is no point of a list"


@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_no_formula_stays_text(shown, kind):
    page = shown(f"{TEXTS[kind]}\n\n$z$")
    settled(page)
    assert page.locator(".answer math").count() == 1
    words = " ".join(TEXTS[kind].replace("`", "").split())
    assert words in " ".join(page.locator(".answer").text_content().split())


@pytest.mark.parametrize("kind", HOSTILE)
def test_formulas_and_code_never_run(shown, kind):
    page = shown(f"{HOSTILE[kind]}\n\n$z$")
    settled(page)
    assert page.evaluate(FOREIGN) == {"elements": [], "attributes": [], "classes": 0, "hacked": None}
    box = page.locator(".answer").bounding_box()
    assert box["height"] < 2000
    assert page.locator("#question").is_visible()


def test_a_formula_of_a_stream_is_drawn_once_it_is_whole(open_page):
    with playing(["$a$ ", *["word "] * 40, "$b", *[" more"] * 40, "$ end", *[" word"] * 200], 0.02) as up:
        page = open_page(up)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer[aria-busy] math")
        page.wait_for_function("() => document.querySelectorAll('.answer[aria-busy] math').length === 2")
        ended(page)
        assert page.locator(".answer math").count() == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("$", 10**6),
        ("\\(", 10**6),
        ("$$\n", 10**5),
        ("\\[\n", 10**5),
        ("$x$ ", 10**5),
        ("[^1]", 10**5),
        ("- [ ] a\n", 10**5),
    ],
)
def test_long_hostile_text_leaves_the_page_alive(shown, text, size):
    page = shown("[^1]: x\n\n" + text * (size // len(text)))
    page.fill("#question", "And now?")
    assert page.input_value("#question") == "And now?"


def test_a_formula_that_is_endless_costs_little(shown):
    worst = r"$\def\a{" + "x" * 900 + r"}\def\b{" + r"\a" * 60 + r"}" + r"\b" * 100 + "$\n\n"
    page = shown(worst * 20 + "$z$")
    settled(page)
    assert page.locator(".answer math").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_tasks_and_footnotes(shown, scheme):
    page = shown(f"{PYTHON}\n\n{TASKS}\n\n{NOTES}\n\n$$x = \\frac{{1}}{{2}}$$\n", color_scheme=scheme)
    page.wait_for_selector(".answer .hljs-keyword")
    page.wait_for_selector(".answer math")
    assert page.locator(".hljs-comment").inner_text() == "# a comment"
    boxes = page.locator(".answer input[type=checkbox]:disabled")
    assert [box.is_checked() for box in boxes.all()] == [True, False]
    assert page.get_by_role("checkbox", name="wash the cup").count() == 1
    page.get_by_role("button", name="Footnote 1", exact=True).click()
    assert page.evaluate("document.activeElement.className") == "footnote"
    assert "It is so" in page.evaluate("document.activeElement.textContent")
    page.get_by_role("button", name="Back to the text of footnote 1").click()
    assert page.evaluate("document.activeElement.ariaLabel") == "Footnote 1"
    assert violations(page) == []


def test_copies_work_without_a_secure_context_and_say_when_they_fail(shown):
    page = shown(f"So *it* is.\n\n{PYTHON}")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    code = PYTHON.removeprefix("```python\n").removesuffix("```")
    for name, text in (("Copy", code), ("Copy the answer", f"So *it* is.\n\n{PYTHON}")):
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_selector(".copied:text-is('Copied')")
        page.fill("#question", "")
        page.focus("#question")
        page.keyboard.press("Control+V")
        assert page.input_value("#question") == text
    page.evaluate("document.execCommand = () => false")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.wait_for_selector(".copied:has-text('does not let the page copy')")
    assert "does not let the page copy" in page.locator("#status").text_content()


def test_a_code_with_citations_is_copied_as_the_answer_has_it(server, open_page):
    page = open_page(server)
    code = "lamp = find[Lamps]\nlamp.light()"
    about = {"documents": [{"id": "Lamps", "text": "The lamp is green."}], "answer": f"```python\n{code}\n```"}
    bring(page, damaged(lambda file, chat, turn: turn.update(about)))
    page.wait_for_selector("#deleted:has-text('1 chat is imported.')")
    page.click(".sidebar li > a")
    page.wait_for_selector(".code .cite")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.wait_for_selector(".copied:text-is('Copied')")
    page.focus("#question")
    page.keyboard.press("Control+V")
    assert page.input_value("#question").rstrip() == code


def test_footnotes_in_a_list_are_footnotes_each_and_end_where_a_block_begins(shown):
    page = shown("A[^1] and B[^2].\n\n- [^1]: one\n- [^2]: two\n\n[^3]: three\n```js\nlet a = 1;\n```\n")
    assert page.locator(".answer li").count() == 2 and page.locator(".footnote").count() == 3
    assert page.locator(".answer sup").all_inner_texts() == ["1", "2"]
    assert page.locator(".code code").inner_text().strip() == "let a = 1;"


def test_an_answer_of_many_open_brackets_ends_at_once(shown):
    page = shown("```\n" + "[\n" * 500_000 + "```\n")
    page.fill("#question", "And now?")
    assert page.input_value("#question") == "And now?"


def test_an_answer_that_cannot_be_drawn_is_text_and_the_page_goes_on(open_page):
    with playing(["So **it** is. ", "Also CURSED.\n\n", "- the end"], 0.01) as up:
        page = open_page(up)
        page.evaluate("""() => {
            const parse = DOMParser.prototype.parseFromString;
            DOMParser.prototype.parseFromString = function (text, kind) {
                if (String(text).includes("CURSED")) throw new RangeError("cursed");
                return parse.call(this, text, kind);
            };
        }""")
        for turn in (1, 2):
            page.fill("#question", "Tell me.")
            page.keyboard.press("Enter")
            page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=turn)
            answer = ended(page).locator(".answer")
            assert "So **it** is. Also CURSED." in answer.text_content() and "the end" in answer.text_content()


def test_without_its_libraries_the_text_stays(open_page):
    with playing([f"So $x^2$ is.\n\n{PYTHON}"], 0) as up:
        page = open_page(up)
        lost = []
        page.route("**/vendor/{temml,highlight}.mjs", lambda route: (lost.append(route.request.url), route.abort()))
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        answer = ended(page).locator(".answer")
        page.wait_for_function("() => performance.getEntriesByType('resource').length > 0")
        assert "So $x^2$ is." in answer.text_content() and "def work" in answer.text_content()
        assert page.locator("[aria-label='Answer again']").is_enabled()


def test_the_page_is_small_and_has_nothing_from_elsewhere(open_page):
    with playing([f"So $x^2$ is.\n\n{PYTHON}"], 0) as up:
        page = open_page(up)
        sizes = {}
        page.on("response", lambda answer: "/page/" in answer.url and sizes.update({answer.url: len(answer.body())}))
        page.goto("about:blank")
        page.goto(up.url)
        page.wait_for_selector("#question")
        first = sum(sizes.values())
        assert not any("temml" in url or "highlight" in url for url in sizes)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        ended(page)
        page.wait_for_selector(".answer .hljs-keyword", timeout=DEADLINE)
        page.wait_for_selector(".answer math")
        assert any("temml" in url for url in sizes) and any("highlight" in url for url in sizes)
        assert 100_000 < first < 700_000 and sum(sizes.values()) < 1_000_000, sizes


ORDERED = {
    "retrieved": [
        {"id": "y", "title": "The sea"},
        {"id": "a", "title": "The lamp"},
        {"id": "b", "title": "The <b>port</b>"},
    ],
    "repeated": ["y"],
    "citations": [],
    "documents": [
        {"id": "z", "tokens": 9, "cached_tokens": 9, "rank": 1, "moved": False},  # of an earlier turn
        {"id": "y", "tokens": 9, "cached_tokens": 9, "rank": 2, "moved": False},  # likewise, and found again
        {"id": "b", "tokens": 9, "cached_tokens": 9, "rank": 3, "moved": True},
        {"id": "a", "tokens": 9, "cached_tokens": 0, "rank": 2, "moved": True},
    ],
}


@pytest.mark.parametrize(
    ("gained_ms", "reported"),
    [(412.3, "documents moved: 412 ms gained"), (1400.0, "1.4 s gained"), (0.0, ""), (-40.0, "")],
)
def test_an_order_that_saved_time_says_so_and_shows_the_ranks(open_page, gained_ms, reported):
    reordered = {"gained_tokens": 9, "gained_ms": gained_ms, "hint": "Most relevant: a"}
    with playing(["It is so."], 0, **ORDERED, reordered=reordered) as up:
        page = open_page(up)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        account = ended(page).locator(".account")
        summary = account.locator("summary").inner_text()
        assert reported in summary and ("documents moved" in summary) == bool(reported)
        assert not account.locator(".ranks").is_visible()
        account.locator("summary").click()
        wanted = "Documents in prompt order: “The <b>port</b>” (rank 3), “The lamp” (rank 2)."
        assert account.locator(".ranks").inner_text() == wanted


def test_documents_that_stand_in_rank_are_not_reported(open_page):
    with playing(["It is so."], 0, **ORDERED) as up:
        page = open_page(up)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        turn = ended(page)
        turn.locator(".account summary").click()
        assert turn.locator(".ranks").count() == 0 and "documents moved" not in turn.inner_text()
