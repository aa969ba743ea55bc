"""Files that clients bring to a chat, over a real port: read, refused, searched, forgotten."""

import io
import shutil
import sqlite3
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from slotcache.models.demo import FILE
from slotcache.server.api import documents
from slotcache.server.search import attachments
from support.dialects import CHATS
from support.office import REPORT, assemble, docx, html, markdown, pdf

from server.conftest import DEADLINE, running, until

BOOK = (
    "\n\n".join(
        f"# Chapter {number}\n\n" + f"The keeper of lamp {number} counts ships and writes them down. " * 40
        for number in range(40)
    )
    + "\n\n# The crane\n\nThe old crane of the harbour lifts nine tons of granite.\n"
)
QUESTION = "How many tons of granite does the crane lift?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("db")
    with running(FILE, flash_attn="auto", docs_db=str(folder), parallel=2) as up:
        yield up
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"], "nothing is left of them"


def read(server, data, name="report.md", **query):
    return server.http.post("/v1/documents/read", params={"filename": name} | query, content=data)


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def kept(server, data: str | bytes = BOOK, name="book.md", **query):
    answer = read(server, data, name, search="auto", **query)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def chat(server, *ids, status=200, question=QUESTION, **fields):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    answer = server.http.post(
        "/v1/chat/completions", json=body | {"retrieval": {"documents": ids} | fields.pop("wish", {})} | fields
    )
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "name, make",
    [("report.md", markdown), ("report.html", html), ("report.docx", docx), ("report.pdf", lambda parts: pdf(parts)[0])],
    ids=["md", "html", "docx", "pdf"],
)
def test_a_file_becomes_text_in_parts_with_their_places(server, name, make):
    answer = read(server, make(REPORT), name).json()
    assert (answer["name"], answer["kind"], answer["id"]) == (name, name.partition(".")[2], None)
    assert answer["parts"][0]["title"] == "Harbour report"
    text = "\n\n".join(part["text"] for part in answer["parts"])
    assert "nine tons" in text and "The berth 7" in text
    assert answer["letters"] == sum(len(part["text"]) for part in answer["parts"])
    counted = [
        len(server.http.post("/tokenize", json={"content": part["text"]}).json()["tokens"]) for part in answer["parts"]
    ]
    assert answer["tokens"] == sum(counted)
    assert {part["page"] for part in answer["parts"]} == ({1, 2} if name.endswith("pdf") else {None})


def test_a_form_brings_a_file_too(server):
    files = {"purpose": (None, "assistants"), "file": ("Größe.txt", b"The moon raises two tides.\r\n--x\r\n")}
    answer = server.http.post("/v1/documents/read", files=files).json()
    assert (answer["name"], answer["parts"][0]["text"]) == ("Größe.txt", "The moon raises two tides.\n--x")
    assert error_of(server.http.post("/v1/documents/read", files={"other": ("a.txt", b"text")}), 400)["param"] == "file"
    kind = {"Content-Type": "multipart/form-data"}
    assert error_of(server.http.post("/v1/documents/read", content=b"x", headers=kind), 400)["param"] == "file"


FORM = {"Content-Type": "multipart/form-data; boundary=x"}
DISPOSITION = b"\r\n--x\r\nContent-Disposition: form-data; name="
FILE_FIELD = DISPOSITION + b'file; filename="a.txt"\r\n\r\n'


def test_the_last_field_of_a_form_that_is_read_ends_where_it_ends(server):
    body = (DISPOSITION + b"other\r\n\r\n1") * (documents.MOST_FIELDS - 1) + FILE_FIELD + b"The moon.\r\n--x--\r\n"
    answer = server.http.post("/v1/documents/read", content=body, headers=FORM)
    assert answer.json()["parts"][0]["text"] == "The moon."


