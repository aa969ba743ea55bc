"""Which devices hold a model's layers: --device, --split-mode, --tensor-split and --main-gpu, with made-up devices."""

import pytest
from slotcache.models import llama, split
from slotcache.models.errors import ModelError
from slotcache.models.hardware import Device
from slotcache.models.split import ALL_CARDS, parse_split

CARDS = [Device("CUDA0", "large", "GPU", 24 << 30, 24 << 30), Device("CUDA1", "small", "GPU", 8 << 30, 12 << 30)]
REMOTE = Device("RPC0", "far", "GPU", 4 << 30, 4 << 30)
SHARED = Device("Vulkan0", "of the CPU", "integrated GPU", 0, 0)
CPU = Device("CPU", "CPU", "CPU", 0, 0)


@pytest.fixture
def cards(monkeypatch):
    """Devices that this test's machine has, as it chooses."""

    def have(*found):
        monkeypatch.setattr(split, "devices", lambda: [*found, CPU])
        monkeypatch.setattr(split, "splits_rows", lambda name: True)
        monkeypatch.setattr(split, "device_handles", lambda: {one.name: 1000 + at for at, one in enumerate([*found, CPU])})

    have(*CARDS)
    return have


def names(*given):
    return [device.name for device in parse_split(*given).devices()]


def placed(*given):
    params = llama.llama_model_default_params()
    arrays = parse_split(*given).place(params)
    return params, [array[: min(len(array), 3)] for array in arrays]


def test_without_a_flag_all_cards_share_and_no_device_is_asked(cards):
    assert parse_split("", "layer", "", 0) is ALL_CARDS and names("", "layer", "", 0) == ["CUDA0", "CUDA1"]
    cards(SHARED, *CARDS, REMOTE)
    assert names("", "layer", "", 0) == ["RPC0", "CUDA0", "CUDA1"]
    cards(SHARED, REMOTE)
    assert names("", "layer", "", 0) == ["RPC0", "Vulkan0"]


def test_named_devices_hold_layers_in_this_order(cards):
    assert names("CUDA1", "layer", "", 0) == ["CUDA1"] and names("CUDA1, CUDA0", "layer", "", 0) == ["CUDA1", "CUDA0"]
    assert names("none", "layer", "", 0) == []
    params, arrays = placed("CUDA1,CUDA0", "layer", "3/1", 0)
    assert arrays == [[1001, 1000, None], [3.0, 1.0, 0.0]] and params.devices and params.tensor_split
    params, arrays = placed("none", "layer", "", 0)
    assert arrays == [[None]] and params.devices and not params.tensor_split


def test_one_device_has_all(cards):
    assert names("", "none", "", 1) == ["CUDA1"] and names("CUDA1,CUDA0", "none", "", 1) == ["CUDA0"]
    assert names("", "none", "", -1) == [] and names("", "row", "", 1) == ["CUDA0", "CUDA1"]
    params, _ = placed("", "none", "", 1)
    assert (params.split_mode, params.main_gpu) == (0, 1)


def test_shares_by_free_memory_are_fixed_when_a_model_is_made(cards):
    """Weights that are loaded again after a sleep go where they were, whatever is free by then."""
    assert placed("", "layer", "", 0)[1] == [[float(24 << 30), float(8 << 30), 0.0]]
    assert placed("CUDA0", "layer", "", 0)[1] == [[1000, None]]
    cards(CARDS[0])
    assert placed("", "layer", "", 0)[1] == []


def test_without_a_gpu_nothing_of_it_counts(cards):
    cards()
    params, _ = placed("", "none", "3,1", 0)
    assert params.split_mode == llama.llama_model_default_params().split_mode  # else llama.cpp would miss the main GPU
    (line,) = parse_split("", "none", "3,1", 0).without_effect()
    assert "there is no GPU" in line
    assert not [*parse_split("none", "layer", "", 0).without_effect()] and not [*ALL_CARDS.without_effect()]


def test_what_changes_nothing_is_reported(cards):
    reported = {given: [*parse_split(*given).without_effect()] for given in [
        ("", "layer", "", 1), ("", "none", "1,2", 0), ("CUDA1", "layer", "", 0),
    ]}  # fmt: skip
    assert [len(lines) for lines in reported.values()] == [1, 1, 0]
    assert "--main-gpu 1" in reported["", "layer", "", 1][0] and "--tensor-split" in reported["", "none", "1,2", 0][0]


def test_rows_are_split_where_the_backend_can(cards, monkeypatch):
    """llama.cpp fails to load a model otherwise."""
    monkeypatch.setattr(split, "splits_rows", lambda name: name == "CUDA0")
    assert names("CUDA0", "row", "", 0) == ["CUDA0"]
    with pytest.raises(ModelError, match=r"^--split-mode row: the backend of CUDA1 splits no rows"):
        parse_split("", "row", "", 0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("CUDA7", "layer", "", 0), "--device CUDA7: expected none, or some of CUDA0, CUDA1"),
        (("CPU", "layer", "", 0), "--device CPU: expected none"),
        (("CUDA0,CUDA0", "layer", "", 0), "--device CUDA0: expected"),
        (("none,CUDA0", "layer", "", 0), "--device none: expected"),
        (("", "none", "", 2), "--main-gpu 2: expected 0 to 1, a place among CUDA0, CUDA1"),
        (("CUDA1", "row", "", 1), "--main-gpu 1: expected 0 to 0"),
        (("", "layer", "1,2,3", 0), "--tensor-split 1,2,3: 3 shares for 2 devices"),
        (("", "layer", "1,,2", 0), "--tensor-split 1,,2: expected a number"),
        (("", "layer", "a", 0), "expected a number"),
        (("", "layer", "-1,2", 0), "expected a number"),
        (("", "layer", "nan", 0), "expected a number"),
        (("", "layer", "0,0", 0), "not all of them 0"),
    ],
)
def test_what_cannot_be_is_refused_with_a_line(cards, given, why):
    with pytest.raises(ModelError, match=f"^{why}" if why.startswith("--") else why):
        parse_split(*given)


def test_the_devices_are_described(cards):
    assert parse_split("", "layer", "3,1", 0).described() == "CUDA0, CUDA1 (--split-mode layer, in shares of 3, 1)"
    assert parse_split("", "none", "", 1).described() == "CUDA1 (--split-mode none, main GPU 1)"
    assert parse_split("none", "layer", "", 0).described() == "no GPU (--split-mode layer)"
