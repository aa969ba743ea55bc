"""Runs that leave as records and come back: bit for bit the KV of a fresh prefill, or no KV at all."""

import io

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.errors import RunnerError
from slotcache.models.model import Model
from slotcache.slots.plan import HostCopy, Snap
from slotcache.slots.record import Record, file_name
from slotcache.slots.reuse import Source
from slotcache.slots.scope import Scope
from slotcache.slots.store.fetches import Fetches
from slotcache.slots.store.record_file import CorruptFile, ForeignFile, Provenance, encode, read
from support.architectures import windowed
from support.lab import Lab
from support.on_device import same_answers
from support.remote import Remote

SCOPE = Scope.shared("a scope")
HERE = Provenance("0" * 32, "1" * 32)


@pytest.fixture(scope="module", params=["dense", "windowed"])
def model(request, tiny, tmp_path_factory):
    """Return a model: with the window nearly every token of these runs is behind it."""
    is_dense = request.param == "dense"
    model = Model(tiny if is_dense else windowed(tmp_path_factory.mktemp("models") / "windowed.gguf"))
    yield model
    model.close()


def lab_of(model):
    lab = Lab(model, host=4096)
    lab.scheduler.tree.host.unsaved = {}
    assert lab.runner.warm_up()
    return lab


@pytest.fixture
def prompt():
    return np.random.default_rng(1).integers(300, 900, 400).astype(np.int32)


@pytest.fixture
def records(model, prompt):
    """Return the records of a prompt of three segments."""
    lab = lab_of(model)
    lab.run(prompt, limit=4, stops=(100, 260), scope=SCOPE)
    while plan := lab.scheduler.plan_idle_work():
        lab.runner.run(plan)
    host = lab.scheduler.tree.host
    found = [host.get(node) for node in host.unsaved or ()]
    lab.close()
    assert all(found)
    return sorted(filter(None, found), key=lambda record: record.start)


def test_a_run_that_is_split_before_it_is_written_is_written_in_both_parts(model, prompt):
    lab = lab_of(model)
    tree = lab.scheduler.tree
    lab.run(prompt, scope=SCOPE)
    while tree.evict():
        pass
    lab.run(np.concatenate([prompt[:150], prompt[:20]]), scope=SCOPE)
    spans = {(one.start, len(one.tokens)) for node in tree.host.unsaved or () if (one := tree.host.get(node))}
    assert {(0, 150), (150, 400)} <= spans
    lab.close()


def test_what_could_not_be_saved_does_not_count_as_saved(model, monkeypatch):
    lab = lab_of(model)
    monkeypatch.setattr(llama, "llama_state_seq_get_data_ext", lambda *_: 0)
    copy = HostCopy(0, 4)
    with pytest.raises(RunnerError, match="saving the state of sequence 0 wrote 0 of"):
        lab.runner.apply(Snap(0, copy))
    assert copy.data is None
    lab.close()


def file_of(record):
    return b"".join(bytes(part) for part in encode(record, HERE))


def decode(content, made_by=HERE):
    return read(io.BytesIO(content), len(content), made_by)


def test_a_record_survives_its_file(records):
    for record in records:
        read = decode(file_of(record))
        assert read.scope == SCOPE and read.start == record.start and read.frequency == record.frequency
        assert np.array_equal(read.tokens, record.tokens) and np.array_equal(read.data, record.data)
        assert file_name(read) == file_name(record)
    assert len({file_name(record) for record in records}) == len(records) == 4  # three segments and the answer


def test_what_comes_back_gives_the_same_logits_bit_for_bit(model, prompt, records):
    reference = Lab(model).run(prompt, limit=4, cache=False)
    lab = lab_of(model)
    host = lab.scheduler.tree.host
    for record in records:
        read = decode(file_of(record))
        assert lab.runner.states.accepts(read.data, read.start, len(read.tokens))
        assert host.put(read, Source.DISK)
    answer = lab.run(prompt, limit=4, scope=SCOPE)
    assert answer.job.reuse.sources["disk"] == answer.job.reuse.cached == len(prompt) - lab.context.costs.recompute_last
    assert same_answers(answer, reference)
    assert lab.run(prompt, limit=1, scope=Scope.shared("another")).job.reuse.cached == 0
    lab.close()


def test_a_run_without_what_comes_before_it_is_not_taken(model, prompt, records):
    lab = lab_of(model)
    host = lab.scheduler.tree.host
    assert not host.put(records[1], Source.DISK) and not lab.scheduler.tree.roots
    assert host.put(records[0], Source.DISK) and host.put(records[1], Source.DISK)
    assert host.put(records[1], Source.DISK)  # the cache holds it already
    assert host.num_tokens == 260
    lab.close()


