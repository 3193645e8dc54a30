"""The graphs of a file, as text."""

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft_common.errors import InvalidArgumentError
from weft_common.signature import ModelSignature
from weft_common.text.pbtxt import parse
from weft_protos import graph_pb2 as pb
from weft_router.graph.syntax.source import ModelCatalog
from weft_tools.convert import kserve, seldon
from weft_tools.convert.draft import Draft
from weft_tools.convert.wiring import wire
from weft_tools.convert.writer import write
from weft_tools.convert.yaml_tree import MAX_FILE_BYTES, Source, YamlValue
from weft_tools.lock import LockCatalog
from weft_tools.offline import GRAPH_FILENAME, OfflineCatalog

_FORMATS: dict[tuple[str, str], Callable[[Source, YamlValue, str], Draft | None]] = {
    (kserve.API_GROUP, kserve.KIND): kserve.draft_kserve,
    (seldon.API_GROUP, seldon.KIND): seldon.draft_seldon,
}
_LISTS = ("List", "InferenceGraphList", "SeldonDeploymentList")


def read_source(data: bytes, name: str) -> Source:
    """The text of a file.

    Args:
        data: Its bytes; of a file beyond the limit, at least ``MAX_FILE_BYTES + 1`` of them.
        name: For messages.

    Raises:
        InvalidArgumentError: It is too long, or not UTF-8.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidArgumentError(f"{name} has more than {MAX_FILE_BYTES >> 20} MiB, the limit")
    try:
        return Source(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InvalidArgumentError(f"{name} is not UTF-8 text: {byte}") from error


def signatures_for(repository: Path | None, lock: Path | None) -> ModelCatalog | None:
    """The models of a lock file or of a repository; None where neither is given.

    Raises:
        OSError: The file or folder cannot be read.
        PbtxtError: It is no lock file.
    """
    if lock is not None:
        return LockCatalog(lock)
    if repository is None:
        return None
    if not repository.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(repository))
    return _DeclaredModels(repository)


def convert(source: Source, documents: list[YamlValue], catalog: ModelCatalog | None, stem: str) -> dict[str, str]:
    """Text of each graph by name; faults are reported to ``source``.

    Args:
        source: The file.
        documents: Its documents; those of other kinds are left out.
        catalog: Signatures of models; None: not known.
        stem: Name of a graph without one in the file.
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


def kinds_of(documents: Sequence[YamlValue]) -> list[str]:
    """The kinds of the documents, each once."""
    return list(dict.fromkeys(_kind(document)[1] or "no kind" for document in documents))


def _objects(source: Source, documents: list[YamlValue]) -> Iterator[YamlValue]:
    """Documents, those inside lists of Kubernetes among them."""
    for document in documents:
        if _kind(document)[1] in _LISTS:
            yield from source.sequence(document.entries.get("items"), "items")
        else:
            yield document


def _kind(document: YamlValue) -> tuple[str, str]:
    """API group and kind of a document."""
    given = document.entries if document.kind == "mapping" else {}
    version, kind = (given[name].text if name in given else "" for name in ("apiVersion", "kind"))
    return version.partition("/")[0], kind


class _DeclaredModels(OfflineCatalog):
    """The models of a repository, without those whose configuration leaves their tensors to the backend."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Service and signature of a model; version "" means the highest."""
        found = super().find(model_name, version)
        return None if model_name in self.undeclared else found
