"""Converted graphs do what the originals did."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, RemoteError
from weft.base.tensors import WireTensor, bytes_tensor, decode, encode
from weft.language import GraphSource, ModelCatalog
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime
from weft.router.target import Target
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source

GOLDEN = Path(__file__).with_name("golden")
Answer = Callable[[Mapping[str, WireTensor]], dict[str, WireTensor]]


class _Target(Target):
    """Answers as a test says."""

    name, address = "model", "in process"

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.called: list[str] = []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.called.append(call.model_name)
        return InferResult(call.model_name, "1", "", {}, self.answers[call.model_name.replace("-", "_")](call.inputs))


async def infer(name: str, models: ModelCatalog, target: _Target, **inputs: WireTensor) -> dict[str, WireTensor]:
    """Outputs of a converted graph."""
    source = Source((GOLDEN / f"{name}.yaml").read_text(), name)
    ((_, text),) = convert(source, source.documents(), Signatures(models), name).items()
    executor = GraphExecutor(compile_graph(GraphSource(text, name), models), Runtime({"model": target}))
    return (await executor.execute(InferCall(name, inputs=dict(inputs)), CallContext())).outputs


def texts(*values: str) -> WireTensor:
    """Rows of one string."""
    return bytes_tensor(values, (len(values), 1))


async def test_a_condition_that_does_not_hold_ends_the_sequence(models: ModelCatalog) -> None:
    """The answer is the one before it; a request goes one way as a whole, so one of several rows is refused."""
    target = _Target(
        animal=lambda inputs: {"LABEL": inputs["IMAGE"]}, dog_breed=lambda inputs: {"BREED": texts("poodle")}
    )
    assert texts("cat") == (await infer("kserve_condition", models, target, IMAGE=texts("cat")))["LABEL"]
    assert ["animal"] == target.called
    assert texts("poodle") == (await infer("kserve_condition", models, target, IMAGE=texts("dog")))["LABEL"]
    with pytest.raises(InvalidArgumentError, match="one row"):
        await infer("kserve_condition", models, target, IMAGE=texts("cat", "dog"))


@pytest.mark.parametrize(("language", "called"), [("de", ["detector", "from-german"]), ("fr", ["detector"])])
async def test_a_step_that_needs_the_answer_before_it_is_left_out(
    models: ModelCatalog, language: str, called: list[str]
) -> None:
    """Where its condition does not hold the answer is the one before it, alone."""
    target = _Target(
        detector=lambda inputs: {"LANG": texts(language), "CLEAN": inputs["TEXT"]},
        from_german=lambda inputs: {"ENGLISH": inputs["CLEAN"]},
    )
    outputs = await infer("kserve_answer_condition", models, target, TEXT=texts("ab"))
    assert called == target.called
    assert {"LANG": texts(language), "CLEAN": texts("ab")} == {n: outputs[n] for n in ("LANG", "CLEAN")}
    assert (texts("ab") if language == "de" else None) == outputs.get("ENGLISH")


async def test_an_answer_goes_on_under_the_name_that_the_next_step_wants(models: ModelCatalog) -> None:
    """Through two steps of one model, whose output is called like its input."""
    target = _Target(
        cleaner=lambda inputs: {"TEXT": texts(decode(inputs["TEXT"])[0, 0].decode() + "!")},
        scorer=lambda inputs: {"PROBS": encode(np.full((1, 3), len(decode(inputs["INPUT"])[0, 0]), np.float32))},
    )
    outputs = await infer("kserve_request_and_response", models, target, TEXT=texts("ab"))
    assert [[4.0, 4.0, 4.0]] == decode(outputs["PROBS"]).tolist()


async def test_a_soft_member_that_fails_leaves_the_others(models: ModelCatalog) -> None:
    """Its outputs are absent."""
    features = encode(np.zeros((1, 4), np.float32))

    def fail_once(inputs: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
        if target.called == ["small"]:
            raise RemoteError("INTERNAL", "boom")
        return {"PROBS": encode(np.ones((1, 3), np.float32))}

    target = _Target(small=fail_once)
    outputs = await infer("kserve_ensemble_soft", models, target, FEATURES=features)
    assert ["small-2.PROBS"] == list(outputs)
    assert [[1.0, 1.0, 1.0]] == decode(outputs["small-2.PROBS"]).tolist()


@pytest.mark.parametrize(("route", "expected"), [(0, ["chooser", "small"]), (1, ["chooser", "cleaner", "scorer"])])
async def test_a_router_of_seldon_chooses_the_child(models: ModelCatalog, route: int, expected: list[str]) -> None:
    """By its number; the child gets what the router got."""
    probs = {"PROBS": encode(np.ones((1, 3), np.float32))}
    target = _Target(
        chooser=lambda inputs: {"ROUTE": encode(np.array([[route]], np.int32))},
        small=lambda inputs: probs,
        cleaner=lambda inputs: {"TEXT": inputs["TEXT"]},
        scorer=lambda inputs: probs,
    )
    features = encode(np.zeros((1, 4), np.float32))
    outputs = await infer("seldon_router", models, target, TEXT=texts("a"), FEATURES=features)
    assert probs == outputs
    assert expected == target.called


async def test_a_route_without_a_child_is_an_error(models: ModelCatalog) -> None:
    """-2 means nobody to Seldon."""
    target = _Target(chooser=lambda inputs: {"ROUTE": encode(np.array([[-2]], np.int32))})
    with pytest.raises(InvalidArgumentError, match="chooser_branch"):
        await infer("seldon_router", models, target, TEXT=texts("a"), FEATURES=encode(np.zeros((1, 4), np.float32)))


@pytest.mark.parametrize(
    ("start", "rounds", "expected"), [(0.0, 3, [230.0] * 4), (90.0, 1, [910.0] * 4), (-99.0, 6, None)]
)
async def test_a_pipeline_goes_round_until_it_has_an_answer(
    models: ModelCatalog, start: float, rounds: int, expected: list[float] | None
) -> None:
    """What comes back is the input of the next round; after the last one the answer has nothing."""

    def count(inputs: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
        counted = decode(inputs["COUNT"]) + 1
        return {
            "COUNTED": encode(counted),
            "DONE" if counted[0, 0] > 20 else "MORE": encode(np.ones((1, 1), np.float32)),
        }

    target = _Target(
        counter=count,
        plus10=lambda inputs: {"OUTPUT": encode(decode(inputs["INPUT"]) + 10)},
        times10=lambda inputs: {"OUTPUT": encode(decode(inputs["INPUT"]) * 10)},
    )
    outputs = await infer("seldon2_cycle", models, target, COUNT=encode(np.full((1, 4), start, np.float32)))
    assert rounds == target.called.count("counter")
    assert expected == (decode(outputs["OUTPUT"])[0].tolist() if outputs else None)
