"""Gathers the inputs of requests into the arrays of one execution, and scatters its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from weft.base.errors import InternalError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.queues.settings import LengthBuckets
from weft.serving.request.request import InferenceRequest

Member = tuple[InferenceRequest, dict[str, Array]]

#: Makes an array of a shape and dtype with undefined contents.
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input of the ``kind`` given in ``batch_input``, which describes ``source`` in a batch."""

    kind: str
    names: tuple[str, ...]
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How requests are laid out in the arrays of a batch.

    Attributes:
        buckets: Padding of variable lengths.
        batch_inputs: Inputs that describe ragged inputs.
        scattered: Outputs that are split by the shape of the named input, not by rows.
        added_inputs: Inputs that the server adds to each request.
        added_outputs: Outputs that the server keeps.
    """

    buckets: LengthBuckets | None = None
    batch_inputs: tuple[BatchInput, ...] = ()
    scattered: Mapping[str, str] = field(default_factory=dict)
    added_inputs: tuple[TensorSpec, ...] = ()
    added_outputs: tuple[TensorSpec, ...] = ()


class Gatherer(Protocol):
    """Gathers and scatters one batch at a time. Not thread-safe; keeps no state between calls."""

    def gather(self, members: Sequence[Member]) -> dict[str, Array]:
        """One array for each input that the model takes."""

    def scatter(self, members: Sequence[Member], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        """The outputs of each member; views where possible. Raises InternalError if they do not fit the batch."""


def make_gatherer(signature: ModelSignature, layout: BatchLayout, allocate: Allocate | None = None) -> Gatherer:
    """Create the gatherer for a model; without ``allocate``, numpy allocates, and a single request is not copied."""
    if layout.buckets is not None:
        return _PaddingGatherer(signature, layout.buckets, allocate)
    if is_ragged(signature, layout):
        return _RaggedGatherer(signature, layout, allocate)
    return _RowGatherer(signature, allocate)


def is_ragged(signature: ModelSignature, layout: BatchLayout) -> bool:
    """Whether some tensors of a batch have no batch dimension."""
    return bool(layout.batch_inputs or layout.scattered or any(spec.allow_ragged_batch for spec in signature.inputs))


def file_signature(signature: ModelSignature, layout: BatchLayout) -> ModelSignature:
    """The signature that the model file must have: ragged tensors in one dimension, batch inputs added."""
    inputs = [replace(spec, dims=()) if spec.allow_ragged_batch else spec for spec in signature.inputs]
    if layout.buckets is not None:
        inputs = [replace(spec, is_optional=False) if spec.name == layout.buckets.mask else spec for spec in inputs]
    num_dims = {spec.name: len(spec.dims) for spec in signature.inputs}
    for extra in layout.batch_inputs:
        dims = (num_dims[extra.source],) if extra.kind == "BATCH_ITEM_SHAPE" else ()
        inputs += [TensorSpec(name, extra.datatype, dims) for name in extra.names]
    outputs = [replace(spec, dims=()) if spec.name in layout.scattered else spec for spec in signature.outputs]
    return replace(signature, inputs=(*inputs, *layout.added_inputs), outputs=(*outputs, *layout.added_outputs))


class _RowGatherer:
    """Concatenates the rows of all members."""

    def __init__(self, signature: ModelSignature, allocate: Allocate | None) -> None:
        self._signature = signature
        self._allocate = allocate

    def gather(self, members: Sequence[Member]) -> dict[str, Array]:
        if len(members) == 1 and self._allocate is None:
            return members[0][1]
        arrays = [prepared for _, prepared in members]
        return {k: _join([a[k] for a in arrays], self._allocate) for k in arrays[0]}

    def scatter(self, members: Sequence[Member], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        if self._signature.max_batch_size > 0:
            num_rows = 0
            for request, _ in members:
                num_rows += request.num_rows
            for name, array in outputs.items():
                _check_rows(self._signature.name, name, array, num_rows)
        if len(members) == 1:
            return [dict(outputs)]
        parts: list[dict[str, Array]] = []
        start = 0
        for request, _ in members:
            end = start + request.num_rows
            parts.append({name: array[start:end] for name, array in outputs.items()})
            start = end
        return parts


class _PaddingGatherer(_RowGatherer):
    """Pads rows of different lengths; cuts outputs back to each member's length."""

    def __init__(self, signature: ModelSignature, buckets: LengthBuckets, allocate: Allocate | None) -> None:
        super().__init__(signature, allocate)
        self._pads = [
            (spec, buckets.pad_values[spec.name]) for spec in signature.inputs if spec.name in buckets.pad_values
        ]
        self._mask = next((spec for spec, _ in self._pads if spec.name == buckets.mask), None)
        self._varying = [spec for spec in signature.outputs if -1 in spec.dims]

    def gather(self, members: Sequence[Member]) -> dict[str, Array]:
        lengths = [self._length(arrays) for _, arrays in members]
        if self._mask is not None:
            mask, given = self._mask, members
            members = []
            for (request, arrays), length in zip(given, lengths, strict=True):
                ones: dict[str, Array] = {}
                if mask.name not in arrays and length != -1:
                    shape = (request.num_rows, *_filled(mask.dims, length))
                    ones[mask.name] = np.ones(shape, NUMPY_BY_DATATYPE[mask.datatype])
                members.append((request, arrays | ones))
        if len(set(lengths)) == 1:
            return super().gather(members)
        longest = max(lengths)
        padded = {spec.name for spec, _ in self._pads}
        first = members[0][1]
        inputs = {k: _join([arrays[k] for _, arrays in members], self._allocate) for k in first if k not in padded}
        empty = self._allocate or np.empty
        num_rows = sum(request.num_rows for request, _ in members)
        for spec, value in self._pads:
            if spec.name in first:
                shape = (num_rows, *_filled(spec.dims, longest))
                inputs[spec.name] = full = empty(shape, NUMPY_BY_DATATYPE[spec.datatype])
                full.fill(value)
                start = 0
                for (request, arrays), length in zip(members, lengths, strict=True):
                    full[_part(spec.dims, start, start + request.num_rows, length)] = arrays[spec.name]
                    start += request.num_rows
        return inputs

    def scatter(self, members: Sequence[Member], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        parts = super().scatter(members, outputs)
        lengths = [self._length(arrays) for _, arrays in members]
        if len(set(lengths)) == 1:
            return parts
        for spec in self._varying:
            array, longest = outputs[spec.name], max(lengths)
            sizes = {size for size, dim in zip(array.shape[1:], spec.dims, strict=False) if dim == -1}
            if array.ndim != len(spec.dims) + 1 or sizes != {longest}:
                raise InternalError(
                    f"model '{self._signature.name}' gave output '{spec.name}' with shape {list(array.shape)} for "
                    f"inputs padded to length {longest}; with batch_buckets every -1 in the dims of an output must be "
                    "that length"
                )
            for part, length in zip(parts, lengths, strict=True):
                part[spec.name] = part[spec.name][_part(spec.dims, 0, None, length)]
        return parts

    def _length(self, arrays: Mapping[str, Array]) -> int:
        """Length of a member; -1 if its inputs disagree: its batch then has only such members."""
        lengths = {
            size
            for spec, _ in self._pads
            if spec.name in arrays
            for size, dim in zip(arrays[spec.name].shape[1:], spec.dims, strict=True)
            if dim == -1
        }
        return lengths.pop() if len(lengths) == 1 else -1


class _RaggedGatherer:
    """Concatenates the elements of ragged inputs in one dimension, with the inputs that delimit them."""

    def __init__(self, signature: ModelSignature, layout: BatchLayout, allocate: Allocate | None) -> None:
        self._model = signature.name
        self._allocate = allocate
        self._ragged = frozenset(spec.name for spec in signature.inputs if spec.allow_ragged_batch)
        self._batch_inputs = layout.batch_inputs
        self._scattered = {
            spec.name: (spec, layout.scattered[spec.name])
            for spec in signature.outputs
            if spec.name in layout.scattered
        }

    def gather(self, members: Sequence[Member]) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for name in members[0][1]:
            arrays = [arrays[name] for _, arrays in members]
            parts = [array.ravel() for array in arrays] if name in self._ragged else arrays
            inputs[name] = _join(parts, self._allocate)
        for extra in self._batch_inputs:
            sources = [arrays[extra.source] for _, arrays in members if extra.source in arrays]
            value = np.asarray(_BATCH_INPUTS[extra.kind](sources), NUMPY_BY_DATATYPE[extra.datatype])
            inputs.update(dict.fromkeys(extra.names, _join([value], self._allocate)))
        return inputs

    def scatter(self, members: Sequence[Member], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        num_rows = sum(request.num_rows for request, _ in members)
        parts: list[dict[str, Array]] = [{} for _ in members]
        for name, array in outputs.items():
            if name in self._scattered:
                pieces = self._pieces(members, name, array.ravel())
            else:
                _check_rows(self._model, name, array, num_rows)
                bounds = np.cumsum([request.num_rows for request, _ in members])[:-1]
                pieces = np.split(array, bounds)
            for part, piece in zip(parts, pieces, strict=True):
                part[name] = piece
        return parts

    def _pieces(self, members: Sequence[Member], name: str, elements: Array) -> list[Array]:
        """Each member's output: its dims, with the source's sizes for each -1."""
        spec, source = self._scattered[name]
        shapes = []
        for request, arrays in members:
            sizes = zip(spec.dims, arrays[source].shape[1:], strict=True)
            shapes.append((request.num_rows, *(size if dim == -1 else dim for dim, size in sizes)))
        counts = [int(np.prod(shape)) for shape in shapes]
        if elements.size != sum(counts):
            raise InternalError(
                f"model '{self._model}' gave output '{name}' with {elements.size} elements for a batch whose members "
                f"need {' + '.join(map(str, counts))}"
            )
        pieces = np.split(elements, np.cumsum(counts)[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _item_shapes(sources: Sequence[Array]) -> Array:
    return np.array([array.shape[1:] for array in sources for _ in range(array.shape[0])])


#: Value of each kind of batch input, from the source input of the members.
_BATCH_INPUTS: Mapping[str, Callable[[Sequence[Array]], Array | Sequence[int]]] = {
    "BATCH_ELEMENT_COUNT": lambda sources: [array.size for array in sources],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda sources: np.cumsum([array.size for array in sources]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda sources: np.cumsum([0, *(array.size for array in sources)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda sources: np.zeros(max((array.size for array in sources), default=0)),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda sources: _item_shapes(sources).ravel(),
}


def _join(parts: Sequence[Array], allocate: Allocate | None) -> Array:
    if allocate is None:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    shape = parts[0].shape if len(parts) == 1 else (sum(len(part) for part in parts), *parts[0].shape[1:])
    joined = allocate(shape, parts[0].dtype)
    if len(parts) == 1:
        np.copyto(joined, parts[0])
    else:
        np.concatenate(parts, out=joined)
    return joined


def _filled(dims: Sequence[int], length: int) -> tuple[int, ...]:
    return tuple(length if dim == -1 else dim for dim in dims)


def _part(dims: Sequence[int], start: int, end: int | None, length: int) -> tuple[slice, ...]:
    return slice(start, end), *(slice(length) if dim == -1 else slice(None) for dim in dims)


def _check_rows(model: str, name: str, array: Array, num_rows: int) -> None:
    if array.ndim == 0 or array.shape[0] != num_rows:
        raise InternalError(
            f"model '{model}' gave output '{name}' with shape {list(array.shape)} for a batch of {num_rows} rows; its "
            f"first dimension must be {num_rows}"
        )