def test_a_form_that_is_cut_within_its_file_is_refused(server):
    answer = server.http.post("/v1/documents/read", content=FILE_FIELD + b"The moon raises", headers=FORM)
    assert "ends within" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("name", [b"filename*=x\0''a", b"filename*" + b"9" * 5000 + b"=a"], ids=["nul", "number"])
def test_a_form_whose_file_has_an_odd_name_is_no_fault_of_the_server(server, name):
    body = DISPOSITION + b"file; " + name + b"\r\n\r\nThe moon.\r\n--x--\r\n"
    assert server.http.post("/v1/documents/read", content=body, headers=FORM).status_code in (200, 400)


@pytest.mark.parametrize("begin", [DISPOSITION + b"file", DISPOSITION + b'"', b"\r\n--x"], ids=["bare", "quoted", "lines"])
def test_the_head_of_a_field_costs_no_more_than_its_size(server, begin):
    """Python parses the parameters of a header in quadratic time: these took hours."""
    body = begin + (b"\r\n:" if begin.endswith(b"x") else b";") * (8 << 20) + b"\r\n\r\nThe moon.\r\n--x--\r\n"
    assert error_of(server.http.post("/v1/documents/read", content=body, headers=FORM), 400)["param"] == "file"


def test_what_is_left_out_is_counted(server):
    page = b"<html><body><nav>Home, all pages</nav><main><p>" + b"The text. " * 40 + b"</p></main></body></html>"
    assert read(server, page, "page.html").json()["left_out"]["navigation"] > 0


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\xff\xfe\xfd" * 9, "it is a picture"),
        ("report.pdf", b"%PDF-1.4 nothing", "it is not a PDF"),
        ("report.docx", b"nothing", "it is not a Word document"),
        ("empty.txt", b"", "it is empty"),
        ("blank.txt", b" \n ", "it has no text"),
        ("scan.pdf", assemble([""]), "ocrmypdf"),
    ],
    ids=["png", "pdf", "docx", "empty", "blank", "scan"],
)
def test_a_file_that_cannot_be_read_says_why(server, name, data, words):
    error = error_of(read(server, data, name), 400)
    assert error["code"] == "unreadable_file" and error["message"].startswith(name) and words in error["message"]


def test_requests_that_name_nothing_say_what_is_expected(server):
    assert error_of(server.http.post("/v1/documents/read", content=b"text"), 400)["param"] == "filename"
    assert error_of(read(server, b"text", search="perhaps"), 400)["param"] == "search"
    assert error_of(read(server, b"text", scope="s" * 300), 400)["param"] == "scope"
    assert error_of(server.http.get("/v1/documents/read"), 404)["code"] == "file_not_found"


def test_names_cannot_leave_their_folder_and_show_no_control_characters(server):
    for name, shown in {"../../etc/passwd": "passwd", "C:\\notes\\a.md": "a.md", "a\nb.md": "a\\nb.md", "..": ".."}.items():
        assert read(server, b"The text.", name).json()["name"] == shown


def test_a_bomb_ends_its_process_alone(server):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/document.xml", b"<w:t>" + b"a" * (200 << 20))
    assert "it unpacks to" in error_of(read(server, packed.getvalue(), "bomb.docx"), 400)["message"]
    assert read(server, b"The text.").status_code == 200


def test_a_file_that_takes_too_long_is_ended_and_others_do_not_wait_for_it(server, monkeypatch):
    monkeypatch.setattr(attachments, "QUICK", 0.3)
    monkeypatch.setattr(attachments, "MOST_SECONDS", 0.6)
    endless = (b"<div>" * 400 + b"a") * 4000
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(read, server, endless, "endless.html")
        assert read(server, b"The text.").status_code == 200
        assert "seconds to read" in error_of(slow.result(), 400)["message"]


def test_many_files_at_once_leave_a_chat_alone(server):
    with ThreadPoolExecutor(12) as threads:
        reads = [
            threads.submit(httpx.post, f"{server.url}/v1/documents/read?filename={n}.md", content=BOOK, timeout=DEADLINE)
            for n in range(12)
        ]
        assert server.chat("Hello?", max_tokens=8)["choices"]
        answers = [one.result() for one in reads]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert not server.host.attachments._waiting


