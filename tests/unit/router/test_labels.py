"""Labels of a graph's outputs."""

from pathlib import Path

import pytest
from tests.unit.router import make

from weft.base.signature import ModelSignature, TensorSpec
from weft.language.syntax.file import GraphError, GraphSource
from weft.router.compile import compile_graph


class Models:
    """Names the classes of its only model."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature]:
        tensors = [TensorSpec("X", "FP32", (2,))], [TensorSpec("Y", "FP32", (2,), labels=("owl", "cat"))]
        return "model", make.signature("double", *tensors, max_batch_size=4)

    def names(self) -> list[str]:
        return ["double"]


def labels_of(folder: Path, text: str) -> tuple[str, ...]:
    """Of output Z of a graph whose files are in the folder."""
    source = GraphSource(text, str(folder / "config.pbtxt"), version="1")
    (output,) = compile_graph(source, Models()).signature.outputs
    return output.labels


@pytest.mark.parametrize("text", [make.PIPE, make.ENSEMBLE])
def test_classes_have_the_names_of_the_graphs_file_else_those_of_the_model(tmp_path: Path, text: str) -> None:
    """The file lies in the graph's folder or in its version's, and one that does not is an error."""
    assert ("owl", "cat") == labels_of(tmp_path, text)
    own = text.replace("output [ { ", 'output [ { label_filename: "names.txt" ')
    with pytest.raises(GraphError, match=r"cannot read labels 'names.txt'"):
        labels_of(tmp_path, own)
    for folder, names in ((tmp_path / "1", "dog\nfox"), (tmp_path, "bee\nant\n")):
        folder.mkdir(exist_ok=True)
        (folder / "names.txt").write_text(names)
        assert tuple(names.split()) == labels_of(tmp_path, own)
