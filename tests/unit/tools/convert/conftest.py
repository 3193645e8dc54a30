"""Models that the graphs of these tests call, by their signatures."""

from collections.abc import Sequence

import pytest

from weft.base.signature import ModelSignature, TensorSpec

_FEATURES = TensorSpec("FEATURES", "FP32", (4,))
_PROBS = TensorSpec("PROBS", "FP32", (3,))


def _bytes(name: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (1,))


class Models:
    """A catalog of a few models."""

    def __init__(self) -> None:
        self._signatures: dict[str, ModelSignature] = {}
        self._add(
            "tokenizer", [_bytes("TEXT")], [TensorSpec("IDS", "INT64", (-1,)), TensorSpec("MASK", "INT64", (-1,))]
        )
        self._add("bert", [TensorSpec("IDS", "INT64", (-1,)), TensorSpec("MASK", "INT64", (-1,))], [_PROBS])
        self._add("label", [_PROBS], [_bytes("LABEL")])
        self._add("cleaner", [_bytes("TEXT")], [_bytes("TEXT")])
        self._add("scorer", [_bytes("INPUT")], [TensorSpec("PROBS", "FP32", (3,))])
        self._add("animal", [_bytes("IMAGE")], [_bytes("LABEL")])
        self._add("dog-breed", [_bytes("PICTURE")], [_bytes("BREED")])
        self._add("small", [_FEATURES], [_PROBS])
        self._add("large", [_FEATURES, TensorSpec("LENGTH", "INT32", (1,), True)], [_PROBS], max_batch_size=8)
        self._add("tiny", [TensorSpec("X", "FP32", (4,))], [TensorSpec("Y", "FP32", (3,))])
        self._add("lone", [_FEATURES], [_PROBS], max_batch_size=1)
        self._add(
            "flat", [TensorSpec("FEATURES", "FP32", (-1, 4))], [TensorSpec("PROBS", "FP32", (-1, 3))], max_batch_size=0
        )
        self._add("measure", [_bytes("TEXT")], [_FEATURES])
        self._add("strict", [_FEATURES, TensorSpec("LENGTH", "INT32", (1,))], [_PROBS])
        self._add("detector", [_bytes("TEXT")], [_bytes("LANG"), _bytes("CLEAN")])
        self._add("from-german", [_bytes("CLEAN")], [_bytes("ENGLISH")])
        self._add("from-french", [_bytes("CLEAN")], [_bytes("ENGLISH")])
        self._add("chooser", [_bytes("TEXT")], [TensorSpec("ROUTE", "INT32", (1,))])
        four = [TensorSpec(name, "FP32", (4,)) for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")]
        for name in ("adder", "adder2"):
            self._add(name, four[:2], four[2:])
        for name in ("times10", "plus10", "plus20"):
            self._add(name, [TensorSpec("INPUT", "FP32", (4,))], [TensorSpec("OUTPUT", "FP32", (4,))])
        either = [TensorSpec(name, "FP32", (4,), True) for name in ("OUTPUT0", "OUTPUT1")]
        self._add("gate", [TensorSpec("CHOICE", "INT32", (1,)), *four[:2]], either)
        self._add("inspect", [TensorSpec("INPUT", "FP32", (4,))], [TensorSpec("FINE", "FP32", (1,), True)])
        self._add("drift", [TensorSpec("INPUT", "FP32", (4,))], [TensorSpec("IS_DRIFT", "INT64", (1,))])
        self._add("in-place", [TensorSpec("INPUT", "FP32", (4,))], [TensorSpec("INPUT", "INT64", (1,))])
        signs = [TensorSpec(name, "FP32", (1,), True) for name in ("MORE", "DONE")]
        self._add("counter", [TensorSpec("COUNT", "FP32", (4,))], [TensorSpec("COUNTED", "FP32", (4,)), *signs])
        self._add("merge", [TensorSpec("STACK", "FP32", (3, 3))], [_PROBS])

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        signature = self._signatures.get(model_name)
        return ("model", signature) if signature else None

    def names(self) -> list[str]:
        return list(self._signatures)

    def _add(
        self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, max_batch_size: int = 32
    ) -> None:
        self._signatures[name] = ModelSignature(name, "1", "", max_batch_size, tuple(inputs), tuple(outputs))


@pytest.fixture
def models() -> Models:
    """The catalog."""
    return Models()
