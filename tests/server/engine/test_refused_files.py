"""A saved slot or a record that is refused changes nothing in the process that refuses it: not one bit of an answer.

Another engine was left with a part of a broken file in its cache, and answered from that.
"""

import os

import pytest
from slotcache.models import gate
from slotcache.server.load import provenance_of
from slotcache.slots.store import record_file
from support.architectures import hybrid, recurrent, windowed

from server.api.test_slots import act
from server.conftest import running, until
from server.engine.test_disk import cached, files

MILL, SEA = "Tell me of the old mill. " * 30, "What does the sea say at night? " * 24


@pytest.fixture(params=[None, hybrid, recurrent, windowed])
def model(request, tiny, tmp_path):
    return request.param(tmp_path / "model.gguf") if request.param else tiny


def answered(up, question, **fields):
    """The greedy answer with its most probable tokens: their probabilities are exact functions of the logits."""
    return up.chat(question, max_tokens=12, temperature=0, logprobs=True, top_logprobs=20, **fields)["choices"]


def state_of(record):
    return b"" if record.state is None else record.state.tobytes()


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]


def damages(content):
    """The file after a bit has tipped in each part of it, torn, grown, and with its parts in another order."""
    size = len(content)
    places = [0, 3, 8, 20, 60, *(size * part // 7 for part in range(1, 7)), size - 1]
    yield from (flipped(content, at) for at in places)
    yield from (content[:length] for length in (1, 7, 100, size // 2, size - 1))
    yield from (content + b"\0", content + content[:100], content[size // 2 :] + content[: size // 2])


def test_a_refused_slot_leaves_every_bit(model, tmp_path):
    slots = tmp_path / "slots"
    slots.mkdir()
    with running(model, slot_save_path=str(slots), parallel=1) as up:
        made_by = provenance_of(up.service.settings, up.service.model, up.service.context)

        def kept():
            """The KV and the states of what the slot ran last, as bytes."""
            assert act(up, "save", filename="kept").status_code == 200
            found = record_file.records(slots / "kept", made_by)
            return [(one.tokens.tobytes(), one.data.tobytes(), state_of(one)) for one in found]

        expected = {question: answered(up, question) for question in (SEA, MILL)}
        assert answered(up, MILL) == expected[MILL]  # the runs are cut as they stay from now on
        before, whole = kept(), (slots / "kept").read_bytes()
        assert sum(len(data) + len(state) for _, data, state in before) > 10_000
        num_refused = 0
        for damaged in damages(whole):
            (slots / "damaged").write_bytes(damaged)
            refused = act(up, "restore", filename="damaged")
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "filename"
            num_refused += 1
            assert answered(up, MILL) == expected[MILL] and kept() == before
        assert num_refused == 20
        for question in (SEA, MILL):
            assert answered(up, question) == answered(up, question, cache_prompt=False) == expected[question]
        (slots / "damaged").write_bytes(whole)
        assert act(up, "restore", filename="damaged").status_code == 200 and kept() == before
        assert answered(up, MILL) == expected[MILL]


def test_a_refused_record_leaves_every_bit(model, tmp_path):
    folder = tmp_path / "kv"
    with running(model, cache_dir=str(folder)) as up:
        expected = {question: answered(up, question) for question in (SEA, MILL)}
    whole = [file.read_bytes() for file in files(folder)]
    assert whole
    for number, (file, content) in enumerate(zip(files(folder), whole, strict=True)):
        size = len(content)
        file.write_bytes([flipped(content, size - 9), flipped(content, 60), content[: size // 2]][number % 3])
    with running(model, cache_dir=str(folder)) as up:
        for question in (SEA, MILL):
            assert up.chat(question, max_tokens=1)["slotcache"]["source"] != "disk"
            assert answered(up, question) == expected[question]
        found = up.metric("slotcache_disk_refused_files_total")
        (own, *_) = up.service.tiers
        for number, content in enumerate((flipped(whole[0], 60), whole[-1][:-1], b"")):  # as another server might leave them
            (own.folder / f"{number:032x}.kv").write_bytes(content)
            os.utime(own.folder, ns=(number + 1, number + 1))
            up.chat(f"Question {number}? {SEA}", max_tokens=1)  # it is written, and the folder looked through for that
            num_refused = found + number + 1
            until(lambda num=num_refused: up.metric("slotcache_disk_refused_files_total") == num)
            for question in (SEA, MILL):
                assert cached(up.chat(question, max_tokens=1)) > 0
                assert answered(up, question) == answered(up, question, cache_prompt=False) == expected[question]


def test_kv_of_another_build_is_not_used(tiny, tmp_path, monkeypatch):
    folder = str(tmp_path / "kv")
    with running(tiny, cache_dir=folder) as up:
        expected = answered(up, SEA)
    with running(tiny, cache_dir=folder) as up:
        assert up.chat(SEA, max_tokens=1)["slotcache"]["source"] == "disk"
    monkeypatch.setattr(gate, "identity", lambda: "another build's")
    with running(tiny, cache_dir=folder) as up:
        assert cached(up.chat(SEA, max_tokens=1)) == 0
        assert answered(up, SEA) == expected
