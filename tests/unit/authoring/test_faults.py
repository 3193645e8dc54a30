"""Errors of graphs in Python: each names the line that is wrong, with the compiler's code and the cure."""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases

import weft
from weft.authoring import faults
from weft.authoring.models import Models

OWN = str(Path(faults.__file__).parent)


@cases(Path(__file__).parent / "faults.txt")
def test_fault(case: Case, run: Callable[[str], dict[str, Any]]) -> None:
    """The message has line, code, cause and cure; inside a graph the traceback ends on that line of the user's file."""
    with pytest.raises(weft.GraphError) as caught:
        run(case.text)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    found = caught.value.diagnostics
    if not case.option("outside"):
        assert ("case.py", found[0].line) == (Path(last.filename).name, last.lineno)
    case.check("\n".join(f"{one.line}: {_plain(one.message)} [{one.code}]" for one in found))


def _plain(message: str) -> str:
    return re.sub(r"/\S*/(?=case\.py|\w+\.pbtxt|model_repository\b)", "", message)


def test_what_is_missing_says_where_to_look(tmp_path: Path, models: Models) -> None:
    """A folder that is not there, and a call outside of a graph, name the cure."""
    with pytest.raises(weft.GraphError, match=r"there is no .*nowhere; give the path of a model repository"):
        weft.models(tmp_path / "nowhere")
    with pytest.raises(weft.GraphError, match=r"model 'digits_cnn' stands outside of a graph"):
        models.digits_cnn()
    assert {"digits_cnn", "decode_digit", "embed"} < set(dir(models))
    assert not hasattr(models, "nothing")


def test_a_lock_file_is_enough(tmp_path: Path, models: Models) -> None:
    """Signatures from a lock file check a graph as those of the repository do."""
    lock = tmp_path / "signatures.lock"
    tensors = '{ name: "A" data_type: TYPE_FP32 dims: 4 }'
    lock.write_text(f'model {{ name: "known" version: "1" target: "model" input {tensors} output {tensors} }}')
    only = weft.models(lock=lock)
    assert ["known"] == dir(only)

    @weft.graph
    def locked(A: weft.Tensor[weft.FP32, 4]) -> weft.Outputs(A=weft.Tensor[weft.FP32, 4]):  # type: ignore[valid-type]
        return only.known(A)

    assert "known" == locked.message.node[0].sequence.step[0].model_name
    assert "G002" in {one.code for one in locked.check(models)}
