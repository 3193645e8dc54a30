"""Cost of a language model: weights, KV cache, activations and operations of a step."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.config import EngineConfig, kv_window
from weft.llm.models.fields import DTYPE_BYTES
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.registry import read_config
from weft.llm.models.sharding import check_sizes
from weft.llm.models.stages import Stage, stages
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.weights.gguf import find_gguf
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, fused_shape, is_matrix

_GROUP_SIZE, _GROUP_BYTES, _SCALE_BYTES = 32, 4, 4
_KINDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SHARE_OF_FREE = 0.9
_ALONE = ParallelSizes()


@dataclass(frozen=True)
class LanguageModel:
    """A model with the settings of its engine, or what one of its ranks has of it.

    Attributes:
        config: Of a rank: with its heads, columns and part of the vocabulary, and all layers.
        engine: ``dtype`` is a type, not ``auto``.
        folder: Of its files; None: weights are as configured in ``engine``.
        stage: The rank's layers; None: all.
        sizes: Ranks that the files are divided among.
        whole: Of the model that is divided; None: ``config``.
    """

    config: TransformerConfig
    engine: EngineConfig
    folder: Path | None = None
    stage: Stage | None = None
    sizes: ParallelSizes = _ALONE
    whole: TransformerConfig | None = None

    def parts(self, sizes: ParallelSizes) -> "list[LanguageModel]":
        """What a rank of each stage has; the model itself if it is not divided.

        Raises:
            InvalidArgumentError: The model cannot be divided among so many ranks.
        """
        if sizes.num_ranks == 1:
            return [self]
        check_sizes(self.config, sizes)
        own = self.config.of_rank(sizes.tensor)
        divided = replace(self, config=own, sizes=sizes, whole=self.config)
        return [replace(divided, stage=each) for each in stages(self.config, sizes.pipeline)]

    @property
    def num_layers(self) -> int:
        """Layers of this part."""
        return self.config.num_layers if self.stage is None else len(self.stage.layers)

    @property
    def num_multiplied(self) -> float:
        """Weights that multiply each token, without the LM head."""
        return self.config.num_multiplied * self._share

    @property
    def num_head(self) -> int:
        """Weights of the LM head; 0: another stage has it."""
        return self.config.num_head if self.stage is None or self.stage.is_last else 0

    @property
    def _share(self) -> float:
        return self.num_layers / self.config.num_layers

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices, the LM head included."""
        if (stored := self._stored_bytes) is not None:
            return max(stored - self._embedding_bytes, 1)
        is_tied = self.num_head > 0 and LM_HEAD not in self._shapes
        return sum(self._matrix_bytes(name, shape) for name, shape in self._shapes.items()) + (
            self._matrix_bytes(LM_HEAD, self._shapes[EMBEDDING]) if is_tied else 0
        )

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of matrices that a step of so many tokens reads: of experts those that tokens choose."""
        return self.matrix_bytes * self.config.read_share(num_tokens)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights and adapters in memory: on a CPU a tied LM head is a packed copy of the embedding."""
        own = self.matrix_bytes + sum(
            math.prod(shape) * self._item_bytes for name, shape in self._shapes.items() if not is_matrix(name)
        )
        is_tied = self.config.tie_word_embeddings and self.num_head > 0
        is_shared = is_tied and self.engine.device != "cpu" and not self.engine.num_bits
        return own + self.adapter_bytes - (self._embedding_bytes if is_shared else 0)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the slots for LoRA adapters."""
        parts = self.config.adapted_parts().values()
        width = sum(len(own) * own[0].shape[1] + fused_shape(own)[0] for own in parts)
        return round(self.engine.num_lora_slots * self.engine.max_lora_rank * width * self._item_bytes * self._share)

    @property
    def kind(self) -> str:
        """Type that products compute in, a key of ``TYPE_BYTES``."""
        return "int8" if self.engine.num_bits and self.engine.device == "cpu" else _KINDS[self.engine.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, scales of 8-bit codes included."""
        return round(self.config.kv_bytes_per_token(self.engine.kv_dtype) * self._share)

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations of the largest step, logits included."""
        config, engine = self.config, self.engine
        width = config.num_heads * config.head_dim
        qkv = width + 2 * config.num_kv_heads * config.head_dim
        numbers = 3 * config.hidden_size + qkv + width + 3 * config.mlp_width
        logits = 3 * engine.max_num_seqs * config.vocab_size * self.sizes.tensor * 4 if self.num_head else 0
        return engine.max_num_batched_tokens * numbers * self._item_bytes + logits

    def kv_bytes(self, device_bytes: int, taken_bytes: int) -> int:
        """Size of the engine's KV cache on a device where runtime and weights take ``taken_bytes``.

        Raises:
            InvalidArgumentError: No block fits.
        """
        block_bytes = self.engine.block_size * self.kv_bytes_per_token
        if num_blocks := self.engine.resolved(self.whole or self.config).num_blocks:
            return num_blocks * block_bytes
        free = max(device_bytes - taken_bytes - self.activation_bytes, 0)
        return int(free * _SHARE_OF_FREE) // block_bytes * block_bytes

    def sequence_bytes(self, context: int) -> int:
        """KV memory of one sequence of ``context`` tokens, in whole blocks; a window keeps fewer."""
        num_blocks = kv_window(self.engine, self.config).num_blocks(context)
        return num_blocks * self.engine.block_size * self.kv_bytes_per_token

    def largest_context(self, kv_bytes: int) -> int:
        """Longest sequence that fits into a cache of ``kv_bytes``, in tokens."""
        longest = self.engine.max_model_len or self.config.max_context_len
        num_blocks = kv_bytes // (self.engine.block_size * self.kv_bytes_per_token) - 1
        return max(0, min(kv_window(self.engine, self.config).max_len(longest, max(num_blocks, 0)), longest))

    def attention_flops(self, num_new: int, context: int) -> float:
        """Operations of attention for the last ``num_new`` tokens of a sequence of ``context``; windows reduce it."""
        return self.config.attention_flops(np.array([num_new]), np.array([context])) * self._share

    def read_kv_bytes(self, context: int) -> float:
        """Bytes of keys and values that one new token reads."""
        return self.config.read_kv_bytes(np.array([1]), np.array([context]), self.engine.kv_dtype) * self._share

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        parts = self.config.weight_parts().items()
        return {name: fused_shape(own) for name, own in parts if self.stage is None or self.stage.has(name)}

    @property
    def _item_bytes(self) -> int:
        return DTYPE_BYTES[self.engine.dtype]

    @property
    def _embedding_bytes(self) -> int:
        return self.config.num_head * self._item_bytes if EMBEDDING in self._shapes else 0

    def _matrix_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        if name != LM_HEAD and not is_matrix(name):
            return 0
        bits = 8 if self.engine.num_bits and name == LM_HEAD else self.engine.num_bits
        num_outputs, num_inputs = shape
        if not bits:
            return num_outputs * num_inputs * self._item_bytes
        if bits == 4 and num_inputs % _GROUP_SIZE == 0:
            return num_outputs * (num_inputs // 2 + num_inputs // _GROUP_SIZE * _GROUP_BYTES)
        return num_outputs * (num_inputs + _SCALE_BYTES)

    @cached_property
    def _stored_bytes(self) -> int | None:
        """File size of weights that are already quantised, of a rank its part; None for plain numbers."""
        if self.folder is None:
            return None
        files = [gguf] if (gguf := find_gguf(self.folder)) is not None else list(self.folder.glob("*.safetensors"))
        if gguf is None and '"quantization_config"' not in (self.folder / "config.json").read_text(encoding="utf-8"):
            return None
        return round(sum(file.stat().st_size for file in files) / self.sizes.tensor * self._share)


def read_language_model(folder: Path, engine: EngineConfig, *, needs_files: bool = True) -> LanguageModel:
    """Read the model in a version folder.

    Without ``needs_files`` weights are random, and only the configuration is read.

    Raises:
        NotFoundError, InvalidArgumentError: The folder has no such model, or the engine cannot run it.
    """
    config = read_config(folder)
    if engine.max_model_len > config.max_context_len:
        raise InvalidArgumentError(
            f"engine: max_model_len must be at most {config.max_context_len}, the context of the model, got "
            f"{engine.max_model_len}"
        )
    if needs_files and find_gguf(folder) is None and not any(folder.glob("*.safetensors")):
        raise NotFoundError(f"{folder} has no *.safetensors; build or fetch the model, or set load_format to dummy")
    return LanguageModel(config, engine, folder if needs_files else None)
