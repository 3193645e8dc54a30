"""The plugin of pytest: fixtures that load a model, serve a mesh, and keep golden answers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # a run that uses nothing of it imports nothing
    from weft.base.processes.process import Endpoint
    from weft.testing.in_process import TestedModel


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--weft-update``."""
    group = parser.getgroup("weft")
    group.addoption("--weft-update", action="store_true", help="write the answers that weft_golden compares with")


@pytest.fixture
def weft_model() -> "Iterator[Callable[..., TestedModel]]":
    """``weft.testing.model``, for models that are closed at the end of the test."""
    from weft.testing import model  # noqa: PLC0415  # see above

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(model(*args, **options))


@pytest.fixture(scope="session")
def weft_mesh(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Callable[..., dict[str, Endpoint]]]":
    """Serve a repository on free ports, until the end of the session: ``weft_mesh(repository)["router"].grpc``.

    Arguments behind the repository are those of ``weft up``. A mesh of equal arguments is started once.
    """
    from weft.mesh.preflight import MeshError  # noqa: PLC0415
    from weft.mesh.running import last_error, running_mesh  # noqa: PLC0415

    meshes: dict[tuple[str, ...], dict[str, Endpoint]] = {}
    with ExitStack() as stack:

        def serve(repository: str | Path, *arguments: str) -> "dict[str, Endpoint]":
            key = (str(Path(repository).resolve()), *arguments)
            if key not in meshes:
                path = tmp_path_factory.mktemp("weft") / "mesh.log"
                log = stack.enter_context(path.open("w", encoding="utf-8"))
                try:
                    meshes[key] = stack.enter_context(running_mesh(Path(repository), arguments, log=log))
                except MeshError as error:
                    raise MeshError(f"{error}: {last_error(path)} (all of it: {path})") from None
            return meshes[key]

        yield serve


@pytest.fixture
def weft_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare outputs with those in a file: ``weft_golden(answer, rtol=1e-5)``.

    The file, ``golden/<test>.json`` beside the test, has datatype, shape and elements of each output; further calls in
    a test take a ``name``. ``pytest --weft-update`` writes it. Numbers of floating point may differ by ``atol + rtol *
    |golden|``, anything else may not.
    """
    from weft.testing.golden import compare, golden_text  # noqa: PLC0415

    def check(outputs: Mapping[str, Any], name: str = "", *, rtol: float = 0.0, atol: float = 0.0) -> None:
        __tracebackhide__ = True
        title = f"{request.node.name}{name and '.'}{name}.json"
        file = "".join(char if char.isalnum() or char in "-_." else "_" for char in title)
        path = request.path.parent / "golden" / file
        if request.config.getoption("--weft-update"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(golden_text(outputs), encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"there is no {path}; pytest --weft-update writes what is answered now")
        compare(outputs, path.read_text(encoding="utf-8"), str(path), rtol=rtol, atol=atol)

    return check
