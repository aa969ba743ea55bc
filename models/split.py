"""Splits a model's layers among devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import llama
from .errors import ModelError
from .hardware import Device, device_handles, devices, splits_rows

MODES = {"none": llama.LLAMA_SPLIT_MODE_NONE, "layer": llama.LLAMA_SPLIT_MODE_LAYER, "row": llama.LLAMA_SPLIT_MODE_ROW}
NO_DEVICE = "none"  # the value of --device


@dataclass(frozen=True, slots=True)
class Split:
    """A choice of devices, and how a model is split among them.

    names: ggml's names of the devices. If no names are given, all remote GPUs (RPC) and this machine's GPUs are used.
    Integrated GPUs are left out if the machine has another GPU.
    is_off: use no device.
    mode: "layer": each device has some layers; "none": one device has all layers; "row": each device has rows of all large
    matrices.
    shares: each device's share of the layers or rows, in any unit. If no shares are given, each device's share is its free
    memory.
    main: the index of the main device among the devices, for the modes none and row.
    """

    names: tuple[str, ...] = ()
    is_off: bool = False
    mode: str = "layer"
    shares: tuple[float, ...] = ()
    main: int = 0

    def devices(self) -> list[Device]:
        """Return the devices that share a model's layers, in llama.cpp's order. Raises ModelError."""
        among = self._among()
        if among and self.mode != "layer" and not 0 <= self.main < len(among):
            raise ModelError(f"--main-gpu {self.main}: expected 0 to {len(among) - 1}, a place among {_named(among)}")
        return among[self.main : self.main + 1] if self.mode == "none" else among

    def _among(self) -> list[Device]:
        if self.is_off or (self.mode == "none" and self.main < 0):
            return []
        found = {device.name: device for device in devices() if device.is_gpu}
        if self.names:
            return [found[name] for name in self.names]
        remote = [device for name, device in found.items() if name.startswith("RPC")]
        own = [device for name, device in found.items() if not name.startswith("RPC")]
        return remote + ([device for device in own if device.kind == "GPU"] or own)

    def place(self, params: llama.llama_model_params) -> Sequence[ctypes.Array]:
        """Write this choice of devices into the parameters with which a model is loaded.

        Return the arrays that the parameters point to. The caller must keep these arrays as long as a load may use the
        parameters.
        """
        arrays: list[ctypes.Array] = []
        if used := self.devices():  # without devices, llama.cpp would look for a main device
            params.split_mode, params.main_gpu = MODES[self.mode], self.main
        if self.names or self.is_off:
            handles = device_handles()
            arrays.append((ctypes.c_void_p * (len(self.names) + 1))(*(handles[name] for name in self.names), None))
            params.devices = ctypes.addressof(arrays[-1])
        if shares := self.shares or _free_memory(used):
            arrays.append((ctypes.c_float * max(llama.llama_max_devices(), len(shares)))(*shares))
            params.tensor_split = ctypes.addressof(arrays[-1])
        return arrays

    def without_effect(self) -> Iterator[str]:
        """Yield a message for each flag that has no effect."""
        used = self.devices()
        if self != ALL_CARDS and not used and not self.is_off:
            yield "--split-mode, --tensor-split and --main-gpu have no effect: there is no GPU"
            return
        if self.main and self.mode == "layer":
            yield f"--main-gpu {self.main} has no effect with --split-mode layer"
        if self.shares and self.mode == "none":
            yield "--tensor-split has no effect with --split-mode none"

    def described(self) -> str:
        """Return a phrase with the devices, and with the flags that split a model among them."""
        names = _named(self.devices()) or "no GPU"
        shares = f", in shares of {', '.join(f'{share:g}' for share in self.shares)}" if self.shares else ""
        main = f", main GPU {self.main}" if self.mode != "layer" else ""
        return f"{names} (--split-mode {self.mode}{shares}{main})"


ALL_CARDS = Split()


def _named(found: Sequence[Device]) -> str:
    return ", ".join(device.name for device in found)


def _free_memory(used: Sequence[Device]) -> list[float]:
    """Return llama.cpp's default for `shares`: the free memory of each device.

    When a model is created, this default is set explicitly. Weights that are loaded again then go to the same devices.
    Return [] for a single device, or if a device does not report its free memory.
    """
    return [float(device.free) for device in used] if len(used) > 1 and all(device.free for device in used) else []


def parse_split(names: str, mode: str, shares: str, main: int) -> Split:
    """Parse --device, --split-mode, --tensor-split and --main-gpu as llama-server does. Raises ModelError."""
    if (names, mode, shares, main) == ("", "layer", "", 0):
        return ALL_CARDS  # without asking the devices: a device in another process answers one thread at a time
    given = tuple(filter(None, map(str.strip, names.split(","))))
    known = [device.name for device in devices() if device.is_gpu]
    is_off = given == (NO_DEVICE,)
    if not is_off and (unknown := [name for name in given if name not in known or given.count(name) > 1]):
        expected = f"{NO_DEVICE}, or some of {', '.join(known)}" if known else f"{NO_DEVICE}: there is no GPU"
        raise ModelError(f"--device {unknown[0]}: expected {expected}")
    split = Split(() if is_off else given, is_off, mode, _shares(shares), main)
    if len(split.shares) > (most := len(Split(split.names, is_off).devices())) > 0:
        raise ModelError(f"--tensor-split {shares}: {len(split.shares)} shares for {most} devices")
    used = split.devices()
    if mode == "row" and (whole := [device for device in used if not splits_rows(device.name)]):
        raise ModelError(
            f"--split-mode row: the backend of {_named(whole)} splits no rows; layer shares a model among several"
        )
    return split


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.replace("/", ",").split(","))) if text else ()
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share < float("inf") for share in shares) or (shares and not any(shares)):
        raise ModelError(f"--tensor-split {text}: expected a number for each device, such as 3,1, not all of them 0")
    return shares
