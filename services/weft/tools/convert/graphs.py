"""Converts the graphs of a file to text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import parse
from weft.tools.convert import kserve, seldon_v1
from weft.tools.convert.draft import CHECK, DIFFERS, Draft, write
from weft.tools.convert.seldon_v2.experiment import draft_experiment
from weft.tools.convert.seldon_v2.flow import PipelineFlow, read_flow, read_model
from weft.tools.convert.seldon_v2.pipeline import PipelineConversion
from weft.tools.convert.signatures import Interface, Signatures
from weft.tools.convert.wiring import wire
from weft.tools.convert.yaml_tree import MAX_FILE_BYTES, Source, YamlValue, shortened
from weft.tools.offline import GRAPH_FILENAME
from weft_protos import graph_pb2 as pb

_SELDON_2 = "mlops.seldon.io"
_MODEL, _PIPELINE, _EXPERIMENT = ((_SELDON_2, kind) for kind in ("Model", "Pipeline", "Experiment"))
#: Beside ``List``: what kubectl writes for several objects of one kind.
_LISTS = ("InferenceGraphList", "SeldonDeploymentList", "PipelineList", "ExperimentList", "ModelList")
#: Pipelines are read beside these, since they may name one another.
_READERS: Mapping[tuple[str, str], Callable[[Source, YamlValue, str], Draft | None]] = {
    (kserve.API_GROUP, kserve.KIND): kserve.draft_kserve,
    (seldon_v1.API_GROUP, seldon_v1.KIND): seldon_v1.draft_seldon,
    _EXPERIMENT: draft_experiment,
}
#: What a converter reads, for messages.
KINDS = "InferenceGraph of KServe, no SeldonDeployment of Seldon Core 1 and no Pipeline or Experiment of Seldon Core 2"


def read_source(data: bytes, name: str) -> Source:
    """Decode a file.

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
    """Convert each graph to text, by name; report errors to ``source``.

    Args:
        documents: Of the file; those of other kinds are skipped.
        signatures: Of the models and graphs that are called.
        stem: Name of a graph without one in the file.
    """
    objects = list(_objects(source, documents))
    flows: dict[str, PipelineFlow] = {}
    models: dict[str, str] = {}
    for document in objects:
        if _kind(document) == _MODEL:
            name, remark = read_model(source, document)
            models |= {name: remark} if remark else {}
        elif _kind(document) == _PIPELINE:
            source.left_out = []
            flow = read_flow(source, document, _name_of(source, document, stem))
            if flow is not None and flow.name in flows:
                source.error(document, f"a second pipeline is called '{shortened(flow.name)}'")
            elif flow is not None:
                flow.left_out = source.left_out
                flows[flow.name] = flow
    flow_of = {id(flow.value): flow for flow in flows.values()}
    texts: dict[str, str] = {}
    # Experiments last: they may split between pipelines.
    for document in sorted(objects, key=lambda one: _kind(one) == _EXPERIMENT):
        source.left_out = []
        draft: Draft | None = None
        if (read := _READERS.get(_kind(document))) is not None:
            draft = read(source, document, _name_of(source, document, stem))
            if draft is not None and not source.has_errors:
                wire(source, draft, signatures)
        elif (flow := flow_of.get(id(document))) is not None and not source.has_errors:
            source.left_out += flow.left_out
            draft = PipelineConversion(source, flow, flows, signatures, models).run()
        if draft is None or source.has_errors:
            continue
        draft.remarks += [CHECK + DIFFERS + text for text in source.left_out]
        if draft.name in texts:
            source.error(document, f"a second graph is called '{draft.name}'")
        known = None
        if draft.inputs is not None and draft.outputs is not None:
            known = Interface(dict(draft.inputs), dict(draft.outputs), draft.max_batch_size)
        signatures.add(draft.name, known)
        text = write(draft, f"{_kind(document)[1]} '{draft.name}' in {Path(source.file).name}")
        parse(text, pb.Graph(), file=GRAPH_FILENAME)  # what is written can be read
        texts[draft.name] = text
    return texts


def _name_of(source: Source, document: YamlValue, stem: str) -> str:
    metadata = source.mapping(document.entries.get("metadata"), "metadata")
    name = source.string(metadata.get("name"), "metadata.name")
    kind = _kind(document)[1]
    if not name and kind == seldon_v1.KIND and "spec" in document.entries:
        name = source.string(document.entries["spec"].entries.get("name"), "name")
    if not name:
        source.warning(document, f"the {kind} has no metadata.name; it is called '{shortened(stem)}'")
    return name or stem


def kinds_of(documents: Sequence[YamlValue]) -> list[str]:
    """The kinds of the documents, each once."""
    return list(dict.fromkeys(_kind(document)[1] or "no kind" for document in documents))


def _objects(source: Source, documents: list[YamlValue]) -> Iterator[YamlValue]:
    """Documents, including those in Kubernetes lists."""
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
    given = document.entries if document.kind == "mapping" else {}
    version, kind = (given[name].text if name in given else "" for name in ("apiVersion", "kind"))
    return version.partition("/")[0], kind
