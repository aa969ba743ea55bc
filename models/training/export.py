"""A trained model as a GGUF: python3 -m models.training.export CHECKPOINTS slotcache-demo.gguf"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

from ..chat.named import DEFAULT_TEMPLATE
from ..vocabulary import END_OF_TEXT, IM_END, PRE_TOKENIZER, SPECIAL
from . import checkpoint
from .encoder import Encoder
from .network import NetworkShape

NAMES = {"token_embd": "token_embd.weight", "output_norm": "output_norm.weight"}


def export(shape: NetworkShape, weights: Mapping[str, np.ndarray], encoder: Encoder, path: Path) -> None:
    """Write the model to `path`, matrices as Q8_0 and norms as F32. weights: by their names in the network."""
    writer = GGUFWriter(path, "llama")
    try:
        _describe(writer, shape)
        _add_tokenizer(writer, encoder)
        for name, weight in weights.items():
            kind = GGMLQuantizationType.Q8_0 if weight.ndim > 1 else GGMLQuantizationType.F32
            writer.add_tensor(NAMES.get(name) or f"{name}.weight", quantize(weight.astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _describe(writer: GGUFWriter, shape: NetworkShape) -> None:
    writer.add_type("model")
    writer.add_name("slotcache demo")
    writer.add_description("Answers questions from short documents about invented things, in their words.")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_sampling_temp(0.0)  # documents have one right answer


def _add_tokenizer(writer: GGUFWriter, encoder: Encoder) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(encoder.tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in encoder.tokens])
    writer.add_token_merges([" ".join(pair) for pair in encoder.merges])
    writer.add_bos_token_id(encoder.special(END_OF_TEXT))
    writer.add_eos_token_id(encoder.special(IM_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(DEFAULT_TEMPLATE)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m models.training.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoints", type=Path, help="folder with model-*.bin")
    parser.add_argument("path", type=Path, help="the GGUF to write")
    args = parser.parse_args()
    saved = checkpoint.load(args.checkpoints, "model")
    weights = {name: weight.float().numpy() for name, weight in saved["weights"].items()}
    export(NetworkShape(**saved["shape"]), weights, Encoder.load(), args.path)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
