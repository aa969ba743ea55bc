"""Text that wants to be a script: in answers, documents, names, places, reports. None of it runs, or asks another host."""

import pytest
from server.conftest import running, until
from slotcache.models.demo import FILE
from support.notes import is_ready, write

from .conftest import ask, attach, say

RUN = "window.hacked=1"
HOSTILE = (
    f"<script>{RUN}</script>",
    f'<img src=x onerror="{RUN}">',
    f"<svg onload={RUN}></svg>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    "<style>body{display:none}</style><link rel=stylesheet href=//evil.example/a.css><base href=//evil.example/>",
    f'<form action="//evil.example"><button onclick="{RUN}">x</button></form>',
    f"[a link](javascript:{RUN})",
    f"[another](data:text/html,<script>{RUN}</script>)",
    f"<javascript:{RUN}>",
    "![a picture](https://evil.example/pixel.png)",
    f'![x](x" onerror="{RUN})',
    f'[t](https://example.com "x onmouseover={RUN}")',
    f"```html onload={RUN}\n<script>{RUN}</script>\n```",
    f"| a | b |\n|:-:|--:|\n| <b onclick={RUN}>x | `<script>{RUN}</script>` |",
    f"[ref]\n\n[ref]: javascript:{RUN}",
    f"<a href=jav&#x09;ascript:{RUN}>x</a> &lt;script&gt;{RUN}&lt;/script&gt;",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    "\ue0000\ue001 \ue00099\ue001 [1](\ue0000\ue001)",
    "[[[[[[" * 200 + "*" * 500 + "_" * 500 + "`" * 99,
)
WORST = "\n\n".join(HOSTILE)
NAME = f"<img src=x onerror={RUN}>"
QUOTED = "is green and turns once a minute"
OUTSIDE = """() => {
    const forbidden = "main :is(script, img, iframe, object, embed, form[action], base, link, style, meta, math)";
    const all = [...document.querySelectorAll("*")];
    const attributes = all.flatMap(one => [...one.attributes]);
    return {
        elements: [...document.querySelectorAll(forbidden)].map(one => one.outerHTML),
        handlers: attributes.filter(one => /^on|^srcdoc$|^formaction$/.test(one.name)).map(one => one.name),
        links: all.filter(one => one.closest("main") && one.hasAttribute("href"))
            .map(one => one.getAttribute("href")).filter(href => !/^(https?:|mailto:|#)/.test(href)),
        hacked: window.hacked ?? null,
        shown: getComputedStyle(document.body).display,
    };
}"""


def check(page):
    assert page.evaluate(OUTSIDE) == {"elements": [], "handlers": [], "links": [], "hacked": None, "shown": "grid"}


@pytest.fixture(scope="module")
def hostile(browser, tmp_path_factory):
    """A server whose name, folder, files, headings and texts want to be scripts."""
    folder = tmp_path_factory.mktemp("hostile") / NAME
    write(folder, {f"{NAME}.md": f"# {NAME}\n\nThe lamp {QUOTED}.\n\n{WORST}\n", f"{NAME}/{NAME}.txt": WORST})
    (folder / f"{NAME}.pdf").write_bytes(b"%PDF-1.4 nothing")
    settings = {"docs": str(folder), "docs_db": str(tmp_path_factory.mktemp("db")), "alias": NAME}
    with running(FILE, flash_attn="auto", idle_prefill=True, **settings) as up:
        until(lambda: is_ready(up))
        yield up


def test_an_answer_never_runs(server, open_page):
    page = open_page(server)
    say(page, WORST)
    answer = ask(page, WORST).locator(".answer")
    assert f"<script>{RUN}</script>" in answer.inner_text(), "it is shown as the text that it is"
    assert answer.locator("a", has_text="a picture").get_attribute("href") == "https://evil.example/pixel.png"
    assert answer.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert answer.locator("td").evaluate_all("all => all.map(one => one.className)") == ["center", "right"]
    check(page)
    page.reload()
    page.wait_for_selector(".turn")
    assert f"<script>{RUN}</script>" in page.locator(".answer").inner_text()
    check(page)


def test_documents_and_their_names_never_run(server, open_page):
    page = open_page(server)
    attach(page, {NAME.replace("/", ""): "\n\n".join(HOSTILE[:8]), f"large {NAME}".replace("/", ""): WORST * 4})
    assert "searched" in page.locator(".chip").last.inner_text()
    check(page)
    page.locator(".chip button").first.click()
    page.wait_for_selector("#drawer .passage")
    assert f"<script>{RUN}</script>" in page.locator("#drawer").inner_text()
    check(page)
    page.keyboard.press("Escape")
    page.click("#open-settings")
    page.fill("#setting-maxTokens", "8")
    page.click("text=Done")
    ask(page, "\n".join(HOSTILE[:6]))
    check(page)
    page.locator(".account summary").click()
    page.click("#to-live")
    page.wait_for_selector(".run")
    for run in page.locator(".run").all()[:4]:
        run.click()
    check(page)


def test_what_a_server_reports_of_itself_never_runs(hostile, open_page):
    page = open_page(hostile)
    page.wait_for_selector(".switch")
    assert page.locator("#model").inner_text() == NAME
    check(page)
    say(page, f"Yes <b>it</b> {QUOTED}.")
    turn = ask(page, "Which lamp is green and turns?")
    assert NAME in turn.locator(".sources").inner_text()
    turn.locator(".account summary").click()
    assert NAME in turn.locator(".account").inner_text()
    turn.locator(".cite").first.click()
    page.wait_for_selector("#drawer mark")
    assert NAME in page.locator("#drawer h2").inner_text() and NAME in page.locator("#drawer .where").inner_text()
    check(page)
    page.keyboard.press("Escape")
    shown = ""
    for source in turn.locator(".sources button, .read button").all():
        source.click()
        page.wait_for_selector("#drawer .passage.here")
        shown += page.locator("#drawer").inner_text()
        check(page)
        page.keyboard.press("Escape")
    assert f"<script>{RUN}</script>" in shown, "the texts of the files are shown as they are"
    page.locator(".folder .plain").click()
    page.wait_for_selector("#drawer .files li")
    assert {f"{NAME}.md", f"{NAME}.pdf", f"{NAME}/{NAME}.txt"} == set(
        page.locator(".files li span:first-child").all_inner_texts()
    )
    check(page)
    page.keyboard.press("Escape")
    page.click("#to-live")
    page.wait_for_selector(".run")
    for run in page.locator(".run").all()[:4]:
        run.click()
    page.wait_for_selector(".about h3")
    check(page)


def test_the_policy_stops_what_slips_through(server, open_page):
    page = open_page(server)
    page.watch.expected = ("Content Security Policy", "TrustedHTML", "ERR_BLOCKED_BY_CSP", "violates")
    reported = page.evaluate(
        """run => {
            try { document.body.innerHTML = `<img src=x onerror=${run}>`; } catch (error) { return error.name; }
        }""",
        RUN,
    )
    assert reported == "TypeError"
    page.evaluate("fetch('http://evil.example/').catch(() => {})")
    page.evaluate("() => new Promise(done => setTimeout(done, 100))")
    page.watch.foreign.clear()  # the policy refused it: Playwright tells of it all the same
    assert page.evaluate("window.hacked ?? null") is None
