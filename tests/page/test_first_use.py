"""The first minute: `slotcache serve` without a flag, its page, and the questions that it suggests."""

import os
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import httpx
import pytest
from server.test_cli import command, free_port
from slotcache.models.demo.corpus import SUGGESTED

from .conftest import DEADLINE, ended, figures


@pytest.fixture(scope="module")
def fresh(browser, tmp_path_factory):
    """A server that a user has just started: a process with its own cache directory, on another port."""
    folder, port = tmp_path_factory.mktemp("cache"), free_port()
    process = subprocess.Popen(
        command("serve"), env=os.environ | {"XDG_CACHE_HOME": str(folder), "LLAMA_ARG_PORT": str(port)}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + DEADLINE / 1000
        while not is_up(url):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        yield SimpleNamespace(url=url)
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
