"""The sides of a difference that are not files here: what a router serves, and revisions of Git."""

import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import CONFIG_FILENAME, is_folder_name, is_version
from weft.tools.lock import lock_text
from weft.tools.offline import GRAPH_FILENAME, GRAPH_FOLDER, find_graph, repository_of
from weft_protos import graph_service_pb2 as pb

if TYPE_CHECKING:
    from weft.v2.client.v2_client import V2Client

_TIMEOUT_S = 10.0


def check_out(revision: str, graph: str, repository: Path | None, folder: Path) -> tuple[str, Path | None]:
    """Write a graph's repository as it was at a revision of Git into ``folder``.

    ``graph`` is a path that ends in ``.pbtxt``, from here or from the top of the working tree; or a name. Returns its
    file and repository there. Raises WeftError: there is no Git, no such revision, or nothing there.
    """
    top = Path(_git("no Git repository", Path(), "rev-parse", "--show-toplevel"))
    verified = ("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    commit = _git(f"no revision '{revision}'", top, *verified)
    path = Path(graph) if graph.endswith(".pbtxt") else None
    if path is not None and not path.exists() and (top / path).exists():
        path = top / path
    found = {one: one.resolve() for one in (path, repository or repository_of(path or Path(graph))) if one is not None}
    if outside := [str(one) for one, place in found.items() if not place.is_relative_to(top)]:
        raise InvalidArgumentError(f"'{outside[0]}' is not in the Git repository {top}")
    places = [place.relative_to(top) for place in found.values()]
    with tempfile.TemporaryFile() as archive:
        _git(f"not in '{revision}'", top, "archive", "--format=tar", commit, "--", *map(str, places), output=archive)
        archive.seek(0)
        try:
            with tarfile.open(fileobj=archive) as files:
                files.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise InvalidArgumentError(f"'{revision}' cannot be written to files: {error}") from None
    at = [folder / place for place in places]
    file = at.pop(0) if path is not None else None
    return str(file or find_graph(graph, at[0] if at else None).file), at[0] if at else None


def _git(fault: str, folder: Path, *arguments: str, output: IO[bytes] | int = subprocess.PIPE) -> str:
    command = ["git", "--literal-pathspecs", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)  # noqa: S603
    except FileNotFoundError:
        raise InvalidArgumentError("revisions are read by 'git', which is not installed here") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().removeprefix("fatal: ")
        raise InvalidArgumentError(f"{fault}: git says '{why}'")
    return (done.stdout or b"").decode().strip()


async def fetch_served(router: "V2Client", graph: str, folder: Path) -> Path:
    """Write NAME or NAME/VERSION as a router serves it, and the graphs in it, as a repository into ``folder``.

    Returns the file of the signatures that its models have there. Raises WeftError: it does not serve it, or answer.
    """
    name, _, version = graph.partition("/")
    if version and not is_version(version):
        raise InvalidArgumentError(f"'{version}' is no version of a graph; write NAME or NAME/NUMBER")
    request = pb.GraphSourceRequest(graph=name, version=int(version or 0))
    found: pb.GraphSourceResponse = await router.graph_service("GraphSource", request, timeout_s=_TIMEOUT_S)
    signatures = await router.graph_service("TargetSignatures", pb.TargetSignaturesRequest(), timeout_s=_TIMEOUT_S)
    for one in found.graph:
        if not is_folder_name(one.graph):
            raise InvalidArgumentError(f"the router names a graph {one.graph!r}, which is no name of a folder")
        at = folder / GRAPH_FOLDER / one.graph
        (at / str(one.version)).mkdir(parents=True, exist_ok=True)
        is_config = Path(one.file).name == CONFIG_FILENAME
        (at / CONFIG_FILENAME if is_config else at / str(one.version) / GRAPH_FILENAME).write_bytes(one.text)
    lock = folder / "signatures.lock"
    lock.write_text(lock_text(signatures.model, lock.name, router.where))
    return lock
