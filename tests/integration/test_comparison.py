"""The pipelines of docs/comparison.md answer, through a mesh, what the exam expects of every system."""

import base64
import runpy
from collections.abc import Iterator

import pytest
from examples.cookbook import PAGE, ROOT, write_repository
from tests.exams.comparison_cases import ANSWERS, pictures

import weft

pytestmark = pytest.mark.long

EXAMPLES = ROOT / "examples/comparison"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[weft.Client]:
    """Of a mesh that serves the files of the examples."""
    repository = write_repository(tmp_path_factory.mktemp("comparison"), PAGE.read_text())
    weft.write(runpy.run_path(str(EXAMPLES / "models/weft_models.py"))["name_digit"], to=repository)
    for name in ANSWERS:
        folder = repository / "graphs" / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "graph.pbtxt").write_text((EXAMPLES / name / "graph.pbtxt").read_text())
    with weft.running_mesh(repository) as mesh, weft.connect(mesh["router"].grpc) as connected:
        yield connected


@pytest.mark.parametrize("name", ANSWERS)
def test_a_pipeline_answers(client: weft.Client, name: str) -> None:
    """Ten digits, or the six of a page and where they stand."""
    images = [[base64.b64decode(picture)] for picture in pictures(name)]
    answer = client[name](**({"PAGE": images[0]} if name == "read_page" else {"IMAGE": images}))
    found = {key: array.tolist() for key, array in answer.items()}
    if name == "classify":
        found = {"NAME": [row[0].decode() for row in found["NAME"]]}
    assert ANSWERS[name] == found


def test_a_user_stays_on_one_side(client: weft.Client) -> None:
    """Both sides answer, about as the weights say, and each user is always on the same."""
    image = [[base64.b64decode(pictures("ab_test")[0])]]

    def side(user: int) -> str:
        path: str = client.ab_test(IMAGE=image, headers={"x-user-id": f"user-{user}"}).path
        return path[-2]

    sides = [side(user) for user in range(50)]
    assert sides == [side(user) for user in range(50)]
    assert 1 <= sides.count("B") <= 25


def test_only_rows_in_doubt_go_to_the_large_model(client: weft.Client) -> None:
    """The small model answers all ten, the large one fewer."""
    images = [[base64.b64decode(picture)] for picture in pictures("cascade")]
    path = client.cascade(IMAGE=images).path
    assert "digits_tiny#10" in path
    assert "digits_committee#10" not in path
