"""``weft.serve``: serves graphs and models made in Python, by a mesh that ends with this process."""

import atexit
import contextlib
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from weft.authoring.graph import Graph
from weft.authoring.model import Model
from weft.authoring.running import stage
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.processes.process import Endpoint
from weft.base.text.suggestion import suggestion
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.mesh.service_names import GATEWAY, ROUTER
from weft.tools.offline import GRAPH_FOLDER


class Server:
    """A running mesh; made by ``weft.serve``. It ends with ``stop``, the ``with`` block or the process.

    Attributes:
        address: ``host:port`` for gRPC.
        http_address: ``host:port`` of V2 over HTTP and OpenAI's interface; "" without ``http_port``.
        log: File with what the services log.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], log: Path, stack: contextlib.ExitStack) -> None:
        self.address = endpoints[ROUTER].grpc
        self.http_address = endpoints[GATEWAY].http if GATEWAY in endpoints else ""
        self.log = log
        self._stack = stack
        self._is_over = threading.Event()
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let requests in flight finish, and end it; may be called again."""
        atexit.unregister(self.stop)
        self._stack.close()
        self._is_over.set()

    def wait(self) -> None:
        """Wait for Ctrl-C, or for ``stop`` in another thread, and stop: the last line of a script."""
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._is_over.wait()
        finally:
            self.stop()


def serve(
    *things: Any,
    port: int = 8001,
    models: str | Path | None = None,
    http_port: int | None = None,
    host: str = "127.0.0.1",
) -> Server:
    """Serve graphs and models by a mesh in processes of its own; return once all of them serve.

    Args:
        things: Graphs and models made in Python. What the graphs reach is served too; of models that only Python models
            call, give the names.
        port: For gRPC; 0 is any free port.
        models: The repository of the models; None: that of the graphs. It is linked to, and not written.
        http_port: For V2 over HTTP and OpenAI's interface; None: not served.

    Raises:
        MeshError: A port is in use, or a graph or model cannot be loaded; the message says which and why.
        NotFoundError: The repository has no model of a name.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-serve-")))
        write_reached(things, models, folder)
        arguments = [f"--host={host}", f"--router-port={port}", "--metrics-port=0", "--exit-on-error", "--in-process"]
        http = [] if http_port is None else [f"--http-port={http_port}"]
        log = folder / "weft.log"
        try:
            output = stack.enter_context(log.open("w"))
            endpoints = stack.enter_context(running_mesh(folder, [*http, *arguments], log=output))
        except MeshError:
            raise MeshError(last_error(log)) from None
        return Server(endpoints, log, stack.pop_all())


def write_reached(things: Sequence[Any], models: str | Path | None, folder: Path) -> None:
    """Write graphs and models into a repository, with links to what they reach. Raises as ``serve``."""
    graphs, made = [one for one in things if isinstance(one, Graph)], [one for one in things if isinstance(one, Model)]
    if unfit := [one for one in things if not isinstance(one, Graph | Model | str)]:
        raise InvalidArgumentError(f"{unfit[0]!r} is no graph, model or name; make one with @weft.graph or @weft.model")
    repositories = [models] if models is not None else [getattr(one.catalog, "repository", None) for one in graphs]
    repository = next((Path(one) for one in repositories if one), None)
    if repository is not None and not repository.is_dir():
        raise NotFoundError(f"models: there is no folder '{repository}'")
    wanted = stage([*made, *graphs], repository, folder) | {one for one in things if isinstance(one, str)}
    links = {link.name: link for link in folder.glob("*/*") if link.is_symlink() and link.parent.name != GRAPH_FOLDER}
    for name in things:
        if isinstance(name, str) and name not in links:
            raise NotFoundError(f"'{repository}' has no model '{name}'{suggestion(name, links)}")
    for name in links.keys() - wanted:
        links[name].unlink()
