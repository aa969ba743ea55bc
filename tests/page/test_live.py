"""The live view: figures that move, slots, and a tree that names only the runs of this browser."""

from .conftest import ask, attach

SECRET = "The word of the other client is rhododendron. " * 8


def test_the_tree_names_this_browser_s_texts_and_no_other_s(server, open_page, corpus):
    question = corpus.questions[3]
    text = corpus.documents[question.document].text
    page = open_page(server)
    attach(page, {"Mine": text})
    ask(page, question.question)
    server.chat(messages=[{"role": "user", "content": "What is the word?"}], documents=[{"id": "secret", "text": SECRET}])
    page.click("#to-live")
    own = page.locator(".run[aria-label^='Mine']").first
    own.click()
    page.wait_for_selector(".about blockquote")
    reported = page.locator(".about").inner_text()
    assert text[:60] in reported and question.question in reported
    page.locator(".run[aria-label^='Another']").first.click()
    page.wait_for_function("() => document.querySelector('.about h3').textContent.includes('Another client')")
    assert "The server shows no text" in page.locator(".about").inner_text()
    assert "rhododendron" not in page.content() and "secret" not in page.locator(".tree").inner_text()


def test_figures_and_slots_move(server, open_page):
    page = open_page(server, "/#/live")
    page.wait_for_function("() => document.querySelectorAll('.slots tbody tr').length === 4")
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body | {"cache_prompt": True}):
        page.wait_for_selector(".slots [data-state=generating], .slots [data-state=prefill]")
        page.wait_for_function("() => Number(document.querySelectorAll('.chart strong')[1].textContent) > 0")
        page.wait_for_selector(".chart path.line[d^=M]", state="attached")
    tiers = page.locator(".tier").all_inner_texts()
    assert [text.split("\n")[0] for text in tiers] == ["Device", "Host memory", "Disk"] and " of " in tiers[2]


def test_a_scope_shows_only_its_own_runs(server, open_page):
    server.chat(content="Of the one scope.", cache_scope="one")
    server.chat(content="Of the common scope, and much longer than the other one is.")
    page = open_page(server)
    page.click("#open-settings")
    page.fill("#setting-scope", "one")
    page.click("text=Done")
    page.click("#to-live")
    page.wait_for_selector(".run")
    runs = server.http.get("/v1/cache", params={"scope": "one"}).json()["runs"]
    end = max(run["start"] + run["tokens"] for run in runs)
    labels = page.locator(".run").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert f" to {end}," in " ".join(labels) and "scope “one”" in page.locator(".cached").inner_text()


def test_the_tree_names_documents_of_the_folder_and_shows_their_text(folder_index, open_page, corpus):
    page = open_page(folder_index)
    page.wait_for_selector(".switch input:checked")
    ask(page, "Who is the mayor of Duncaster?")
    page.click("#to-live")
    page.locator(".run[aria-label^='Duncaster']").first.click()
    page.wait_for_selector(".about blockquote")
    assert corpus.documents["duncaster"].text[:60] in page.locator(".about").inner_text()
