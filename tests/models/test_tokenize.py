"""Stretches of a prompt tokenised alone, with a vocabulary that puts a space in front of every text."""

from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from slotcache.models.model import Model


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A SentencePiece vocabulary without weights: bytes, some letters, and merges with and without a space in front."""
    path: Path = tmp_path_factory.mktemp("spm") / "vocabulary.gguf"
    controls = ["<unk>", "<s>", "</s>", "<|end|>"]
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab"]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 512),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 1),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_tokenizer_model, "llama"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, types),
        (writer.add_token_scores, [0.0] * (len(tokens) - 2) + [1.0, 2.0]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_add_space_prefix, True),
    ):
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Model(path, vocab_only=True)


def pieces(model: Model, text: str, **options: bool) -> list[bytes]:
    return [model.piece(token) for token in model.tokenize(text, **options).tolist()]


def test_only_the_first_stretch_of_a_prompt_gets_a_space(spaced: Model) -> None:
    assert pieces(spaced, "ab", begin=True) == [b"", b" ab"]
    assert pieces(spaced, "ab") == [b"ab"]
    assert pieces(spaced, " ab") == [b" ab"]


def test_stretches_joined_are_the_text(spaced: Model) -> None:
    stretches = ["ab c", "\nab", " a", "\u00e9\n", "b"]
    joined = [token for text in stretches for token in spaced.tokenize(text).tolist()]
    assert b"".join(map(spaced.piece, joined)).decode() == "".join(stretches)


def test_control_tokens_at_the_start_of_a_stretch_stay_control_tokens(spaced: Model) -> None:
    assert spaced.tokenize("<|end|>ab", special=True).tolist()[0] == 3
    assert b"<|end|>" in b"".join(pieces(spaced, "<|end|>ab"))
