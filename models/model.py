"""The loaded model: its properties, its weights in memory, and the tokens for infill and for the end of an answer."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np

from . import llama
from .errors import ModelError
from .hardware import HOST, Device, load_backends, no_devices
from .heap import return_freed_memory
from .model_files import KnownFiles, files_of
from .named_templates import named_template
from .overrides import AS_TRAINED, EXPERTS, MetadataOverride, Override, RopeScaling, as_array, metadata_rows
from .split import ALL_CARDS, Split
from .tokenizer import Tokenizer

# ---- The tensors of a model, in memory while a context computes with them. ----------------------------------------------

GGUF_MAGIC = b"GGUF"
ARCHITECTURE = "general.architecture"
ORIGINAL = "rope.scaling.original_context_length"
CLOSED = llama.llama_model_p(0)


class Weights:
    """The tensors of a model, loaded when this object is created. Safe from several threads.

    may_unload: free the weights when the last context is closed, and load them again for the next context. If `may_unload`
    is set, loading the weights leaves out the vocabulary, which `head` has: reading it would take most of a small model's
    load time.
    head: llama.cpp's model with the metadata and the vocabulary, which always stay in memory.
    known: the files of the model and of its adapters, whose content must not change.
    on_load: functions to call whenever the weights are loaded again. These functions create again what was freed with the
    weights, and may raise ModelError.
    metadata: overrides of the file's metadata.
    """

    def __init__(
        self,
        path: Path,
        params: llama.llama_model_params,
        *,
        may_unload: bool,
        metadata: Sequence[MetadataOverride] = (),
    ) -> None:
        self.files = KnownFiles(files_of(path))
        self.known = [self.files]
        self.on_load: list[Callable[[], None]] = []
        self._path, self._params, self._may_unload = path, params, may_unload
        self._lock, self._num_contexts = Lock(), 0
        self._rows = metadata_rows(metadata)
        params.kv_overrides = _address(self._rows)
        params.vocab_only |= may_unload
        self._handle = self.head = _load(path, params)
        if may_unload:
            self._handle, params.vocab_only = CLOSED, False
            own, self._rows = self._rows, metadata_rows(metadata, _without_vocabulary(self.head, metadata))
            params.kv_overrides = _address(self._rows)
            try:
                self._handle = _load(path, params)
                if _num_tokens(self._handle) != _num_tokens(self.head):  # this library ignores our rows
                    self._free()
                    self._rows = own
                    params.kv_overrides = _address(own)
                    self._handle = _load(path, params)
                self.files.digest()  # later loads compare the files with it
            except ModelError:
                self.close()
                raise

    @property
    def handle(self) -> llama.llama_model_p:
        """The loaded model. Raises ModelError while the weights are unloaded, because llama.cpp would end the process."""
        if not self._handle:
            raise ModelError(f"{self._path} is not in memory")
        return self._handle

    def enter(self) -> None:
        """Count a new context. Load the weights if they are unloaded. Raises ModelError."""
        with self._lock:
            if not self._handle:
                self._load_again()
            self._num_contexts += 1

    def exit(self) -> None:
        """Stop counting a context. If no context is left and `may_unload` is set, free the weights."""
        with self._lock:
            self._num_contexts -= 1
            if self._may_unload and not self._num_contexts:
                self._free()
                return_freed_memory()

    def check(self) -> None:
        """Raise ChangedFile if a file's content has changed since the load, and ModelError if a file cannot be read.

        Reading a file may take long, so only files with a changed stamp (see `Stamp`) are read.
        """
        for files in self.known:
            files.check()

    def close(self) -> None:
        """Free all memory. Close every context first."""
        if self.head != self._handle:
            llama.llama_model_free(self.head)
        self._free()
        self.head = CLOSED

    def _free(self) -> None:
        if self._handle:
            llama.llama_model_free(self._handle)
        self._handle = CLOSED

    def _load_again(self) -> None:
        self.check()  # KV of other weights may be in host memory
        self._handle = _load(self._path, self._params)
        try:
            self.check()  # files may have been replaced during the load
            for act in self.on_load:
                act()
        except BaseException:
            self._free()  # else the next `enter` would find weights and skip `on_load`
            raise


def _load(path: Path, params: llama.llama_model_params) -> llama.llama_model_p:
    """Load a model from its file. Raises ModelError."""
    llama.COMPLAINTS.clear()  # of earlier loads
    llama.LAYERS.clear()
    handle = llama.llama_model_load_from_file(str(path).encode(), params)
    if not handle:
        raise ModelError(f"cannot load {path}: {llama.last_complaint()}")
    return handle


def _address(array: ctypes.Array | None) -> int | None:
    return ctypes.addressof(array) if array else None


def _without_vocabulary(
    head: llama.llama_model_p, metadata: Sequence[MetadataOverride]
) -> list[llama.llama_model_kv_override]:
    """Return metadata overrides that make llama.cpp load as many tokens as `head` has, but without their texts."""
    buffer = ctypes.create_string_buffer(128)
    llama.llama_model_meta_val_str(head, ARCHITECTURE.encode(), buffer, len(buffer))
    given = {override.key: override.text for override in metadata}
    architecture = given.get(ARCHITECTURE) or buffer.value.decode("utf-8", "replace")
    vocabulary = MetadataOverride("tokenizer.ggml.model", "no_vocab")
    return [vocabulary.row(), MetadataOverride(f"{architecture}.vocab_size", _num_tokens(head)).row()]


def _num_tokens(handle: llama.llama_model_p) -> int:
    vocab = llama.llama_model_get_vocab(handle)
    return llama.llama_vocab_n_tokens(vocab) if vocab else 0


def check_file(path: Path) -> None:
    """Raise ModelError unless `path` is a readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not with {GGUF_MAGIC!r}")


