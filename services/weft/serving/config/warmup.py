"""Checks ``model_warmup`` and makes its samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.reshape import reshaped
from weft.base.signature import datatype_name
from weft.base.tensors import ITEMSIZE_BYTES, NUMPY_BY_DATATYPE, WireTensor, encode, encode_bytes, num_elements
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import Backend, Batch
from weft.serving.config.checks import model_dims, path_fault
from weft.serving.config.report import ConfigReport
from weft.serving.request.request import InferenceRequest
from weft_protos.model_config_pb2 import ModelConfig, ModelInput, ModelWarmup

#: Of one input of a sample.
MAX_BYTES = 1 << 30
_SEED = 0
_STRING = b"warm-up"
_STRING_BYTES = 4 + len(_STRING)


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample request: inputs by name, batch dimension included, its batch size and its number of runs."""

    name: str
    inputs: Mapping[str, WireTensor]
    num_rows: int
    num_runs: int


def warmed(backend: type[Backend], samples: Sequence[WarmupSample]) -> type[Backend]:
    """``backend`` with a ``load`` that also runs the samples; a sample that fails fails the load."""

    class WarmedBackend(backend):  # type: ignore[valid-type,misc]  # the base is a value here
        def load(self) -> None:
            super().load()
            for sample in samples:
                for _ in range(sample.num_runs):
                    self._warm(sample)

        def _warm(self, sample: WarmupSample) -> None:
            call = InferCall(self.model.signature.name, inputs=dict(sample.inputs))
            (outcome,) = self.execute(Batch([InferenceRequest(call, CallContext(), num_rows=sample.num_rows)]))
            if isinstance(outcome, WeftError):
                raise outcome.with_message(f"warm-up sample '{sample.name}' failed: {outcome.message}")

    WarmedBackend.__name__ = WarmedBackend.__qualname__ = backend.__name__
    return WarmedBackend


def warmup_samples(config: ModelConfig, directory: Path, report: ConfigReport) -> list[WarmupSample]:
    """Samples that every instance runs before the model is ready; one with a fault is left out.

    ``input_data_file`` names a file in the subfolder ``warmup`` of ``directory``, the model's folder.
    """
    samples = []
    for i, warmup in enumerate(config.model_warmup):
        path = f"model_warmup[{i}]"
        num_faults = len(report.diagnostics)
        _check_sample(path, config, warmup, report)
        tensors = {
            tensor.name: _tensor(path, tensor, warmup, config.max_batch_size > 0, directory, report)
            for tensor in config.input
            if tensor.name in warmup.inputs
        }
        if len(report.diagnostics) == num_faults:
            inputs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            samples.append(WarmupSample(warmup.name or str(i), inputs, max(warmup.batch_size, 1), max(warmup.count, 1)))
    return samples


def _check_sample(path: str, config: ModelConfig, warmup: ModelWarmup, report: ConfigReport) -> None:
    largest = max(config.max_batch_size, 1)
    if not 1 <= warmup.batch_size <= largest:
        report.error(
            f"{path}.batch_size", f"warm-up batch_size must be between 1 and {largest}, got {warmup.batch_size}"
        )
    known = [tensor.name for tensor in config.input]
    for name in sorted(set(warmup.inputs) - set(known)):
        report.error(f"{path}.inputs[{name}]", f"the model has no input '{name}'{suggestion(name, known)}")
    for tensor in config.input:
        if not tensor.optional and tensor.name not in warmup.inputs:
            report.error(path, f"the warm-up lacks input '{tensor.name}', which the model needs")


def _tensor(
    path: str, tensor: ModelInput, warmup: ModelWarmup, has_batch: bool, directory: Path, report: ConfigReport
) -> WireTensor | None:
    data = warmup.inputs[tensor.name]
    dims = tuple(data.dims)
    datatype = datatype_name(data.data_type)
    called = f"warm-up input '{tensor.name}'"
    fits = len(dims) == len(tensor.dims) and all(
        dim > 0 and want in (-1, dim) for dim, want in zip(dims, tensor.dims, strict=True)
    )
    if data.data_type != tensor.data_type or not fits:
        report.error(
            f"{path}.inputs[{tensor.name}]",
            f"{called} has {datatype} {list(dims)}, but the model takes {datatype_name(tensor.data_type)} "
            f"{list(tensor.dims)}, each dimension at least 1",
        )
        return None
    num_bytes = max(warmup.batch_size, 1) * num_elements(dims) * ITEMSIZE_BYTES.get(datatype, _STRING_BYTES)
    if num_bytes > MAX_BYTES:
        report.error(
            f"{path}.inputs[{tensor.name}]", f"{called} has {num_bytes} bytes; at most {MAX_BYTES} are allowed"
        )
        return None
    try:
        row = _row(datatype, dims, data, directory)
    except ValueError as error:
        report.error(f"{path}.inputs[{tensor.name}]", f"{called}: {error}")
        return None
    shape = reshaped(dims, tensor.dims, model_dims(tensor))
    if not has_batch:
        return WireTensor(datatype, shape, row)
    return WireTensor(datatype, (warmup.batch_size, *shape), row * warmup.batch_size)


def _row(datatype: str, dims: tuple[int, ...], data: ModelWarmup.Input, directory: Path) -> bytes:
    kind = data.WhichOneof("input_data_type")
    count = num_elements(dims)
    if kind == "input_data_file":
        return _file_row(datatype, count, data.input_data_file, directory / "warmup")
    if kind not in ("zero_data", "random_data"):
        raise ValueError("set one of zero_data, random_data and input_data_file")
    if datatype == "BYTES":
        return encode_bytes([b"" if kind == "zero_data" else _STRING] * count)
    if kind == "zero_data":
        return bytes(count * ITEMSIZE_BYTES[datatype])
    uniform = np.random.default_rng(_SEED).random(count)
    scale = 1 if np.issubdtype(NUMPY_BY_DATATYPE[datatype], np.inexact) or datatype == "BF16" else 2
    return encode((uniform * scale).astype(NUMPY_BY_DATATYPE[datatype])).data


def _file_row(datatype: str, count: int, filename: str, folder: Path) -> bytes:
    if fault := path_fault(filename, "the folder 'warmup'"):
        raise ValueError(fault)
    try:
        row = (folder / filename).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {folder / filename}: {error.strerror}") from None
    if datatype != "BYTES" and len(row) != (expected := count * ITEMSIZE_BYTES[datatype]):
        raise ValueError(f"{folder / filename} has {len(row)} bytes, expected {expected}")
    return row
