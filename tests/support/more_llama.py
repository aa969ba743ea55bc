"""Functions of llama.cpp that only tests call, bound as in models/llama.py."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Annotated

import pytest
from slotcache.models import llama
from slotcache.models.llama import (
    bind,
    float_p,
    float_t,
    int32_t,
    library,
    llama_batch,
    llama_context_p,
    llama_sampler_p,
    llama_token,
    llama_vocab_p,
    pointer,
    size_t,
    uint32_t,
)

LLAMA_FLASH_ATTN_TYPE_DISABLED = 0
LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_Q4_K_M = 0, 15


class llama_logit_bias(ctypes.Structure):
    _fields_ = (("token", llama_token), ("bias", ctypes.c_float))


class llama_model_quantize_params(ctypes.Structure):
    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    )


char_p = Annotated[bytes, ctypes.c_char_p]
strings_p = Annotated[ctypes.Array[ctypes.c_char_p], ctypes.POINTER(ctypes.c_char_p)]


CAN_QUANTISE = hasattr(library, "llama_model_quantize")  # xllamacpp's library does not have it
if CAN_QUANTISE:

    @bind
    def llama_model_quantize_default_params() -> llama_model_quantize_params: ...
    @bind
    def llama_model_quantize(fname_inp: char_p, fname_out: char_p, params: pointer, /) -> uint32_t: ...


def quantised(source: Path, target: Path, kind: int = LLAMA_FTYPE_MOSTLY_Q4_K_M) -> Path:
    """Let llama.cpp write `source` to `target`, with weights of a kind. Return `target`."""
    if not CAN_QUANTISE:
        pytest.skip(f"{llama.LIBRARY} has no function that quantises")
    llama.capture()
    params = llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = kind, 1, True
    assert llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.addressof(params)) == 0
    return target


@bind
def llama_batch_get_one(tokens: pointer, n_tokens: int32_t, /) -> llama_batch: ...
@bind
def llama_get_logits_ith(ctx: llama_context_p, i: int32_t, /) -> float_p: ...
@bind
def llama_sampler_init_logit_bias(n_vocab: int32_t, n_logit_bias: int32_t, logit_bias: pointer, /) -> llama_sampler_p: ...
@bind
def llama_sampler_init_penalties(
    n_vocab: int32_t,
    penalty_last_n: int32_t,
    penalty_repeat: float_t,
    penalty_freq: float_t,
    penalty_present: float_t,
    /,
) -> llama_sampler_p: ...
@bind
def llama_sampler_init_dry(
    vocab: llama_vocab_p,
    dry_multiplier: float_t,
    dry_base: float_t,
    dry_allowed_length: int32_t,
    dry_penalty_last_n: int32_t,
    seq_breakers: strings_p,
    num_breakers: size_t,
    /,
) -> llama_sampler_p: ...
