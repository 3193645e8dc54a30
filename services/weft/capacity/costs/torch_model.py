"""Cost of an exported torch program: run on tensors without memory, counting every operator. Imports torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from weft.backends.pt2 import load_program
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.capacity.costs import BatchCost, Operation, Weights

_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
#: Operators by family, and operations for each element of a result.
_FAMILIES = {
    "product": (0, "addmm mm linear"),
    "matmul": (0, "bmm baddbmm matmul"),
    "view": (
        0,
        "view reshape _unsafe_view expand permute transpose t unsqueeze squeeze slice select alias detach split"
        " split_with_sizes unbind as_strided",
    ),
    "function": (10, "gelu tanh sigmoid exp erf silu pow sqrt rsqrt"),
    "norm": (
        8,
        "native_layer_norm layer_norm native_batch_norm _native_batch_norm_legit_no_training group_norm",
    ),
    "softmax": (8, "_softmax softmax _log_softmax"),
    "gather": (0, "embedding index_select gather"),
    "conv": (0, "convolution"),
}
_FAMILY_OF = {name: (family, cost) for family, (cost, names) in _FAMILIES.items() for name in names.split()}
_DTYPES = {
    "FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64, "INT64": torch.int64,
    "INT32": torch.int32, "INT16": torch.int16, "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TorchModel:
    """Cost of a ``.pt2`` file. Raises InvalidArgumentError for other files."""

    def __init__(self, path: Path, signature: ModelSignature) -> None:
        self._path = path
        self._signature = signature
        self._program = load_program(torch, path)
        held = [*self._program.state_dict.values(), *self._program.constants.values()]
        self.weights = Weights(sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)))

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """See ``CostModel``."""
        has_rows = self._signature.max_batch_size > 0
        given = []
        for spec in self._signature.inputs:
            dims = shapes.get(spec.name, spec.reshape if spec.reshape is not None else spec.dims)
            given.append(
                torch.empty((num_rows, *dims) if has_rows else dims, dtype=_DTYPES[spec.datatype], device="meta")
            )
        module = self._program.module().to("meta")
        recorder = _OperationRecorder()
        try:
            with torch.inference_mode(), FlopCounterMode(display=False), recorder:
                results = module(*given)
        except Exception as error:  # guards of the program, and operators that have no such form
            raise InvalidArgumentError(f"{self._path} cannot take inputs of this batch and shape: {error}") from error
        outputs = _tensors(results)
        return BatchCost(
            num_rows,
            tuple(recorder.operations),
            recorder.peak_bytes + sum(tensor.nbytes for tensor in given),
            sum(tensor.nbytes for tensor in given),
            sum(tensor.nbytes for tensor in outputs),
            len(given) + len(outputs),
        )


class _OperationRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed
    """Records the operations of a program that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not name.startswith(("_assert", "sym_")):
            inputs, outputs = _tensors((args, kwargs)), _tensors(result)
            self.operations.append(_operation(name, inputs, outputs))
            # An upper bound: a program's results are freed as Python drops them.
            self.peak_bytes = max(self.peak_bytes, sum(t.nbytes for t in (*inputs, *outputs) if t.dim() > 1))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _operation(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Operation:
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    kind = _KINDS.get(inputs[0].dtype, "fp32") if inputs else "fp32"
    family, per_element = _FAMILY_OF.get(name, ("element", 1))
    if family == "view" or not outputs:
        return Operation("view")
    if family == "product":
        left, right = [tensor for tensor in inputs if tensor.dim() == 2][-2:]
        num_inputs, num_outputs = right.shape if left.shape[1] == right.shape[0] else right.shape[::-1]
        shape = (left.shape[0], num_inputs, num_outputs)
        return Operation(family, 2.0 * math.prod(shape), right.nbytes, moved - right.nbytes, kind, shape)
    if family == "matmul" and len(inputs) > 1:
        left, right = inputs[-2:]
        shape = (left.shape[-2], left.shape[-1], right.shape[-1])
        return Operation(family, 2.0 * math.prod(left.shape[:-2]) * math.prod(shape), 0, moved, kind, shape)
    if family == "conv":
        filters, output = inputs[1], outputs[0]
        channels = output.shape[1]
        shape = (math.prod(output.shape) // channels, math.prod(filters.shape[1:]), channels)
        return Operation(family, 2.0 * math.prod(shape), filters.nbytes, moved - filters.nbytes, kind, shape)
    if family == "gather":
        return Operation(family, 0.0, 0, 2 * sum(tensor.nbytes for tensor in outputs))
    elements = float(max(tensor.numel() for tensor in outputs))
    return Operation("element" if family == "matmul" else family, (per_element or 1) * elements, 0, moved)
