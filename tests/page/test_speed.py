"""A stream of 2,000 tokens: the page stays responsive while it comes."""

import json

import pytest

from .conftest import ended
from .player import playing

LONGEST = 50  # ms of a task: longer ones count as long (W3C, Long Tasks)
TOKENS = 2000
PAUSE = 0.004  # s between two tokens: 250 a second
SECTION = """## A part, with **strong** words

A paragraph of some *length* with `code`, a [link](https://example.com/a) and the words that a paragraph has, so that it
takes more than a line on the screen of a reader.

- a point of a list
- another one, with `more code`

| name | value |
|---|---:|
| one | 1 |
| two | 22 |

```python
def work(items):
    return [item for item in items if item.is_ready]
```

"""


TEXTS = {
    "parts": SECTION * 40,
    "one list": "- a point of a long list\n" * 400,
    "one block of code": "```\n" + "a = b\n" * 1500,
}
TRICKY = """1. one

   still one
2. two

> a quote
goes on

Setext
======

[ref] and ![p](a.png)

$$
x
- y
$$

A note[^1] and $x$, and $5.

- [x] done

[ref]: https://a.b

[^1]: It is so.
"""


def long_tasks(trace):
    """The ms of the processor that each long task of the page's main thread took, from a trace.

    Not of the clock: beside other work on the same cores any task may be long by that.
    """
    events = json.loads(trace)["traceEvents"]
    mains = {(event["pid"], event["tid"]) for event in events if event.get("args", {}).get("name") == "CrRendererMain"}
    tasks = [event for event in events if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in mains]
    assert len(tasks) > 100
    return [event["tdur"] / 1000 for event in tasks if event.get("tdur", 0) / 1000 > LONGEST]


@pytest.mark.parametrize("kind", TEXTS)
def test_no_task_is_long_while_a_stream_plays(browser, open_page, kind):
    pieces = [TEXTS[kind][at : at + 4] for at in range(0, TOKENS * 4, 4)]
    with playing(pieces, PAUSE) as up:
        page = open_page(up)
        page.fill("#question", "Tell me.")
        browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer[aria-busy]", state="attached")
        shown = ended(page).locator(".answer").inner_text()
        assert len(shown) > len("".join(pieces)) / 2
        assert long_tasks(browser.stop_tracing()) == []


def test_a_drawn_stream_is_what_the_whole_text_gives(open_page):
    with playing(SECTION + TRICKY, 0.001) as up:
        page = open_page(up)
        page.fill("#question", "Tell me.")
        page.keyboard.press("Enter")
        ended(page)
        page.wait_for_selector(".hljs-keyword")
        page.wait_for_selector("math")
        elements = "all => all.map(one => one.innerHTML)"
        streamed = page.locator(".answer").evaluate_all(elements)
        page.reload()
        page.wait_for_selector(".hljs-keyword")
        page.wait_for_selector("math")
        assert page.locator(".answer").evaluate_all(elements) == streamed
