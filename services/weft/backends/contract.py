"""Checks a model's configuration against its file, or completes it from the file."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import DATATYPES
from weft.serving.backends.base import ModelContext
from weft.serving.backends.layout import file_signature
from weft.serving.backends.loading import Dims, check_tensor

#: Of a model that can be batched and does not say how large its batches may be, as in Triton Inference Server.
DEFAULT_MAX_BATCH_SIZE = 4


def inputs_among(
    model: ModelContext, of: str, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, TensorSpec]:
    """The declared inputs by name: all ``required`` ones, and possibly ``optional`` ones.

    Raises:
        InvalidArgumentError: Others are declared, or required ones are missing.
    """
    inputs = {spec.name: spec for spec in model.signature.inputs}
    if inputs.keys() - set(optional) != set(required):
        also = f" and may have {optional[0]} beside" if optional else ""
        names = ", ".join(required)
        raise model.error("input", f"{of} must have the inputs {names}{also}, got {', '.join(inputs)}")
    return inputs


def only_output(model: ModelContext, datatypes: Sequence[str], dims: Dims) -> TensorSpec:
    """The single declared output, checked by ``check_tensor``.

    Raises:
        InvalidArgumentError: There are several, or it is declared differently.
    """
    outputs = model.signature.outputs
    if len(outputs) != 1:
        text = f"model '{model.signature.name}' must have exactly one output, got {len(outputs)}"
        raise model.fault("output", text)
    return check_tensor(model, outputs[0], datatypes, dims)


class FileTensor(NamedTuple):
    """One input or output of a model file.

    Attributes:
        datatype: V2 datatype, or the file's own name for one that V2 lacks; "": not specified in the file.
        shape: Including the batch dimension; -1 is any size. None: not specified in the file.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


def check_file(
    model: ModelContext,
    path: Path,
    inputs: Sequence[FileTensor],
    outputs: Sequence[FileTensor],
    *,
    may_be_absent: Collection[str] = (),
) -> ModelSignature:
    """Check that the configuration declares the inputs of the file and some of its outputs, with types and shapes.

    Inputs in ``may_be_absent`` have a default in the file. Returns the signature of the file.

    Raises:
        InvalidArgumentError: They differ; the message has both sides.
    """
    signature = file_signature(model.signature, model.layout)
    for i, spec in enumerate(signature.inputs):
        if spec.is_optional and spec.name not in may_be_absent:
            why = f"is optional in the configuration, but {path} has no default for it; remove 'optional'"
            raise model.error(f"input[{i}].optional", f"input '{spec.name}' {why}")
    declared = [spec.name for spec in signature.inputs]
    if missing := [t.name for t in inputs if t.name not in declared and t.name not in may_be_absent]:
        text = f"{path} needs input {_quoted(missing)}, which the configuration does not declare"
        raise model.error("input", f"{text}; it declares {_quoted(declared)}")
    used = [tensor for tensor in inputs if tensor.name in declared]
    for kind, specs, found in (("input", signature.inputs, used), ("output", signature.outputs, outputs)):
        _check_each(model, signature, path, kind, specs, found)
    return signature


def _check_each(
    model: ModelContext,
    signature: ModelSignature,
    path: Path,
    kind: str,
    specs: Sequence[TensorSpec],
    found: Sequence[FileTensor],
) -> None:
    by_name = {tensor.name: tensor for tensor in found}
    for i, spec in enumerate(specs):
        tensor = by_name.get(spec.name)
        if tensor is None:
            text = f"{path} has no {kind} '{spec.name}'; it has {_quoted(by_name)}"
            raise model.error(f"{kind}[{i}].name", text)
        shape = signature.full_shape(spec)
        agree = _agree(shape, tensor.shape, is_input=kind == "input", has_batch=signature.max_batch_size > 0)
        if tensor.datatype not in ("", spec.datatype) or not agree:
            of_file = "any shape" if tensor.shape is None else str(list(tensor.shape))
            field = "data_type" if agree else "dims"
            raise model.error(
                f"{kind}[{i}].{field}",
                f"{kind} '{spec.name}' is {spec.datatype} {list(shape)} by the configuration "
                f"(max_batch_size {signature.max_batch_size}), but {tensor.datatype} {of_file} in {path}; "
                f"{_cure(shape, tensor.shape, signature)}",
            )


def _cure(declared: tuple[int, ...], found: tuple[int, ...] | None, signature: ModelSignature) -> str:
    has_batch = signature.max_batch_size > 0
    if has_batch and found and _agree(declared[1:], found, is_input=True, has_batch=False):
        return "it has no batch dimension: set max_batch_size: 0"
    if has_batch and found and len(found) == len(declared) and found[0] != -1:
        return "export it with a variable first dimension, or set max_batch_size: 0"
    return "make the configuration agree with the file"


def _agree(declared: tuple[int, ...], found: tuple[int, ...] | None, *, is_input: bool, has_batch: bool) -> bool:
    """Whether the file accepts every input that the configuration allows, or can produce the declared output."""
    if found is None:
        return True
    if len(declared) != len(found) or (has_batch and found[0] != -1):
        return False
    return all(have in (-1, want) or (want == -1 and not is_input) for want, have in zip(declared, found, strict=True))


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def completed(
    config: dict[str, Any],
    path: Path,
    inputs: Sequence[FileTensor],
    outputs: Sequence[FileTensor],
    *,
    max_rows: int = DEFAULT_MAX_BATCH_SIZE,
) -> dict[str, Any]:
    """Complete the configuration, in place, with inputs and outputs of the file, or missing types and shapes.

    A model whose tensors all have a variable first dimension gets a batch dimension, of at most ``max_rows``, and
    dynamic batching, unless the configuration declares tensors.

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
