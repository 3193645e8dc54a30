"""``reshape`` of inputs and outputs: clients see one shape, the model another one of as many elements."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from weft_common.core import InferCall
from weft_common.signature import ModelSignature


def reshaped(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Convert ``shape``, which fits the dims ``source``, to one that fits ``target``.

    Sizes of the -1 in ``source`` are those of the -1 in ``target``, in order. A batch dimension before the dims stays.
    """
    num_before = len(shape) - len(source)
    sizes = iter([size for size, dim in zip(shape[num_before:], source, strict=True) if dim == -1])
    return (*shape[:num_before], *(next(sizes) if dim == -1 else dim for dim in target))


def call_reshaper(signature: ModelSignature) -> Callable[[InferCall], InferCall] | None:
    """Makes of a call that fits the signature one with the shapes that the model takes; its bytes are not copied.

    None: no input has ``reshape``.
    """
    specs = [(spec, spec.reshape) for spec in signature.inputs if spec.reshape is not None]
    if not specs:
        return None

    def reshape(call: InferCall) -> InferCall:
        inputs = dict(call.inputs)
        for spec, target in specs:
            if (tensor := inputs.get(spec.name)) is not None:
                inputs[spec.name] = tensor._replace(shape=reshaped(tensor.shape, spec.dims, target))
        return replace(call, inputs=inputs)

    return reshape
