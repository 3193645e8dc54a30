"""The batch key: requests share a batch only where it is equal."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor

BatchKey = Callable[[Mapping[str, WireTensor]], object]


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Requests of similar length share batches; the shorter ones are padded to the longest of their batch.

    Attributes:
        bounds: Largest length of each bucket, rising. Longer requests share batches with those of their own length.
        pad_values: Padding value by input. Every -1 in the dims of these inputs is the length.
        mask: The padded input that marks real positions (1) and padding (0); the server adds it to a request without
            it. "" if the model has none.
        max_elements: Most rows times largest length of the bucket in one batch; 0: no limit.
    """

    bounds: tuple[int, ...]
    pad_values: Mapping[str, float]
    mask: str = ""
    max_elements: int = 0

    def bound_of(self, length: int) -> int:
        """Largest length in the bucket of a request of ``length``; that itself beyond the last bucket."""
        index = bisect_left(self.bounds, length)
        return self.bounds[index] if index < len(self.bounds) else length

    def max_rows(self, key: object, max_batch_size: int) -> int:
        """Most rows of a batch with this key, may be 0; one request alone may have more."""
        bound = bound_in(key)
        if not self.max_elements or bound is None:
            return max_batch_size
        return min(max_batch_size, self.max_elements // max(bound, 1))


def bound_in(key: object) -> int | None:
    """Largest length of the bucket of a batch key; None if it has none."""
    bound = key[0] if isinstance(key, tuple) and key else key
    return bound if isinstance(bound, int) else None


def make_batch_key(signature: ModelSignature, buckets: LengthBuckets | None = None) -> BatchKey | None:
    """The batch key as a function of the inputs; None where any two requests may share a batch.

    Two requests of a batching model can differ in the shape of an input with a -1, and in which optional inputs they
    have. An input with ``allow_ragged_batch``, or one that is padded, may differ in shape.
    """
    if signature.max_batch_size == 0:
        return None
    padded = () if buckets is None else tuple(spec for spec in signature.inputs if spec.name in buckets.pad_values)
    others = [spec for spec in signature.inputs if spec not in padded]
    exact = tuple(spec.name for spec in others if not spec.allow_ragged_batch and (spec.is_optional or -1 in spec.dims))
    present = tuple(spec.name for spec in others if spec.allow_ragged_batch and spec.is_optional)
    shapes = _shapes(exact) if not present else _shapes_and_presence(exact, present)
    if buckets is not None:
        return _bucketed(padded, buckets, shapes if exact or present else None)
    return shapes if exact or present else None


def _shapes(names: tuple[str, ...]) -> BatchKey:
    def key(inputs: Mapping[str, WireTensor]) -> object:
        return tuple([tensor.shape[1:] if (tensor := inputs.get(name)) is not None else None for name in names])

    return key


def _shapes_and_presence(exact: tuple[str, ...], present: tuple[str, ...]) -> BatchKey:
    shapes = _shapes(exact)

    def key(inputs: Mapping[str, WireTensor]) -> object:
        return shapes(inputs), tuple([name in inputs for name in present])

    return key


def _bucketed(padded: tuple[TensorSpec, ...], buckets: LengthBuckets, others: BatchKey | None) -> BatchKey:
    """The bound of the bucket; a request whose lengths disagree has its shapes as key, and is not padded."""
    axes = tuple(
        (spec.name, tuple(axis for axis, dim in enumerate(spec.dims, start=1) if dim == -1)) for spec in padded
    )
    optional = tuple(spec.name for spec in padded if spec.is_optional and spec.name != buckets.mask)
    exact = _shapes(tuple(spec.name for spec in padded))

    def key(inputs: Mapping[str, WireTensor]) -> object:
        lengths = {inputs[name].shape[axis] for name, positions in axes if name in inputs for axis in positions}
        bound = buckets.bound_of(lengths.pop()) if len(lengths) == 1 else exact(inputs)
        if others is None and not optional:
            return bound
        return bound, tuple([name in inputs for name in optional]), others and others(inputs)

    return key
