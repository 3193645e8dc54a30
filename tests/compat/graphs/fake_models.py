"""The models of a sample as a target in this process; it checks what it gets as a model server would."""

import inspect
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
from tests.compat.graphs.shape import Given, Model, Shape

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode, encode
from weft.base.validation import validate
from weft.router.repository.config import config_of_signature
from weft.router.target import Target, TargetModel


class SampleTarget(Target):
    """Answers as the models of a sample do.

    Attributes:
        called: Names of the models in the order of their calls.
    """

    name, address = "model", "in process"

    def __init__(self, shape: Shape) -> None:
        self._models = {(model.name, version): model for model in shape.models for version in model.versions}
        self.called: list[str] = []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """One call."""
        model, signature, inputs = self._begun(call)
        return _result(signature, call, model.answer(inputs))

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a decoupled model, and an empty one at the end."""
        model, signature, inputs = self._begun(call)
        assert model.is_decoupled, f"'{model.name}' does not stream"
        for outputs in model.answer(inputs):
            result = _result(signature, call, outputs)
            result.is_final = False
            yield result
        yield InferResult(model.name, signature.version, call.request_id, is_null=True)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """All of them, ready."""
        found = (model.signature(version) for (_, version), model in self._models.items())
        return [TargetModel(signature, True, config_of_signature(signature)) for signature in found]

    async def close(self) -> None:
        """Nothing to close."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As a catalog of the compiler."""
        versions = [known for name, known in self._models if name == model_name]
        version = version or max(versions, key=int, default="")
        return ("model", self._models[model_name, version].signature(version)) if version in versions else None

    def names(self) -> list[str]:
        """As a catalog of the compiler."""
        return [name for name, _ in self._models]

    def _begun(self, call: InferCall) -> tuple[Model, ModelSignature, Given]:
        self.called.append(call.model_name)
        found = self.find(call.model_name, call.model_version)
        assert found, f"no model '{call.model_name}' of version '{call.model_version}'"
        _, signature = found
        model = self._models[call.model_name, signature.version]
        validate(call, signature)
        if model.fails:
            raise RemoteError("INTERNAL", model.fails)
        inputs = {name: decode(tensor) for name, tensor in call.inputs.items()}
        return model, signature, Given(inputs, call.parameters)


def _result(signature: ModelSignature, call: InferCall, outputs: Mapping[str, Any]) -> InferResult:
    """A response of the requested outputs that has what the model declares."""
    if inspect.isgenerator(outputs):
        raise RemoteError("UNIMPLEMENTED", f"'{signature.name}' is decoupled")
    wanted = [output.name for output in call.outputs] or [spec.name for spec in signature.outputs]
    result = InferResult(signature.name, signature.version, call.request_id)
    for spec in signature.outputs:
        if spec.name in wanted and spec.name in outputs:
            tensor = encode(np.ascontiguousarray(outputs[spec.name]))
            dims = tensor.shape[1:] if signature.max_batch_size else tensor.shape
            assert tensor.datatype == spec.datatype, f"'{spec.name}' of '{signature.name}': {tensor.datatype}"
            fits = len(dims) == len(spec.dims) and all(a in (b, -1) for b, a in zip(dims, spec.dims, strict=True))
            assert fits, f"'{spec.name}' of '{signature.name}': {dims} for {spec.dims}"
            result.outputs[spec.name] = tensor
    return result