def test_a_file_that_could_not_be_started_does_not_count_for_ever(server, monkeypatch):
    def fails(*given):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(server.host.attachments, "_write", fails)
        failed = read(server, b"The text.")
    assert failed.status_code == 500 and failed.headers["connection"] == "close"
    assert not server.host.attachments._waiting


def test_files_that_wait_have_bounds_and_a_client_may_have_half(server, monkeypatch):
    monkeypatch.setattr(attachments, "MOST_WAITING", 100)
    assert read(server, b"The text.").status_code == 200
    error = read(server, b"The text. " * 6)
    assert error_of(error, 503) and error.headers["retry-after"]


def test_a_file_whose_client_disconnects_is_not_read_to_its_end(server):
    before = server.host.attachments.num_read
    patience = httpx.Timeout(DEADLINE, read=0.02)
    with httpx.Client(base_url=server.url, timeout=patience) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/documents/read?filename=a.md", content=BOOK)
    until(lambda: not server.host.attachments._taken)
    assert server.host.attachments.num_read <= before + 1


def test_a_large_text_is_not_returned_but_kept(server, monkeypatch):
    monkeypatch.setattr(documents, "MOST_LETTERS", 1000)
    error = error_of(read(server, BOOK.encode()), 413)
    assert "search=auto" in error["message"] and error["param"] == "search"
    assert kept(server)


def test_a_small_file_is_returned_and_a_large_one_searched(server):
    assert read(server, b"The text.", search="auto").json()["parts"]
    assert read(server, b"The text.", search="always").json()["id"].startswith("file-")
    answer = read(server, BOOK.encode(), search="auto").json()
    assert answer["tokens"] > 8192 // 3 and "parts" not in answer
    shown = server.http.get(f"/v1/documents/{answer['id']}").json()
    assert shown == answer


def test_each_turn_gets_the_parts_that_answer_it(server):
    id = kept(server)
    report = chat(server, id)["slotcache"]
    first = report["retrieved"][0]
    assert "nine tons of granite" in first["text"] and (first["path"], first["file"]) == ("book.md", id)
    other = chat(server, id, question="What does the keeper of lamp 17 write?")["slotcache"]["retrieved"]
    assert "lamp 17" in other[0]["text"] and other[0]["id"] != first["id"]
    again = chat(server, id, cache_prompt=True)["slotcache"]
    assert again["retrieved"] == report["retrieved"]


def test_several_files_are_searched_together(server):
    tides = kept(server, b"# Tides\n\nThe moon raises two tides a day. " * 400, "tides.md")
    found = chat(server, kept(server), tides, question="granite of the crane, tides of the moon", wish={"top_k": 2})
    assert [hit["path"] for hit in found["slotcache"]["retrieved"]] == ["book.md", "tides.md"]


def test_what_is_left_out_of_a_file_for_its_score_is_counted(server):
    id = kept(server)
    found = len(chat(server, id, wish={"min_score": 0.0})["slotcache"]["retrieved"])
    report = chat(server, id, id, kept(server), wish={"min_score": 1e6})["slotcache"]
    assert (report["retrieved"], report["left_out"]) == ([], 2 * found)


