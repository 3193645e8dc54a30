"""Signatures of models as messages, as ``weft lock`` keeps them."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from weft.base.signature import ModelSignature, TensorSpec, datatype_name
from weft.base.versions import version_order
from weft.router.repository.config import config_of_signature
from weft_protos import graph_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelInput, ModelOutput

if TYPE_CHECKING:
    from weft.router.targets.catalog import CatalogEntry, TargetCatalog


def signatures_of(catalog: "TargetCatalog") -> pb.TargetSignaturesResponse:
    """The models of a catalog, by name and version."""
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
