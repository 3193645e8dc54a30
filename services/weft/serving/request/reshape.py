"""``reshape`` of inputs and outputs: clients see one shape, the model another one of as many elements."""

from collections.abc import Callable
from dataclasses import replace

from weft.base.core import InferCall
from weft.base.reshape import reshaped
from weft.base.signature import ModelSignature


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
