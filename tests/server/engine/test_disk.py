"""The cache outlives the server: real restarts, damaged files, full disks."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from slotcache.slots.radix import descendants
from slotcache.slots.record import Record
from slotcache.slots.scope import Scope
from slotcache.slots.store import disk as disks
from slotcache.slots.store.disk import DiskTier
from slotcache.slots.store.private_folder import FolderError
from slotcache.slots.store.record_file import Provenance
from support.architectures import delta, hybrid, mamba2, recurrent, windowed

from server.conftest import DEADLINE, REST, cached, running, until

HERE = Provenance("0" * 32, "1" * 32)
DOCUMENTS = [{"id": f"k{number}", "text": f"Page {number} tells of the {name} and of those who built it. " * 4} for
             number, name in enumerate(["canal", "school", "castle"])]  # fmt: skip
BODY = {"messages": [{"role": "user", "content": "Who built it?"}], "documents": DOCUMENTS, "max_tokens": 12}


def files(folder):
    return sorted(folder.glob("*/*.kv"))


def read_all(disk):
    """All records of a tier that can be read, beginnings first."""
    disk.wait()
    entries = sorted(disk.index.entries.values(), key=lambda entry: entry.start)
    return [record for entry in entries if (record := disk.get(entry.key))]


def settled(server):
    """Wait until all idle KV is on disk that is worth a copy: of a device, scattered answers may not be."""
    engine = server.service.engine
    tree = engine.scheduler.tree

    def is_saved():
        runs = [node for root in tree.roots.values() for node in descendants(root)]
        return (
            engine.scheduler.idle
            and runs
            and all(node.copy or not tree.copies.pays(node) for node in runs)
            and not tree.host.unsaved
        )

    until(lambda: engine.inbox.ask(is_saved).result())
    until(lambda: all(tier.idle for tier in server.service.tiers))


@pytest.mark.parametrize("generate", [None, windowed])
def test_a_restart_finds_what_was_computed_and_answers_the_same(generate, tiny, tmp_path):
    path = generate(tmp_path / "model.gguf") if generate else tiny
    with running(path, cache_dir=str(tmp_path)) as up:
        first = up.chat(**BODY)
        assert cached(first) == 0
    assert files(tmp_path)
    with running(path, cache_dir=str(tmp_path)) as up:
        shuffled = up.chat(**BODY | {"documents": [DOCUMENTS[2], *DOCUMENTS[:2]]})
        assert [one["id"] for one in shuffled["slotcache"]["documents"]] == ["k0", "k1", "k2"]
        assert shuffled["slotcache"]["source"] == "disk"
        again = up.chat(**BODY)
        assert cached(again) == again["usage"]["prompt_tokens"] - REST
        assert again["choices"] == first["choices"]
        assert cached(up.chat(**BODY | {"cache_scope": "another"})) == 0
        assert up.metric("slotcache_cached_tokens_total", source="disk") > 100


def test_kv_of_requests_that_ran_together_outlives_a_restart_too(tiny, tmp_path, caplog):
    """Each stands in cells that others have left, in any order of its positions."""
    questions = [f"Question {number}: {' and '.join(['who built it?'] * (1 + 5 * number % 7))}" for number in range(24)]

    def ask(up, number):
        return up.chat(questions[number], max_tokens=4 + 7 * number % 40)

    with running(tiny, cache_dir=str(tmp_path)) as up, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(up, number), range(len(questions))))
        settled(up)
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = [ask(up, number) for number in range(len(questions))]
    assert [cached(one) for one in again] == [one["usage"]["prompt_tokens"] - REST for one in answers]
    assert "does not fit" not in caplog.text


@pytest.mark.parametrize("generate", [recurrent, hybrid, delta, mamba2])
def test_snapshots_of_models_that_cannot_be_cut_outlive_the_server_too(generate, tmp_path):
    path, folder = generate(tmp_path / "model.gguf"), tmp_path / "kv"
    with running(path, cache_dir=str(folder)) as up:
        first = up.chat(**BODY)
        up.chat(**BODY | {"messages": [{"role": "user", "content": "Which one is the oldest?"}], "cache_prompt": False})
    written = files(folder)
    assert written
    with running(path, cache_dir=str(folder)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "disk"
        assert again["timings"]["prompt_n"] < 60 < again["timings"]["cache_n"]
        assert again["choices"] == first["choices"]
        assert cached(up.chat(**BODY | {"cache_scope": "another"})) == 0
    assert set(files(folder)) >= set(written)


def test_only_the_owner_may_read_it_and_no_name_reports_anything(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path / "kv")) as up:
        up.chat(**BODY | {"cache_scope": "../../etc/passwd"})
        settled(up)
    found = files(tmp_path / "kv")
    assert found and {one.stat().st_mode & 0o777 for one in found} == {0o600}
    assert {one.parent.stat().st_mode & 0o777 for one in found} == {0o700}
    assert all("passwd" not in str(one) for one in tmp_path.rglob("*"))


def test_what_is_not_to_be_cached_is_not_written(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        up.chat(**BODY | {"cache_prompt": False})
    assert not files(tmp_path)


def test_other_settings_do_not_find_it(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        up.chat(**BODY)
    with running(tiny, cache_dir=str(tmp_path), cache_type_k="q8_0") as up:
        assert cached(up.chat(**BODY)) == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "swapped"])
def test_damaged_files_are_refused_and_the_server_goes_on(tiny, tmp_path, damage):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        first = up.chat(**BODY)
    found = files(tmp_path)
    contents = [one.read_bytes() for one in found]
    for one, content, other in zip(found, contents, contents[1:] + contents[:1], strict=True):
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        foreign = b"something else altogether " * 100
        one.write_bytes(
            {"cut": content[:half], "flipped": flipped, "foreign": foreign, "empty": b"", "swapped": other}[damage]
        )
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = up.chat(**BODY)  # swapped: each file is whole, under the name of another one: names are not trusted
        assert (cached(again) > 0) == (damage == "swapped")
        assert again["choices"] == first["choices"]


def test_a_dropped_scope_is_gone_from_disk_too(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        for scope in ("drop", "keep"):
            up.chat(**BODY | {"cache_scope": scope})
        settled(up)
        before = len(files(tmp_path))
        up.http.delete("/v1/cache", params={"scope": "drop"})
        assert len(files(tmp_path)) == before / 2
    with running(tiny, cache_dir=str(tmp_path)) as up:
        assert cached(up.chat(**BODY | {"cache_scope": "drop"})) == 0
        assert cached(up.chat(**BODY | {"cache_scope": "keep"})) > 100


def test_a_budget_of_nothing_keeps_nothing(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path), cache_disk=0) as up:
        up.chat(**BODY)
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="expected a folder to write to"):
        DiskTier(tmp_path / "file" / "kv", 1 << 20, HERE)


def record(number, size=1000):
    tokens = np.arange(number, number + 10, dtype=np.int32)
    return Record(Scope.shared("s"), tokens, 0, np.full(size, number, np.uint8))


def test_a_file_that_is_damaged_when_it_is_read_is_not_counted_any_more(tmp_path):
    disk = DiskTier(tmp_path, 1 << 20, HERE)
    for number in range(3):
        disk.put(record(100 * number))
    disk.close()
    bad = files(tmp_path)[1]
    content = bad.read_bytes()
    bad.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = DiskTier(tmp_path, 1 << 20, HERE)
    assert len(read_all(again)) == 2 and again.num_refused == 1
    assert again.num_bytes == sum(file.stat().st_size for file in files(tmp_path)) and bad.name not in again
    again.close()


def test_a_folder_that_cannot_be_listed_once_ends_no_writing(tmp_path, monkeypatch):
    disk, failed = DiskTier(tmp_path, 1 << 20, HERE), []
    names = disks.names

    def fail_once(folder):
        if not failed:
            failed.append(folder)
            raise OSError(errno.EMFILE, "Too many open files")
        return names(folder)

    disk.wait()
    monkeypatch.setattr(disks, "names", fail_once)
    for number in (1, 2):
        disk.put(record(number))
        until(lambda: disk.idle)
    assert failed and len(files(tmp_path)) == 2 and disk.drop(Scope.shared("s")) and not files(tmp_path)
    disk.close()


def test_the_budget_holds_and_the_oldest_are_evicted(tmp_path):
    disk = DiskTier(tmp_path, 5000, HERE)
    for number in range(8):
        disk.put(record(number))
    disk.close()
    again = DiskTier(tmp_path, 5000, HERE)
    found = [int(one.data[0]) for one in read_all(again)]
    assert sorted(found) == [4, 5, 6, 7] or sorted(found) == [5, 6, 7]
    assert again.num_bytes == sum(one.stat().st_size for one in files(tmp_path)) <= 5000
    again.close()


@pytest.mark.parametrize("has_index", [True, False])
def test_a_file_of_the_future_is_evicted_before_what_is_used_later(tmp_path, has_index):
    disk = DiskTier(tmp_path, 1 << 20, HERE)
    for number in range(3):
        disk.put(record(number))
    disk.close()
    far = time.time_ns() + 10**18
    for file in files(tmp_path):
        os.utime(file, ns=(far, far))
    if not has_index:
        next(tmp_path.glob("*/records.index")).unlink()
    again = DiskTier(tmp_path, 4 * files(tmp_path)[0].stat().st_size, HERE)
    for number in range(100, 104):
        again.put(record(number))
    until(lambda: again.idle)
    assert sorted(int(one.data[0]) for one in read_all(again)) == [100, 101, 102, 103]
    again.close()


def test_what_is_dropped_is_not_read_any_more(tmp_path):
    disk = DiskTier(tmp_path, 1 << 20, HERE)
    for number in range(3):
        disk.put(record(number))
    until(lambda: disk.idle)
    keys = list(disk.index.entries)
    assert all(key in disk for key in keys) and disk.drop(Scope.shared("s"))
    assert not any(key in disk or disk.get(key) for key in keys) and disk.num_refused == 0 and not files(tmp_path)
    disk.close()


def test_a_full_disk_ends_nothing(tmp_path):
    """A limit on the size of files is as near to a full disk as a test comes: writing fails half-way."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from server.engine.test_disk import HERE, record\n"
        "from slotcache.slots.store.disk import DiskTier\n"
        "disk = DiskTier(Path(sys.argv[1]), 1 << 30, HERE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "for one in (record(1), record(2, 9000), record(3)): disk.put(one)\n"
        "disk.close(); print(disk.num_written)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, 'tests'); import conftest\n" + code, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert done.stdout.strip() == "2"
    assert "cannot write" in done.stderr and "can write" in done.stderr
    assert len(files(tmp_path)) == 2 and not list(tmp_path.glob("*/*.tmp"))


@pytest.mark.parametrize("generate", [None, mamba2])
def test_a_sudden_kill_loses_at_most_what_was_not_written(tiny, tmp_path, generate):
    model = generate(tmp_path / "model.gguf") if generate else tiny
    first, second = (_killed_after(model, tmp_path / "kv") for _ in range(2))
    assert cached(first) == 0 and cached(second) > 100
    assert first["choices"] == second["choices"]


def _killed_after(model, folder):
    """One chat of a server, as soon as it is up, that is killed as soon as something is on disk."""
    port = _free_port()
    command = [sys.executable, "-m", "slotcache.server.cli", "serve", "-m", str(model), "--port", str(port)]
    flags = ["-fa", "off", "-t", "1", "-c", "4096", "--cache-dir", str(folder)]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as http:
            until(lambda: _healthy(http))
            body = BODY | {"temperature": 0, "cache_prompt": True, "ignore_eos": True}
            answer = http.post("/v1/chat/completions", json=body).json()
            until(lambda: len(files(folder)) >= 4)
        return answer
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(http):
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
