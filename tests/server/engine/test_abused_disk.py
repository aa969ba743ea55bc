"""A disk that is full, read-only, taken away or stands still while the server runs: the same answers, and none waits for it.

`python tests/abused_disk.py` times slow disks.
"""

import errno
import os
import shutil

import pytest
from support.abused import abused

from server.conftest import running
from server.engine.test_disk import cached, files
from server.engine.test_fetching import PROMPTS, SMALL, ask, tokens_of, written


def ask_all(up):
    answers = []
    for number in range(len(PROMPTS)):
        answers.append(ask(up, number))
        written(up)
    return answers


def texts(answers):
    return [one["choices"] for one in answers]


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    yield
    assert not [record.message for record in caplog.records if record.exc_info]


def test_requests_compute_what_a_disk_that_stands_still_has(tiny, tmp_path, monkeypatch):
    with abused(monkeypatch) as tiers, running(tiny, cache_dir=str(tmp_path), **SMALL) as up:
        first = ask_all(up)
        (tier,), fetches = tiers, up.service.engine.fetches
        hits, fetches.least = fetches.num_hits, 0.05
        tier.gate.clear()
        assert texts([ask(up, number) for number in range(len(PROMPTS))]) == texts(first)
        assert tier.num_reads > 0 and fetches.num_given_up > 0 and fetches.num_hits == hits
        tier.gate.set()


def test_a_folder_that_is_taken_away_costs_what_was_in_it(tiny, tmp_path):
    folder = tmp_path / "kv"
    with running(tiny, cache_dir=str(folder), **SMALL) as up:
        first = ask_all(up)
        folder.rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)  # the server may be about to write into it
        assert texts(ask_all(up)) == texts(first)
        folder.mkdir(mode=0o700)
        assert texts(ask_all(up)) == texts(first) and files(folder)
        again = ask_all(up)
        assert texts(again) == texts(first) and sum(map(cached, again)) >= 0.9 * tokens_of(first)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_kv_that_a_disk_does_not_take_is_counted_as_lost(tiny, tmp_path, monkeypatch, caplog, reason):
    sync, fails = os.fsync, True

    def fsync(number):
        if fails:
            raise OSError(reason, os.strerror(reason))
        sync(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with running(tiny, cache_dir=str(tmp_path), **SMALL) as up:
        first = ask_all(up)
        lost = up.metric("slotcache_lost_tokens_total")
        assert lost > 0 and not files(tmp_path) and caplog.text.count("the cache goes on without") == 1
        fails = False
        assert texts(ask_all(up)) == texts(first) and files(tmp_path) and "can write to" in caplog.text
        lost = up.metric("slotcache_lost_tokens_total")
        assert texts(ask_all(up)) == texts(first) and up.metric("slotcache_lost_tokens_total") == lost
