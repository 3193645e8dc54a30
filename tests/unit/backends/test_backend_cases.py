"""Backends and transforms: what comes out of what goes in, by the files in ``cases/``."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tests.case_files import Case, cases
from tests.unit.backends.files import without_library, write_files
from tests.unit.builders import MakeModelContext, execute_batch, load_backend

from weft.backends import BACKENDS as MODELS
from weft.backends import postprocess, preprocess
from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, encode
from weft.serving.request.request import InferenceRequest, Outcome

FILES = sorted((Path(__file__).parent / "cases").glob("[a-z]*.txt"))
BACKENDS = {**MODELS, **preprocess.BACKENDS, **postprocess.BACKENDS}


def _tensors(text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    parts = [each.split() for each in text.split("; ")]
    return {name: (datatype, tuple(map(int, dims))) for name, datatype, *dims in parts}


def _array(value: Any, datatype: str, dims: tuple[int, ...]) -> Array:
    if datatype == "BYTES":
        return np.vectorize(lambda text: text.encode("utf-8", "surrogateescape"), otypes=[np.object_])(value)
    array = np.array(value, NUMPY_BY_DATATYPE[datatype])
    return array if array.size else array.reshape((*array.shape, *dims[array.ndim - 1 :]))


def _request(line: str, inputs: dict[str, tuple[str, tuple[int, ...]]], *, has_rows: bool) -> InferenceRequest:
    arrays = {name: _array(value, *inputs[name]) for name, value in json.loads(line).items()}
    call = InferCall("model", inputs={name: encode(array) for name, array in arrays.items()})
    return InferenceRequest(call, CallContext(), num_rows=len(next(iter(arrays.values()))) if has_rows else 1)


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value.decode() if isinstance(value, bytes) else value


def _line(outcome: Outcome) -> str:
    if isinstance(outcome, WeftError):
        return f"{type(outcome).__name__}: {outcome.message}"
    assert not isinstance(outcome, str)
    outputs = {name: _shown(np.asarray(array).tolist()) for name, array in outcome.outputs.items()}
    return json.dumps(outputs, ensure_ascii=False)


@cases(*FILES)
def test_backend(version_folder: Path, make_model_context: MakeModelContext, case: Case) -> None:
    """A backend answers each request of a batch, or refuses it alone, or does not load, as the case says."""
    write_files(version_folder.parent, case.options)
    inputs, outputs = _tensors(case.option("inputs")), _tensors(case.option("outputs"))
    parameters: dict[str, Any] = {}
    for name, value in case.options:
        if name == "set":
            parameters |= dict(each.split("=", 1) for each in value.split())
        elif name == "unset":
            parameters = {key: each for key, each in parameters.items() if key not in value.split()}
    batch = int(case.option("batch", "8"))
    try:
        model = make_model_context(
            inputs,
            outputs,
            max_batch_size=batch,
            optional=tuple(case.option("optional").split()),
            config=json.loads(case.option("config", "{}")),
            **parameters,
        )
        backend = load_backend(BACKENDS[case.option("backend")], model)
        requests = [_request(line, inputs, has_rows=batch > 0) for line in case.text.split("\n") if line]
        lines = [_line(outcome) for outcome in execute_batch(backend, *requests)]
    except WeftError as error:
        lines = [_line(error)]
    case.check(without_library("\n".join(lines).replace(str(version_folder.parent), "model")))
