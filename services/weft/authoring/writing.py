"""Graphs and models of Python as files, files as graphs, and whether the two still say the same."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.authoring.faults import fault
from weft.authoring.graph import Graph
from weft.authoring.models import models
from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import Diagnostic, parse
from weft.language.dialects import TRITON, dialect_of
from weft.language.syntax.file import GraphError, GraphSource
from weft.serving.config import CONFIG_FILENAME
from weft.tools.offline import GRAPH_FILENAME, GRAPH_FOLDER, graph_source, is_graph, repository_of
from weft_protos import graph_pb2 as pb

#: Beside a graph's file, the Python that writes it; or one file at the top of the repository for many graphs.
BESIDE, AT_TOP = "graph.py", "graphs.py"
_TIMEOUT_S = 60


def write(*things: Any, to: str | Path) -> list[Path]:
    """Write graphs and models into a repository: all of them, or none if one has an error.

    A graph becomes ``graphs/NAME/VERSION/graph.pbtxt``, an ensemble ``graphs/NAME/config.pbtxt``. Each file appears at once
    and whole; one that would not change is not touched.

    Args:
        things: What ``@weft.graph`` and ``@weft.model`` make, or ``weft.read``.
        to: The repository; made if it is not there.

    Returns:
        The files that changed.

    Raises:
        GraphError: A graph has errors (with its diagnostics), or a thing is neither a graph nor a model.
        OSError: A file cannot be written.
    """
    repository = Path(to)
    found: list[Diagnostic] = []
    for thing in things:
        if isinstance(thing, Graph):
            known = models(repository) if thing.catalog is None and repository.is_dir() else None
            found += [one for one in thing.check(known) if one.severity == "error"]
        elif not callable(getattr(thing, "write", None)):
            raise fault("G025", f"weft.write takes graphs and models, which @weft.graph and @weft.model make, got {thing!r}")
    if found:
        raise GraphError(found)
    around = next(folder for folder in (repository.absolute(), *repository.absolute().parents) if folder.is_dir())
    with TemporaryDirectory(prefix=".weft-", dir=around) as folder:
        staged = Path(folder)
        made = [file for thing in things if not isinstance(thing, Graph) for file in thing.write(staged)]
        made += [_write_graph(thing, staged) for thing in things if isinstance(thing, Graph)]
        return [*_replaced(staged, made, repository)]


def _write_graph(graph: Graph, repository: Path) -> Path:
    folder = repository / GRAPH_FOLDER / graph.name
    version = folder / str(graph.version)
    version.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILENAME if dialect_of(graph.message) is TRITON else version / GRAPH_FILENAME
    file.write_text(graph.text, encoding="utf-8")
    return file


def _replaced(staged: Path, files: Iterable[Path], repository: Path) -> Iterator[Path]:
    """Move the files into the repository, but for those that it has already, and return these."""
    for folder in [path for path in sorted(staged.rglob("*")) if path.is_dir()]:
        (repository / folder.relative_to(staged)).mkdir(parents=True, exist_ok=True)
    for file in files:
        target = repository / file.relative_to(staged)
        if not target.is_file() or target.read_bytes() != file.read_bytes():
            file.replace(target)
            yield target


def read(source: str | Path) -> Graph:
    """Read a graph: a file's path, or its text.

    Its models are those of the repository that the file is in.

    Raises:
        PbtxtError: It does not parse.
        InvalidArgumentError: It is the configuration of a model.
        OSError: The file cannot be read.
    """
    is_text = isinstance(source, str) and ("\n" in source or "{" in source)
    path = Path("graph.pbtxt" if is_text else source)
    if not is_text and not is_graph(path):
        raise InvalidArgumentError(f"'{path}' is the configuration of a model; give a graph.pbtxt, or that of an ensemble")
    given = GraphSource(str(source), str(path)) if is_text else graph_source(path)
    message, positions = parse(given.text, pb.Graph(), file=given.file)
    message.name = given.name or message.name
    place = None if is_text else repository_of(path)
    known = models(place) if place is not None else None
    version = int(given.version) if given.version else 1
    graph = Graph(message, version, catalog=known and known.catalog, graphs=known and known.graphs)
    graph.__doc__ = "\n".join(head_comment(positions.text))
    return graph


def head_comment(text: str) -> list[str]:
    """The lines of the comment with which a file begins."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].removeprefix(" ").rstrip())
    return lines


