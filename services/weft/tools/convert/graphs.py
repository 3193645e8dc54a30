"""The graphs of a file, as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import parse
from weft.tools.convert import kserve, seldon_v1
from weft.tools.convert.draft import CHECK, DIFFERS, Draft
from weft.tools.convert.seldon_v2.experiment import draft_experiment
from weft.tools.convert.seldon_v2.flow import PipelineFlow, read_flow
from weft.tools.convert.seldon_v2.models import read_model
from weft.tools.convert.seldon_v2.pipeline import PipelineConversion
from weft.tools.convert.shared import Interface
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.wiring import wire
from weft.tools.convert.writer import write
from weft.tools.convert.yaml_tree import MAX_FILE_BYTES, Source, YamlValue, shortened
from weft.tools.offline import GRAPH_FILENAME
from weft_protos import graph_pb2 as pb

_SELDON_2 = "mlops.seldon.io"
#: Beside ``List``: what kubectl writes for several objects of one kind.
_LISTS = ("InferenceGraphList", "SeldonDeploymentList", "PipelineList", "ExperimentList", "ModelList")
#: Pipelines are read beside these, since they may name one another.
_READERS: Mapping[tuple[str, str], Callable[[Source, YamlValue, str], Draft | None]] = {
    (kserve.API_GROUP, kserve.KIND): kserve.draft_kserve,
    (seldon_v1.API_GROUP, seldon_v1.KIND): seldon_v1.draft_seldon,
    (_SELDON_2, "Experiment"): draft_experiment,
}
#: What a converter reads, for messages.
KINDS = "InferenceGraph of KServe, no SeldonDeployment of Seldon Core 1 and no Pipeline or Experiment of Seldon Core 2"


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


def convert(source: Source, documents: list[YamlValue], signatures: Signatures, stem: str) -> dict[str, str]:
    """Text of each graph by name; faults are reported to ``source``.

    Args:
        source: The file.
        documents: Its documents; those of other kinds are left out.
        signatures: Of what the graphs call.
        stem: Name of a graph without one in the file.
    """
    return _FileConversion(source, signatures, stem).run(list(_objects(source, documents)))


class _FileConversion:
    """The documents of one file, which may name one another."""

    def __init__(self, source: Source, signatures: Signatures, stem: str) -> None:
        self._source = source
        self._signatures = signatures
        self._stem = stem
        self._flows: dict[str, PipelineFlow] = {}
        self._models: dict[str, str] = {}

    def run(self, documents: list[YamlValue]) -> dict[str, str]:
        source = self._source
        for document in documents:
            if _kind(document) == (_SELDON_2, "Model"):
                name, remark = read_model(source, document)
                self._models |= {name: remark} if remark else {}
            elif _kind(document) == (_SELDON_2, "Pipeline"):
                self._read_flow(document)
        texts: dict[str, str] = {}
        # Experiments last: they may split between pipelines.
        for document in sorted(documents, key=lambda one: _kind(one) == (_SELDON_2, "Experiment")):
            source.left_out = []
            draft = self._draft(document)
            if draft is None or source.has_errors:
                continue
            draft.remarks += [CHECK + DIFFERS + text for text in source.left_out]
            if draft.name in texts:
                source.error(document, f"a second graph is called '{draft.name}'")
            known = draft.inputs is not None and draft.outputs is not None
            interface = Interface(dict(draft.inputs or {}), dict(draft.outputs or {}), draft.max_batch_size)
            self._signatures.add(draft.name, interface if known else None)
            text = write(draft, f"{_kind(document)[1]} '{draft.name}' in {Path(source.file).name}")
            parse(text, pb.Graph(), file=GRAPH_FILENAME)  # what is written can be read
            texts[draft.name] = text
        return texts

    def _draft(self, document: YamlValue) -> Draft | None:
        if _kind(document) == (_SELDON_2, "Pipeline"):
            return self._pipeline(document)
        read = _READERS.get(_kind(document))
        draft = read(self._source, document, self._name_of(document)) if read else None
        if draft is not None and not self._source.has_errors:
            wire(self._source, draft, self._signatures)
        return draft

    def _pipeline(self, document: YamlValue) -> Draft | None:
        flow = next((one for one in self._flows.values() if one.value is document), None)
        if flow is None or self._source.has_errors:
            return None
        self._source.left_out += flow.left_out
        return PipelineConversion(self._source, flow, self._flows, self._signatures, self._models).run()

    def _read_flow(self, document: YamlValue) -> None:
        self._source.left_out = []
        flow = read_flow(self._source, document, self._name_of(document))
        if flow is not None and flow.name in self._flows:
            self._source.error(document, f"a second pipeline is called '{shortened(flow.name)}'")
        elif flow is not None:
            flow.left_out = self._source.left_out
            self._flows[flow.name] = flow

    def _name_of(self, document: YamlValue) -> str:
        source = self._source
        metadata = source.mapping(document.entries["metadata"], "metadata") if "metadata" in document.entries else {}
        name = source.string(metadata.get("name"), "metadata.name")
        kind = _kind(document)[1]
        if not name and kind == seldon_v1.KIND and "spec" in document.entries:
            name = source.string(document.entries["spec"].entries.get("name"), "name")
        if not name:
            source.warning(document, f"the {kind} has no metadata.name; it is called '{shortened(self._stem)}'")
        return name or self._stem


def kinds_of(documents: Sequence[YamlValue]) -> list[str]:
    """The kinds of the documents, each once."""
    return list(dict.fromkeys(_kind(document)[1] or "no kind" for document in documents))


def _objects(source: Source, documents: list[YamlValue]) -> Iterator[YamlValue]:
    """Documents, those inside lists of Kubernetes among them."""
    for document in documents:
        kind = _kind(document)[1]
        if kind not in ("List", *_LISTS):
            yield document
            continue
        for item in source.sequence(document.entries.get("items"), "items"):
            if item.kind == "mapping" and kind in _LISTS:  # the items of such a list may say no kind
                of_list = {"kind": YamlValue("plain", item.line, item.column, kind.removesuffix("List"))}
                item.entries = {**of_list, "apiVersion": document.entries.get("apiVersion", document), **item.entries}
            yield item


def _kind(document: YamlValue) -> tuple[str, str]:
    """API group and kind of a document."""
    given = document.entries if document.kind == "mapping" else {}
    version, kind = (given[name].text if name in given else "" for name in ("apiVersion", "kind"))
    return version.partition("/")[0], kind
