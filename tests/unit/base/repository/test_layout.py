"""Models, ensembles and graphs side by side in a repository are told apart by their files."""

from pathlib import Path

import pytest

from weft.base.repository.layout import is_graph_folder


@pytest.mark.parametrize(
    ("file", "text", "is_graph"),
    [
        ("1/model.onnx", "", False),
        ("1/graph.pbtxt", "", True),
        ("config.pbtxt", 'platform: "ensemble"', True),
        ("config.pbtxt", 'backend: "python"', False),
        ("config.pbtxt/file", "", False),
    ],
)
def test_a_folder_is_of_a_graph_by_its_files(tmp_path: Path, file: str, text: str, is_graph: bool) -> None:
    """Without a config.pbtxt the version tells; a file that cannot be read is of no graph, and raises nothing."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert is_graph == is_graph_folder(tmp_path)
