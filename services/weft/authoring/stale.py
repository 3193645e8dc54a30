"""Tells whether the Python of a graph still writes the graph's file. The Python runs in a process of its own."""

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from weft.authoring.graph import Graph
from weft.authoring.writing import head_comment
from weft.base.text.pbtxt import Diagnostic, PbtxtError, parse
from weft.base.text.pbtxt_writer import text_of
from weft.language import GraphError
from weft.tools.offline import graph_source, is_graph, repository_of
from weft_protos import graph_pb2 as pb

#: Beside a graph's file, the Python that writes it; or one file at the top of the repository, for many graphs.
BESIDE, AT_TOP = "graph.py", "graphs.py"
_TIMEOUT_S = 60


def stale(files: Iterable[Path]) -> list[Diagnostic]:
    """Find the graphs whose files are not what their Python writes; if it is the same graph, that is a warning.

    The Python of a graph is ``graph.py`` in the folder of its file, else ``graphs.py`` at the top of the repository if
    that has a graph of its name. An error in it is reported on its line.

    Args:
        files: Files of graphs; others are passed over.
    """
    graphs = {file: python for file in files if file.is_file() and is_graph(file) and (python := _python_of(file))}
    made = _run([*dict.fromkeys(graphs.values())])
    found = [result for result in made.values() if isinstance(result, Diagnostic)]
    for file, python in graphs.items():
        if not isinstance(made[python], Diagnostic):
            found += _differences(file, python, made[python])
    return found


def _differences(file: Path, python: Path, made: dict[str, tuple[str, str]]) -> list[Diagnostic]:
    source = graph_source(file)
    name = source.name or file.parent.name
    cure = f"run {python}, or make it anew: weft convert {file} --to python -o {python} --force"
    if name not in made:
        text = f"it makes no graph '{name}', whose file is beside it; {cure}"
        return [Diagnostic(str(python), 0, 0, text)] if python.name == BESIDE else []
    version, text = made[name]
    if source.version not in ("", version):
        return [Diagnostic(str(python), 0, 0, f"it writes version {version} of '{name}'; say version={source.version}")]
    given = file.read_text(errors="replace")
    try:
        message = parse(given, pb.Graph(), file=str(file))[0]
    except PbtxtError:
        return []  # reported by the check of the file
    message.name = name
    is_same = text == text_of(message, {"": head_comment(given)})  # but for its layout and its other comments
    pairs = zip_longest(given.splitlines(), text.splitlines(), fillvalue="")
    for line, (own, other) in enumerate(pairs, start=1):
        if own != other:
            what = f"{python} writes another text, which has here: {other.strip() or 'nothing'}; {cure}"
            return [Diagnostic(str(file), line, 1, what, severity="warning" if is_same else "error", source_line=own)]
    return []


def _python_of(file: Path) -> Path | None:
    repository = repository_of(file)
    places = [file.with_name(BESIDE), *([repository / AT_TOP] if repository is not None else [])]
    return next((place for place in places if place.is_file()), None)


def _run(files: Sequence[Path]) -> dict[Path, Any]:
    """The graphs that each file makes, by name, as version and text; a diagnostic if it fails."""
    if not files:
        return {}
    command, why = [sys.executable, "-m", "weft.authoring.stale", *map(str, files)], "it ends the process"
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=False).stdout  # noqa: S603
    except subprocess.TimeoutExpired as error:
        cure = 'put what runs long under if __name__ == "__main__"'
        output, why = error.stdout or b"", f"it takes more than {_TIMEOUT_S} s; {cure}"
    answers = [json.loads(line) for line in output.splitlines()]
    if len(answers) < len(files):  # those behind it did not run
        answers.append({"line": 0, "text": why})
    found: dict[Path, Any] = {file: {} for file in files}
    for file, answer in zip(files, answers, strict=False):
        line = answer.get("line", 0)
        found[file] = answer.get("graphs") or Diagnostic(str(file), line, min(line, 1), answer["text"])
    return found


def _graphs_in(file: str) -> dict[str, Any]:
    """Run a file: the graphs that it makes, or its error."""
    sys.path[0] = str(Path(file).parent)
    try:
        names = runpy.run_path(file, run_name=Path(file).stem)
    except SyntaxError as error:
        return {"line": (error.lineno or 0) if error.filename == file else 0, "text": f"SyntaxError: {error.msg}"}
    except (Exception, SystemExit) as error:
        lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        text = error.diagnostics[0].message if isinstance(error, GraphError) else f"{type(error).__name__}: {error}"
        return {"line": lines[-1] if lines else 0, "text": text}
    made = {one.name: (str(one.version), one.text) for one in names.values() if isinstance(one, Graph)}
    return {"graphs": made} if made else {"line": 0, "text": "it makes no graph at its top level"}


if __name__ == "__main__":
    files, sys.argv[1:] = sys.argv[1:], []
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the files print does not mix with the answers
        for argument in files:
            print(json.dumps(_graphs_in(argument)), file=answers, flush=True)
            for name, module in [*sys.modules.items()]:  # those beside it: the next may have others of their names
                if Path(getattr(module, "__file__", None) or "/").parent == Path(argument).parent:
                    del sys.modules[name]
