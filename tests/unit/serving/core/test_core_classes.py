"""Outputs of a served model that are asked for as their best classes."""

from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import decode, encode

LABELLED = 'output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ]'


def call(count: object = 1) -> InferCall:
    """Asks for the best classes of [[0, 1], [3, 2]] + value."""
    inputs = {"X": encode(np.array([[0, 1], [3, 2]], np.float32))}
    return InferCall("m", inputs=inputs, outputs=(RequestedOutput("Y", {"classification": count}),))  # type: ignore[dict-item]


@pytest.mark.parametrize("folder", ["", "1/"])
async def test_labels_of_the_config(repository: Any, folder: str) -> None:
    """Labels are the lines of ``label_filename``, in the model's folder or the version's."""
    config = repository.CONFIG.replace(LABELLED, LABELLED + ' label_filename: "names.txt"')
    repository.write("m", {1: 1}, config)
    (repository.root / "m" / f"{folder}names.txt").write_text("süß\nsour\n")
    core = await repository.serve()
    answer = (await core.infer(call(), CallContext())).outputs["Y"]
    assert [[b"2.000000:1:sour"], ["4.000000:0:süß".encode()]] == decode(answer).tolist()


async def test_the_others_of_the_batch_get_their_tensors(repository: Any) -> None:
    """A request that asks for classes and one that does not are answered each in its way."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    plain = InferCall("m", inputs=call().inputs)
    assert [[b"2.000000:1"], [b"4.000000:0"]] == decode((await core.infer(call(), CallContext())).outputs["Y"]).tolist()
    assert [[1, 2], [4, 3]] == decode((await core.infer(plain, CallContext())).outputs["Y"]).tolist()


async def test_a_bad_number_of_classes_is_refused_before_the_model_runs(repository: Any) -> None:
    """The request is INVALID_ARGUMENT and nothing was executed."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    with pytest.raises(InvalidArgumentError, match="must be an integer above 0, got 0"):
        await core.infer(call(0), CallContext())
    assert [0] == [entry.execution_count for entry in core.statistics("m", "1")]


async def test_labels_that_cannot_be_read(repository: Any) -> None:
    """A model whose label file is missing does not load, and the index says which file."""
    config = repository.CONFIG.replace(LABELLED, LABELLED + ' label_filename: "names.txt"')
    repository.write("m", {1: 1}, config)
    core = await repository.serve()
    (entry,) = core.index(ready_only=False)
    assert "cannot read labels 'names.txt': there is no such file" in entry.reason


async def test_labels_of_the_model_come_first(repository: Any) -> None:
    """Of a file in both folders that of the model's is read, as Triton Inference Server does."""
    config = repository.CONFIG.replace(LABELLED, LABELLED + ' label_filename: "names.txt"')
    repository.write("m", {1: 1}, config)
    (repository.root / "m" / "names.txt").write_text("a\r\nb")
    (repository.root / "m" / "1" / "names.txt").write_text("x\ny\n")
    core = await repository.serve()
    assert ("a", "b") == core.signature("m", "").outputs[0].labels
