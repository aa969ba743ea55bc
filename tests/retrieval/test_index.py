"""An index follows its folder: new, edited, moved and removed files, hostile ones, and a kill at any moment."""

import asyncio
import doctest
import os
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from slotcache import retrieval
from slotcache.retrieval import FAILED, INDEXED, SKIPPED, Embedder, Index, Query
from slotcache.retrieval import index as index_module
from slotcache.retrieval import process as process_module
from support.office import Part, docx, html, markdown, package, pdf

from retrieval.manuals import MANUALS, sentences

KILLS = int(os.environ.get("SLOTCACHE_KILLS", "3"))  # `SLOTCACHE_KILLS=20` for the long net
XML = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>{}</w:body></w:document>'
LAUGHS = "<!DOCTYPE l [<!ENTITY a0 'ha'>{}]>".format("".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 10)))


class Counting:
    """An embedder that counts the texts it gets. A vector holds the numbers of some letters."""

    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += texts
        return np.array([[text.count(letter) for letter in "abcdefgh"] for text in texts], np.float32)


def chunks_of(index, path):
    last = index.store.files()[path].num_chunks
    numbers = index.store.numbers_at(path, 1, last)
    found = index.store.chunks(numbers)
    return [found[number] for number in numbers]


def test_the_example_of_the_package_works():
    assert doctest.testmod(retrieval).attempted > 5


def test_formats_of_a_folder(folder, make):
    for name, parts in MANUALS.items():
        (folder / f"{name}.md").write_bytes(markdown(parts))
        (folder / f"{name}.html").write_bytes(html(parts))
        (folder / f"{name}.docx").write_bytes(docx(parts))
        (folder / f"{name}.pdf").write_bytes(pdf(parts)[0])
    index = make()
    assert index.refresh() and not index.progress.files_left and index.progress.files == 12
    states = {file.state for file in index.store.files().values()}
    assert states == {INDEXED}
    counts = {path: file.num_chunks for path, file in index.store.files().items()}
    assert all(counts[f"{name}.md"] == counts[f"{name}.{kind}"] > 0 for name in MANUALS for kind in ("html", "docx", "pdf"))
    places = [place for chunk in chunks_of(index, "handbook.pdf") for place in chunk.places if place.path == "handbook.pdf"]
    assert [place.page for place in places] == sorted(place.page for place in places)
    assert {place.page for place in places} == set(range(1, 9))


def test_an_edit_embeds_one_or_two_chunks_and_leaves_the_ids_of_all_others(folder, make):
    embed, parts = Counting(), list(MANUALS["handbook"])
    path = folder / "handbook.md"
    path.write_bytes(markdown(parts))
    index = make(embed)
    index.refresh()
    before, count = [chunk.id for chunk in chunks_of(index, "handbook.md")], len(embed.texts)
    assert count == len(before) == index.progress.vectors == len(index.vectors)
    at = next(at for at, part in enumerate(parts) if part.kind == "p" and at > 20)
    parts[at] = Part("p", parts[at].text.replace("the", "some"))
    path.write_bytes(markdown(parts))
    index.refresh()
    after = [chunk.id for chunk in chunks_of(index, "handbook.md")]
    assert 1 <= len(embed.texts) - count <= 2
    assert len(set(before) & set(after)) == len(before) - (len(embed.texts) - count)
    assert len(index.vectors) == len(after)
    path.touch()
    (folder / "copy.md").write_bytes(markdown(parts))
    index.refresh()
    assert len(embed.texts) - count <= 2  # neither a new time nor a second place is a new text
    copies = [place.path for place in chunks_of(index, "copy.md")[0].places]
    assert copies == ["copy.md", "handbook.md"]
    path.unlink()
    index.refresh()
    assert list(index.store.files()) == ["copy.md"] and len(index.vectors) == len(after)
    (folder / "copy.md").unlink()
    index.refresh()
    assert index.store.num_chunks == 0 == len(index.vectors)


def test_an_index_is_kept_and_made_anew_for_another_model_or_size(folder, make):
    embed = Counting()
    (folder / "a.md").write_bytes(markdown(MANUALS["guide"]))
    make(embed).refresh()
    count = len(embed.texts)
    index = make(embed)
    assert len(index.vectors) == count and index.refresh() and len(embed.texts) == count
    index = make(embed, name="other")
    assert (len(index.vectors), index.progress.chunks) == (0, count)
    index.refresh()
    assert len(embed.texts) == 2 * count
    index = make(embed, name="other", chunk_tokens=100)
    assert index.progress.chunks == 0
    index.refresh()
    assert index.progress.chunks > count