ALL_LAYERS = -1
OF_SMALL_MISTRAL = 40  # layers of Mistral Small 2503, whose file may lack its chat template
NO_LOADING = 0  # llama.cpp's load mode without a file mapping
TYPE_BYTES = {  # bytes of one number, scales included
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}  # fmt: skip
NO_KV = frozenset({  # architectures without KV in llama.cpp
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1",
})  # fmt: skip
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


class Model:
    """Weights and vocabulary. Once loaded, the model is safe from several threads.

    gpu_layers: how many layers go to the GPU, starting with the last layer. `gpu_layers` has no effect if the build does not
    support GPUs, or if no card may compute.
    progress: called with the loaded share, 0 to 1. If `progress` returns False, the load ends.
    vocab_only: load no weights. A model without weights can only tokenize.
    repack: let the CPU use weights in another layout (AMX, interleaved rows). On some machines, the other layout makes
    prefill faster. With repacked weights, kernels round differently for different batch sizes, so reused KV is not equal bit
    for bit.
    may_unload: the weights may be freed and loaded again (see `Weights`). The vocabulary and the model's properties stay
    while the weights are unloaded.
    split: the GPUs, and how layers are split among them.
    overrides: which tensors are in another buffer than the rest of their layer, such as host memory.
    metadata: overrides of the file's metadata.
    rope_scaling: how every context scales positions.
    is_simulated: allocate no memory for weights and contexts. A simulated model serves only to find out how much memory
    weights and contexts would use.
    with_heads: also load the multi-token heads.
    between: as in `Tokenizer`.
    """

    def __init__(
        self,
        path: Path,
        gpu_layers: int = ALL_LAYERS,
        progress: Callable[[float], bool] | None = None,
        vocab_only: bool = False,
        repack: bool = False,
        *,
        may_unload: bool = False,
        split: Split = ALL_CARDS,
        overrides: tuple[Override, ...] = (),
        metadata: tuple[MetadataOverride, ...] = (),
        rope_scaling: RopeScaling = AS_TRAINED,
        is_simulated: bool = False,
        with_heads: bool = False,
        between: Callable[[], None] | None = None,
    ) -> None:
        load_backends()
        self._between = between
        self.path, self.gpu_layers, self.repack = path, gpu_layers, repack
        check_file(path)
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only, params.use_extra_bufts = gpu_layers, vocab_only, repack
        params.load_mtp = with_heads
        self.overrides, self._overrides = overrides, as_array(overrides)
        params.tensor_buft_overrides = _address(self._overrides)
        self.split, self._split = split, () if vocab_only else split.place(params)
        if (nothing := no_devices()) is not None:
            params.devices, self._no_devices = ctypes.addressof(nothing), nothing
        self.metadata_overrides, self.rope_scaling, self._vocab_only = metadata, rope_scaling, vocab_only
        if is_simulated:
            params.no_alloc, params.load_mode = True, NO_LOADING
        self._progress = llama.llama_progress_callback(lambda share, _: progress(share) if progress else True)
        params.progress_callback = self._progress
        self.weights = Weights(path, params, may_unload=may_unload, metadata=metadata)
        self.layers: Mapping[str, int] = Counter(llama.LAYERS.values())
        """How many layers each device has, by name; the output counts as a layer. Empty if llama.cpp does not report it."""
        vocab = llama.llama_model_get_vocab(self.weights.head)
        assert vocab is not None
        self.vocab = vocab
        self.num_vocab: int = llama.llama_vocab_n_tokens(self.vocab)
        self.num_layers: int = llama.llama_model_n_layer(self.handle)
        self.width: int = llama.llama_model_n_embd_inp(self.handle)
        """The size of an embedded token, in numbers."""
        of_file = self.metadata("general.file_type") or ""  # needed without weights: llama.cpp reads the type only with them
        number = int(of_file) if vocab_only and of_file.isdecimal() else llama.llama_model_ftype(self.handle)
        self.file_type = (llama.llama_ftype_name(number) or b"").decode()
        """The quantization of most tensors, as llama.cpp names it."""
        self.context_train: int = self._trained_for()
        self._pieces: dict[int, bytes] = {}

    def close(self) -> None:
        self.weights.close()

    @property
    def handle(self) -> llama.llama_model_p:
        """llama.cpp's model. Raises ModelError while the weights are unloaded."""
        return self.weights.handle

    # ---- metadata --------------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @cached_property
    def devices(self) -> list[Device]:
        """The devices that have some of the model's layers; empty if the CPU has all layers.

        The first use of this property queries the devices, so it must come before the engine starts. A device in another
        process (RPC) answers one thread at a time. Once the engine runs, only the engine's thread may query a device in
        another process.
        """
        among = self.split.devices() if self.gpu_layers else []
        return [device for device in among if device.name in self.layers or not self.layers]

    @cached_property
    def device(self) -> Device | None:
        """The first of `devices`."""
        return next(iter(self.devices), None)

    @property
    def is_on_device(self) -> bool:
        """Whether devices have all layers and the output, and no override moves a tensor.

        If llama.cpp does not report where the layers are, `gpu_layers` decides.
        """
        is_asked = self.gpu_layers < 0 or self.gpu_layers > self.num_layers
        is_all = HOST not in self.layers if self.layers else is_asked
        return is_all and not self.overrides and self.device is not None

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return llama.llama_model_size(self.weights.head)

    @property
    def vocabulary_type(self) -> int:
        """llama.cpp's number for the kind of vocabulary."""
        return llama.llama_vocab_type(self.vocab)

    @property
    def num_parameters(self) -> int:
        return llama.llama_model_n_params(self.weights.head)

    @property
    def num_layer_parameters(self) -> int:
        """The number of weights that each token is computed with: all weights but the token embedding."""
        return max(self.num_parameters - self.num_vocab * llama.llama_model_n_embd(self.handle), 1)

    @property
    def attention_width(self) -> int:
        """The total width of the attention heads in all layers.

        Attention to a cell takes time in proportion to this width.
        """
        num_layers = sum(heads > 0 for heads in self._kv_heads)
        return num_layers * llama.llama_model_n_head(self.handle) * self._head_size("key")

    @property
    def rope(self) -> tuple[int, int, int]:
        """llama.cpp's kind of rotary positions (-1: none), a key head's size, and how many of its numbers are rotated."""
        head = self._head_size("key")
        return llama.llama_model_rope_type(self.handle), head, int(self._own("rope.dimension_count") or head)

    def _head_size(self, what: str) -> int:
        """Return the width of one head's key or value."""
        usual = llama.llama_model_n_embd(self.handle) // max(llama.llama_model_n_head(self.handle), 1)
        return int(self._own(f"attention.{what}_length") or usual)

    def kv_bytes(self, type_k: str, type_v: str) -> int:
        """Return the bytes of one token's KV in all layers."""
        key, value = self._head_size("key") * TYPE_BYTES[type_k], self._head_size("value") * TYPE_BYTES[type_v]
        return int(sum(self._kv_heads) * (key + value))

    @property
    def _kv_heads(self) -> list[int]:
        """The number of KV heads of each layer; 0 for a layer without attention.

        The file of a hybrid model lists the number of KV heads of each layer, or says that every n-th layer has attention.
        """
        heads, listed = llama.llama_model_n_head_kv(self.handle), self._own("attention.head_count_kv") or ""
        if listed.startswith("["):
            return [int(number) for number in listed.strip("[]").split(",")]
        interval = max(int(self._own("full_attention_interval") or 1), 1)
        return [0 if (layer + 1) % interval else heads for layer in range(self.num_layers)]

    @property
    def rope_depends_on_context(self) -> bool:
        """Whether llama.cpp chooses the rotary factors by the size of the pool, as for Phi 3."""
        return bool(self._own(ORIGINAL))

    def digest(self) -> str:
        """Return a digest of every byte of the model's files. The call is slow if a file's digest is not stored yet.

        Raises ModelError if a file has changed since it was loaded.
        """
        return self.weights.files.digest()

    @property
    def can_trim(self) -> bool:
        """Whether every prefix of the model's KV can be reused.

        This is false for recurrent and hybrid models, whose state is a single snapshot.
        """
        handle = self.weights.head
        return not (llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle))

    @property
    def window(self) -> int:
        """How many tokens the sliding-window layers look back; 0 if there are no such layers."""
        return llama.llama_model_n_swa(self.handle)

    @property
    def can_chat(self) -> bool:
        """Whether the model is a causal decoder, which can generate text. Encoders only compute vectors."""
        is_causal = self.metadata(ARCHITECTURE) not in NO_KV and self._own("attention.causal") != "false"
        has_encoder = llama.llama_model_has_encoder(self.handle)
        return is_causal and llama.llama_model_has_decoder(self.handle) and not has_encoder

    @property
    def pooling(self) -> str:
        """How the vectors of a text's tokens are combined into one vector; empty if the model's file does not say."""
        number = self._own("pooling_type") or "-1"
        return next((name for name, value in POOLINGS.items() if str(value) == number), "")

    def _trained_for(self) -> int:
        """Return the number of tokens that the model was trained for, or the number that flags for YaRN extend it to."""
        known = llama.llama_model_n_ctx_train(self.handle) or int(self._number("context_length"))  # 0 without the weights
        scaling = self.rope_scaling
        if not scaling.scale or not self._has_rope or (scaling.kind or self._own("rope.scaling.type")) != "yarn":
            return known
        factor = self._number("rope.scaling.factor") or self._number("rope.scale_linear") or 1.0
        original, scale = scaling.original or self._number(ORIGINAL) or known, np.float32(scaling.scale)
        return known if scale == np.float32(1 / factor) else int(np.float32(original) / scale)

    @property
    def _has_rope(self) -> bool:
        return llama.llama_model_rope_type(self.handle) >= 0

    @property
    def _extrapolates(self) -> bool:
        """Whether YaRN leaves high frequencies unscaled.

        If YaRN leaves them unscaled, llama.cpp ignores --yarn-attn-factor.
        """
        of_file = self._own("rope.scaling.yarn_ext_factor")
        share = self.rope_scaling.ext_factor if self.rope_scaling.ext_factor >= 0 else float(of_file or -1)
        return share > 0 or (share < 0 and (self.rope_scaling.kind or self._own("rope.scaling.type")) == "yarn")

    @cached_property
    def _replaced(self) -> dict[str, str]:
        """The values that flags set in place of the file's metadata, by key.

        Only flags that llama.cpp has used are included.

        All flags are included if the model has no weights, because llama.cpp then reads only some metadata.
        """
        used = (one for one in self.metadata_overrides if self._vocab_only or llama.HEEDED.get((one.key, one.type)) == "")
        return {one.key: one.text for one in used}

    @property
    def altered(self) -> tuple[str, ...]:
        """The flags that replace values of the model's file, as texts for digests; empty if there are no such flags."""
        given = ((self.rope_scaling, AS_TRAINED), (self.metadata_overrides, ()))
        return tuple(repr(one) for one, unset in given if one != unset)

    def described_flags(self) -> Iterator[str]:
        """Yield a line for each thing that flags change: the devices of layers, rotary positions, metadata."""
        if self.split != ALL_CARDS:
            yield f"layers on {self.split.described()}"
        if self.rope_scaling != AS_TRAINED:
            yield f"rotary positions: {self.rope_scaling}; trained for {self.context_train:,} tokens"
        if self._replaced:
            yield f"metadata: {', '.join(str(one) for one in self.metadata_overrides if one.key in self._replaced)}"

    def without_effect(self) -> Iterator[str]:
        """Yield a message for each flag that has no effect on this model."""
        yield from self.split.without_effect()
        no_gpu = "" if self.split.devices() else "there is no GPU to use"
        if self.gpu_layers not in (ALL_LAYERS, 0) and no_gpu:
            yield f"--gpu-layers has no effect: {no_gpu}"
        unmoved = no_gpu if self.num_expert_layers else f"{self.path.name} has no experts"
        if unmoved and any(one.pattern.endswith(EXPERTS) for one in self.overrides):
            yield f"--n-cpu-moe and --cpu-moe have no effect: {unmoved}"
        if self.rope_scaling != AS_TRAINED and not self._has_rope:
            yield f"--rope-... and --yarn-... have no effect: {self.path.name} has no rotary positions"
        elif self.rope_scaling.attn_factor >= 0 and self._extrapolates:
            yield "--yarn-attn-factor has no effect where YaRN extrapolates: --yarn-ext-factor 0"
        for one in self.metadata_overrides:
            if one.key not in self._replaced:
                expected = llama.HEEDED.get((one.key, one.type))
                why = f"it is of type {expected}" if expected else f"llama.cpp reads no such key of {self.path.name}"
                yield f"--override-kv {one} has no effect: {why}"

    def metadata(self, key: str) -> str | None:
        """Return a metadata value as text, or the value of the flag that replaces it; None if there is no such key."""
        if key in self._replaced:
            return self._replaced[key]
        size = 1 << 16
        buffer = ctypes.create_string_buffer(size)
        needed = self._read_metadata(key, buffer)
        if needed >= size:
            buffer = ctypes.create_string_buffer(needed + 1)
            self._read_metadata(key, buffer)
        return buffer.value.decode("utf-8", "replace") if needed >= 0 else None

    def _own(self, key: str) -> str | None:
        """Return a metadata value whose key starts with the model's architecture."""
        return self.metadata(f"{self.metadata('general.architecture')}.{key}")

    def _number(self, key: str) -> float:
        """Return a number from the architecture's metadata; 0 if the file has none."""
        with suppress(ValueError):
            return float(self._own(key) or 0)
        return 0.0

    def _read_metadata(self, key: str, buffer: ctypes.Array[ctypes.c_char]) -> int:
        """Write a value to `buffer`, cut to fit, and return the length of the whole value; -1 if the key is missing."""
        return llama.llama_model_meta_val_str(self.weights.head, key.encode(), buffer, len(buffer))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; None if the model has none.

        Instead of a template, a file may contain the name of one of llama.cpp's templates. Some files of Mistral Small
        contain neither a template nor a name, and get llama.cpp's template for this model.
        """
        template = llama.llama_model_chat_template(self.handle, None)
        text = template.decode("utf-8", "replace") if template else ""
        if not text and self.metadata("tokenizer.ggml.pre") == "tekken" and self.num_layers == OF_SMALL_MISTRAL:
            text = "mistral-v7-tekken"  # llama.cpp recognizes it by the vocabulary, which weights that may unload lack
        return (named_template(text) or text) if text else None

    @property
    def num_heads(self) -> int:
        """The number of multi-token heads, according to the model's file."""
        return int(self._own("nextn_predict_layers") or 0)

    @property
    def num_expert_layers(self) -> int:
        """The number of layers that may have experts; 0 if the model is no mixture of experts."""
        return self.num_layers if int(self._own("expert_count") or 0) else 0

    # ---- vocabulary ------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        The tokenizer is created at its first use, because this takes a second for a large vocabulary, and a simulated model
        needs no tokenizer.
        """
        return Tokenizer(self.vocab, self._between)

    def tokenize(self, text: str, special: bool = False, begin: bool = False) -> np.ndarray:
        """Return the token ids (int32) of a part of a prompt: see `Tokenizer`."""
        return self.tokenizer(text, special, begin)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; empty for a control token.

        The bytes are cached, so a repeated call costs a dictionary look-up.
        """
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def piece_with(self, spellings: frozenset[str]) -> Callable[[int], bytes]:
        """Return a function like `piece` that also returns the bytes of the control tokens with these spellings."""
        ids = (self.tokenize(spelling, special=True) for spelling in spellings)
        spelt = {int(found[0]): self.spelling(int(found[0])) for found in ids if len(found) == 1}
        return lambda token: spelt.get(token) or self.piece(token)

    def spelling(self, token: int) -> bytes:
        """Return a token's bytes in the vocabulary. A control token has bytes, too, such as b"<|im_end|>"."""
        return self._piece(token, special=True)

    def text_of(self, token: int) -> str:
        """Return a token's spelling as text; empty for -1."""
        return self.spelling(token).decode("utf-8", "replace") if token >= 0 else ""

    def detokenize(self, tokens: np.ndarray, special: bool = False) -> str:
        """Return the text of tokens (int32), without control tokens.

        special: the text contains the spellings of control tokens.
        """
        pieces = (self.piece(token) or (self.spelling(token) if special else b"") for token in tokens.tolist())
        return b"".join(pieces).decode("utf-8", "replace")

    def prompt_text(self, tokens: np.ndarray) -> str:
        """Return the prompt that the tokenizer turns into these tokens (int32).

        Control tokens are spelled out. Spaces that the tokenizer would add are left out.
        """
        texts = ((self.detokenize(run, special=True), spaced) for run, spaced in self.tokenizer.texts(tokens))
        return "".join(text.removeprefix(" ") if spaced else text for text, spaced in texts)

    def spells(self, tokens: np.ndarray, text: str, piece: Callable[[int], bytes] | None = None) -> bool:
        """Return whether tokens (int32) spell exactly `text`, and no token is empty.

        piece: returns the bytes of a token.
        """
        pieces = [(piece or self.piece)(token) for token in tokens.tolist()]
        return all(pieces) and b"".join(pieces) == text.encode("utf-8", "replace")

    def _piece(self, token: int, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:size]

    def is_end(self, token: int) -> bool:
        """Return whether a token is one of the model's end-of-generation tokens."""
        return token in self._ends

    @property
    def ends(self) -> frozenset[int]:
        return self._ends

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(t for t in range(self.num_vocab) if llama.llama_vocab_is_eog(self.vocab, t))

    @cached_property
    def bos(self) -> str:
        return self.text_of(llama.llama_vocab_bos(self.vocab))

    @cached_property
    def eos(self) -> str:
        return self.text_of(llama.llama_vocab_eos(self.vocab))


# ---- The tokens of a vocabulary for filling in the middle of a text (Bavarian et al. 2022). -----------------------------

NEEDED = {
    "prefix": llama.llama_vocab_fim_pre,
    "suffix": llama.llama_vocab_fim_suf,
    "middle": llama.llama_vocab_fim_mid,
}


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The ids of a model's infill tokens.

    repository: the token before the name of a repository; -1 if there is none.
    file: the token before the name of each file; -1 if there is none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int

    @classmethod
    def of(cls, model: Model) -> Self | None:
        """Return the tokens of a model; None if it lacks `prefix`, `suffix` or `middle`, which every infill needs."""
        needed = {name: find(model.vocab) for name, find in NEEDED.items()}
        if min(needed.values()) < 0:
            return None
        repository, file = llama.llama_vocab_fim_rep(model.vocab), llama.llama_vocab_fim_sep(model.vocab)
        return cls(**needed, repository=repository, file=file)
