"""``weft convert``: read a file, find its graphs, write each."""

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from weft_common.errors import WeftError
from weft_common.signature import ModelSignature
from weft_common.text.pbtxt import parse, render
from weft_protos import graph_pb2 as pb
from weft_router.graph.syntax.source import ModelCatalog
from weft_tools.convert import kserve, seldon
from weft_tools.convert.draft import Draft
from weft_tools.convert.wiring import wire
from weft_tools.convert.writer import write
from weft_tools.convert.yaml_tree import MAX_FILE_BYTES, Source, UnreadableError, YamlValue
from weft_tools.lock_file import LockCatalog
from weft_tools.offline import GRAPH_FILENAME, OfflineCatalog

_FORMATS: dict[tuple[str, str], Callable[[Source, YamlValue, str], Draft | None]] = {
    (kserve.API_GROUP, kserve.KIND): kserve.draft_kserve,
    (seldon.API_GROUP, seldon.KIND): seldon.draft_seldon,
}
_LISTS = ("List", "InferenceGraphList", "SeldonDeploymentList")


def run(options: argparse.Namespace) -> int:
    """Write the graphs; 0 done, though questions may be left in the output, 1 the file has errors, 2 wrong usage."""
    if find_spec("yaml") is None:
        return _fail("PyYAML is not installed; install it with: pip install 'weft[convert]'")
    is_input = str(options.file) == "-"
    try:
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if is_input else _head(options.file)
        catalog = _catalog(options)
    except OSError as error:
        return _fail(f"cannot read '{error.filename}': {error.strerror}")
    except WeftError as error:
        return _fail(error.message)
    name = "standard input" if is_input else str(options.file)
    if len(data) > MAX_FILE_BYTES:
        return _fail(f"{name} has more than {MAX_FILE_BYTES >> 20} MiB, the limit")
    try:
        source = Source(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        return _fail(f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}")
    try:
        documents = source.documents()
    except UnreadableError as error:
        print(render([error.diagnostic]), file=sys.stderr)
        return 1
    stem = "graph" if is_input else options.file.stem
    graphs = convert(source, documents, catalog, stem)
    if source.diagnostics:
        print(render(sorted(source.diagnostics, key=lambda d: (d.line, d.column))), file=sys.stderr)
    if source.has_errors:
        return 1
    if not graphs:
        kinds = ", ".join(dict.fromkeys(_kind(d)[1] or "no kind" for d in documents)) or "nothing"
        return _fail(f"{name} has no {kserve.KIND} of KServe and no {seldon.KIND} of Seldon Core; it has {kinds}")
    return _output(graphs, options.output)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _catalog(options: argparse.Namespace) -> ModelCatalog | None:
    """Where signatures come from; None where nothing was given."""
    if options.signatures is not None:
        return LockCatalog(options.signatures)
    if options.repository is not None:
        if not options.repository.is_dir():
            raise FileNotFoundError(2, "no such folder", str(options.repository))
        return _DeclaredModels(options.repository)
    return None


class _DeclaredModels(OfflineCatalog):
    """The models of a repository, without those whose configuration leaves their tensors to the backend."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Service and signature of a model; version "" means the highest."""
        found = super().find(model_name, version)
        return None if model_name in self.undeclared else found


def _kind(document: YamlValue) -> tuple[str, str]:
    """API group and kind of a document."""
    given = document.entries if document.kind == "mapping" else {}
    version, kind = (given[name].text if name in given else "" for name in ("apiVersion", "kind"))
    return version.partition("/")[0], kind


def convert(source: Source, documents: list[YamlValue], catalog: ModelCatalog | None, stem: str) -> dict[str, str]:
    """Text of each graph by name; what is wrong is reported to ``source``.

    Args:
        source: The file.
        documents: Its documents; those of other kinds are left out.
        catalog: Signatures of models; None: nothing is known of them.
        stem: Name of a graph that the file gives none.
    """
    texts: dict[str, str] = {}
    for document in _objects(source, documents):
        draft_of = _FORMATS.get(_kind(document))
        draft = draft_of(source, document, stem) if draft_of else None
        if draft is None or source.has_errors:
            continue
        wire(source, draft, catalog)
        if draft.name in texts:
            source.error(document, f"a second graph is called '{draft.name}'")
        text = write(draft, f"{_kind(document)[1]} '{draft.name}' in {Path(source.file).name}")
        parse(text, pb.Graph(), file=GRAPH_FILENAME)  # what is written can be read
        texts[draft.name] = text
    return texts


def _objects(source: Source, documents: list[YamlValue]) -> Iterator[YamlValue]:
    """Documents, those inside lists of Kubernetes among them."""
    for document in documents:
        if _kind(document)[1] in _LISTS:
            yield from source.sequence(document.entries.get("items"), "items")
        else:
            yield document


def _output(graphs: dict[str, str], output: Path | None) -> int:
    is_folder = output is not None and output.suffix != ".pbtxt"
    if len(graphs) > 1 and not is_folder:
        names = ", ".join(graphs)
        return _fail(f"the file has {len(graphs)} graphs: {names}; give a folder with -o, which gets FOLDER/NAME/1/")
    try:
        for name, text in graphs.items():
            if output is None:
                sys.stdout.write(text)
                continue
            path = output / name / "1" / GRAPH_FILENAME if is_folder else output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            num_checks = text.count("# CHECK: ")
            left = f"; {num_checks} line{'s say' if num_checks > 1 else ' says'} CHECK" if num_checks else ""
            print(f"wrote {path}{left}; next: weft check {path}", file=sys.stderr)
    except OSError as error:
        return _fail(f"cannot write '{error.filename}': {error.strerror}")
    return 0


def _fail(message: str) -> int:
    print(f"weft convert: {message}", file=sys.stderr)
    return 2