def test_all_apis_search_them(server):
    id = kept(server)
    asked = {"retrieval": {"documents": [id]}}
    found = chat(server, id)["slotcache"]["retrieved"]
    for api in CHATS:
        answer = api.ask(server, QUESTION, most=8, model="slotcache-demo", stream=False, **asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["slotcache"]["retrieved"] == found, api
    message = {"messages": [{"role": "user", "content": QUESTION}]}
    bare, whole = (
        server.http.post("/v1/chat/completions/input_tokens", json=message | more).json()["input_tokens"]
        for more in ({}, asked)
    )
    assert whole > bare + 20, "the prompt has what was found"


def test_a_scope_sees_nothing_of_another_one_s_files(server):
    id = kept(server, scope="mine")
    assert chat(server, id, cache_scope="mine")["slotcache"]["retrieved"]
    error = chat(server, id, status=404)["error"]
    assert (error["code"], error["param"]) == ("file_not_found", "retrieval.documents[0]")
    for method in ("GET", "DELETE"):
        assert error_of(server.http.request(method, f"/v1/documents/{id}"), 404)["code"] == "file_not_found"
    assert server.http.delete(f"/v1/documents/{id}?scope=mine").json()["deleted"]
    chat(server, id, status=404, cache_scope="mine")


def test_an_id_that_is_not_kept_is_named_by_its_place(server):
    id = kept(server)
    assert chat(server, id, id, "file-none", status=404)["error"]["param"] == "retrieval.documents[2]"
    assert len(chat(server, id, id)["slotcache"]["retrieved"]) == len(chat(server, id)["slotcache"]["retrieved"])


def test_a_file_that_cannot_be_stored_leaves_nothing_and_the_next_one_is_read(tmp_path, monkeypatch):
    with running(FILE, flash_attn="auto", docs_db=str(tmp_path)) as server:
        mkdir = Path.mkdir

        def fails(path, *arguments, **named):
            if path.parent.name == "attached" or path.name.startswith("attached"):
                raise OSError(28, "No space left on device")
            return mkdir(path, *arguments, **named)

        def full(*arguments):
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", fails)
            assert "stored" in error_of(read(server, b"The text."), 503)["message"]
        assert read(server, b"The text.").status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(attachments, "Store", full)
            assert "full" in error_of(read(server, b"The text."), 503)["message"]
        place = server.host.attachments._place
        assert place is not None
        until(lambda: not [*place.iterdir()])
        shutil.rmtree(place)
        assert read(server, b"The text.").status_code == 200


def test_those_used_least_recently_are_evicted_first_and_a_scope_leaves_others_alone(server, monkeypatch):
    monkeypatch.setattr(attachments, "MOST_OF_SCOPE", 2)
    theirs = kept(server, scope="theirs")
    first, second = kept(server, scope="own"), kept(server, scope="own")
    chat(server, first, cache_scope="own")
    kept(server, scope="own")
    chat(server, second, status=404, cache_scope="own")
    chat(server, first, cache_scope="own")
    chat(server, theirs, cache_scope="theirs")
    monkeypatch.setattr(attachments, "SECONDS_KEPT", 0.0)
    chat(server, first, status=404, cache_scope="own")


def test_a_disk_that_is_full_takes_the_files_of_the_largest_scope(server, monkeypatch):
    small, *_ = kept(server, scope="small"), kept(server, scope="large"), kept(server, scope="large")
    most = sum(file.num_bytes for file in server.host.attachments._kept.values())
    monkeypatch.setattr(attachments, "MOST_KEPT", most)
    kept(server, scope="large")
    chat(server, small, cache_scope="small")


def test_a_wish_that_searches_nothing_is_refused(server):
    assert chat(server, status=400, wish={"folder": False})["error"]["param"] == "retrieval.folder"
    assert "--docs" in chat(server, kept(server), status=400, wish={"folder": True})["error"]["message"]
    assert chat(server, kept(server), status=400, wish={"paths": ["a"]})["error"]["param"] == "retrieval.folder"


def test_they_are_counted(server):
    kept(server)
    assert server.metric("slotcache_attached_files") == server.host.attachments.num_kept > 0
    before = server.metric("slotcache_attached_failed_total")
    read(server, b"")
    read(server, b"nothing", "a.pdf")
    assert server.metric("slotcache_attached_failed_total") == before + 1
    assert server.metric("slotcache_attached_read_total") and server.metric("slotcache_attached_searches_total")
