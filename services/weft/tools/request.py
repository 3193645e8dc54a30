"""Converts command-line texts to tensors that fit a model's inputs."""

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy as np

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import Array, WireTensor, array_of, encode, fits

_PROMPT = "text_input"  # of language models, after the vLLM backend of Triton Inference Server


def build_inputs(
    specs: Sequence[TensorSpec], named: Mapping[str, str], elements: Mapping[str, Sequence[bytes]]
) -> dict[str, WireTensor]:
    """Tensors of one request, in the model's order; an input without a value is left out.

    Args:
        specs: The model's inputs; ``dims`` is the full shape, -1 where any size fits.
        named: JSON text by input name.
        elements: Elements of BYTES inputs, by name; several are the rows of a batch. "" is the one required BYTES
            input without a value.

    Raises:
        InvalidArgumentError: A name is unknown, a value does not fit, or "" may be one of several inputs.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in (*named, *elements):
        if name and name not in by_name:
            raise InvalidArgumentError(f"no input '{name}'; the inputs are {_describe(specs)}")
    tensors = {name: tensor_from_json(by_name[name], text) for name, text in named.items()}
    for name, given in elements.items():
        spec = by_name[name] if name else _open_bytes_input(specs, {*named, *elements})
        if spec.name in tensors:
            raise InvalidArgumentError(f"input '{spec.name}' is given twice")
        tensors[spec.name] = _rows(spec, given)
    return {spec.name: tensors[spec.name] for spec in specs if spec.name in tensors}


def _rows(spec: TensorSpec, elements: Sequence[bytes]) -> WireTensor:
    """The elements as rows: two are [2, 1] for an input of shape [-1, 1]."""
    if spec.datatype != "BYTES":
        raise InvalidArgumentError(f"input '{spec.name}' is {spec.datatype}; give it with --input {spec.name}=JSON")
    value = np.empty(len(elements), dtype=np.object_)
    value[:] = list(elements)
    rows = value.reshape(len(elements), *[1] * (len(spec.dims) - 1)) if spec.dims else value
    return encode(rows if fits(rows.shape, spec.dims) else _fit(value, spec))


def content_of(text: str) -> str:
    """The text, or the content of the file named after ``@``.

    Raises:
        InvalidArgumentError: The file is not UTF-8.
        OSError: It cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"'{text[1:]}' is no UTF-8 text; write the value as JSON") from error


def tensor_from_json(spec: TensorSpec, text: str) -> WireTensor:
    """The tensor of a JSON number, string, boolean or nested list; leading dimensions of 1 may be left out.

    Raises:
        InvalidArgumentError: The text is not JSON, or the value does not fit the input's datatype or shape.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "; quote text twice: '\"...\"'" if spec.datatype == "BYTES" else ""
        raise InvalidArgumentError(f"value of input '{spec.name}' is no JSON: {error}{hint}") from error
    return encode(_fit(array_of(value, spec.datatype, what=f"value of input '{spec.name}'"), spec))


def parameter_value(text: str) -> ParameterValue:
    """A boolean, integer or number if the text is one in JSON, else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _fit(array: Array, spec: TensorSpec) -> Array:
    """``array`` with leading dimensions of 1 added until it has the rank of the input."""
    shape = (1,) * (len(spec.dims) - array.ndim) + array.shape
    if not fits(shape, spec.dims):
        raise InvalidArgumentError(
            f"value of input '{spec.name}' has shape {list(array.shape)}, which does not fit {list(spec.dims)}"
        )
    return array.reshape(shape)


def _open_bytes_input(specs: Sequence[TensorSpec], named: Container[str]) -> TensorSpec:
    """The single BYTES input without a value: a required one, else ``text_input``, else any."""
    open_ones = [spec for spec in specs if spec.datatype == "BYTES" and spec.name not in named]
    required = [spec for spec in open_ones if not spec.is_optional]
    prompts = [spec for spec in open_ones if spec.name == _PROMPT]
    candidates = required or prompts or open_ones
    if len(candidates) != 1:
        what = "no BYTES input is open" if not candidates else f"{len(candidates)} BYTES inputs are open"
        raise InvalidArgumentError(
            f"--text and --file fill the one open BYTES input, but {what}; use --file NAME=PATH or --input NAME=JSON "
            f"(inputs: {_describe(specs)})"
        )
    return candidates[0]


def _describe(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype}{list(spec.dims)}" for spec in specs) or "none"
