"""The disk answers misses while the server runs, with host memory for a part of what is on it."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.architectures import hybrid

from server.conftest import REST, running, until
from server.engine.test_disk import BODY, cached, files, settled

PROMPTS = [f"Question {number}: {' '.join(f'word{number * at % 97}' for at in range(90))}?" for number in range(12)]
SMALL = {"ctx_size": 2048, "parallel": 2, "cache_ram": 1}


def ask(up, number):
    return up.chat(PROMPTS[number], max_tokens=4)


def written(up):
    """Wait until the copies are on disk."""
    until(lambda: up.service.engine.inbox.ask(lambda: not up.service.engine.scheduler.index.host.unsaved).result())
    until(lambda: all(tier.idle for tier in up.service.tiers))


def tokens_of(answers):
    return sum(one["usage"]["prompt_tokens"] - REST for one in answers)


@pytest.mark.parametrize("at_once", [1, 6])
def test_prompts_that_host_memory_has_lost_come_back_from_disk(tiny, tmp_path, at_once):
    with running(tiny, cache_dir=str(tmp_path), **SMALL) as up, ThreadPoolExecutor(at_once) as pool:
        first = []
        for number in range(len(PROMPTS)):
            first.append(ask(up, number))
            written(up)
        for number in range(8):  # these take the cells, so that the others are on disk: cells are copied when they are freed
            up.chat(f"Filler {number}: {' '.join(f'word{(number + 50) * at % 97}' for at in range(90))}?", max_tokens=4)
            written(up)
        host = up.service.engine.scheduler.index.host
        assert host.num_tokens < tokens_of(first) / 2, "host memory holds them all"
        again = list(pool.map(lambda number: ask(up, number), range(len(PROMPTS))))
        assert sum(map(cached, again)) >= 0.95 * tokens_of(first)
        assert [one["choices"] for one in again] == [one["choices"] for one in first]
        from_disk = [one["slotcache"] for one in again if one["slotcache"]["source"] == "disk"]
        assert len(from_disk) > 4 and all(one["fetch_ms"] > 0 for one in from_disk)
        assert up.metric("slotcache_fetches_total") >= len(from_disk)
        assert up.metric("slotcache_fetched_bytes_total") > 0 and up.metric("slotcache_fetches_given_up_total") == 0
        until(lambda: up.metric("slotcache_host_bytes") <= up.metric("slotcache_host_budget_bytes"))


def test_states_that_host_memory_has_lost_come_back_from_disk(tmp_path):
    model = hybrid(tmp_path / "model.gguf")
    with running(model, cache_dir=str(tmp_path / "kv"), **SMALL) as up:
        first = []
        for number in range(len(PROMPTS)):
            first.append(ask(up, number))
            written(up)
        again = [ask(up, number) for number in range(len(PROMPTS))]
        assert [one["choices"] for one in again] == [one["choices"] for one in first]
        sources = [one["slotcache"]["source"] for one in again]
        assert sources.count("disk") > len(PROMPTS) / 2 and set(sources) <= {"disk", "snapshot"}, (
            "which stays is a cost's choice"
        )


def test_files_that_are_damaged_while_the_server_runs_are_found_out_and_change_no_answer(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path), **SMALL) as up:
        first = []
        for number in range(len(PROMPTS)):
            first.append(ask(up, number))
            written(up)
        for file in files(tmp_path):
            about, content = file.stat(), file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            os.utime(file, ns=(about.st_mtime_ns, about.st_mtime_ns))
        again = [ask(up, number) for number in range(len(PROMPTS))]
        assert [one["choices"] for one in again] == [one["choices"] for one in first]
        assert up.metric("slotcache_disk_refused_files_total") >= len(PROMPTS)


def test_a_start_reads_the_index_and_only_the_heads_that_are_not_in_it(tiny, tmp_path, monkeypatch):
    from slotcache.slots.store import disk

    with running(tiny, cache_dir=str(tmp_path)) as up:
        first = [ask(up, number) for number in range(4)]
    heads = []
    read_path = disk.read_path
    monkeypatch.setattr(disk, "read_path", lambda *file: heads.append(1) or read_path(*file))
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = [ask(up, number) for number in range(4)]
    assert not heads and [cached(one) for one in again] == [one["usage"]["prompt_tokens"] - REST for one in first]
    next(tmp_path.glob("*/records.index")).write_bytes(b"junk")
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = [ask(up, number) for number in range(4)]
    assert len(heads) == len(files(tmp_path)) and all(one["slotcache"]["source"] == "disk" for one in again)


def test_a_dropped_scope_is_gone_from_the_index_on_disk_too(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        ask(up, 0)
    assert list(tmp_path.glob("*/records.index"))
    with running(tiny, cache_dir=str(tmp_path)) as up:
        up.http.delete("/v1/cache", params={"scope": ""})
        assert not list(tmp_path.glob("*/records.index")) and not files(tmp_path)


def test_a_damaged_file_in_the_middle_of_a_prompt_costs_its_own_tokens(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        first = up.chat(**BODY)
        settled(up)
        (tier,) = up.service.tiers
        entry = sorted(tier.index.entries.values(), key=lambda entry: entry.start)[1]
        damaged, hole = tier.folder / entry.key, (entry.start, entry.stop)
    about, content = damaged.stat(), damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(damaged, ns=(about.st_mtime_ns, about.st_mtime_ns))
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "disk" and again["slotcache"]["miss"]["at"] == hole[0]
        assert cached(again) == tokens_of([first]) - max(hole[1] - hole[0], REST)
        assert again["choices"] == first["choices"]
        assert up.metric("slotcache_disk_refused_files_total") == 1 and up.metric("slotcache_lost_tokens_total") == 0
    with running(tiny, cache_dir=str(tmp_path)) as up:
        assert cached(up.chat(**BODY)) == tokens_of([first]), "the hole was not written again"
