"""``TransformerModel``: a model with its weights; the forward pass of any architecture over a paged KV cache."""

import math
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.llm import ops
from weft.llm.models.decoder import StepInput
from weft.llm.models.lora import LoraBank
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.rope import rotary_dim_of
from weft.llm.models.sharding import Shard, is_second
from weft.llm.models.stages import stages
from weft.llm.parallel.context import ContextShare
from weft.llm.parallel.groups import ALONE, Groups
from weft.llm.parallel.products import Gathered, OfGathered, Reduced, embedding
from weft.llm.weights.parts import EMBEDDING, FINAL_NORM, LM_HEAD, bias_of, is_matrix, is_norm, is_router
from weft_kernels.blocks.layout import MAX_CODE, KVLayer, cache_shape, split_layers
from weft_kernels.linear.products import Matrix, linear, matrix_bytes
from weft_kernels.linear.quantized import QuantizedWeight


def rope_tables(rope: Mapping[str, Any], head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position, two float32 ``[num_positions, head_dim / 2]`` on the CPU.

    Computed in float32 in the same order as in transformers, so that angles agree at large positions. The attention
    factor of types ``yarn`` and ``longrope`` is multiplied in; pairs that ``partial_rotary_factor`` excludes do not
    turn. The angles of stored keys cannot depend on the length of the context. So type ``longrope`` has its long
    factors at all positions if ``num_positions`` exceeds the original context, else its short ones (transformers
    changes within a text); and type ``dynamic``, which has no effect up to ``max_position_embeddings``, gets no more
    positions.
    """
    rotary_dim = rotary_dim_of(rope, head_dim) or head_dim
    powers = _powers(rope["rope_theta"], rotary_dim)
    frequencies = 1.0 / powers
    factor = 1.0
    if rope["rope_type"] == "linear":
        frequencies = frequencies / rope["factor"]
    elif rope["rope_type"] == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope["rope_type"] == "yarn":
        frequencies = _yarn(rope, rotary_dim)
        factor = _yarn_attention_factor(rope)
    elif rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        frequencies = 1.0 / (torch.tensor(rope["long_factor" if num_positions > original else "short_factor"]) * powers)
        stretch = 1 + math.log(max(rope["factor"], 1.0)) / math.log(original)
        factor = rope.get("attention_factor", math.sqrt(stretch))
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    still = (0, (head_dim - rotary_dim) // 2)
    pad = torch.nn.functional.pad
    return pad(angles.cos() * factor, still, value=1.0), pad(angles.sin() * factor, still)


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers: torch.Tensor = theta**exponents
    return powers


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wave_lengths = 2 * math.pi / frequencies
    stretched = frequencies / rope["factor"]
    share_kept = (original / wave_lengths - low) / (high - low)
    mixed = (1 - share_kept) * stretched + share_kept * frequencies
    return torch.where(
        wave_lengths > original / low,
        stretched,
        torch.where(wave_lengths < original / high, frequencies, mixed),
    )


def _yarn(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    theta, original = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    share_kept = 1 - ramp
    powers = _powers(theta, head_dim)
    return 1.0 / (rope["factor"] * powers) * (1 - share_kept) + 1.0 / powers * share_kept


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    if "attention_factor" in rope:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if "mscale" in rope and "mscale_all_dim" in rope:
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


class TransformerModel:
    """A decoder that computes any tokens of any sequences in one step, over a paged KV cache.

    Shape letters: T tokens of a step, B sequences of a step, M blocks in the longest table, S rows of logits. There is
    no prefill or decode mode: a step may have 1 token of one sequence and 500 of another.

    Args:
        weights: Weights by the names of ``config.weight_parts``; matrices as ``Matrix``, others as numbers. Removed
            from the mapping one by one, so that a weight and its packed copy are not both kept. With tied embeddings
            there may still be a matrix for the LM head.
        dtype: Type of computation and KV cache.
        device: Device of computation.
        deterministic: The hidden state of a token is bitwise independent of the other tokens of the step.
        max_model_len: Number of supported positions; 0: the context length of the model.
        lora: Adapters of the model, of ``dtype`` and on ``device``; None: it has none.
        num_bits: 8 or 4: linear layers round unquantised weights to that many bits, the LM head to 8, and on a CPU all
            of them round activations to 8. 0: nothing is rounded.
        lm_head: The product of another model's LM head, in place of an own one.
        groups: The ranks that compute the model together; weights are those of this one (``load_folder``).

    Attributes:
        stage: The layers of the rank. Without their weights there is no ``embedding`` or ``lm_head``.
        matrix_bytes: Size of all matrices: codes and scales if quantised, else numbers.
        embedding: Rows of tokens, ``[vocab_size, hidden_size]``, or of the rank's tokens.
        lm_head: The product that makes logits of normed rows.
        taps: Numbers of layers whose output ``forward`` returns besides, 0 for the embeddings.

    Raises:
        InvalidArgumentError: A weight is missing, or ``max_model_len`` exceeds the context length of the model.
    """

    groups: Groups = ALONE

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
        lm_head: ops.Linear | None = None,
        lora: LoraBank | None = None,
        groups: Groups = ALONE,
    ) -> None:
        longest = config.max_context_len
        if not 0 <= max_model_len <= longest:
            raise InvalidArgumentError(f"max_model_len must be from 0 to {longest}, got {max_model_len}")
        self.stage = stage = stages(config, groups.pipeline.size)[groups.pipeline.rank]
        parts = {name for name in config.weight_parts() if stage.has(name)}
        if missing := sorted(parts - weights.keys()):
            raise InvalidArgumentError(
                f"weights: {len(missing)} of {len(parts)} missing, first {missing[0]!r}; "
                f"take them from load_folder or random_weights with the same configuration"
            )
        self.config = config
        self.groups = groups
        self._own_config = own_config = config.of_rank(groups.tensor.size)
        self._shard = shard = Shard(config, groups.tensor.rank, groups.tensor.size)
        self.dtype = dtype
        self.device = torch.device(device)
        multiply_by = partial(linear, dtype=dtype, deterministic=deterministic, has_kernels=ops.ARE_KERNELS_FORCED)
        head_bits = 8 if num_bits else 0
        matrices = [name for name in weights if is_matrix(name) or is_router(name)]
        bits = {name: head_bits if name == LM_HEAD else 0 if is_router(name) else num_bits for name in matrices}
        self.matrix_bytes = sum(matrix_bytes(weights[name], dtype, bits[name]) for name in matrices if is_matrix(name))
        own = {name: weights.pop(name).to(device=device, dtype=dtype) for name in weights.keys() - matrices}
        own |= {name: config.gain(weight) for name, weight in own.items() if is_norm(name)}
        by_outputs = {name for name in matrices if is_second(name) and _num_outputs(weights[name]) < config.hidden_size}
        products = {
            name: multiply_by(
                _moved(weights.pop(name), self.device, dtype),
                self._bias(name, own.get(bias_of(name)), is_by_outputs=name in by_outputs),
                num_bits=bits[name],
                num_experts=own_config.num_experts_of(name),
                # Ranks must choose the same experts, and so by the same product.
                deterministic=deterministic or (is_router(name) and groups.tensor.size > 1),
            )
            for name in matrices
        }
        is_tied = stage.is_last and LM_HEAD not in products and lm_head is None
        if is_tied:
            self.matrix_bytes += matrix_bytes(own[EMBEDDING], dtype, head_bits)
            products[LM_HEAD] = multiply_by(own[EMBEDDING], num_bits=head_bits)
        self.lora = lora
        if lora is not None:
            adapted = {name: each for name, each in config.adapted_parts().items() if stage.has(name)}
            pieces = {name: shard.pieces(name, adapted[name], by_outputs=name in by_outputs) for name in adapted}
            products = lora.wrap(products, pieces)
        if stage.has_embedding:
            self.embedding = own[EMBEDDING]
        scale = config.embedding_scale
        self._embedding_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)
        if groups.tensor.size > 1:
            products = {
                name: self._whole(name, product, is_by_outputs=name in by_outputs) for name, product in products.items()
            }
        if stage.is_last:
            self._final_norm = own[FINAL_NORM]
            self.lm_head = lm_head or products[LM_HEAD]
        self.taps: tuple[int, ...] = ()
        self._layers = [
            own_config.layer(index, own, products, deterministic=deterministic, tensor=groups.tensor)
            for index in stage.layers
        ]
        self._split: tuple[torch.Tensor, list[KVLayer]] | None = None
        tables = (rope_tables(rope, config.head_dim, max_model_len or longest) for rope in config.ropes)
        self._ropes = [(cos.to(device), sin.to(device)) for cos, sin in tables]

    def _bias(self, name: str, bias: torch.Tensor | None, *, is_by_outputs: bool) -> torch.Tensor | None:
        """The part of a bias that this rank adds; of a sum of ranks' products the first one adds it."""
        group = self.groups.tensor
        if bias is None or group.size == 1 or not is_second(name):
            return bias
        if is_by_outputs:
            return bias.chunk(group.size)[group.rank]
        return bias if group.rank == 0 else None

    def _whole(self, name: str, product: ops.Linear, *, is_by_outputs: bool) -> ops.Linear:
        """The product whose result all tensor ranks have, of one that gives a rank's part; others stay."""
        group = self.groups.tensor
        if name == LM_HEAD:
            return Gathered(product, group, self.config.vocab_size)
        if not is_second(name):
            return product
        if is_by_outputs:
            return Gathered(OfGathered(product, group), group, self.config.hidden_size)
        return Reduced(product, group)

    def new_kv(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A zeroed KV cache, laid out as in ``weft_kernels.blocks.layout``; of ``self.dtype`` by default.

        Raises:
            ResourceExhaustedError: The host has less memory; a GPU raises ``torch.OutOfMemoryError``.
        """
        config, dtype, num_layers = self._own_config, dtype or self.dtype, len(self.stage.layers)
        shape = cache_shape(num_blocks, num_layers, block_size, config.num_kv_heads, config.head_dim, dtype)
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

    def new_states(self, num_tokens: int) -> torch.Tensor | None:
        """Room for what the stage before computes, zeros ``[num_tokens, hidden_size]``; None: there is none."""
        if self.stage.is_first:
            return None
        return torch.zeros(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def prepare(self, kv_dtype: torch.dtype | None = None) -> None:
        """Compile what steps with such a KV cache need, so that serving does not; nothing on a GPU."""
        config = self._own_config
        ops.prepare_attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            kv_dtype or self.dtype,
            self.device,
            has_cap=config.soft_cap > 0,
            has_sinks=config.has_sinks,
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
        adapters: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        incoming: torch.Tensor | None = None,
        share: ContextShare | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states of the tokens of a step, and store their keys and values in ``kv``.

        ``token_ids``: int32 or int64 ``[T]``, contiguous per sequence; ``kv``: of ``new_kv``; ``features``: what the
        layer of a draft head gets besides, ``[T, hidden_size]``; ``adapters``: slot of each token's adapter, int32
        ``[T]``, -1 for none; None: no token has one; the others as ``StepInput`` says. The result, of type ``dtype``,
        is after the final norm: ``[T, hidden_size]``, and as many columns more for each of ``taps``. A stage that is
        not the last returns the residual stream, ``[T, hidden_size]``, which is ``incoming`` of the next.
        """
        if self.lora is not None:
            self.lora.row_slots = adapters
        step = StepInput(
            positions, slot_mapping, block_tables, q_start, ctx_len, max_q_len, max_ctx_len, self._ropes, share
        )
        with torch.inference_mode():
            hidden = self.embed(token_ids) if incoming is None else incoming
            residual, tapped = features, []
            for index, (layer, kv_layer) in enumerate(zip(self._layers, self._layers_of(kv), strict=True)):
                if index in self.taps:
                    tapped.append(hidden.clone() if residual is None else hidden + residual)
                hidden, residual = layer.forward(hidden, residual, step, kv_layer)
            if not self.stage.is_last:
                return hidden if residual is None else hidden + residual  # as the next norm would add them
            normed, last = ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps, residual)
            if len(self._layers) in self.taps:
                tapped.append(last)
            found = torch.cat([normed, *tapped], 1) if tapped else normed
            return found if share is None else share.whole(found)

    def _layers_of(self, kv: torch.Tensor) -> list[KVLayer]:
        """Views of the cache, kept over steps: making them takes 20 us a layer; another thread may replace them."""
        split = self._split
        if split is None or split[0] is not kv:
            self._split = split = kv, split_layers(kv, self._own_config.num_kv_heads, self.config.head_dim)
        return split[1]

    def forget_cache(self) -> None:
        """Drop the views of the last cache, so that its memory is freed with it."""
        self._split = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, ``[N, hidden_size]``, of type ``dtype``; ``token_ids``: int32 or int64 ``[N]``."""
        rows = self.rows_of(token_ids)
        return rows if self._embedding_scale is None else rows * self._embedding_scale

    def rows_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens as they are stored."""
        group = self.groups.tensor
        if group.size == 1:
            return torch.nn.functional.embedding(token_ids, self.embedding)
        return embedding(token_ids, self.embedding, self._shard.tokens(self.config.vocab_size).start, group)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[S, vocab_size]``, for rows of the result of ``forward``."""
        with torch.inference_mode():
            normed = hidden[:, : self.config.hidden_size].contiguous()
            return self.config.final_logits(self.lm_head(normed).float())


def _num_outputs(weight: Matrix) -> int:
    return sum(part.shape[0] for part in weight) if isinstance(weight, tuple) else weight.shape[0]


def _moved(weight: Matrix, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(weight, tuple):
        return tuple(_moved(part, device, dtype) for part in weight)
    return weight.to(device) if isinstance(weight, QuantizedWeight) else weight.to(device, dtype)
