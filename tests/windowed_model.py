"""A tiny model with random weights whose layers look back a few tokens only, but for every fourth."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from slotcache.models.chat import DEFAULT_TEMPLATE
from slotcache.models.vocabulary import PRE_TOKENIZER, train

LAYERS, WIDTH, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 4, 128, 4, 2, 256, 1024
WINDOW = 32


def generate(path: Path) -> Path:
    """Cohere 2's architecture: windows of 32 in layers 0 to 2, none in layer 3."""
    words = train(VOCABULARY, 700)
    writer = GGUFWriter(path, "cohere2")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_logit_scale(1.0)
    writer.add_sliding_window(WINDOW)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    writer.add_add_bos_token(False)
    writer.add_chat_template(DEFAULT_TEMPLATE)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        matrix = rng.standard_normal((rows, columns), dtype=np.float32) * (gain / columns**0.5)
        blocks = matrix.reshape(rows, -1, 32)
        scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
        whole = np.rint(blocks / scale).astype(np.int8)
        data = np.concatenate([scale.astype(np.float16).view(np.uint8), whole.view(np.uint8)], axis=2)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", np.full(WIDTH, 3.0, np.float32))
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(WIDTH, np.float32))
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH, 2.0)
        add(f"blk.{layer}.attn_k.weight", WIDTH // HEADS * KV_HEADS, WIDTH, 2.0)
        add(f"blk.{layer}.attn_v.weight", WIDTH // HEADS * KV_HEADS, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
