"""Text that wants to be a script: in answers, documents, names, places, reports. None of it runs, or asks another host."""

import pytest
from starlette.responses import JSONResponse
from starlette.routing import Route

from .conftest import ask, attach
from .stand_in import PROPS, standing_in

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
FOUND = {"id": NAME, "title": NAME, "path": NAME, "page": NAME, "score": 1.0}
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


@pytest.mark.parametrize("piece", [3, 100_000], ids=["streamed", "at once"])
def test_an_answer_never_runs(open_page, piece):
    with standing_in() as up:
        up.answer = tuple(WORST[at : at + piece] for at in range(0, len(WORST), piece))
        page = open_page(up)
        answer = ask(page, WORST).locator(".answer")
        assert f"<script>{RUN}</script>" in answer.inner_text(), "it is shown as the text that it is"
        assert answer.locator("a", has_text="a picture").get_attribute("href") == "https://evil.example/pixel.png"
        assert answer.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
        assert answer.locator("td").evaluate_all("all => all.map(one => one.className)") == ["center", "right"]
        check(page)
        page.reload()
        page.wait_for_selector(".turn")
        check(page)


def test_documents_and_their_names_never_run(server, open_page):
    page = open_page(server)
    attach(page, {NAME.replace("/", ""): WORST})
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


def test_what_a_server_tells_of_itself_never_runs(open_page):
    sources = {
        "collections": [{"path": NAME, "state": "ready", "questions": [NAME], "files": [{"path": NAME, "state": NAME}]}]
    }
    place = FOUND | {"text": WORST, "neighbours": [FOUND | {"text": WORST}]}
    routes = [
        Route("/v1/sources", lambda request: JSONResponse(sources)),
        Route("/v1/sources/{id:path}", lambda request: JSONResponse(place)),
    ]
    with standing_in(PROPS | {"model_alias": NAME, "ui_settings": {"sources": True}}, routes) as up:
        up.report = {
            "retrieved": [FOUND],
            "citations": [{"id": NAME, "start": 0, "stop": 3}, {"id": NAME, "start": 4, "stop": 9, "quote": True}],
            "miss": {"at": 1, "why": f"document {NAME} is not cached here: {NAME} differs"},
            "segments": [
                {"label": f"document {NAME}", "id": NAME, "tokens": 9, "cached_tokens": {NAME: 3}, "saved_ms": 1.0}
            ],
        }
        up.answer = ("Yes <b>it</b> is.",)
        page = open_page(up)
        page.wait_for_selector(".questions")
        check(page)
        turn = ask(page, NAME)
        assert turn.locator(".cite").count() == 2
        turn.locator(".account summary").click()
        turn.locator(".cite").first.click()
        page.wait_for_selector("#drawer .passage.here")
        check(page)
        page.keyboard.press("Escape")
        page.locator(".folder .plain").click()
        page.wait_for_selector("#drawer .files")
        check(page)


def test_the_policy_stops_what_slips_through(server, open_page):
    page = open_page(server)
    page.watch.expected = ("Content Security Policy", "TrustedHTML", "ERR_BLOCKED_BY_CSP", "violates")
    told = page.evaluate(
        """run => {
            try { document.body.innerHTML = `<img src=x onerror=${run}>`; } catch (error) { return error.name; }
        }""",
        RUN,
    )
    assert told == "TypeError"
    page.evaluate("fetch('http://evil.example/').catch(() => {})")
    page.evaluate("() => new Promise(done => setTimeout(done, 100))")
    page.watch.foreign.clear()  # the policy refused it: Playwright tells of it all the same
    assert page.evaluate("window.hacked ?? null") is None
