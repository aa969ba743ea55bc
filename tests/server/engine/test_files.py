"""Files are not trusted: their owners, their content, and the rights of their folders are checked."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gguf
import msgspec
import numpy as np
import pytest
from slotcache.slots.record import Record, file_name
from slotcache.slots.scope import Scope
from slotcache.slots.store.disk import DiskTier
from slotcache.slots.store.private_folder import FolderError
from slotcache.slots.store.record_file import FORMAT, Provenance
from support.record_files import resealed, split

from server.api.test_slots import LONG, act
from server.conftest import running, until
from server.engine.test_disk import BODY, HERE, cached, files, read_all, settled

THERE = Provenance("2" * 32, "3" * 32)


def with_other_weights(model, path, tensor="blk.1.ffn_down.weight"):
    """A model that differs in a few bytes of one tensor."""
    path.write_bytes(model.read_bytes())
    found = next(one for one in gguf.GGUFReader(path).tensors if one.name == tensor)
    content = bytearray(path.read_bytes())
    for at in range(found.data_offset + 2, found.data_offset + 34):
        content[at] ^= 0x55
    path.write_bytes(content)
    return path


def test_another_model_does_not_take_the_kv_of_the_first(tiny, tmp_path):
    other, folder, slots = with_other_weights(tiny, tmp_path / "other.gguf"), tmp_path / "kv", tmp_path / "slots"
    settings = {"cache_dir": str(folder), "slot_save_path": str(slots), "parallel": 1}
    with running(tiny, **settings) as up:
        up.chat(**LONG)
        act(up, "save", filename="mill")
    with running(other, **settings) as up:
        until(lambda: up.service.tiers[0].idle)
        fresh = up.chat(**LONG | {"cache_prompt": False})
        refused = act(up, "restore", filename="mill")
        assert refused.status_code == 400 and "of another model" in refused.text
        again = up.chat(**LONG)
        assert cached(again) == 0 and again["choices"] == fresh["choices"]


def test_a_slot_of_other_settings_is_refused(tiny, tmp_path):
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        up.chat(**LONG)
        act(up, "save", filename="mill")
    with running(tiny, slot_save_path=str(tmp_path), parallel=1, flash_attn="on") as up:
        refused = act(up, "restore", filename="mill")
        assert refused.status_code == 400 and "with other settings" in refused.text


ODD_VALUES = [
    ("scope", 5),
    ("scope", "s" * 5000),
    ("start", -1),
    ("start", "0"),
    ("start", 1 << 40),
    ("tokens", 0),
    ("tokens", 1 << 62),
    ("frequency", "many"),
    ("frequency", None),
    ("token_cost", "dear"),
    ("documents", 3),
    ("documents", [["k"]]),
    ("documents", [["k", 1 << 20]]),
    ("documents", {"k": 1}),
]
HEADS = {
    "a list": lambda head: b"[]",
    "not JSON": lambda head: b"{{{{",
    "not text": lambda head: b"\xff\xfe" * 40,
    "nested": lambda head: b"[" * 200_000,
    "an unknown field": lambda head: msgspec.json.encode(head | {"more": 1}),
    **{f"no {name}": lambda head, name=name: msgspec.json.encode({k: v for k, v in head.items() if k != name})
       for name in ("scope", "start", "tokens", "documents", "frequency")},
    **{f"{name} {value!r}": lambda head, name=name, value=value: msgspec.json.encode(head | {name: value})
       for name, value in ODD_VALUES},
}  # fmt: skip


def test_heads_that_are_none_are_a_warning_each_and_the_rest_comes_back(tiny, tmp_path, caplog):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        up.chat(**BODY)
        settled(up)
    whole = files(tmp_path)
    prefix = next(one for one in whole if split(one)["start"] == 0)
    damaged = [prefix.with_name(f"{number:032x}.kv") for number in range(len(HEADS))]
    for path, head in zip(damaged, HEADS.values(), strict=True):
        path.write_bytes(resealed(prefix.read_bytes(), head(split(prefix))))
    with running(tiny, cache_dir=str(tmp_path)) as up:
        until(lambda: up.metric("slotcache_disk_refused_files_total") == len(HEADS))
        assert cached(up.chat(**BODY)) > 100
    assert files(tmp_path) == whole
    assert sum("is not used" in one.message for one in caplog.records) == len(HEADS)


def path_of(number, *sizes):
    """Return the records of a path that begins with `number`; sizes: the tokens of each."""
    tokens = np.concatenate([[number], np.arange(sum(sizes) - 1) + 1000 * number]).astype(np.int32)
    ends = np.cumsum(sizes)
    return [Record(Scope.shared("s"), tokens[:end], int(end - size), np.zeros(1000, np.uint8))
            for end, size in zip(ends, sizes, strict=True)]  # fmt: skip


def written(disk, *records):
    for record in records:
        disk.put(record)
        until(lambda: disk.idle)


def on_disk(root):
    return {one.name for one in files(root)}


def test_a_full_disk_keeps_the_prefixes_on_which_others_stand(tmp_path):
    shared, first = path_of(1, 100, 50)
    disk = DiskTier(tmp_path, 7000, HERE)
    written(disk, shared, first)
    for number in range(2, 20):
        question = np.concatenate([shared.tokens, np.full(30, number, np.int32)])
        written(disk, Record(shared.scope, question, 100, np.zeros(1000, np.uint8)))
        assert disk.num_bytes <= 7000 and file_name(shared) in on_disk(tmp_path)
    assert file_name(first) not in on_disk(tmp_path)
    disk.close()
    again = DiskTier(tmp_path, 4000, HERE)  # a smaller bound, and the order is known from the files alone
    until(lambda: again.idle)
    kept = on_disk(tmp_path)
    assert again.num_bytes <= 4000 and file_name(shared) in kept and len(kept) >= 2
    again.close()


def test_a_prefix_is_kept_though_it_was_written_as_a_longer_run(tmp_path):
    """A run that was split later has no file of its own: a run on its first part stands on its file."""
    (whole,) = path_of(1, 100)
    branch = Record(whole.scope, np.concatenate([whole.tokens[:40], np.full(9, 7, np.int32)]), 40, np.zeros(1000, np.uint8))
    others = [path_of(number, 10)[0] for number in range(2, 6)]
    disk = DiskTier(tmp_path, 7000, HERE)
    written(disk, *[whole, others[0], branch, *others[1:3]])
    assert on_disk(tmp_path) == {file_name(one) for one in (whole, branch, *others[1:3])}
    written(disk, others[3])
    assert on_disk(tmp_path) == {file_name(one) for one in (whole, *others[1:])}
    disk.close()


def test_after_a_restart_what_a_full_disk_kept_is_found(tiny, tmp_path):
    def asking(number):
        return BODY | {"messages": [{"role": "user", "content": f"Question {number}: who built it? " * 6}]}

    with running(tiny, cache_dir=str(tmp_path), cache_disk=1) as up:
        for number in range(30):
            up.chat(**asking(number))
            settled(up)
        (disk,) = up.service.tiers
        assert disk.num_bytes <= 1 << 20 < disk.num_written * 30_000
    with running(tiny, cache_dir=str(tmp_path), cache_disk=1) as up:
        until(lambda: up.service.tiers[0].idle)
        answer = up.chat(**asking(99))
        assert answer["slotcache"]["source"] == "disk" and cached(answer) > 150


def test_folders_of_other_settings_are_under_the_same_bound(tmp_path):
    one = DiskTier(tmp_path, 6000, THERE)
    written(one, *path_of(1, *[10] * 4))
    other = DiskTier(tmp_path, 6000, HERE)
    written(other, *path_of(1, 10, 10, 10))
    total = sum(file.stat().st_size for file in files(tmp_path))
    assert total == other.num_bytes <= 6000
    left = [file for file in files(tmp_path) if file.parent == one.folder]
    assert {file.name for file in left} < {file_name(record) for record in path_of(1, *[10] * 4)[:3]}
    written(one, *path_of(2, 10))  # it still writes, though files of it are gone
    assert one.num_written == 5
    for number in range(3, 9):
        written(other, *path_of(number, 10))
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 6000
    for disk in (one, other):
        disk.close()


def test_files_of_an_earlier_format_are_one_line_and_evicted_first(tmp_path, caplog):
    caplog.set_level("INFO")
    older = tmp_path / HERE.folder_of(FORMAT - 1)
    older.mkdir(mode=0o700)
    for number in range(3):
        (older / f"{number:032x}.kv").write_bytes(b"slotcache KV 2\n" + bytes(1500))
    disk = DiskTier(tmp_path, 6000, HERE)
    written(disk, *path_of(1, 10, 10, 10))
    assert len(on_disk(tmp_path) & {file_name(one) for one in path_of(1, 10, 10, 10)}) == 3
    assert len(files(tmp_path)) < 6 and disk.num_refused == 0 and disk.num_bytes <= 6000
    assert [one.message for one in caplog.records if "earlier format" in one.message and str(older) in one.message]
    disk.close()


def test_what_one_server_drops_another_one_on_the_folder_has_dropped(tmp_path):
    one, other = DiskTier(tmp_path, 1 << 20, HERE), DiskTier(tmp_path, 1 << 20, HERE)
    beside = DiskTier(tmp_path, 1 << 20, THERE)
    written(one, *path_of(1, 10))
    written(other, *path_of(2, 10))
    written(beside, *path_of(3, 10))
    kept = Record(Scope.shared("keep"), np.arange(9, dtype=np.int32), 0, np.zeros(10, np.uint8))
    written(other, kept)
    assert one.drop(Scope.shared("s"))
    assert on_disk(tmp_path) == {file_name(kept)}
    assert len(read_all(other)) == 1
    assert other.num_refused == 0
    for disk in (one, other, beside):
        disk.close()


def test_what_one_server_drops_is_in_no_index_of_another_one(tmp_path):
    one, other = DiskTier(tmp_path, 1 << 20, HERE), DiskTier(tmp_path, 1 << 20, HERE)
    (dropped,) = path_of(1, 10)
    kept = Record(Scope.shared("keep"), np.arange(9, dtype=np.int32), 0, np.zeros(10, np.uint8))
    written(other, dropped, kept)
    assert one.drop(Scope.shared("s"))
    for disk in (one, other):
        disk.close()
    (index,) = tmp_path.glob("*/records.index")
    assert kept.tokens.tobytes() in index.read_bytes() and dropped.tokens.tobytes() not in index.read_bytes()


def test_a_server_takes_nothing_from_under_another_ones_hands(tmp_path):
    one = DiskTier(tmp_path, 1 << 20, HERE)
    half = one.folder / "of-another-server.tmp"
    half.write_bytes(b"half")
    DiskTier(tmp_path, 1 << 20, HERE).close()
    assert half.exists()
    os.utime(half, (0, 0))
    DiskTier(tmp_path, 1 << 20, HERE).close()
    assert not half.exists()
    one.close()


def at_once(call):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, (0, 1)))


def test_two_saves_to_one_name_leave_one_of_both(tiny, tmp_path):
    with running(tiny, slot_save_path=str(tmp_path), parallel=2) as up:
        at_once(lambda number: up.chat(f"{number}. " * 40, max_tokens=32))
        sizes = {act(up, "save", number, filename=f"alone{number}").json()["n_written"] for number in (0, 1)}
        for _ in range(20):
            answers = at_once(lambda number: act(up, "save", number, filename="both"))
            assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
            assert (tmp_path / "both").stat().st_size in sizes
            assert act(up, "restore", filename="both").status_code == 200
        assert {one.name for one in tmp_path.iterdir()} == {"both", "alone0", "alone1"}
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("setting", ["cache_dir", "slot_save_path", "docs_db"])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_refused(tiny, tmp_path, setting, mode):
    from slotcache.server.config.settings import Settings
    from slotcache.server.load import load

    docs = tmp_path / "docs"
    docs.mkdir()
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FolderError, match=r"other users may write to it.*chmod go-w"):
        load(replace(Settings(), docs=str(docs), **{setting: str(folder)}), tiny)
    assert not [*folder.iterdir()]


def test_a_folder_that_is_not_there_is_made_for_its_owner_alone(tmp_path):
    before = os.umask(0o002)
    try:
        disk = DiskTier(tmp_path / "a" / "kv", 1 << 20, HERE)
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (disk.folder, disk.folder.parent)] == [0o700, 0o700]
    disk.close()


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000, "a\nb", ""])
@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_name_that_no_file_can_have_is_refused(tiny, tmp_path, name, action, server_with_slots):
    answer = act(server_with_slots, action, filename=name)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "filename", answer.text


@pytest.fixture(scope="module")
def server_with_slots(tiny, tmp_path_factory):
    with running(tiny, slot_save_path=str(tmp_path_factory.mktemp("slots"))) as up:
        yield up