def stale(files: Iterable[Path]) -> list[Diagnostic]:
    """Tell which graphs' files are not what the Python beside them writes.

    The Python of a graph is ``graph.py`` in the folder of its file, else what defines it in ``graphs.py`` at the top of the
    repository. It runs in a process of its own; whatever is wrong with it is reported with its line.

    Args:
        files: Files of graphs; others are passed over.
    """
    graphs = {file: python for file in files if file.is_file() and is_graph(file) and (python := _python_of(file)) is not None}
    made = _run([*dict.fromkeys(graphs.values())])
    found = [one for result in made.values() if isinstance(result, Diagnostic) for one in [result]]
    for file, python in graphs.items():
        result, source = made[python], graph_source(file)
        if isinstance(result, Diagnostic):
            continue
        text = source.text.decode(errors="replace") if isinstance(source.text, bytes) else source.text
        name = source.name or file.parent.name
        version, written = result.get(name, ("", None))
        cure = f"run {python}, or make it anew: weft convert {file} --to python -o {python}"
        if written is None and python.name == BESIDE:
            found.append(Diagnostic(str(python), 0, 0, f"it has no graph '{name}', whose file is beside it; {cure}"))
        elif written is not None and version != (source.version or version):
            found.append(Diagnostic(str(python), 0, 0, f"it writes version {version} of '{name}', not {source.version}; @weft.graph(version={source.version})"))
        elif written not in (None, text):
            pairs = enumerate(zip_longest(text.splitlines(), (written or "").splitlines()), start=1)
            line, (own, other) = next((line, pair) for line, pair in pairs if pair[0] != pair[1])
            what = f"{python} writes another text from here on: {other or 'nothing'!r}; {cure}"
            found.append(Diagnostic(str(file), line, 1, what, source_line=own or ""))
    return found


def _python_of(file: Path) -> Path | None:
    repository = repository_of(file)
    places = [file.with_name(BESIDE), *([repository / AT_TOP] if repository is not None else [])]
    return next((place for place in places if place.is_file()), None)


def _run(files: Sequence[Path]) -> dict[Path, Any]:
    """Graphs of each file by name, as version and text; a diagnostic if it fails."""
    if not files:
        return {}
    command = [sys.executable, "-m", "weft.authoring.writing", *map(str, files)]
    why = "it ended the process"
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired as error:
        output, why = error.stdout or b"", f"it took more than {_TIMEOUT_S} s; what runs long belongs under if __name__ == '__main__'"
    found: dict[Path, Any] = {}
    for file, line in zip_longest(files, output.decode().splitlines()[: len(files)]):
        result = json.loads(line) if line else {"line": 0, "text": "" if len(found) < len(files) and found and isinstance([*found.values()][-1], Diagnostic) else why}
        found[file] = result["graphs"] if "graphs" in result else Diagnostic(str(file), result["line"], int(result["line"] > 0), result["text"])
    return found


def _graphs_in(file: str) -> dict[str, Any]:
    """Run a file: its graphs, or its error."""
    sys.path[0] = str(Path(file).parent)
    try:
        names = runpy.run_path(file, run_name=Path(file).stem)
    except SyntaxError as error:
        return {"line": (error.lineno or 0) if error.filename == file else 0, "text": f"SyntaxError: {error.msg}"}
    except (Exception, SystemExit) as error:
        lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        text = error.diagnostics[0].message if isinstance(error, GraphError) else f"{type(error).__name__}: {error}"
        return {"line": lines[-1] if lines else 0, "text": text}
    return {"graphs": {one.name: (str(one.version), one.text) for one in names.values() if isinstance(one, Graph)}}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for argument in sys.argv[1:]:
            print(json.dumps(_graphs_in(argument)), file=answers, flush=True)
