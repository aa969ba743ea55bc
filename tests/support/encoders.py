"""Makes tiny models of BERT's architecture with random weights, which turn texts into vectors, or pairs into scores."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType

LAYERS, WIDTH, HEAD, CONTEXT = 2, 64, 32, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
WORDS = ("the", "an", "of", "is", "machine", "learning", "city", "text", "river", "stone")


def bert(
    path: Path,
    pooling: PoolingType = PoolingType.MEAN,
    seed: int = 0,
    *,
    label: str = "",
    layers: int = LAYERS,
    width: int = WIDTH,
) -> Path:
    """Write a BERT with a vocabulary of words and letters. With rank pooling, it has a classification head."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "bert")

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", rng.standard_normal((rows, columns), dtype=np.float32) * gain / columns**0.5)
        writer.add_tensor(f"{name}.bias", 0.1 * rng.standard_normal(rows, dtype=np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    pieces = [*SPECIAL, *(f"\u2581{word}" for word in (*WORDS, *LETTERS)), *LETTERS]
    if label:
        writer.add_name(label)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(width // HEAD)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL if piece in SPECIAL else TokenType.NORMAL for piece in pieces])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    for name, rows in (("token_embd", len(pieces)), ("position_embd", CONTEXT), ("token_types", 2)):
        writer.add_tensor(f"{name}.weight", rng.standard_normal((rows, width), dtype=np.float32))
    norm("token_embd_norm")
    for layer in range(layers):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}.{name}", width, width)
        matrix(f"{block}.ffn_up", 2 * width, width)
        matrix(f"{block}.ffn_down", width, 2 * width)
        norm(f"{block}.attn_output_norm")
        norm(f"{block}.layer_output_norm")
    if pooling == PoolingType.RANK:
        matrix("cls", width, width)
        matrix("cls.output", 1, width, gain=2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