def test_a_run_that_does_not_fit_the_budget_is_not_taken(model, records):
    lab = lab_of(model)
    host = lab.scheduler.tree.host
    host.max_bytes = 200
    assert host.put(records[0], Source.DISK) and not host.put(records[1], Source.DISK)
    lab.close()


def test_kv_of_another_shape_or_place_is_not_accepted(model, records):
    lab, record = lab_of(model), records[1]
    assert lab.runner.states.accepts(record.data, record.start, len(record.tokens))
    assert not lab.runner.states.accepts(record.data, record.start + 1, len(record.tokens))
    other = record.data.copy()
    other[16 + 12 * (len(record.tokens) - record.start)] ^= 1  # whether V is transposed
    assert not lab.runner.states.accepts(other, record.start, len(record.tokens))
    lab.close()


def frame(count):
    """Return the offsets of a state's layout numbers, four bytes each, for a state of `cells` cells."""
    cells = [16 + 12 * cell + part for cell in (0, 1, count - 1) for part in (0, 4)]
    return [0, 8, 12, *cells, *range(16 + 12 * count, 16 + 12 * count + 20, 4)]


FORGERIES = {
    "trailing bytes": lambda data: np.append(data, np.zeros(12, np.uint8)),
    "a missing byte": lambda data: data[:-1],
    "nothing": lambda data: data[:0],
    "a header alone": lambda data: data[:16],
    "another holder for one cell": lambda data: _with_number(data, 16 + 8, 7),
    "a sequence that there is not": lambda data: _with_number(data, 4, 1 << 30),
}


def _with_number(data, at, number):
    changed = data.copy()
    changed[at : at + 4] = np.array([number], np.uint32).view(np.uint8)
    return changed


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_state_is_not_accepted(model, records, forgery):
    lab, record = lab_of(model), records[1]
    assert not lab.runner.states.accepts(FORGERIES[forgery](record.data), record.start, len(record.tokens))
    lab.close()


@pytest.mark.parametrize("number", [0, 2, 5, 1 << 31, (1 << 32) - 1])
def test_no_number_in_the_frame_of_a_state_may_be_another(model, records, number):
    lab, record = lab_of(model), records[1]
    start, stop = record.start, len(record.tokens)
    for at in frame(stop - start):
        forged = _with_number(record.data, at, number)
        assert np.array_equal(forged, record.data) or not lab.runner.states.accepts(forged, start, stop), at
    lab.close()


def test_a_record_of_another_model_or_other_settings_is_foreign(records):
    content = file_of(records[0])
    with pytest.raises(ForeignFile, match="of another model"):
        decode(content, Provenance("2" * 32, HERE.settings))
    with pytest.raises(ForeignFile, match="with other settings"):
        decode(content, Provenance(HERE.model, "2" * 32))


@pytest.mark.parametrize("at", [0, 16, 40, 300, -1])
def test_a_flipped_bit_anywhere_is_noticed(records, at):
    content = bytearray(file_of(records[0]))
    content[at] ^= 4
    with pytest.raises(CorruptFile):
        decode(bytes(content))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_file_that_ends_early_is_noticed(records, share):
    content = file_of(records[0])
    with pytest.raises(CorruptFile):
        decode(content[: int(share * len(content))])


def test_documents_are_found_again(model, prompt, records):
    lab = lab_of(model)
    first, second = records[0], records[1]
    tree, host = lab.scheduler.tree, lab.scheduler.tree.host
    assert host.put(first, Source.DISK)
    marked = Record(SCOPE, second.tokens, second.start, second.data, documents=(("key", 100),))
    assert host.put(marked, Source.DISK)
    origin = next(iter(tree.roots[SCOPE].children.values()))
    assert origin.documents["key"].end == 260
    record = host.get(origin.documents["key"])
    assert record is not None and record.documents == (("key", 100),)
    lab.close()


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_what_was_fetched_from_after_a_hole_gives_the_same_logits_bit_for_bit(model, prompt, records, lost):
    tokens = records[-1].tokens
    longer = np.concatenate([tokens, prompt[:60]])
    reference = Lab(model).run(longer, limit=4, cache=False)
    lab, remote, reads = lab_of(model), Remote(1 << 30), []
    for record in records[:lost] + records[lost + 1 :]:
        remote.put(record)
    fetches = Fetches(lab.scheduler, [remote], hand_over=lambda act: act(), read=reads.append)
    fetches.least = 1000.0
    answer = lab.submit(longer, limit=4, scope=SCOPE)
    fetches.expect(answer.job)
    fetches.look()
    for act in reads:
        act()
    fetches.look()
    lab.finish()
    gone = records[lost]
    assert answer.job.reuse.sources == {"remote": len(tokens) - (len(gone.tokens) - gone.start)}
    assert same_answers(answer, reference)
    lab.close()
