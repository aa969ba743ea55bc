"""Damaged and forged files, by the hundred: the server stays up, and no answer differs.

SLOTCACHE_MUTATIONS=10000 tries so many, with those of tests/models/test_mutated_models.py.
"""

import logging
import random

import pytest
from slotcache.server.engine.slot_files import Arrivals
from slotcache.server.load import provenance_of
from slotcache.slots.store.disk import DiskTier
from support.mutation import cases, forged, mutated

from server.api.test_slots import act
from server.conftest import running
from server.engine.test_disk import DOCUMENTS, files, read_all, settled

AT_ONCE = 8  # damaged files at a start, or one to restore from
BODY = {
    "messages": [{"role": "user", "content": "Who built it?"}],
    "documents": DOCUMENTS,
    "document_order": "retrieval",  # forged documents may change the order, which is no secret and no harm
    "max_tokens": 8,
}


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """The files of a prompt, as records and as a slot, and its answer."""
    folder, slots = tmp_path_factory.mktemp("kv"), tmp_path_factory.mktemp("slots")
    with running(tiny, cache_dir=str(folder), slot_save_path=str(slots), parallel=1) as up:
        answer = up.chat(**BODY)
        settled(up)
        assert act(up, "save", filename="whole").status_code == 200
    return [one.read_bytes() for one in files(folder)], (slots / "whole").read_bytes(), answer["choices"]


def brought_back(disk, arrivals):
    return sum([arrivals.adopt(record) for record in read_all(disk)])


@pytest.mark.timeout(3600)
def test_damaged_records_hurt_nobody(tiny, tmp_path, saved, caplog):
    caplog.set_level(logging.CRITICAL)
    records, _, expected = saved
    num_adopted = 0
    with running(tiny, parallel=1) as up:
        service = up.service
        made_by, arrivals = provenance_of(service.settings, service.model, service.context), Arrivals(service.engine)
        for number in range(-(-cases(240, 0.4) // AT_ONCE)):
            chance, root = random.Random(number), tmp_path / str(number)
            disk = DiskTier(root, 1 << 30, made_by)
            disk.close()
            for index, content in enumerate(records):
                if chance.random() < 0.5:
                    (disk.folder / f"{index:032x}.kv").write_bytes(content)
            for index in range(AT_ONCE):
                change = chance.choice((mutated, forged))
                (disk.folder / f"{index + 16:032x}.kv").write_bytes(change(chance.choice(records), chance))
            again = DiskTier(root, 1 << 30, made_by)
            num_adopted += brought_back(again, arrivals)
            assert up.chat(**BODY)["choices"] == expected, number
            again.close()
            assert up.http.delete("/v1/cache").status_code == 200
            for file in files(root):
                file.unlink()
    assert num_adopted > 10  # some of them were whole


@pytest.mark.timeout(3600)
def test_damaged_slots_hurt_nobody(tiny, tmp_path, saved, caplog):
    caplog.set_level(logging.CRITICAL)
    _, slot, expected = saved
    statuses = []
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        for number in range(cases(80, 0.3)):
            chance = random.Random(number)
            (tmp_path / "slot").write_bytes(mutated(slot, chance) if chance.random() < 0.7 else _forged_slot(slot, chance))
            statuses.append(act(up, "restore", filename="slot").status_code)
            assert up.chat(**BODY)["choices"] == expected, number
            assert up.http.delete("/v1/cache").status_code == 200
    assert set(statuses) == {200, 400} and statuses.count(400) > len(statuses) / 2


def _forged_slot(slot: bytes, chance: random.Random) -> bytes:
    """One of a slot's records forged, its size put right."""
    parts, at = [], 0
    while at < len(slot):
        size = int.from_bytes(slot[at : at + 8], "little")
        parts.append(slot[at + 8 : at + 8 + size])
        at += 8 + size
    chosen = chance.randrange(len(parts))
    parts[chosen] = forged(parts[chosen], chance)
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