def test_a_damaged_index_is_made_anew(folder, make, tmp_path):
    (folder / "a.txt").write_text("one")
    make().refresh()
    make().close()
    (tmp_path / "index.db").write_bytes(b"no database" * 1000)
    index = make()
    assert index.progress.chunks == 0 and index.refresh() and index.progress.chunks == 1
    assert (tmp_path / "index.db").stat().st_mode & 0o077 == 0


def test_an_index_that_was_removed_while_it_was_open_is_made_anew(folder, make, tmp_path):
    (folder / "a.txt").write_text("one")
    index = make(embed := Counting())
    index.refresh()
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    assert len(asyncio.run(index.search().hits(Query(text="one")))) == 1, "what was open can still be read"
    (folder / "b.txt").write_text("two")
    assert index.refresh() and (index.progress.chunks, index.progress.vectors) == (2, 2)
    assert len(embed.texts) == 3 and (tmp_path / "index.db").exists()
    assert make(embed).refresh() and len(embed.texts) == 3


def test_an_index_that_is_removed_between_two_files_is_made_anew_at_the_next_look(folder, make, tmp_path):
    (folder / "a.txt").write_text("one")
    index = make()
    (file,) = index.scan().changed
    (tmp_path / "index.db").unlink()
    with pytest.raises(sqlite3.OperationalError):
        index.read(file)
    assert not (tmp_path / "index.db").exists(), "no empty file that looks like an index"
    assert index.refresh() and index.progress.chunks == 1


def test_a_reader_that_was_killed_between_two_files_fails_none(folder, make):
    (folder / "a.txt").write_text("one")
    index = make()
    index.refresh()
    index.interrupt()
    (folder / "b.txt").write_text("two")
    os.waitid(os.P_PID, index._reader._process.pid, os.WEXITED | os.WNOWAIT)
    assert index.refresh() and {file.state for file in index.store.files().values()} == {INDEXED}


def test_hostile_files_have_reasons_and_do_not_stop_the_others(folder, make):
    files = {
        "bomb.docx": docx([], document=XML.format(" " * (66 << 20))),
        "laughs.docx": docx([], document=LAUGHS + XML.format("<w:p><w:r><w:t>&a9;</w:t></w:r></w:p>")),
        "lies.docx": package({"word/document.xml": XML.format("")}).replace(b"w:body", b"w:boby"),
        "broken.pdf": pdf([Part("p", "text")])[0][:300],
        "binary.txt": bytes(range(256)),
        "photo.jpg": b"\xff\xd8\xff\xe0\0\x10JFIF",
        "blank.md": b"\n \n",
        "deep.html": b"<div>" * 4_000 + b"deep text",
        "a.txt": b"a good one",
        "z.txt": b"another good one",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "link.txt").symlink_to("/etc/passwd")
    index = make()
    assert index.refresh()
    found = index.store.files()
    assert set(found) == {*files, "link.txt"}
    good = {"a.txt", "z.txt", "deep.html"}
    assert {path for path, file in found.items() if file.state == INDEXED} == good
    assert {path for path, file in found.items() if file.state == FAILED} == files.keys() - good
    assert found["link.txt"].state == SKIPPED
    assert all(file.reason for path, file in found.items() if path not in good)
    assert "unpacks to 66 MiB" in found["bomb.docx"].reason and "ocrmypdf" in found["photo.jpg"].reason
    assert "passwd" not in str(index.store.chunks(range(1, 20)))


def test_a_file_that_takes_too_long_ends_its_reader_alone(folder, make, monkeypatch):
    """A small file gets little time, whatever it unpacks to."""
    monkeypatch.setattr(index_module, "QUICK", 0.1)
    monkeypatch.setattr(process_module, "SECONDS", 0.2)
    many = docx([], document=XML.format("<w:p><w:r><w:t>a</w:t></w:r></w:p>" * 30_000))
    assert len(many) < 20_000
    (folder / "slow.docx").write_bytes(many)
    (folder / "large.html").write_bytes(b"<p>text</p>" * 60_000)
    index = make()
    assert index.refresh()
    assert "seconds to read" in index.store.files()["slow.docx"].reason
    assert index.store.files()["large.html"].state == INDEXED
    (folder / "z.txt").write_text("a good one")
    assert index.refresh() and index.store.files()["z.txt"].state == INDEXED


