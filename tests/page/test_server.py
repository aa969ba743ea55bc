"""The page and its server: one that goes, comes back as another one, or wants a key."""

from urllib.parse import urlsplit

from server.conftest import running
from slotcache.models.demo import FILE
from support.notes import write


def test_the_page_notices_that_its_server_goes_and_comes_back_as_another_one(open_page, tmp_path):
    folder = write(tmp_path / "notes", {"tides.md": "# Tides\n\nThe moon raises two tides a day."})
    with running(FILE, alias="first", docs=str(folder), docs_db=str(tmp_path / "db")) as up:
        port = urlsplit(up.url).port
        page = open_page(up)
        page.wait_for_selector("#model:text-is('first')")
        page.wait_for_selector(".folder .plain:text-is('1 file')")
    page.wait_for_selector("#model:text-is('The server cannot be reached.')")
    page.watch.expected = ("503",)
    with running(FILE, alias="second", port=port):
        page.wait_for_selector("#model:text-is('second: another model than before, without its folder')")
        page.wait_for_selector(".folder", state="hidden")


def test_a_browser_may_install_the_page(server, open_page):
    page = open_page(server)
    browser = page.context.new_cdp_session(page)
    manifest = browser.send("Page.getAppManifest")
    assert manifest["errors"] == [] and manifest["url"] == f"{server.url}/page/app.webmanifest"
    found = browser.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {one["errorId"] for one in found} <= {"in-incognito"}, "Playwright's windows are such"


def test_a_lost_look_at_the_folder_is_made_again(folder_index, open_page):
    page = open_page(folder_index, path="/#/live")
    lost = []

    def lose(route):
        lost.append(route.request.url)
        route.abort() if len(lost) == 1 else route.continue_()

    page.route("**/v1/sources?*", lose)
    page.goto("about:blank")
    page.goto(folder_index.url)
    page.wait_for_selector(".folder .plain:visible")
    assert len(lost) > 1


def test_a_key_that_is_not_given_is_explained_and_asked_for_again(open_page):
    with running(FILE, api_key="the key") as up:
        page = open_page(up)
        page.watch.expected = ("401",)
        page.wait_for_selector("dialog:has-text('Without it you can read your chats, and ask nothing.')")
        page.click("dialog >> text=Cancel")
        page.wait_for_selector("#model:has-text('Without its key the server answers nothing.')")
        page.click("text=Enter the key")
        page.fill("#key", "the key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model:not(:has(button))")
