"""The first minute: `slotcache serve` without a flag, its page, the questions that it suggests, and the README's picture."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from server.conftest import free_port, until
from server.test_cli import ROOT, command
from slotcache.models.demo.corpus import SUGGESTED
from support.notes import is_ready

from .conftest import DEADLINE, ask, ended, figures

WEIGHTS = Path(os.environ.get("SLOTCACHE_WEIGHTS", ".")) / "smollm2.gguf"
PICTURE = os.environ.get("SLOTCACHE_PICTURE")  # a file that the README's picture is written to


@pytest.fixture(scope="module")
def fresh(browser, tmp_path_factory):
    """A server that a user has just started."""
    with started(tmp_path_factory.mktemp("cache")) as up:
        yield up


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[SimpleNamespace]:
    """`slotcache serve` with these arguments: a process with its own cache directory, on another port."""
    port = free_port()
    process = subprocess.Popen(
        command("serve", *arguments), env=os.environ | {"XDG_CACHE_HOME": str(folder), "LLAMA_ARG_PORT": str(port)}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + DEADLINE / 1000
        while not is_up(url):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        with httpx.Client(base_url=url) as http:
            yield SimpleNamespace(url=url, http=http)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def is_up(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def offered(page):
    """The questions that the page offers now."""
    return page.locator(".questions button:visible").all_inner_texts()


def asked(page, question):
    before = page.locator(".turn").count()
    page.click(f".questions >> text={question}")
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=before + 1)
    return ended(page)


def words(text):
    return re.findall(r"\w+", text.casefold())


def check_citations(page, turn):
    """Each citation opens a document of the folder, at words that the answer has."""
    answer = turn.locator(".answer").inner_text()
    cites = turn.locator(".cite")
    assert cites.count() >= 1, answer
    for cite in cites.all():
        cite.click()
        page.wait_for_selector("#drawer mark")
        quoted = words(page.locator("#drawer mark").inner_text())
        assert " ".join(quoted) in " ".join(words(answer)) and len(quoted) >= 5
        assert page.locator("#drawer .where").inner_text().endswith(".md")
        page.keyboard.press("Escape")


@pytest.mark.parametrize("question", SUGGESTED)
def test_each_suggested_question_is_answered_with_its_source(fresh, open_page, question):
    page = open_page(fresh)
    page.wait_for_selector(".questions button")
    assert offered(page) == list(SUGGESTED)
    check_citations(page, asked(page, question))


def test_they_are_answered_in_one_chat_and_reuse_what_was_read(fresh, open_page):
    page = open_page(fresh)
    page.wait_for_selector(".questions button")
    for at, question in enumerate(SUGGESTED):
        turn = asked(page, question)
        check_citations(page, turn)
        assert offered(page) == list(SUGGESTED[at + 1 :])
        if at:
            cost = figures(turn)
            assert sum(cost.values()) > 2 * cost["computed"]


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="SLOTCACHE_WEIGHTS names no folder with smollm2.gguf")
def test_the_picture_of_the_readme_is_what_its_command_shows(browser, open_page, tmp_path):
    with started(tmp_path, "-m", str(WEIGHTS), "--docs", str(ROOT / "examples/notes"), "--temp", "0") as up:
        until(lambda: is_ready(up))
        page = open_page(up, device_scale_factor=1.5)
        page.set_viewport_size({"width": 1120, "height": 640})
        page.wait_for_selector(".switch input:checked")
        ask(page, "Where are the winter tyres stored?")
        turn = ask(page, "What is the guest network called?")
        assert "Heron" in turn.locator(".answer").inner_text()
        check_citations(page, turn)
        cost = figures(turn)
        assert cost["on the device"] > cost["computed"]
        turn.locator(".cite").first.click()
        page.wait_for_selector("#drawer mark")
        if PICTURE:
            page.screenshot(path=PICTURE)
