"""A walk through the layers of a model that shows each matrix its inputs, one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from weft.llm.models.decoder import DecoderLayer, StepInput
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.rope import rope_tables
from weft.llm.weights.parts import EMBEDDING, bias_of, is_matrix, is_norm, layer_prefix
from weft.tools.quantize.sequence_input import BLOCK_SIZE, sequence_input
from weft_kernels.blocks.layout import cache_shape, split_layers
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.reference import linear


class _Recorder:
    """A product that adds up ``inputs.T @ inputs``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.hessian = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        self.hessian += (x.t() @ x).double()
        return linear(x, self.weight, self.bias)


def calibrated(
    config: TransformerConfig,
    read: Callable[[str], Tensor],
    rows: Sequence[Tensor],
    quantize: Callable[[str, Tensor, Tensor], QuantizedWeight],
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Quantise the matrices of all layers, in order; inputs of a layer are those that the quantised ones before give.

    Args:
        config: The model.
        read: Returns a weight by the names of ``weight_parts``, float32.
        rows: Token ids, int64.
        quantize: Takes name, matrix and ``inputs.T @ inputs``.

    Yields:
        Name and codes of each matrix.
    """
    embedding = read(EMBEDDING)
    states: list[tuple[Tensor, Tensor | None]] = [(embedding[row] * config.embedding_scale, None) for row in rows]
    del embedding
    longest = max(len(row) for row in rows)
    ropes = [rope_tables(rope, config.head_dim, longest) for rope in config.ropes]
    for index in range(config.num_layers):
        names = [name for name in config.weight_parts() if name.startswith(layer_prefix(index))]
        own = {name: read(name) for name in names if not is_matrix(name)}
        own |= {name: config.gain(weight) for name, weight in own.items() if is_norm(name)}
        recorders = {name: _Recorder(read(name), own.get(bias_of(name))) for name in names if is_matrix(name)}
        layer = config.layer(index, own, recorders, deterministic=False)
        for hidden, residual in states:
            _forward(config, layer, hidden, residual, ropes)
        for name, recorder in recorders.items():
            codes = quantize(name, recorder.weight, recorder.hessian)
            recorder.weight = codes.dequantize()
            yield name, codes
        states = [_forward(config, layer, hidden, residual, ropes) for hidden, residual in states]


def _forward(
    config: TransformerConfig,
    layer: DecoderLayer,
    hidden: Tensor,
    residual: Tensor | None,
    ropes: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    count = len(hidden)
    step = sequence_input(count)
    inputs = StepInput(
        step.positions, step.slot_mapping, step.block_tables, step.q_start, step.ctx_len, count, count, ropes
    )
    shape = cache_shape(step.num_blocks, 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32)
    (cache,) = split_layers(torch.zeros(shape), config.num_kv_heads, config.head_dim)
    with torch.inference_mode():
        # the layer writes into what it is given
        return layer.forward(hidden.clone(), None if residual is None else residual.clone(), inputs, cache)