def test_files_that_take_long_are_read_after_all_others(folder, make, monkeypatch):
    monkeypatch.setattr(index_module, "QUICK", 0.1)
    (folder / "a.html").write_bytes(b"<p>text</p>" * 60_000)
    for name in ("b.txt", "c.txt"):
        (folder / name).write_text("a quick one")
    index, seen = make(), []
    assert index.refresh(lambda: not seen.append((index.progress.reading, [*index.store.files()])))
    assert [path for path, file in index.store.files().items() if file.state == INDEXED] == ["a.html", "b.txt", "c.txt"]
    assert ("a.html", ["b.txt", "c.txt"]) in seen and not index.progress.files_left


def test_work_waits_and_ends_between_small_steps(folder, make):
    embed = Counting()
    for number in range(4):
        (folder / f"{number}.md").write_bytes(markdown(MANUALS["handbook"][number:]))
    index, asked = make(embed), []

    def once():
        asked.append(index.progress)
        return len(asked) <= 2

    assert not index.refresh(once)
    assert index.progress.files_left >= 2 and index.progress.vectors == 0
    index.store.check()
    assert index.refresh(lambda: not asked.append(index.progress))
    assert index.progress.files_left == 0 and index.progress.vectors == index.progress.chunks
    assert max(after.vectors - before.vectors for before, after in pairwise(asked)) <= 8


def test_neighbours_of_a_chunk(folder, make):
    (folder / "a.md").write_bytes(markdown(MANUALS["handbook"]))
    index = make()
    index.refresh()
    ids = [chunk.id for chunk in chunks_of(index, "a.md")]
    assert [chunk.id for chunk in index.expand(ids[5], before=2, after=1)] == ids[3:7]
    assert [chunk.id for chunk in index.expand(ids[0])] == ids[:2]
    assert index.expand("0" * 10) == []


LOOK = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1])
print(*other.execute("select (select count(*) from file), (select count(*) from vector)").fetchone())
other.close()
"""


def test_another_process_that_looks_into_the_index_takes_nothing_along(folder, make, tmp_path):
    def look():
        command = [sys.executable, "-c", LOOK, str(tmp_path / "index.db")]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()

    (folder / "a.md").write_text("A document.")
    index = make(Counting())
    assert look() == ["0", "0"]
    assert index.refresh()
    assert look() == ["1", "1"]


KILLED = """
import sys
from pathlib import Path
import types
package = sys.modules["slotcache"] = types.ModuleType("slotcache")
package.__path__ = [sys.argv[3]]
import numpy as np
from slotcache.retrieval import Embedder, Index
def embed(texts):
    return np.ones((len(texts), 8), np.float32)
def step():
    print(flush=True)
    return True
index = Index([Path(sys.argv[1])], Path(sys.argv[2]), embedder=Embedder("letters", embed))
while True:
    index.refresh(step)
    for number, path in enumerate(sorted(Path(sys.argv[1]).iterdir())):
        path.write_text(path.read_text() + f"\\n\\nAnother paragraph, of round {number}.")
"""


@pytest.mark.timeout(900 + 20 * KILLS)
def test_a_killed_process_leaves_a_whole_index(folder, tmp_path):
    random, database = Random(time.time_ns()), tmp_path / "index.db"
    for number in range(30):
        text = "\n\n".join(f"# Part {part}\n\n{sentences(random, 30)}" for part in range(6))
        (folder / f"{number}.md").write_text(text)
    states = set()
    for _ in range(KILLS):
        command = [sys.executable, "-c", KILLED, str(folder), str(database), str(Path(retrieval.__path__[0]).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(random.randint(1, 60)):  # steps
            process.stdout.readline()
        time.sleep(random.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        index = Index([folder], database, embedder=Embedder("letters", Counting()))
        index.store.check()
        states.add((index.progress.vectors, *(file.digest for file in index.store.files().values())))
        index.close()
    index = Index([folder], database, embedder=Embedder("letters", Counting()))
    assert index.refresh()
    index.store.check()
    assert index.progress.vectors == index.progress.chunks and len(index.store.files()) == 30
    index.close()
    assert len(states) > 1 or KILLS < 3, "each kill came at the same moment"
