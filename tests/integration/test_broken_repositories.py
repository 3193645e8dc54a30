"""What ``weft check`` passes loads, and what it refuses does not: each repository is given to both."""

import os
import random
from pathlib import Path

import pytest
from tests.repositories_broken import GOOD, apply, mutate, write_good

from weft.language import GraphError
from weft.mesh.preflight import MeshError, service_folders
from weft.mesh.running import running_mesh
from weft.router.compile import compile_graph
from weft.router.repository.files import GraphRepository
from weft.serving.core import ServingCore
from weft.tools.check import check, check_layout, find_files
from weft.tools.lock import StaticCatalog
from weft.tools.offline import BACKENDS

_FIRST = int(os.environ.get("WEFT_BROKEN_FIRST", "0"))
#: For each repository; another first one gives others.
_SEEDS = range(_FIRST, _FIRST + int(os.environ.get("WEFT_BROKEN", "11")))
_LINES = Path(__file__).with_name("broken_repositories.txt").read_text().split("\n")
ROWS = [line for line in _LINES if line and not line.startswith("#")]


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def refusals(root: Path) -> list[str]:
    """What ``weft check`` refuses."""
    found = [*check_layout(root), *check(find_files([root]), None)]
    return [f"{one.file.removeprefix(str(root))}:{one.line}: {one.message}" for one in found if one.severity == "error"]


async def faults(root: Path) -> list[str]:
    """Why a mesh would not serve all that the repository has, by the code of its services and its router."""
    try:
        folders = service_folders(root, tuple(BACKENDS))
    except (MeshError, OSError) as error:
        return [str(error)]
    found: list[str] = []
    catalog = StaticCatalog()
    for service, folder in folders.items():
        if service == "graphs":
            continue
        core = ServingCore(folder, BACKENDS[service], num_gpus=0)
        await core.start()
        try:
            for entry in core.index(ready_only=False):
                if entry.state == "READY":
                    catalog.add(entry.name, int(entry.version), service, core.signature(entry.name, entry.version))
                else:
                    found.append(f"{entry.name}: {entry.reason}")
        finally:
            await core.close(grace_s=5)
    graphs = GraphRepository(folders["graphs"])
    for file in (file for files in graphs.scan().values() for file in files):
        try:
            compile_graph(file.read(), catalog, graphs)
        except (GraphError, OSError) as error:
            found.append(str(error))
    return [*found, *graphs.faults.values()]


async def _compare(root: Path, change: str) -> list[str]:
    refused, failed = refusals(root), await faults(root)
    assert bool(refused) == bool(failed), f"{change}\ncheck: {refused}\nload: {failed}"
    return refused


@pytest.mark.parametrize("name", GOOD)
async def test_a_repository_without_fault_passes_and_loads(name: str, templates: Path, tmp_path: Path) -> None:
    """Each repository that is broken below has no fault before."""
    write_good(name, templates, tmp_path / "r")
    assert not await _compare(tmp_path / "r", name)


@pytest.mark.parametrize("row", ROWS)
async def test_what_users_do(row: str, templates: Path, tmp_path: Path) -> None:
    """Both say the same of a fault that users make, and check says what is wrong with these words; none: it serves."""
    name, *commands, words = map(str.strip, row.split(" | "))
    write_good(name, templates, tmp_path / "r")
    for command in commands:
        apply(command, tmp_path / "r")
    refused = await _compare(tmp_path / "r", row)
    told = "\n".join(refused) or "serves"
    assert words in told, told


@pytest.mark.long
@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("name", GOOD)
async def test_random_changes(name: str, seed: int, templates: Path, tmp_path: Path) -> None:
    """Both say the same of a repository after a random change."""
    write_good(name, templates, tmp_path / "r")
    change = mutate(tmp_path / "r", random.Random(f"{name} {seed}"))
    await _compare(tmp_path / "r", change)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS[::3])
def test_a_real_mesh_says_the_same(row: str, templates: Path, tmp_path: Path) -> None:
    """``weft up`` itself serves what check passes, and names in its log what check refuses."""
    name, *commands, _ = map(str.strip, row.split(" | "))
    write_good(name, templates, tmp_path / "r")
    for command in commands:
        apply(command, tmp_path / "r")
    refused = refusals(tmp_path / "r")
    with (tmp_path / "log").open("w") as log:
        try:
            with running_mesh(tmp_path / "r", log=log) as endpoints:
                assert endpoints
        except MeshError:
            assert refused
            return
    assert bool(refused) == _has_errors((tmp_path / "log").read_text())


def _has_errors(log: str) -> bool:
    return any(text in log for text in ('"level": "error"', "cannot be loaded", "graph folder"))
