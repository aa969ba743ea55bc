"""A server whose model is on a device: chats with documents, KV that leaves and comes back, memory that is too small.

The built-in model answers: each token of these answers is far more probable than the next one, so that no kernel's rounding
chooses another, and an answer from wrong KV is a wrong one.
"""

from contextlib import contextmanager
from dataclasses import replace

from server.conftest import running, text_of, until
from server.engine.test_disk import cached
from server.engine.test_failed_steps import RIVERS, about
from slotcache.models import split
from slotcache.models.context import breakdown
from slotcache.models.demo import FILE
from slotcache.models.hardware import HOST, devices
from support.on_device import needs_device

pytestmark = needs_device
READING = {"prompt": "The ferry crosses the river. " * 100, "n_predict": 4, "return_progress": True, "stream": True}


@contextmanager
def serving(**changed):
    """A server of the built-in model. One at a time: RPC's device answers one thread."""
    with running(FILE, is_timed=False, **changed) as up:
        yield up


def right(town):
    return f"The river of {town} is {RIVERS[town]}."


def used(up):
    """Return the memory of each device, by its name."""
    return {use.device: use for use in breakdown(up.service.context.handle)}


def check_two_turns(up, source):
    """Two chats are answered right, and the first one, asked again, reuses all that was not beside the last question."""
    for town in ("Calder", "Farwell"):
        assert text_of(up.chat(**about(town))) == right(town)
    again = up.chat(**about("Calder"))
    rest = up.service.context.costs.recompute_last
    assert text_of(again) == right("Calder") and cached(again) == again["usage"]["prompt_tokens"] - rest
    assert again["slotcache"]["source"] == source


def test_documents_in_any_order_are_read_once():
    """Each document stands in two chats, once as the first and once as the second one."""
    with serving() as up:
        answers = [up.chat(**about(town)) for town in (*RIVERS, *RIVERS)]
    assert list(map(text_of, answers)) == [right(town) for town in (*RIVERS, *RIVERS)]
    first, second = (sum(map(cached, half)) for half in (answers[: len(RIVERS)], answers[len(RIVERS) :]))
    assert 0 < first < second


def test_kv_moves_to_host_memory_and_comes_back():
    with serving() as up:
        check_two_turns(up, "host")
        assert up.metric("slotcache_restored_tokens_total") > 0


def test_a_client_that_disconnects_in_the_middle_of_its_prefill_stops_it():
    with serving(batch_size=64) as up:
        with up.http.stream("POST", "/completion", json=READING) as answer:
            assert any('"prompt_progress"' in line for line in answer.iter_lines())
        until(lambda: not up.service.open)
        assert up.metric("slotcache_requests_total", end="cancelled") == 1
        assert 0 < up.metric("slotcache_prompt_tokens_total") < len(up.service.model.tokenize(READING["prompt"]))
        assert text_of(up.chat(**about("Skarrow"))) == right("Skarrow")


def test_a_restart_reads_from_disk_what_was_computed_there(tmp_path):
    with serving(cache_dir=str(tmp_path)) as up:
        assert text_of(up.chat(**about("Calder"))) == right("Calder")
    with serving(cache_dir=str(tmp_path)) as up:
        again = up.chat(**about("Calder"))
        assert text_of(again) == right("Calder") and again["slotcache"]["source"] == "disk"
        assert cached(again) == again["usage"]["prompt_tokens"] - up.service.context.costs.recompute_last


def test_half_of_the_layers_compute_on_the_device():
    with serving(gpu_layers=3) as up:
        check_two_turns(up, "fork")  # most of what the last 32 tokens leave is the front that both chats have
        on = used(up)
    assert on[devices()[0].name].kv > 0 and on[HOST].kv > 0


def test_keys_of_eight_bits():
    name = devices()[0].name
    with serving() as up:
        usual = used(up)[name].kv
    with serving(cache_type_k="q8_0") as up:
        check_two_turns(up, "host")
        assert 0.6 < used(up)[name].kv / usual < 0.9


def test_on_a_device_with_little_memory_the_start_chooses_what_fits(monkeypatch):
    device, *others = devices()
    with serving() as up:
        use = used(up)[device.name]
    small = replace(device, free=use.total - use.kv // 3, total=use.total)
    monkeypatch.setattr(split, "devices", lambda: [small, *others])
    with serving(fit_target=0) as up:
        assert 0 < used(up)[device.name].total <= small.free
        assert 0 <= up.service.settings.gpu_layers < up.service.model.num_layers
        wanted, fitted = (f"{kind}: 8,192 cells (-c), 4 slots (-np), " for kind in ("wanted", "fitted"))
        lines = up.http.get("/props").json()["memory"]["decision"]
        assert any(line.startswith(wanted) and f"{device.name} lacks " in line for line in lines)
        assert any(line.startswith(f"{fitted}{up.service.settings.gpu_layers} of 7 layers on the GPU") for line in lines)
        check_two_turns(up, "fork")
