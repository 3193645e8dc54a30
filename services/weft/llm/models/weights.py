"""Weights of a ``TransformerModel``: loaded from a folder, or random."""

from collections.abc import Mapping
from pathlib import Path

import torch

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.registry import open_weights
from weft.llm.models.sharding import Shard
from weft.llm.models.stages import stages
from weft.llm.parallel.groups import ALONE, Groups
from weft.llm.weights.codes import ReadWeight, cut
from weft.llm.weights.folder_source import FolderSource
from weft.llm.weights.gguf_source import GgufSource
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, Part, Piece, fused_shape, is_matrix, is_norm
from weft_kernels.linear.products import Matrix
from weft_kernels.linear.quantized import QuantizedWeight, concatenate

_LOG = get_logger("weft.llm")

#: Weights by name, all of them numbers.
Weights = dict[str, torch.Tensor]
#: Weights by name: matrices as codes where they are quantised, others as numbers.
LoadedWeights = dict[str, Matrix]


def load_folder(
    path: Path,
    config: TransformerConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    groups: Groups = ALONE,
    by_outputs: bool = False,
) -> LoadedWeights:
    """Load the weights from the files of a folder, in whatever format they are quantised.

    Names, shapes and types of all tensors are validated before any is read.

    Args:
        dtype: Type of weights that are not quantised; None: ``config.dtype``.
        device: Device of the result; weights are copied one by one, so the CPU holds one at a time.
        groups: Those of a rank, of whose weights no more is kept; of plain numbers no more is read.
        by_outputs: See ``Shard.pieces``; quantised weights are in any case. For deterministic mode, and for weights
            that are rounded when they are loaded.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is truncated; a tensor is missing, unexpected or of another shape; or the format is
            not supported.
    """
    if isinstance(config, ForeignConfig):
        raise InvalidArgumentError(
            f"{config.name} runs through transformers: its weights are not read as matrices here"
        )
    dtype = dtype or getattr(torch, config.dtype)
    layout, shard = config.weight_parts(), Shard(config, groups.tensor.rank, groups.tensor.size)
    stage = stages(config, groups.pipeline.size)[groups.pipeline.rank]
    weights: LoadedWeights = {}
    with open_weights(path, config) as source:

        def load(name: str, parts: list[Part]) -> None:
            is_cut_by_outputs = by_outputs or any(map(source.is_quantized, parts))
            pieces = shard.pieces(name, parts, by_outputs=is_cut_by_outputs)
            weights[name] = _load(source, name, pieces, dtype, device)

        for name in filter(stage.has, layout):
            load(name, layout[name])
        if stage.is_last and config.tie_word_embeddings and source.is_quantized(layout[EMBEDDING][0]):
            load(LM_HEAD, layout[EMBEDDING])
        _log_formats(source.format_name, weights)
    return weights


def numbers_of(weight: Matrix) -> torch.Tensor:
    """The weight ``[out, in]`` in float32, dequantised if necessary; newly allocated unless it is float32 already."""
    parts = weight if isinstance(weight, tuple) else (weight,)
    numbers = [
        part.dequantize(torch.float32) if isinstance(part, QuantizedWeight) else part.to(torch.float32)
        for part in parts
    ]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def _load(
    source: FolderSource | GgufSource, name: str, pieces: list[Piece], dtype: torch.dtype, device: torch.device | str
) -> Matrix:
    if is_matrix(name) and any(source.is_quantized(piece.part) for piece in pieces):
        read = [
            weight.to(device) if isinstance(weight, QuantizedWeight) else weight.to(device, dtype)
            for weight in (_read(source, piece) for piece in pieces)
        ]
        codes = [weight for weight in read if isinstance(weight, QuantizedWeight)]
        if len(codes) == len(read):
            return concatenate(codes) or tuple(codes)
        return tuple(read) if codes else torch.cat([weight for weight in read if isinstance(weight, torch.Tensor)])
    shapes = [piece.shape for piece in pieces]
    fused = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
    row = 0
    for piece, shape in zip(pieces, shapes, strict=True):
        weight = _read(source, piece)
        numbers = weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
        fused[row : row + shape[0]].copy_(numbers)
        row += shape[0]
    return fused


def _read(source: FolderSource | GgufSource, piece: Piece) -> ReadWeight:
    weight, part = source.read(piece), piece.part
    if not source.is_quantized(part):
        return weight
    values = (weight.scales, weight.zeros, weight.lookup) if isinstance(weight, QuantizedWeight) else (weight,)
    if not all(each is None or bool(each.isfinite().all()) for each in values):
        raise InvalidArgumentError(
            f"weights: scales and zero points of '{part.name}' must be finite, got NaN or infinity; fetch the folder "
            f"again, or quantise the model again"
        )
    return weight


def _log_formats(format_name: str, weights: Mapping[str, Matrix]) -> None:
    matrices = [weight for name, weight in weights.items() if is_matrix(name)]
    packed = sum(not isinstance(weight, torch.Tensor) for weight in matrices)
    if packed:
        split = sum(isinstance(weight, tuple) for weight in matrices)
        _LOG.info(
            "weights of %s: %d of %d matrices have codes; %d are products of several parts, whose codes differ",
            format_name,
            packed,
            len(matrices),
            split,
        )


def random_weights(
    config: TransformerConfig,
    seed: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    groups: Groups = ALONE,
    by_outputs: bool = False,
) -> Weights:
    """Normal random weights that keep activations near 1: matrices scaled by input width, gains 1, biases 0.1.

    The same seed gives the same weights on the same type of device, of which a rank keeps its own; other arguments are
    as of ``load_folder``.
    """
    dtype = dtype or getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    weights: Weights = {}
    shard = Shard(config, groups.tensor.rank, groups.tensor.size)
    stage = stages(config, groups.pipeline.size)[groups.pipeline.rank]
    for name, parts in config.weight_parts().items():
        shape = fused_shape(parts)
        if is_norm(name):
            weight = torch.full(shape, 1.0 - config.norm_offset, dtype=dtype, device=device)
        else:
            scale = 0.1 if name.endswith(".bias") else shape[-1] ** -0.5
            whole = torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(scale)
            (piece,) = shard.pieces(name, [Part(name, shape)], by_outputs=by_outputs)
            weight = cut(whole, piece)
        if stage.has(name):  # others are drawn all the same, so that those after them are the same
            weights[name] = weight
    return weights
