"""``ModelConfig`` messages of graphs, and signature messages of models."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from weft.base.repository.layout import version_order
from weft.base.signature import (
    COLLECTS_PARAMETER,
    GRAPH_DIGEST_PARAMETER,
    OPTIONAL_OUTPUTS_PARAMETER,
    ModelSignature,
    TensorSpec,
    answering_part,
    datatype_name,
)
from weft.language.plan import CallPlan, GraphPlan, NodePlan
from weft.language.syntax.file import GraphSource
from weft.language.syntax.parse import model_config
from weft_protos import graph_service_pb2 as pb
from weft_protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

if TYPE_CHECKING:
    from weft.router.targets.catalog import CatalogEntry, TargetCatalog


def config_of_graph(source: GraphSource, plan: GraphPlan) -> ModelConfig:
    """The configuration message of a graph.

    A sequence of model calls is shown as ``platform: "ensemble"`` with its steps, however it was written, so that
    perf_analyzer finds the composing models. Other graphs are shown without steps, because no request runs them all.
    """
    config = model_config(source, plan)
    if plan.signature.is_decoupled:  # though the file need not say so
        config.model_transaction_policy.decoupled = True
    if plan.signature.can_collect:
        config.parameters[COLLECTS_PARAMETER].string_value = "true"
    _set_optional(config, plan.signature)
    root = plan.root
    is_plain = root.is_pipeline and all(isinstance(step.action, CallPlan) for step in root.steps)
    if config.HasField("ensemble_scheduling") or not is_plain:
        return config
    config.platform = "ensemble"
    names = dict(_tensor_names(root))
    for step in root.steps:
        if isinstance(step.action, CallPlan):
            config.ensemble_scheduling.step.add(
                model_name=step.action.model_name,
                model_version=int(step.action.model_version or -1),
                input_map={binding.name: names[binding.slot] for binding in step.inputs},
                output_map={binding.name: names[binding.slot] for binding in step.outputs},
            )
    return config


def set_digest(config: ModelConfig, source: GraphSource, nested: Mapping[tuple[str, str], GraphSource | None]) -> None:
    """Put the sha256 of a graph's files into its configuration, so that it differs after any change of a file.

    Args:
        nested: Files of the graphs that it may contain, by name and version as they are named there.
    """
    digest = hashlib.sha256()
    for name, version, part in [
        (source.name, source.version, source),
        *((*key, nested[key]) for key in sorted(nested)),
    ]:
        for text in (name, version, "" if part is None else part.version, b"" if part is None else part.text):
            _update(digest, text.encode() if isinstance(text, str) else text)
    config.parameters[GRAPH_DIGEST_PARAMETER].string_value = digest.hexdigest()


def with_models(config: ModelConfig, models: Iterable[tuple[ModelSignature, ModelConfig | None]]) -> ModelConfig:
    """Extend the digest of a graph's configuration by the models that the graph calls.

    Args:
        config: Of the graph, with the digest of its files.
        models: Signature and configuration of each, in any order, wherever they run; None: it has none.
    """
    digest = hashlib.sha256(config.parameters[GRAPH_DIGEST_PARAMETER].string_value.encode())
    found = {
        (signature.name, signature.version): answering_part(own or config_of_signature(signature))
        for signature, own in models
    }
    for (name, version), text in sorted(found.items()):
        for content in (name.encode(), version.encode(), text):
            _update(digest, content)
    complete = ModelConfig()
    complete.CopyFrom(config)
    complete.parameters[GRAPH_DIGEST_PARAMETER].string_value = digest.hexdigest()
    return complete


def _update(digest: "hashlib._Hash", content: bytes) -> None:
    digest.update(len(content).to_bytes(8, "little") + content)


def config_of_signature(signature: ModelSignature) -> ModelConfig:
    """A configuration with the tensors of a signature."""
    config = ModelConfig(name=signature.name, platform=signature.platform, max_batch_size=signature.max_batch_size)
    for spec in signature.inputs:
        config.input.add(
            name=spec.name,
            data_type=_data_type(spec),
            dims=spec.dims,
            optional=spec.is_optional,
            allow_ragged_batch=spec.allow_ragged_batch,
        )
    for spec in signature.outputs:
        config.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
    config.model_transaction_policy.decoupled = signature.is_decoupled
    if signature.is_stateful:
        config.sequence_batching.SetInParent()
    if signature.can_collect:
        config.parameters[COLLECTS_PARAMETER].string_value = "true"
    _set_optional(config, signature)
    return config


def _set_optional(config: ModelConfig, signature: ModelSignature) -> None:
    config.parameters.pop(OPTIONAL_OUTPUTS_PARAMETER, None)
    if names := [spec.name for spec in signature.outputs if spec.is_optional]:
        config.parameters[OPTIONAL_OUTPUTS_PARAMETER].string_value = ",".join(names)


def _data_type(spec: TensorSpec) -> DataType.ValueType:
    return DataType.Value("TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}")


def _tensor_names(node: NodePlan) -> Iterator[tuple[int, str]]:
    """Slot and name of each tensor of a node: inputs and outputs by their own names, others as ``step.output``."""
    for step in node.steps:
        for binding in step.outputs:
            yield binding.slot, f"{step.name}.{binding.name}"
    for binding in (*node.outputs, *node.inputs):
        yield binding.slot, binding.name


def signatures_of(catalog: "TargetCatalog") -> pb.TargetSignaturesResponse:
    """The signatures of a catalog's models, sorted by name and version."""
    entries = sorted(catalog.entries(), key=_order)
    return pb.TargetSignaturesResponse(
        model=[message_of(entry.target, entry.model.signature) for entry in entries if entry.model.is_ready],
        not_ready=[
            f"{entry.model.signature.name}/{entry.model.signature.version} on {entry.target}"
            for entry in entries
            if not entry.model.is_ready
        ],
        unreachable_target=catalog.unreachable,
    )


def message_of(target: str, signature: ModelSignature) -> pb.ModelSignature:
    """The signature of a model that ``target`` serves."""
    config = config_of_signature(signature)
    return pb.ModelSignature(
        name=signature.name,
        version=signature.version,
        target=target,
        max_batch_size=signature.max_batch_size,
        input=config.input,
        output=config.output,
        decoupled=signature.is_decoupled,
        stateful=signature.is_stateful,
        optional_output=[spec.name for spec in signature.outputs if spec.is_optional],
    )


def signature_of(message: pb.ModelSignature) -> ModelSignature:
    """The signature in a message, which has no platform."""
    return ModelSignature(
        name=message.name,
        version=message.version,
        platform="",
        max_batch_size=message.max_batch_size,
        inputs=tuple(_specs(message.input)),
        outputs=tuple(_specs(message.output, message.optional_output)),
        is_decoupled=message.decoupled,
        is_stateful=message.stateful,
    )


def _specs(tensors: Iterable[ModelInput | ModelOutput], optional: Collection[str] = ()) -> Iterable[TensorSpec]:
    for tensor in tensors:
        is_optional = tensor.optional if isinstance(tensor, ModelInput) else tensor.name in optional
        is_ragged = isinstance(tensor, ModelInput) and tensor.allow_ragged_batch
        yield TensorSpec(tensor.name, datatype_name(tensor.data_type), tuple(tensor.dims), is_optional, is_ragged)


def _order(entry: "CatalogEntry") -> tuple[str, int, str]:
    version = entry.model.signature.version
    return entry.model.signature.name, version_order(version), version
