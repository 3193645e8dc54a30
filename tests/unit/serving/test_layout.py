"""Batches put together and taken apart, without a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.case_files import Case, cases

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.layout import BatchInput, BatchLayout, file_signature, make_gatherer
from weft.serving.queues.settings import LengthBuckets
from weft.serving.request.request import InferenceRequest


def _specs(text: str) -> tuple[TensorSpec, ...]:
    """``NAME DATATYPE DIMS... [optional | ragged]; ...``."""
    specs = []
    for name, datatype, *words in (each.split() for each in text.split(";") if each):
        dims = tuple(int(word) for word in words if word not in ("optional", "ragged"))
        specs.append(TensorSpec(name, datatype, dims, "optional" in words, allow_ragged_batch="ragged" in words))
    return tuple(specs)


def _layout(case: Case) -> BatchLayout:
    values = json.loads(case.option("buckets", "{}"))
    given = [value.split() for name, value in case.options if name == "batch_input"]
    return BatchLayout(
        LengthBuckets((8,), values, case.option("mask")) if values else None,
        tuple(BatchInput(kind, tuple(names.split(",")), datatype, source) for kind, names, datatype, source in given),
        dict([case.option("scattered").split()]) if case.option("scattered") else {},
    )


class Batch:
    """Members, and what they are put into and taken out of."""

    def __init__(self, case: Case) -> None:
        self.signature = ModelSignature(
            "m", "1", "", int(case.option("batch")), _specs(case.option("inputs")), _specs(case.option("outputs"))
        )
        self.layout = _layout(case)
        self.gatherer = make_gatherer(self.signature, self.layout)
        self.dtypes = {spec.name: NUMPY_BY_DATATYPE[spec.datatype] for spec in self.signature.inputs}
        self.members: list[tuple[InferenceRequest, dict[str, Array]]] = []

    def do(self, line: str) -> list[str]:
        """What comes of a line."""
        verb, _, text = line.partition(" ")
        given: dict[str, Any] = json.loads(text or "{}")
        if verb == "gather":
            return self.gathered()
        if verb == "+":
            arrays = {name: np.array(value, self.dtypes[name]) for name, value in given.items()}
            num_rows = len(next(iter(arrays.values()))) if self.signature.max_batch_size else 1
            self.members.append((InferenceRequest(InferCall("m"), CallContext(), num_rows), arrays))
            return []
        assert verb == "scatter", verb
        outputs = {name: np.arange(np.prod(shape, dtype=int)).reshape(shape) for name, shape in given.items()}
        try:
            parts = self.gatherer.scatter(self.members, outputs)
        except InternalError as error:
            return [error.message.partition(" (error id")[0]]
        return [json.dumps({name: array.tolist() for name, array in part.items()}, sort_keys=True) for part in parts]

    def gathered(self) -> list[str]:
        """Inputs of the model, which in arrays of a caller are the same."""
        made: list[Array] = []

        def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
            made.append(np.full(shape, 99, dtype))
            return made[-1]

        inputs = self.gatherer.gather(self.members)
        placed = make_gatherer(self.signature, self.layout, allocate).gather(self.members)
        assert inputs.keys() == placed.keys()
        for name, array in placed.items():
            assert any(array is known for known in made), name
            np.testing.assert_array_equal(inputs[name], array, strict=True)
        own = [id(array) for _, arrays in self.members for array in arrays.values()]
        return [
            f"{name} {array.dtype} {array.tolist()}{' as it is' * (id(array) in own)}"
            for name, array in sorted(inputs.items())
        ]


@cases(Path(__file__).with_name("layouts.txt"))
def test_layout(case: Case) -> None:
    """Members are put together and taken apart as the case says."""
    case.check_script(Batch(case).do)


def test_file_signature():
    """The file has ragged tensors in one dimension, batch inputs beside the others, and a mask that is always there."""
    inputs = _specs("R FP32 -1 -1 ragged; MASK INT32 -1 optional; IDS INT64 -1")
    layout = BatchLayout(
        LengthBuckets((8,), {"IDS": -5, "MASK": 0}, "MASK"),
        (BatchInput("BATCH_ITEM_SHAPE", ("S",), "FP32", "R"), BatchInput("BATCH_ELEMENT_COUNT", ("N",), "INT32", "R")),
        {"HIDDEN": "R"},
    )
    seen = file_signature(ModelSignature("m", "1", "", 8, inputs, _specs("HIDDEN FP32 -1 3; POOLED FP32 3")), layout)
    assert {"R": (-1,), "MASK": (-1, -1), "IDS": (-1, -1), "S": (-1, 2), "N": (-1,)} == {
        spec.name: seen.full_shape(spec) for spec in seen.inputs
    }
    assert {"HIDDEN": (-1,), "POOLED": (-1, 3)} == {spec.name: seen.full_shape(spec) for spec in seen.outputs}
    assert not any(spec.is_optional for spec in seen.inputs)
