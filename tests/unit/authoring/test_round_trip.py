"""Files of graphs, written and read, as Python and back: nothing is lost."""

from pathlib import Path

import pytest
from examples.cookbook import PAGE, files_of, write_repository
from hypothesis import assume, given, note, settings
from tests.case_files import Case, cases
from tests.unit.authoring.round_trip import check_round_trip, made_by
from tests.unit.language.conftest import FOLDER, FakeCatalog, FolderGraphs
from tests.unit.language.test_corpus import _read
from tests.unit.router.random_drawing import graphs_of_any_batch, num_examples
from tests.unit.router.random_graph_text import Catalog, Graphs, text_of
from tests.unit.router.random_graph_text import files_of as files_of_random
from tests.unit.router.random_graphs import Node
from tests.unit.tools.convert import test_golden as converted
from tests.unit.tools.convert.conftest import Models as ConvertedModels

from weft.authoring.to_python import python_text
from weft.authoring.writing import read
from weft.language import GraphError
from weft.router.compile import compile_graph
from weft.tools.offline import OfflineCatalog, graphs_of

SAMPLES = Path(__file__).parents[3] / "model_repository"
SAMPLE_FILES = sorted([*SAMPLES.glob("graphs/*/1/graph.pbtxt"), *SAMPLES.glob("graphs/*/config.pbtxt")])
RECIPES = [path for path, _ in files_of(PAGE.read_text()) if path.endswith("graph.pbtxt")]
CONVERTED = [path for path in sorted(converted.GOLDEN.glob("*.pbtxt")) if path.stem not in converted.OPEN]


@pytest.fixture(scope="module")
def sample_models() -> OfflineCatalog:
    """The models of the samples."""
    return OfflineCatalog(SAMPLES)


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OfflineCatalog]:
    """The cookbook's repository and its models."""
    root = write_repository(tmp_path_factory.mktemp("cookbook"), PAGE.read_text())
    return root, OfflineCatalog(root)


@pytest.mark.parametrize("file", SAMPLE_FILES, ids=lambda path: path.parts[-3])
def test_a_sample(file: Path, sample_models: OfflineCatalog) -> None:
    """Each is written as it stands, and so does the Python beside it."""
    text, graphs = file.read_text(), graphs_of(SAMPLES)
    check_round_trip(text, sample_models, graphs)
    assert text == read(file).text == made_by(file.with_name("graph.py").read_text(), sample_models, graphs).text


@pytest.mark.parametrize("path", RECIPES)
def test_a_recipe(path: str, cookbook: tuple[Path, OfflineCatalog]) -> None:
    """Each graph of the cookbook is written as it stands, and so does its Python."""
    root, models = cookbook
    text, graphs = (root / path).read_text(), graphs_of(root)
    check_round_trip(text, models, graphs)
    python = (root / path).with_name("graph.py").read_text()
    assert text == made_by(python, models, graphs).text
    made = python_text(read(text).source, models, graphs, repository="Path(__file__).parents[3]")
    assert python == made, f"docs/cookbook.md has other Python for {path}"


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_a_converted_graph(path: Path) -> None:
    """What was converted from KServe and Seldon Core goes to Python and back."""
    check_round_trip(path.read_text(), ConvertedModels())


@pytest.mark.parametrize("path", sorted((FOLDER / "good").glob("*.pbtxt")), ids=lambda path: path.stem)
def test_a_graph_of_the_corpus(path: Path) -> None:
    """Graphs and ensembles of the compiler's tests."""
    check_round_trip(path.read_text(), FakeCatalog(), FolderGraphs())


@cases(*(FOLDER / "plans").glob("*.txt"))
def test_a_feature(case: Case) -> None:
    """Every field and kind that has a plan."""
    catalog, source = _read(case.text)
    assert isinstance(source.text, str)
    check_round_trip(source.text, catalog, FolderGraphs())


def compiles(name: str, root: Node) -> bool:
    """Whether a graph that another calls is right by itself, and not only under the conditions of its step."""
    found = Graphs(root).find(name, "")
    try:
        return found is not None and bool(compile_graph(found, Catalog(root), Graphs(root)))
    except GraphError:
        return False


@settings(deadline=None, max_examples=num_examples(15))
@given(root=graphs_of_any_batch())
def test_a_random_graph(root: Node) -> None:
    """Nodes of every kind within one another, under any policies, with odd orders and repeated names."""
    note(files_of_random(root))
    graphs = Graphs(root)
    assume(all(compiles(name, root) for name in graphs.names()))
    check_round_trip(text_of(root), Catalog(root), Graphs(root))


def test_a_graph_with_errors_has_no_python() -> None:
    """The errors are those of the compiler."""
    graph = read('name: "g" node { name: "root" sequence { step { model_name: "nothing" } } }\n')
    with pytest.raises(GraphError, match=r"unknown model 'nothing'"):
        python_text(graph.source, FakeCatalog())


HEAD = 'name: "g" max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: 1 }\n'
ODD = {
    "words of Python": (
        'name: "class" max_batch_size: 8 input { name: "for" data_type: TYPE_STRING dims: 1 } '
        'node { name: "root" sequence { step { name: "import" node: "m" input_map { key: "TEXT" value: "for" } } } } '
        'node { name: "m" sequence { step { name: "weft" model_name: "bert_de" } } } ',
        ("def class_2(for_2: ", "def m_2(", 'name="import"'),
    ),
    "names with dots": (
        'name: "a.b-c" max_batch_size: 8 input { name: "x.y" data_type: TYPE_STRING dims: 1 } '
        'output { name: "p:q" data_type: TYPE_FP32 dims: 3 } node { name: "root" sequence { step { name: "1.2" '
        'model_name: "bert_de" input_map { key: "TEXT" value: "x.y" } output_map { key: "PROBS" value: "p:q" } } } }',
        ('@weft.graph(name="a.b-c"', 'names={"x_y": "x.y"}', '**{"p:q": '),
    ),
    "a comment with quotes": (
        '# Says "no" \\ and """never""".\n'
        + HEAD
        + 'node { name: "root" sequence { step { model_name: "bert_de" } } }',
        ('"no" \\\\ and',),
    ),
}


@pytest.mark.parametrize("title", ODD)
def test_odd_names(title: str) -> None:
    """Names that Python cannot have are given as texts."""
    text, said = ODD[title]
    check_round_trip(text, FakeCatalog())
    graph = read(text + "\n")
    code = python_text(graph.source, FakeCatalog())
    assert [] == [words for words in said if words not in code]
