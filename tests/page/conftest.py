"""The page in Debian's Chromium, against real servers. `make page-test` installs what that needs; else it is skipped."""

import json
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server.conftest import running, until
from slotcache.models.demo import FILE
from slotcache.models.demo.corpus import Corpus
from support.notes import is_ready, write
from support.office import REPORT, pdf

CHROMIUM = shutil.which("chromium")
AXE = Path(sys.prefix) / "package/axe.min.js"
DEADLINE = 120_000  # ms: only what never comes about takes as long, also on a busy machine
LAMPS = ("North Head", "Sundrift", "Marrow Point")
LIGHTS = "# Lighthouses\n\n" + "\n\n".join(
    f"## {name}\n\nThe lamp of {name} is {colour},\nand it turns once a minute. "
    + f"The keeper of {name} counts ships. " * 5
    for name, colour in zip(LAMPS, ("red", "green", "white"), strict=True)
)
READ = ".composer .chip[data-state=read]"
LONG = "a-name-that-is-long-and-has-no-space-in-it-" * 4


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no chromium")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox of its own: in a container it has no rights to make one. It opens nothing but this server.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with running(FILE, flash_attn="auto", idle_prefill=True, cache_dir=str(folder), predict=100) as up:
        yield up


@pytest.fixture(scope="session")
def corpus():
    return Corpus.load()


@pytest.fixture(scope="session")
def folder_index(browser, corpus, tmp_path_factory):
    """A server over a folder: the bundled documents, one of several parts, one with pages, one that cannot be read."""
    folder = corpus.write(tmp_path_factory.mktemp("folder"))
    write(folder, {"coast/lights.md": LIGHTS, f"{LONG}.md": f"# {LONG}\n\nThe {LONG} is endless."})
    (folder / "coast/report.pdf").write_bytes(pdf(REPORT)[0])
    (folder / "coast/broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    settings = {"docs": str(folder), "docs_db": str(tmp_path_factory.mktemp("db")), "docs_watch": False, "chunk_tokens": 64}
    with running(FILE, flash_attn="auto", idle_prefill=True, predict=100, **settings) as up:
        until(lambda: is_ready(up))
        yield up


@pytest.fixture
def open_page(browser):
    """A function that opens a server's page. At the end: no error in the console, and no request to another host."""
    watched = []

    def open_page(server, path="/", **context):
        page = browser.new_context(viewport={"width": 1280, "height": 860}, **context).new_page()
        page.set_default_timeout(DEADLINE)
        watch = Watch(page, urlsplit(server.url).netloc)
        watched.append(watch)
        page.goto(server.url + path)
        page.wait_for_selector("#question, .live")
        page.watch = watch
        return page

    yield open_page
    for watch in watched:
        watch.page.context.close()
        assert watch.errors == [] and watch.foreign == []


class Watch:
    """The errors of a page, and its requests to other hosts. expected: parts of errors that a test brings about."""

    def __init__(self, page, host):
        self.page, self.expected = page, ()
        self._errors, self.foreign = [], []
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: urlsplit(request.url).netloc == host or self.foreign.append(request.url))

    def _note(self, counts, text):
        if counts and "net::ERR_" not in text:  # a page looks again at a server that a test has ended before it
            self._errors.append(text)

    @property
    def errors(self):
        return [error for error in self._errors if not any(part in error for part in self.expected)]


def attach(page, documents):
    """Add documents as files, by the button, and wait until they are read."""
    before = page.locator(READ).count()
    files = [{"name": f"{name}.txt", "mimeType": "text/plain", "buffer": text.encode()} for name, text in documents.items()]
    page.set_input_files("input[type=file]", files)
    page.wait_for_function(f"n => document.querySelectorAll('{READ}').length === n", arg=before + len(files))


def ask(page, question):
    """Ask, and wait for the whole answer. Returns its turn."""
    before = page.locator(".turn").count()
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=before + 1)
    return ended(page)


def act(page, name, at=0):
    """Do something with a chat of the list, by its place there."""
    more = page.locator(".sidebar li > button.icon").nth(at)
    if more.get_attribute("aria-expanded") == "false":
        more.click()
    page.click(f".acts >> text='{name}'")


def say(page, text):
    """Have the model write a text as its next answers: a grammar allows no other one."""
    grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    added = {"grammar": grammar, "max_tokens": 4 * len(text) + 9}

    def send(route):
        route.continue_(post_data=json.dumps(route.request.post_data_json | added))

    page.route("**/v1/chat/completions", send)


def ended(page):
    """Wait for the end of the last answer. Returns its turn."""
    page.wait_for_selector(".turn:last-child .answer:not([aria-busy])", state="attached")
    page.wait_for_selector(".turn:last-child [aria-label='Copy the answer']")
    return page.locator(".turn").last


def figures(turn):
    """The tokens under an answer, by place."""
    texts = turn.locator("summary .figures span").all_inner_texts()
    found = {text.partition(" ")[2]: text.partition(" ")[0].replace(",", "") for text in texts}
    return {words: int(number) for words, number in found.items() if number.isdecimal() and "%" not in words}
