"""The programs of docs/language-models.md run as they stand, but for the ports."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh

GUIDE = (Path(__file__).resolve().parents[2] / "docs/language-models.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
#: What the commands and programs of the guide call.
SERVED = (
    "graphs/write", "model/writer", "preprocess/tokenize_writer", "postprocess/detokenize_writer",
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[dict[str, Endpoint]]:
    root = tmp_path_factory.mktemp("repository")
    for folder in SERVED:
        (root / folder).parent.mkdir(exist_ok=True)
        (root / folder).symlink_to(repository / folder)
    with running_mesh(root, ["--openai-port", "0"]) as endpoints:
        yield endpoints


def output(*command: str) -> str:
    """What a program prints; it ends well."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_both_programs_print_the_same_text(mesh: dict[str, Endpoint]) -> None:
    """They ask for the same tokens with the same seed, over HTTP and over gRPC, and lose nothing of them."""
    http, grpc = str(mesh["gateway"].http), str(mesh["router"].grpc)
    texts = [
        output("-c", program.replace("localhost:8000", http).replace("localhost:8001", grpc)) for program in PROGRAMS
    ]
    assert 2 == len(texts)
    assert texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("arguments", [["writer", "--param", "max_tokens=4", "--param", "temperature=0.5"], ["write"]])
def test_the_command_line_streams(mesh: dict[str, Endpoint], arguments: list[str]) -> None:
    """The model by itself, and the graph around it."""
    url = str(mesh["router"].grpc)
    printed = output("-m", "weft.cli", "infer", *arguments, "--text", "Return the", "--url", url)
    assert re.search(r"responses? in .* ms, the first after", printed)
