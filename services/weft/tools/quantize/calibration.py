"""Runs calibration text through a model layer by layer, collecting the inputs of each matrix."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.backends.llm.text import TextCodec
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.models.decoder import DecoderLayer, StepInput
from weft.llm.models.model import TransformerModel, rope_tables
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.parts import EMBEDDING, bias_of, is_matrix, is_norm, is_router, layer_prefix
from weft_kernels.blocks.layout import cache_shape, split_layers
from weft_kernels.linear.products import linear as product
from weft_kernels.linear.quantized import QuantizedWeight, pack
from weft_kernels.linear.reference import linear

_NUM_AT_ONCE = 128
#: Share of the mean of the diagonal that is added to it, so that it can be inverted.
_DAMPING = 0.01


def quantize_gptq(weight: Tensor, hessian: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
    """Choose codes so that the outputs change little: the error of each input is compensated by those after it.

    Inputs are processed by energy, the largest first; groups stay contiguous ("static groups").

    Args:
        weight: ``[out, in]``, float32. Not modified.
        hessian: ``inputs.T @ inputs`` of rows that the layer gets, ``[in, in]``, float32 or float64. Not modified.
        rounded: The weight with each element rounded alone; its scales and zero points are used.
    """
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    diagonal += (_DAMPING * diagonal.mean()).clamp_min(1e-12)
    order = torch.argsort(diagonal, descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    center = 2.0 ** (rounded.num_bits - 1)
    scales = rounded.scales.float()
    zeros = torch.full_like(scales, center) if rounded.zeros is None else rounded.zeros.float()
    left = weight.float().t()[order].contiguous()  # [in, out]
    codes = torch.empty_like(left)
    for start in range(0, len(left), _NUM_AT_ONCE):
        end = min(start + _NUM_AT_ONCE, len(left))
        errors = torch.empty_like(left[start:end])
        for place in range(start, end):
            group = int(order[place]) // rounded.group_size
            code = (left[place] / scales[group]).round_().add_(zeros[group]).clamp_(0, 2**rounded.num_bits - 1)
            error = (left[place] - (code - zeros[group]) * scales[group]) / factor[place, place]
            left[place + 1 : end] -= factor[place, place + 1 : end].unsqueeze(1) * error
            codes[order[place]], errors[place - start] = code, error
        left[end:] -= factor[start:end, end:].t() @ errors
    return replace(rounded, codes=pack(codes, rounded.num_bits))


_JSONL = ".jsonl"
_MAX_ROW_TOKENS, _MIN_ROW_TOKENS, _MIN_ROWS = 512, 16, 8
#: Rows that are used at most, for each of the two purposes.
_MAX_CALIBRATION_ROWS, _MAX_HELD_OUT_ROWS = 128, 64
_HELD_OUT_SHARE = 0.2
#: Tokenizing takes about 40 bytes of memory for each byte of text.
_MAX_DATA_BYTES = 2**26


class TextRows(NamedTuple):
    """Token ids, int64, rows of up to 512.

    Attributes:
        held_out: Rows from the end of the data, not for calibration.
    """

    calibration: list[torch.Tensor]
    held_out: list[torch.Tensor]


def read_rows(data: Path, folder: Path, max_row_tokens: int) -> TextRows:
    """Tokenize the data with the tokenizer of the folder.

    Args:
        data: UTF-8 text, or ``.jsonl`` with a text, or an object with ``text``, on each line.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: The data is not text, too short or larger than 64 MiB.
        OSError: A file cannot be read.
    """
    if not data.is_file():
        raise NotFoundError(f"no file {data}; --data takes a text, or {_JSONL} with 'text' on each line")
    if (num_bytes := data.stat().st_size) > _MAX_DATA_BYTES:
        raise InvalidArgumentError(
            f"{data} must have at most {_MAX_DATA_BYTES} bytes, got {num_bytes}; give a part of it: at most "
            f"{(_MAX_CALIBRATION_ROWS + _MAX_HELD_OUT_ROWS) * _MAX_ROW_TOKENS} tokens are used"
        )
    content = data.read_bytes()
    codec = TextCodec.from_folder(folder, max(1, len(content)))
    if codec is None:
        raise NotFoundError(f"no tokenizer in {folder}; put the model's tokenizer.json there")
    texts = list(_lines(data, content)) if data.suffix == _JSONL else [content]
    ids = [
        torch.from_numpy(
            codec.ids(text, str(data), adds_special_tokens=False, parses_special_tokens=False)[1].astype("int64")
        )
        for text in texts
    ]
    num_tokens = sum(len(each) for each in ids)
    size = min(_MAX_ROW_TOKENS, max_row_tokens, max(_MIN_ROW_TOKENS, num_tokens // _MIN_ROWS))
    rows = [row for each in ids for row in each.split(size) if len(row) >= _MIN_ROW_TOKENS]
    if len(rows) < _MIN_ROWS // 2:
        raise InvalidArgumentError(
            f"{data} must have at least {_MIN_ROWS // 2} rows of {_MIN_ROW_TOKENS} tokens, got {num_tokens} tokens in "
            f"{len(texts)} texts; give more text, like that which the model is for"
        )
    num_held_out = max(1, min(int(len(rows) * _HELD_OUT_SHARE), _MAX_HELD_OUT_ROWS))
    return TextRows(rows[: min(len(rows) - num_held_out, _MAX_CALIBRATION_ROWS)], rows[-num_held_out:])


def _lines(data: Path, content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{data}, line {number} is not JSON: {error}") from error
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InvalidArgumentError(
                f"{data}, line {number} must be a text, or an object with 'text', got {line[:80]!r}"
            )
        yield text.encode("utf-8", "replace")


_MAX_LOSS = 700.0  # nats; its exponential is a number yet


class Predictions(NamedTuple):
    """A model's predictions on rows of text.

    Attributes:
        perplexity: Exponential of the mean negative log probability of each token but the first of a row.
        greedy: The likeliest next token at every position but the last of a row, all rows one after another.
    """

    perplexity: float
    greedy: torch.Tensor

    def agreement(self, other: "Predictions") -> float:
        """Share of positions at which both models have the same likeliest token, 0 to 1."""
        return float((self.greedy == other.greedy).double().mean())


def evaluate(model: TransformerModel, rows: Sequence[torch.Tensor], kv_dtype: torch.dtype | None = None) -> Predictions:
    """Predict each token of each row from those before it; the KV cache has ``kv_dtype``, or that of computation."""
    total, greedy = 0.0, []
    for row in rows:
        step, num_blocks = sequence_input(len(row))
        hidden = model.forward(row, kv=model.new_kv(num_blocks, BLOCK_SIZE, kv_dtype or model.dtype), **step)
        logits = model.logits(hidden[:-1])
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        greedy.append(logits.argmax(1))
    tokens = torch.cat(greedy)
    return Predictions(math.exp(min(total / len(tokens), _MAX_LOSS)), tokens)


BLOCK_SIZE = 16


def sequence_input(num_tokens: int) -> tuple[dict[str, Any], int]:
    """Arguments of ``StepInput`` for one row, which has the blocks from 1 on, and the number of blocks of its cache."""
    num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
    step = {
        "positions": torch.arange(num_tokens, dtype=torch.int32),
        "slot_mapping": BLOCK_SIZE + torch.arange(num_tokens),
        "block_tables": torch.arange(1, num_blocks, dtype=torch.int32).unsqueeze(0),
        "q_start": torch.tensor([0, num_tokens], dtype=torch.int32),
        "ctx_len": torch.tensor([num_tokens], dtype=torch.int32),
        "max_q_len": num_tokens,
        "max_ctx_len": num_tokens,
    }
    return step, num_blocks


class _Recorder:
    """Accumulates ``inputs.T @ inputs`` of a linear layer; of experts, those of all together."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_experts: int) -> None:
        self.weight = weight
        self.hessian = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
        self.bias = bias
        self._num_experts = num_experts

    def __call__(self, x: Tensor, starts: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        self.hessian += (x.t() @ x).double()
        if starts is None:
            return linear(x, self.weight, self.bias)
        multiply: Any = product(self.weight, self.bias, num_experts=self._num_experts)
        return multiply(x, starts=starts, rows=rows)


def calibrated(
    config: TransformerConfig,
    read: Callable[[str], Tensor],
    rows: Sequence[Tensor],
    quantize: Callable[[str, Tensor, Tensor], QuantizedWeight],
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Quantise the matrices of all layers, in order; the inputs of a layer come from the quantised layers before.

    Args:
        read: Returns a weight by the names of ``weight_parts``, float32.
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
        recorders = {
            name: _Recorder(read(name), own.get(bias_of(name)), config.num_experts_of(name))
            for name in names
            if is_matrix(name)
        }
        routers = {name: _Recorder(own[name], own.get(bias_of(name)), 1) for name in own if is_router(name)}
        layer = config.layer(index, own, recorders | routers, deterministic=False)
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
    step, num_blocks = sequence_input(len(hidden))
    shape = cache_shape(num_blocks, 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32)
    (cache,) = split_layers(torch.zeros(shape), config.num_kv_heads, config.head_dim)
    with torch.inference_mode():
        # the layer writes into what it is given
        given = None if residual is None else residual.clone()
        return layer.forward(hidden.clone(), given, StepInput(**step, ropes=ropes), cache)
