"""The menu of several models: what is in memory, and which one is asked."""

import pytest
from server.service.test_models import sharing
from slotcache.bench.random_models import SHAPES, generate

from .conftest import ask


@pytest.fixture(scope="module")
def several(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("menu")
    files = [generate(folder / f"{name}.gguf", SHAPES["tiny"], seed=seed) for seed, name in enumerate("ab", 21)]
    (folder / "docs").mkdir()
    (folder / "docs/one.md").write_text("# One\n\nThe lamp is red.")
    docs = {"docs": str(folder / "docs"), "docs_db": str(folder / "db"), "docs_watch": False}
    with sharing(files, predict=8, **docs) as up:
        yield up


def shown(page):
    return page.locator(".models option").all_inner_texts()


def test_the_menu_shows_what_is_in_memory_and_chooses_who_answers(several, open_page):
    page = open_page(several)
    page.wait_for_selector(".models:visible")
    page.wait_for_selector(".folder:visible")
    assert shown(page) == ["a · in memory", "b"] and page.locator("#model").inner_text() == ""
    page.select_option(".models", "b")
    assert page.locator(".folder:visible").count() == 0  # it belongs to the first one
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is it?")
    assert sent.value.post_data_json["model"] == "b"
    page.wait_for_function("() => document.querySelector('.models').textContent === 'ab · in memory'")
    page.reload()
    page.wait_for_selector(".models:visible")
    assert page.locator(".models").input_value() == "b"
    page.select_option(".models", "a")
    with page.expect_request("**/v1/chat/completions") as sent:
        turn = ask(page, "And now?")
    assert sent.value.post_data_json["model"] == "a" and turn.locator(".answer").count() == 1
    page.wait_for_function("() => document.querySelector('.models').textContent === 'a · in memoryb'")


def test_a_server_of_one_model_has_no_menu(server, open_page):
    page = open_page(server)
    page.wait_for_function("() => document.getElementById('model').textContent")
    assert page.locator(".models").is_hidden()
