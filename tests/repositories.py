"""Repositories that services of tests serve: models in Python, and graphs over them."""

from pathlib import Path

#: In the process of its service.
THREAD = 'parameters { key: "EXECUTION" value { string_value: "thread" } }\n'
#: A number X to a number Y.
NUMBERS = """input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
#: The same in batches of up to 8, in the process of its service.
NUMBER_BATCHES = THREAD + NUMBERS + "max_batch_size: 8\n"


def write_model(services: Path, name: str, source: str, config: str) -> Path:
    """A model in Python with one version, whose folder is returned; the configuration says the backend."""
    version = services / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (version.parent / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    return version


def write_graph(graphs: Path, name: str, text: str) -> None:
    """A graph with one version."""
    folder = graphs / name / "1"
    folder.mkdir(parents=True)
    (folder / "graph.pbtxt").write_text(text)
