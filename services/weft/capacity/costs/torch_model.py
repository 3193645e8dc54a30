"""Cost of an exported torch program: run on tensors without memory, every operator counted. Imports torch."""

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
_PRODUCTS = {"addmm", "mm", "linear"}
_MATMULS = {"bmm", "baddbmm", "matmul"}
_VIEWS = {
    "view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "alias", "detach", "split", "split_with_sizes", "unbind", "as_strided",
}  # fmt: skip
_FUNCTIONS = {"gelu", "tanh", "sigmoid", "exp", "erf", "silu", "pow", "sqrt", "rsqrt"}
_NORMS = {"native_layer_norm", "layer_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "group_norm"}
_DTYPES = {
    "FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64, "INT64": torch.int64,
    "INT32": torch.int32, "INT16": torch.int16, "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TorchModel:
    """The cost of a ``.pt2`` file.

    Raises:
        InvalidArgumentError: It is no such file.
    """

    def __init__(self, path: Path, signature: ModelSignature) -> None:
        self._path = path
        self._signature = signature
        self._program = load_program(torch, path)
        tensors = [*self._program.state_dict.values(), *self._program.constants.values()]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self.weights = Weights(sum(tensor.nbytes for tensor in tensors))

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
        outputs = [tensor for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)]
        return BatchCost(
            num_rows,
            tuple(recorder.operations),
            recorder.peak_bytes + sum(tensor.nbytes for tensor in given),
            sum(tensor.nbytes for tensor in given),
            sum(tensor.nbytes for tensor in outputs),
            len(given) + len(outputs),
        )


class _OperationRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed
    """Keeps the operations of a program that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not name.startswith("_assert") and not name.startswith("sym_"):
            inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
            outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
            self.operations.append(_operation(name, inputs, outputs))
            # An upper bound: a program's results are freed as Python drops them.
            self.peak_bytes = max(self.peak_bytes, sum(t.nbytes for t in (*inputs, *outputs) if t.dim() > 1))
        return result


def _operation(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Operation:
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    kind = _KINDS.get(inputs[0].dtype, "fp32") if inputs else "fp32"
    if name in _VIEWS or not outputs:
        return Operation("view")
    if name in _PRODUCTS:
        left, right = [tensor for tensor in inputs if tensor.dim() == 2][-2:]
        num_inputs, num_outputs = right.shape if left.shape[1] == right.shape[0] else right.shape[::-1]
        rows = left.shape[0]
        flops = 2.0 * rows * num_inputs * num_outputs
        return Operation("product", flops, right.nbytes, moved - right.nbytes, kind, (rows, num_inputs, num_outputs))
    if name in _MATMULS and len(inputs) > 1:
        left, right = inputs[-2:]
        rows, num_inputs, num_outputs = left.shape[-2], left.shape[-1], right.shape[-1]
        count = math.prod(left.shape[:-2])
        flops = 2.0 * count * rows * num_inputs * num_outputs
        return Operation("matmul", flops, 0, moved, kind, (rows, num_inputs, num_outputs), count)
    if name == "convolution":
        filters, output = inputs[1], outputs[0]
        num_inputs = math.prod(filters.shape[1:])
        rows = math.prod(output.shape) // output.shape[1]
        flops = 2.0 * rows * num_inputs * output.shape[1]
        return Operation(
            "conv", flops, filters.nbytes, moved - filters.nbytes, kind, (rows, num_inputs, output.shape[1])
        )
    elements = float(max((tensor.numel() for tensor in outputs), default=0))
    if name in _NORMS:
        return Operation("norm", 8 * elements, 0, moved)
    if name in ("_softmax", "softmax", "_log_softmax"):
        return Operation("softmax", 8 * elements, 0, moved)
    if name in _FUNCTIONS:
        return Operation("function", 10 * elements, 0, moved)
    if name in ("embedding", "index_select", "gather"):
        return Operation("gather", 0.0, 0, 2 * sum(tensor.nbytes for tensor in outputs))
    return Operation("element", elements, 0, moved)
