"""A model on calibration data: the ranges of its values, and how far another version's answers are away."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from weft.base.errors import InvalidArgumentError
from weft.optimize.methods.method import Inputs
from weft.optimize.methods.onnx_model import MAX_FILE_BYTES, save_model

Floats = NDArray[np.float32]

_ERRORS_ONLY = 3
_TINY = 1e-12


class ChannelRange(NamedTuple):
    """Least and greatest value of each channel, FP32 ``[channels]``."""

    low: Floats
    high: Floats

    @property
    def largest(self) -> Floats:
        """Greatest absolute value of each channel."""
        values: Floats = np.maximum(np.abs(self.low), np.abs(self.high))
        return values


def open_session(model: Any) -> Any:
    """A session on the CPU for a ``ModelProto``. Raises InvalidArgumentError."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    try:
        if model.ByteSize() < MAX_FILE_BYTES:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        with tempfile.TemporaryDirectory(prefix="weft-optimize-") as folder:
            save_model(model, Path(folder) / "model.onnx")
            return onnxruntime.InferenceSession(Path(folder) / "model.onnx", options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base of their own
        raise InvalidArgumentError(f"ONNX Runtime cannot load the model: {error}") from error


def answers(session: Any, names: Sequence[str] | None, inputs: Inputs) -> list[NDArray[Any]]:
    """Outputs of one batch; of all names if None. Raises InvalidArgumentError if the model does not take it."""
    try:
        values: list[NDArray[Any]] = session.run(names, dict(inputs))
    except Exception as error:  # same
        raise InvalidArgumentError(f"the model does not take the calibration data: {error}") from error
    return values


def observe(model: Any, names: Collection[str], calibration: Sequence[Inputs]) -> dict[str, ChannelRange]:
    """Ranges of values of the main graph, by their last dimension.

    Args:
        model: ``ModelProto``; not changed.
        names: FP32 values.
        calibration: Batches of the model's inputs.

    Raises:
        InvalidArgumentError: There is no calibration data, the model does not take it, or values are not finite.
    """
    if not calibration:
        raise InvalidArgumentError("there is no calibration data; give at least one batch of the model's inputs")
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    outputs = {output.name for output in model.graph.output}
    inputs = {node.name for node in model.graph.input}
    for name in names:
        if name not in outputs and name not in inputs:
            watched.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session, found = open_session(watched), dict[str, ChannelRange]()
    asked = [name for name in names if name not in inputs]
    for batch in calibration:
        values = dict(zip(asked, answers(session, asked, batch), strict=True)) if asked else {}
        for name in names:
            value = values[name] if name in values else np.asarray(batch[name])
            rows = value.reshape(-1, value.shape[-1])
            if not len(rows):
                continue
            low, high = rows.min(axis=0), rows.max(axis=0)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise InvalidArgumentError(f"'{name}' is not finite for some calibration data")
            before = found.get(name)
            found[name] = (
                ChannelRange(np.minimum(low, before.low), np.maximum(high, before.high))
                if before
                else ChannelRange(low, high)
            )
    if missing := [name for name in names if name not in found]:
        raise InvalidArgumentError(f"no calibration batch has rows for '{missing[0]}'")
    return found


def some_rows(calibration: Sequence[Inputs], num_rows: int) -> Sequence[Inputs]:
    """The last batches that have so many rows together, or all."""
    found, count = 0, 0
    while found < len(calibration) and count < num_rows:
        found += 1
        count += max((len(value) for value in calibration[-found].values() if value.ndim), default=1)
    return calibration[-found:] if found else calibration


class ExpectedAnswers:
    """A model's answers to some batches, and how far those of other versions are away.

    Args:
        model: ``ModelProto``.
        calibration: Batches of the model's inputs.

    Raises:
        InvalidArgumentError: The model does not take the batches.
    """

    def __init__(self, model: Any, calibration: Sequence[Inputs]) -> None:
        self._calibration = calibration
        session = open_session(model)
        self._expected = [answers(session, None, batch) for batch in calibration]

    def error(self, session: Any, calibration: Sequence[Inputs] | None = None) -> float:
        """Squared distance of an answer from the expected one over the square of that; the median over all rows.

        Rows are the last dimension of the floating-point outputs. A mean would be ruled by the rows of padding, which
        mean nothing and are far off: in MiniLM 0.3 where the others are at 0.006.

        Args:
            session: The other version, see ``open_session``.
            calibration: The batches, if its inputs are not those of the model.
        """
        errors = [np.zeros(0)]
        for batch, expected in zip(calibration or self._calibration, self._expected, strict=True):
            for value, right in zip(answers(session, None, batch), expected, strict=True):
                if right.dtype.kind == "f" and right.size:
                    width = right.shape[-1] if right.ndim > 1 else 1
                    distance = np.square(value - right, dtype=np.float64).reshape(-1, width).sum(axis=1)
                    size = np.square(right, dtype=np.float64).reshape(-1, width).sum(axis=1)
                    errors.append(distance / np.maximum(size, _TINY))
        rows = np.concatenate(errors)
        return float(np.median(rows)) if len(rows) else 0.0
