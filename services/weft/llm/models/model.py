"""A model with its weights: the forward pass of any architecture over a paged KV cache."""

import math
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.llm import ops
from weft.llm.models.decoder import StepInput
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.rope import rope_tables
from weft.llm.weights.parts import EMBEDDING, FINAL_NORM, LM_HEAD, bias_of, is_matrix, is_norm
from weft_kernels.blocks.layout import MAX_CODE, KVLayer, cache_shape, split_layers
from weft_kernels.linear.products import Matrix, linear, matrix_bytes
from weft_kernels.linear.quantized import QuantizedWeight


class TransformerModel:
    """A decoder that computes any tokens of any sequences in one step, over a paged KV cache.

    Shape letters: T tokens of a step, B sequences of a step, M blocks in the longest table, S rows of logits. There is
    no prefill or decode mode: a step may have 1 token of one sequence and 500 of another.

    Args:
        config: The model.
        weights: Weights by the names of ``config.weight_parts``; matrices as ``Matrix``, others as numbers. Taken out
            of the mapping one by one: a packed weight is a copy, and the two need not be in memory at once. With tied
            embeddings there may be a matrix for the LM head all the same.
        dtype: Type of computation and KV cache.
        device: Device of computation.
        deterministic: The hidden state of a token is bitwise independent of the other tokens of the step.
        max_model_len: Number of supported positions; 0: the context length of the model.
        num_bits: 8 or 4: linear layers round weights of numbers to so many bits, the LM head to 8, and on a CPU all of
            them activations to 8. 0: nothing is rounded.

    Attributes:
        config: The model.
        dtype: Type of computation.
        device: Device of computation.
        matrix_bytes: Size of the matrices of all products: codes and scales where there are such, else numbers.

    Raises:
        InvalidArgumentError: A weight is missing, or ``max_model_len`` exceeds the context length of the model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: MutableMapping[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        max_model_len: int = 0,
        num_bits: int = 0,
    ) -> None:
        longest = config.max_context_len
        if not 0 <= max_model_len <= longest:
            raise InvalidArgumentError(f"max_model_len must be from 0 to {longest}, got {max_model_len}")
        parts = config.weight_parts()
        if missing := sorted(parts.keys() - weights):
            raise InvalidArgumentError(
                f"weights: {len(missing)} of {len(parts)} missing, first {missing[0]!r}; "
                f"take them from load_folder or random_weights with the same configuration"
            )
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        multiply_by = partial(linear, dtype=dtype, deterministic=deterministic, has_kernels=ops.ARE_KERNELS_FORCED)
        head_bits = 8 if num_bits else 0
        matrices = [name for name in weights if is_matrix(name)]
        self.matrix_bytes = sum(
            matrix_bytes(weights[name], dtype, head_bits if name == LM_HEAD else num_bits) for name in matrices
        )
        own = {name: weights.pop(name).to(device=device, dtype=dtype) for name in weights.keys() - matrices}
        own |= {name: config.gain(weight) for name, weight in own.items() if is_norm(name)}
        products = {
            name: multiply_by(
                _moved(weights.pop(name), self.device, dtype),
                own.get(bias_of(name)),
                num_bits=head_bits if name == LM_HEAD else num_bits,
            )
            for name in matrices
        }
        if LM_HEAD not in products:
            self.matrix_bytes += matrix_bytes(own[EMBEDDING], dtype, head_bits)
        self._embedding = own[EMBEDDING]
        scale = config.embedding_scale
        self._embedding_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)
        self._final_norm = own[FINAL_NORM]
        self._lm_head = products.get(LM_HEAD) or multiply_by(own[EMBEDDING], num_bits=head_bits)
        self._layers = [
            config.layer(index, own, products, deterministic=deterministic) for index in range(config.num_layers)
        ]
        self._split: tuple[torch.Tensor, list[KVLayer]] | None = None
        tables = (rope_tables(rope, config.head_dim, max_model_len or longest) for rope in config.ropes)
        self._ropes = [(cos.to(device), sin.to(device)) for cos, sin in tables]

    def new_kv(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A KV cache of zeros, laid out as ``weft_kernels.blocks.layout`` says.

        Args:
            num_blocks: Blocks.
            block_size: Tokens of a block.
            dtype: Of keys and values, which may be codes; None: that of computation.

        Raises:
            ResourceExhaustedError: The host has less memory; a GPU raises ``torch.OutOfMemoryError``.
        """
        config, dtype = self.config, dtype or self.dtype
        shape = cache_shape(num_blocks, config.num_layers, block_size, config.num_kv_heads, config.head_dim, dtype)
        stored = torch.uint8 if dtype in MAX_CODE else dtype  # there are no zeros of every type of codes
        try:
            return torch.zeros(shape, dtype=stored, device=self.device).view(dtype)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ResourceExhaustedError(
                f"engine: a KV cache of {num_blocks} blocks takes {math.prod(shape) * dtype.itemsize} bytes, which the "
                f"host cannot allocate; lower kv_cache_bytes, or num_blocks"
            ) from error

    def prepare(self, kv_dtype: torch.dtype | None = None) -> None:
        """Compile what steps with a KV cache of the type need, by default that of computation; nothing on a GPU."""
        config = self.config
        ops.prepare_attention(
            config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, kv_dtype or self.dtype, self.device
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        q_start: torch.Tensor,
        ctx_len: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_q_len: int,
        max_ctx_len: int,
    ) -> torch.Tensor:
        """Compute the hidden states of the tokens of a step, and store their keys and values in ``kv``.

        Args:
            token_ids: int32 or int64 ``[T]``, contiguous per sequence.
            positions: int32 ``[T]``, position of each token in its sequence.
            kv: KV cache of ``new_kv``; of type ``dtype``, or of 8-bit codes. Changed in place.
            block_tables: int32 ``[B, M]``: blocks of each sequence in order, 0 behind the last.
            q_start: int32 ``[B + 1]``: first token of each sequence, and T.
            ctx_len: int32 ``[B]``: tokens of each sequence, including those of this step.
            slot_mapping: int64 ``[T]``: block times block size plus offset, the slot of each token's keys and values.
            max_q_len: Most tokens of one sequence in the step.
            max_ctx_len: Largest ``ctx_len``.

        Returns:
            ``[T, hidden_size]``, after the final norm, of type ``dtype``.
        """
        step = StepInput(positions, slot_mapping, block_tables, q_start, ctx_len, max_q_len, max_ctx_len, self._ropes)
        with torch.inference_mode():
            hidden = self.embed(token_ids)
            residual: torch.Tensor | None = None
            for layer, kv_layer in zip(self._layers, self._layers_of(kv), strict=True):
                hidden, residual = layer.forward(hidden, residual, step, kv_layer)
            normed, _ = ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps, residual)
        return normed

    def _layers_of(self, kv: torch.Tensor) -> list[KVLayer]:
        """Views of the cache, kept from step to step: a model has one cache, and making them takes 20 us a layer."""
        if self._split is None or self._split[0] is not kv:
            self._split = kv, split_layers(kv, self.config.num_kv_heads, self.config.head_dim)
        return self._split[1]

    def forget_cache(self) -> None:
        """Drop the views of the last cache, so that its memory is freed with it."""
        self._split = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, ``[N, hidden_size]``, of type ``dtype``; ``token_ids``: int32 or int64 ``[N]``."""
        rows = torch.nn.functional.embedding(token_ids, self._embedding)
        return rows if self._embedding_scale is None else rows * self._embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[S, vocab_size]``, for rows of the result of ``forward``."""
        with torch.inference_mode():
            return self._lm_head(hidden).float()


def _moved(weight: Matrix, device: torch.device, dtype: torch.dtype) -> Matrix:
    if isinstance(weight, tuple):
        return tuple(_moved_one(part, device, dtype) for part in weight)
    return _moved_one(weight, device, dtype)


def _moved_one(
    weight: torch.Tensor | QuantizedWeight, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | QuantizedWeight:
    return weight.to(device) if isinstance(weight, QuantizedWeight) else weight.to(device, dtype)
