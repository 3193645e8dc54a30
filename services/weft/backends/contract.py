"""Validation of a model file's inputs and outputs against the configuration, at load."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec


class FileTensor(NamedTuple):
    """One input or output of a model file.

    Attributes:
        name: Tensor name.
        datatype: V2 datatype, or the file's own name for one that V2 lacks.
        shape: Including the batch dimension; -1 is any size. None: not specified in the file.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


def check_inputs(
    signature: ModelSignature, path: Path, found: Sequence[FileTensor], *, may_be_absent: Collection[str] = ()
) -> None:
    """Check that the configuration declares the inputs of the file, with equal types and shapes.

    Args:
        signature: From the configuration.
        path: The model file, for errors.
        found: Inputs of the file.
        may_be_absent: Inputs with a default in the file.

    Raises:
        InvalidArgumentError: They differ; the message has both sides.
    """
    for spec in signature.inputs:
        if spec.is_optional and spec.name not in may_be_absent:
            raise InvalidArgumentError(
                f"model '{signature.name}': input '{spec.name}' is optional in the configuration, but {path} has no "
                "default for it"
            )
    declared = [spec.name for spec in signature.inputs]
    if missing := [t.name for t in found if t.name not in declared and t.name not in may_be_absent]:
        raise InvalidArgumentError(
            f"model '{signature.name}': {path} needs input {_quoted(missing)}, which the configuration does not "
            f"declare; it declares {_quoted(declared)}"
        )
    _check_each(signature, path, "input", signature.inputs, found)


def check_outputs(signature: ModelSignature, path: Path, found: Sequence[FileTensor]) -> None:
    """Check that the file has each output that the configuration declares; it may have more.

    Raises:
        InvalidArgumentError: An output is missing or differs; the message has both sides.
    """
    _check_each(signature, path, "output", signature.outputs, found)


def _check_each(
    signature: ModelSignature, path: Path, kind: str, specs: Sequence[TensorSpec], found: Sequence[FileTensor]
) -> None:
    by_name = {tensor.name: tensor for tensor in found}
    for spec in specs:
        tensor = by_name.get(spec.name)
        if tensor is None:
            raise InvalidArgumentError(
                f"model '{signature.name}': {path} has no {kind} '{spec.name}'; it has {_quoted(by_name)}"
            )
        shape = signature.full_shape(spec)
        agree = _agree(shape, tensor.shape, is_input=kind == "input", has_batch=signature.max_batch_size > 0)
        if tensor.datatype != spec.datatype or not agree:
            of_file = "any shape" if tensor.shape is None else str(list(tensor.shape))
            raise InvalidArgumentError(
                f"model '{signature.name}': {kind} '{spec.name}' is {spec.datatype} {list(shape)} by the configuration "
                f"(max_batch_size {signature.max_batch_size}), but {tensor.datatype} {of_file} in {path}; make the "
                "configuration agree with the file"
            )


def _agree(declared: tuple[int, ...], found: tuple[int, ...] | None, *, is_input: bool, has_batch: bool) -> bool:
    """Whether the file accepts every input that the configuration allows, or can produce the declared output."""
    if found is None:
        return True
    if len(declared) != len(found) or (has_batch and found[0] != -1):
        return False
    return all(have in (-1, want) or (want == -1 and not is_input) for want, have in zip(declared, found, strict=True))


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
