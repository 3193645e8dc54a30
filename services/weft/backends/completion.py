"""What a configuration leaves out, taken from the tensors of a model's file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.backends.contract import FileTensor
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import DATATYPES

#: Of a model that can be batched and does not say how large its batches may be, as in Triton Inference Server.
DEFAULT_MAX_BATCH_SIZE = 4


def completed(
    config: dict[str, Any],
    path: Path,
    inputs: Sequence[FileTensor],
    outputs: Sequence[FileTensor],
    *,
    max_rows: int = DEFAULT_MAX_BATCH_SIZE,
) -> dict[str, Any]:
    """The configuration with inputs and outputs of the file, or types and shapes of those that it declares without.

    A model whose tensors all begin with a dimension of any size gets a batch dimension and dynamic batching, unless
    the configuration declares tensors.

    Args:
        config: JSON-like; changed.
        path: The file, for errors.
        inputs: Of the file, in its order.
        outputs: Likewise.
        max_rows: Most rows of a batch that the file can take.

    Raises:
        InvalidArgumentError: A tensor has no datatype of V2, or no shape.
    """
    found = {"input": inputs, "output": outputs}
    can_batch = all(t.shape and t.shape[0] == -1 for tensors in found.values() for t in tensors)
    if can_batch and not (config.get("max_batch_size") or config.get("input") or config.get("output")):
        config["max_batch_size"] = min(DEFAULT_MAX_BATCH_SIZE, max_rows)
        if not {"sequence_batching", "ensemble_scheduling"} & set(config):
            config.setdefault("dynamic_batching", {})
    has_batch = bool(config.get("max_batch_size"))
    for kind, tensors in found.items():
        if not config.get(kind):
            config[kind] = [_declaration(path, tensor, has_batch=has_batch) for tensor in tensors]
            continue
        by_name = {tensor.name: tensor for tensor in tensors}
        for declared in config[kind]:
            is_open = "dims" not in declared or declared.get("data_type", "TYPE_INVALID") == "TYPE_INVALID"
            if is_open and (tensor := by_name.get(declared.get("name", ""))) is not None:
                made = _declaration(path, tensor, has_batch=has_batch)
                if "dims" in declared:
                    made.pop("reshape", None)
                declared.update(made | declared)
    return config


def _declaration(path: Path, tensor: FileTensor, *, has_batch: bool) -> dict[str, Any]:
    """The tensor as an entry of ``input`` or ``output`` in a configuration; one value per row has a dimension of 1."""
    if tensor.datatype not in DATATYPES or not tensor.shape:
        raise InvalidArgumentError(
            f"{path}: '{tensor.name}' is {tensor.datatype} {list(tensor.shape or ())}, from which no datatype and dims "
            "can be made; declare input and output in config.pbtxt"
        )
    dims = list(tensor.shape)[has_batch:]
    data_type = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    declaration: dict[str, Any] = {"name": tensor.name, "data_type": f"TYPE_{data_type}", "dims": dims or [1]}
    return declaration if dims else declaration | {"reshape": {"shape": []}}
