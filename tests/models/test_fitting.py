"""The parts of a fit: the search, the memory that is free, llama.cpp's count, and tensors that stand elsewhere."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slotcache.models.context import Context, ContextSettings, breakdown
from slotcache.models.errors import ModelError
from slotcache.models.hardware import HOST, free_memory
from slotcache.models.model import Model
from slotcache.models.overrides import MOST_LAYERS, Override, experts_on_host, parse_overrides
from slotcache.server.engine.fit import Concession, MemoryPlacement, search
from support.architectures import mixture

WANTED = MemoryPlacement(cells=16384, slots=4, gpu_layers=33, gpu_experts=32)
CONCESSIONS = (
    Concession("cells", 4096, 256),
    Concession("slots", 1),
    Concession("gpu_experts", 0),
    Concession("gpu_layers", 0),
)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("models") / "mixture.gguf", layers=2, experts=4, feed_forward=256)


@settings(max_examples=300)
@given(
    costs=st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 1000)),
    most=st.integers(0, 80_000),
)
def test_the_search_ends_where_nothing_can_be_raised(costs, most):
    """Each quantity has a price, and all together a limit."""

    def excess(placement):
        values = (placement.cells, placement.slots, placement.gpu_experts, placement.gpu_layers)
        return sum(cost * value for cost, value in zip(costs, values, strict=True)) - most

    def fits(placement):
        return excess(placement) <= 0

    found = search(WANTED, CONCESSIONS, excess)
    if found is None:
        assert not fits(MemoryPlacement(cells=4096, slots=1, gpu_layers=0, gpu_experts=0))
        return
    assert fits(found)
    for concession in CONCESSIONS:
        value, wanted = getattr(found, concession.name), getattr(WANTED, concession.name)
        assert concession.least <= value <= wanted and (value == wanted or (value - concession.least) % concession.step == 0)
        more = replace(found, **{concession.name: min(value + concession.step, wanted)})
        assert more == found or not fits(more), f"{concession.name} could be more"


def test_earlier_concessions_spare_later_ones():
    found = search(WANTED, CONCESSIONS, lambda placement: placement.cells - 8000)
    assert found == replace(WANTED, cells=4096 + 256 * 15)


@pytest.mark.parametrize(("power", "tries"), [(1, 5), (2, 9), (8, 16), (0, 9)])
def test_few_placements_are_tried(power, tries):
    """Of 81 numbers of layers, whose memory grows evenly, or ever faster; 0: llama.cpp gives no number beyond the limit."""
    tried = set()

    def excess(placement):
        tried.add(placement)
        over = placement.gpu_layers ** (power or 1) - 47.5 ** (power or 1)
        return inf if power == 0 and over > 0 else over

    found = search(replace(WANTED, gpu_layers=80), CONCESSIONS[3:], excess)
    assert found and found.gpu_layers == 47 and len(tried) <= tries


def test_less_than_the_least_is_kept_as_it_is_wanted():
    small = replace(WANTED, cells=1024)
    assert search(small, CONCESSIONS, lambda placement: placement.slots - 1) == replace(small, slots=1)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8000 << 10),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, 8000 << 10),
        ({"memory.max": "9000", "memory.current": "6000", "memory.stat": "anon 4000\ninactive_file 500\n"}, 3500),
        ({"memory.max": "9000", "memory.current": "9900", "memory.stat": ""}, 0),
        ({"memory/memory.limit_in_bytes": "700", "memory/memory.usage_in_bytes": "600", "memory/memory.stat": ""}, 100),
    ],
)
def test_the_free_memory_is_the_machine_s_or_a_container_s(tmp_path, files, free):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\nHugePages_Total:  0\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert free_memory(tmp_path) == free


def test_this_machine_has_free_memory():
    assert 1 << 20 < free_memory() < 1 << 50


@pytest.mark.parametrize("cells", [512, 4096])
def test_a_simulated_model_counts_what_a_real_one_takes(experts, cells):
    settings = ContextSettings(num_cells=cells, num_sequences=16, threads=1)

    def counted(is_simulated):
        model = Model(experts, is_simulated=is_simulated, overrides=experts_on_host(1))
        context = Context(model, settings)
        try:
            return breakdown(context.handle)
        finally:
            context.close()
            model.close()

    simulated, real = counted(True), counted(False)
    assert simulated[:-1] == real[:-1] and real[-1].device == HOST
    assert replace(simulated[-1], weights=0) == replace(real[-1], weights=0)
    assert simulated[-1].weights <= real[-1].weights <= experts.stat().st_size  # of the file, pages are mapped
    assert sum(use.kv for use in real) == cells * 2 * 256 and sum(use.weights for use in real) > 512 << 10
    assert all(use.compute > 0 for use in real)


def test_overrides_are_read_as_llama_server_writes_them():
    assert parse_overrides("") == ()
    assert parse_overrides("a=CPU,b[0-9]=c=CPU") == (Override("a", "CPU"), Override("b[0-9]=c", "CPU"))


@pytest.mark.parametrize("text", ["a", "=CPU", "a=b", "a=CPU,b"])
def test_an_override_that_cannot_be_is_refused_with_the_buffers_there_are(text):
    with pytest.raises(ModelError, match="expected PATTERN=BUFFER, a buffer of CPU"):
        parse_overrides(text)


def test_a_model_loads_with_tensors_elsewhere(experts):
    model = Model(experts, overrides=(*parse_overrides("attn_.*=CPU"), *experts_on_host(2)))
    assert model.num_expert_layers == 2
    model.close()


def test_an_expression_that_is_none_is_an_error_and_no_crash(experts):
    with pytest.raises(ModelError, match=r"cannot load.*error loading model: \w"):  # in words of the C++ library
        Model(experts, overrides=parse_overrides("(=CPU"))


def test_the_error_of_a_file_that_is_cut_off_says_so(experts, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(experts.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"cannot load.*file bounds"):
        Model(cut)


def test_more_layers_than_a_model_can_have_are_no_more_work():
    assert len(experts_on_host(10**9)) == MOST_LAYERS
