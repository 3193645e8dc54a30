"""The arrays of a batch as configured: ragged inputs, batch inputs and outputs, length buckets."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from weft.base.signature import datatype_name
from weft.base.tensors import NUMPY_BY_DATATYPE
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.layout import BatchInput, BatchLayout
from weft.serving.config.checks import model_dims
from weft.serving.config.report import ConfigReport
from weft.serving.scheduler.grouping import LengthBuckets
from weft_protos.model_config_pb2 import TYPE_STRING, ModelConfig, ModelInput
from weft_protos.model_config_pb2 import BatchInput as BatchInputMessage

_BOUNDS, _PAD, _MASK = "batch_buckets", "batch_buckets_pad", "batch_buckets_mask"
_MAX_ELEMENTS = "batch_buckets_max_elements"
LAYOUT_PARAMETERS = (_BOUNDS, _PAD, _MASK, _MAX_ELEMENTS)


def batch_layout(config: ModelConfig, report: ConfigReport, *, has_tensor_backend: bool) -> BatchLayout:
    """The layout of batches as configured; ``has_tensor_backend``: a batch runs as one array for each input."""
    ragged = [f"input[{i}].allow_ragged_batch" for i, tensor in enumerate(config.input) if tensor.allow_ragged_batch]
    buckets = [f"parameters[{key}]" for key in LAYOUT_PARAMETERS if key in config.parameters]
    mixed = [
        *(["batch_input"] if config.batch_input else []),
        *(["batch_output"] if config.batch_output else []),
        *buckets,
    ]
    if not config.max_batch_size:
        for path in [*ragged, *mixed]:
            report.error(path, f"{path} needs max_batch_size > 0")
    if not has_tensor_backend:
        for path in mixed:
            report.error(
                path, f"backend '{config.backend}' gets each request by itself and has no use for {path}; remove it"
            )
    if buckets and (ragged or config.batch_input or config.batch_output):
        report.error(buckets[0], f"{buckets[0]} and ragged batches exclude each other; a length is padded or it is not")
    return BatchLayout(
        buckets=_buckets(config, report) if buckets else None,
        batch_inputs=tuple(_batch_inputs(config, report)),
        scattered=dict(_scattered(config, report)),
    )


def _batch_inputs(config: ModelConfig, report: ConfigReport) -> Iterator[BatchInput]:
    inputs = [tensor.name for tensor in config.input]
    taken = set(inputs)
    for i, message in enumerate(config.batch_input):
        path = f"batch_input[{i}]"
        kind = BatchInputMessage.Kind.Name(message.kind)
        datatype = datatype_name(message.data_type)
        if datatype not in ("INT32", "FP32"):
            report.error(f"{path}.data_type", f"batch input must be TYPE_INT32 or TYPE_FP32, got {datatype}")
        if not message.target_name:
            report.error(path, "batch input must specify 'target_name', the input of the model that gets it")
        for name in message.target_name:
            if name in taken:
                report.error(f"{path}.target_name", f"batch input '{name}' is an input already; its name must differ")
            taken.add(name)
        if len(message.source_input) != 1 or message.source_input[0] not in inputs:
            got = ", ".join(message.source_input) or "none"
            near = suggestion(got, inputs)
            report.error(
                f"{path}.source_input", f"batch input must have one of the inputs as 'source_input', got {got}{near}"
            )
            continue
        yield BatchInput(kind, tuple(message.target_name), datatype, message.source_input[0])


def _scattered(config: ModelConfig, report: ConfigReport) -> Iterator[tuple[str, str]]:
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for i, message in enumerate(config.batch_output):
        path = f"batch_output[{i}]"
        sources = [name for name in message.source_input if name in inputs]
        if len(message.source_input) != 1 or not sources:
            got = ", ".join(message.source_input) or "none"
            near = suggestion(got, list(inputs))
            report.error(
                f"{path}.source_input", f"batch output must have one of the inputs as 'source_input', got {got}{near}"
            )
            continue
        if not message.target_name:
            report.error(path, "batch output must specify 'target_name', the output that is cut")
        for name in message.target_name:
            if name not in outputs:
                report.error(
                    f"{path}.target_name", f"the model has no output '{name}'{suggestion(name, list(outputs))}"
                )
            elif (given := len(model_dims(outputs[name]))) != (wanted := len(model_dims(inputs[sources[0]]))):
                report.error(
                    f"{path}.target_name",
                    f"output '{name}' has {given} dims, its source '{sources[0]}' has {wanted}; they must be as many",
                )
            else:
                yield name, sources[0]


def _buckets(config: ModelConfig, report: ConfigReport) -> LengthBuckets | None:
    text = {key: config.parameters[key].string_value for key in LAYOUT_PARAMETERS if key in config.parameters}
    if _BOUNDS not in text:
        for key in text:
            report.error(f"parameters[{key}]", f"parameter '{key}' needs parameter '{_BOUNDS}'")
        return None
    if not config.HasField("dynamic_batching"):
        report.error(f"parameters[{_BOUNDS}]", f"parameter '{_BOUNDS}' needs dynamic_batching")
    parts = [part.strip() for part in text[_BOUNDS].split(",")]
    bounds = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    if bounds[0] < 1 or any(low >= high for low, high in pairwise(bounds)):
        report.error(
            f"parameters[{_BOUNDS}]",
            f"parameter '{_BOUNDS}' must be lengths that rise, such as '16,32,64', got '{text[_BOUNDS]}'",
        )
    pad_values: dict[str, float] = dict(_pad_values(config, text.get(_PAD, ""), report)) if text.get(_PAD) else {}
    mask = text.get(_MASK, "")
    if mask and (tensor := _varying_input(config, _MASK, mask, report)) is not None:
        if pad_values.setdefault(mask, 0) != 0:
            report.error(f"parameters[{_PAD}]", f"the mask '{mask}' is padded with 0, got {pad_values[mask]}")
        if tensor.data_type == TYPE_STRING:
            report.error(f"parameters[{_MASK}]", f"the mask '{mask}' must hold numbers")
    if not pad_values:
        report.error(
            f"parameters[{_BOUNDS}]", f"parameter '{_BOUNDS}' needs the inputs to pad, as '{_PAD}': 'input=value,...'"
        )
    max_elements = text.get(_MAX_ELEMENTS, "0")
    if not max_elements.isdecimal():
        report.error(
            f"parameters[{_MAX_ELEMENTS}]",
            f"parameter '{_MAX_ELEMENTS}' must be a whole number of at least 0, got '{max_elements}'",
        )
        return None
    return LengthBuckets(bounds, pad_values, mask, int(max_elements))


def _pad_values(config: ModelConfig, text: str, report: ConfigReport) -> Iterator[tuple[str, float]]:
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        tensor = _varying_input(config, _PAD, name, report)
        if tensor is None:
            continue
        number = _number(value, datatype_name(tensor.data_type))
        if number is None:
            report.error(
                f"parameters[{_PAD}]",
                f"input '{name}' is {datatype_name(tensor.data_type)} and cannot be padded with '{value}'; write "
                f"'{name}=0' or another value of that type",
            )
        else:
            yield name, number


def _varying_input(config: ModelConfig, key: str, name: str, report: ConfigReport) -> ModelInput | None:
    for tensor in config.input:
        if tensor.name == name:
            if -1 in tensor.dims:
                return tensor
            report.error(
                f"parameters[{key}]", f"input '{name}' has no -1 in its dims {list(tensor.dims)}; nothing to pad"
            )
            return None
    near = suggestion(name, [tensor.name for tensor in config.input])
    report.error(f"parameters[{key}]", f"parameter '{key}': the model has no input '{name}'{near}")
    return None


def _number(text: str, datatype: str) -> float | None:
    dtype = NUMPY_BY_DATATYPE.get(datatype)
    if dtype is None or dtype == np.object_:
        return None
    try:
        if datatype == "BOOL" or np.issubdtype(dtype, np.integer):
            number = int(text)
            limits = np.iinfo(dtype) if datatype != "BOOL" else np.iinfo(np.uint8)
            return number if limits.min <= number <= (1 if datatype == "BOOL" else limits.max) else None
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
