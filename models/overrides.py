"""Flags that override a model's file: the buffers of tensors, values of the metadata, the scaling of positions."""

from __future__ import annotations

import csv
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from . import llama
from .errors import ModelError
from .hardware import HOST, buffer_types

# ---- Tensors in another place than their layer: the experts of a mixture, for which many cards lack memory. -------------

EXPERTS = r"\.ffn_(gate|up|gate_up|down)_(ch)?exps"
"""A pattern for what follows the block's name in the names of expert tensors."""

MOST_LAYERS = 512  # llama.cpp's limit for any model


class OverrideRow(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Override:
    """The buffer type of some tensors.

    pattern: a regular expression for the names of the tensors.
    buffer: ggml's name of the buffer type.
    """

    pattern: str
    buffer: str


def parse_overrides(text: str) -> tuple[Override, ...]:
    """Parse PATTERN=BUFFER,... as llama-server does for --override-tensor. Raises ModelError."""
    found = []
    for entry in filter(None, text.split(",")):
        pattern, equals, buffer = entry.rpartition("=")
        known = buffer_types()
        if not equals or not pattern or buffer not in known:
            raise ModelError(f"--override-tensor {entry}: expected PATTERN=BUFFER, a buffer of {', '.join(known)}")
        found.append(Override(pattern, buffer))
    return tuple(found)


def experts_on_host(num_layers: int) -> tuple[Override, ...]:
    """Return the overrides that keep the experts of the first `num_layers` layers in host memory."""
    return tuple(Override(rf"blk\.{layer}{EXPERTS}", HOST) for layer in range(min(num_layers, MOST_LAYERS)))


def as_array(overrides: tuple[Override, ...]) -> ctypes.Array[OverrideRow] | None:
    """Return llama.cpp's array of overrides; None if there are none.

    The array must live as long as a model may be loaded with it.
    """
    if not overrides:
        return None
    known = buffer_types()
    rows = [(override.pattern.encode(), known[override.buffer]) for override in overrides]
    return (OverrideRow * (len(rows) + 1))(*rows, (None, None))


# ---- Metadata -----------------------------------------------------------------------------------------------------------
# For a key in these rows, llama.cpp uses their value instead of the file's value, and logs this.

Number = int | float | bool | str
MOST_BYTES = 127  # bytes of a key, and of a text


@dataclass(frozen=True, slots=True)
class MetadataOverride:
    """A key of a model's metadata, and the value that replaces the file's value."""

    key: str
    value: Number

    def __str__(self) -> str:
        return f"{self.key}={self.type}:{self.text}"

    @property
    def type(self) -> str:
        return NAMES[type(self.value)]

    @property
    def text(self) -> str:
        """The value as text, in the form in which llama.cpp writes a value of the file."""
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        return f"{self.value:.6f}" if isinstance(self.value, float) else str(self.value)

    def row(self) -> llama.llama_model_kv_override:
        """Return the override as llama.cpp's row."""
        given = self.value.encode() if isinstance(self.value, str) else self.value
        value = llama.llama_model_kv_override_value(**{FIELDS[self.type]: given})
        return llama.llama_model_kv_override(KINDS[self.type], self.key.encode(), value)


NAMES = {int: "int", float: "float", bool: "bool", str: "str"}
KINDS = {
    "int": llama.LLAMA_KV_OVERRIDE_TYPE_INT,
    "float": llama.LLAMA_KV_OVERRIDE_TYPE_FLOAT,
    "bool": llama.LLAMA_KV_OVERRIDE_TYPE_BOOL,
    "str": llama.LLAMA_KV_OVERRIDE_TYPE_STR,
}
FIELDS = {"int": "val_i64", "float": "val_f64", "bool": "val_bool", "str": "val_str"}


def parse_metadata(text: str) -> tuple[MetadataOverride, ...]:
    """Parse KEY=TYPE:VALUE,... as llama-server does for --override-kv. A text with commas is quoted. Raises ModelError."""
    found: dict[str, MetadataOverride] = {}
    for entry in filter(None, next(csv.reader([text]), [])):
        key, _, typed = entry.partition("=")
        name, colon, value = typed.partition(":")
        try:
            one = MetadataOverride(key, _value(name, value))
        except (ValueError, OverflowError):
            raise ModelError(f"--override-kv {entry}: {value!r} is no {name}") from None
        except KeyError:
            raise ModelError(f"--override-kv {entry}: expected KEY=TYPE:VALUE, a type of {', '.join(FIELDS)}") from None
        if not key or not colon or max(len(key.encode()), len(value.encode())) > MOST_BYTES:
            raise ModelError(f"--override-kv {entry}: expected KEY=TYPE:VALUE, both of at most {MOST_BYTES} bytes")
        if key in found:
            raise ModelError(f"--override-kv {entry}: {key} has a value already")
        found[key] = one
    return tuple(found.values())


def _value(name: str, text: str) -> Number:
    """Parse a value. Raises KeyError for an unknown type, and ValueError for a text that is no value of the type."""
    value = {"int": int, "float": float, "bool": {"true": True, "false": False}.get, "str": str}[name](text)
    if value is None or (name == "int" and not -(1 << 63) <= value < 1 << 63) or (name == "float" and not isfinite(value)):
        raise ValueError
    return value


def metadata_rows(
    overrides: Sequence[MetadataOverride], first: Sequence[llama.llama_model_kv_override] = ()
) -> ctypes.Array[llama.llama_model_kv_override] | None:
    """Return llama.cpp's array of overrides; None if there are no rows.

    The array must live as long as a model may be loaded with it.

    first: rows to put before the rows of `overrides`. If two rows have the same key, llama.cpp uses the first one.
    """
    rows = [*first, *(override.row() for override in overrides)]
    return (
        (llama.llama_model_kv_override * (len(rows) + 1))(*rows) if rows else None
    )  # the last row, without a key, ends the array


# ---- Rotary positions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are scaled. Values that are not given come from the model's file.

    kind: none, linear or yarn.
    base: the base of the frequencies.
    scale: the number by which the frequencies are multiplied, such as 0.25 to make the context four times as long.
    original: the number of tokens that the model was trained for before YaRN extended its context.
    ext_factor, attn_factor, beta_fast, beta_slow: parameters of YaRN.
    """

    kind: str = ""
    base: float = 0.0
    scale: float = 0.0
    original: int = 0
    ext_factor: float = -1.0
    attn_factor: float = -1.0
    beta_fast: float = -1.0
    beta_slow: float = -1.0

    def apply(self, params: llama.llama_context_params) -> None:
        """Set the parameters of a context."""
        params.rope_scaling_type = ROPE_KINDS[self.kind]
        params.rope_freq_base, params.rope_freq_scale, params.yarn_orig_ctx = self.base, self.scale, self.original
        params.yarn_ext_factor, params.yarn_attn_factor = self.ext_factor, self.attn_factor
        params.yarn_beta_fast, params.yarn_beta_slow = self.beta_fast, self.beta_slow

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._given())

    def _given(self) -> Iterator[tuple[str, object]]:
        """Yield each field that has a value: its name in words, and the value."""
        unset = RopeScaling()
        for field, name in ROPE_WORDS.items():
            if (value := getattr(self, field)) != getattr(unset, field):
                yield name, value


ROPE_KINDS = {
    "": llama.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": llama.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama.LLAMA_ROPE_SCALING_TYPE_YARN,
}
ROPE_WORDS = {
    "kind": "scaling",
    "base": "base",
    "scale": "frequencies times",
    "original": "tokens before YaRN",
    "ext_factor": "YaRN's extrapolation",
    "attn_factor": "YaRN's attention times",
    "beta_fast": "YaRN's fast beta",
    "beta_slow": "YaRN's slow beta",
}
AS_TRAINED = RopeScaling()
