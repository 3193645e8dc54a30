"""Conditions in Python: the CEL text of every operator and method, which the compiler takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.case_files import table

import weft
from weft.authoring.expressions import as_expression
from weft.authoring.faults import here
from weft.authoring.tensors import TensorType
from weft.authoring.tracing import Scope, Symbol, Trace
from weft.base.signature import TensorSpec
from weft.language.types.expression import FUNCTIONS

FILE = Path(__file__).parent / "expressions.txt"
TYPES = {"F": ("FP32", (2, 3)), "I": ("INT64", (4,)), "S": ("BYTES", (1,)), "B": ("BOOL", (1,))}


def _names() -> dict[str, Any]:
    scope = Scope(Trace(), "sequence", "n", here())
    tensors = {name: Symbol(name, TensorSpec(name, *known), None, scope) for name, known in TYPES.items()}
    return {**{name: getattr(weft, name) for name in weft.__all__}, **tensors, "np": np}


@pytest.mark.parametrize(("what", "words"), table(FILE, "text"))
def test_text(what: str, words: str) -> None:
    """An expression of Python is this text, and `weft check` compiles it."""
    value = eval(what, _names())
    assert f"<condition {words}>" == repr(as_expression(value))
    tensors: dict[str, Any] = {name: TensorType(kind, dims) for name, (kind, dims) in TYPES.items()}

    def body(F: Any, I: Any, S: Any, B: Any) -> Any:  # noqa: E741  # names of the table
        scope = {**_names(), "F": F, "I": I, "S": S, "B": B}
        same = weft.where(eval(what, scope) == eval(what, scope), True, False)
        kept = weft.step(model_name="any", X=F, outputs={"Y": "Y"}).when(same)
        return {"Y": kept.Y}

    body.__annotations__ = {**tensors, "return": weft.Outputs(Y=TensorType("FP32", (1,), {"optional": True}))}
    graph = weft.graph(body)
    assert [] == [one for one in graph.diagnostics if one.severity == "error"]


@pytest.mark.parametrize(("what", "words"), table(FILE, "refused"))
def test_refused(what: str, words: str) -> None:
    """What CEL lacks raises, and says what to write."""
    with pytest.raises(weft.GraphError) as caught:
        eval(what, _names())
    assert words in str(caught.value)


def test_every_function_of_the_language_has_a_spelling() -> None:
    """The table above has each function that conditions know."""
    text = FILE.read_text()
    assert [] == [name for name in FUNCTIONS if f"{name}(" not in text.partition("[refused]")[0]]
