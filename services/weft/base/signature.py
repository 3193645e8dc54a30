"""Model signatures: names, types and shapes from a model's configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft_protos import model_config_pb2

#: Model parameter that is "true" if a decoupled model ``can_collect``; set by its server.
COLLECTS_PARAMETER = "collects_responses"
#: Model parameter with the names of the outputs that answers may lack, separated by commas. Other servers, whose
#: configurations have no word for that, pass it over.
OPTIONAL_OUTPUTS_PARAMETER = "optional_outputs"

#: Model parameter: ``once``: a router may send a request again whose connection broke before any response; ``never``.
#: Its server sets it for models whose executions have no effects outside.
RETRY_PARAMETER = "retry"
#: Model parameter: how often a router lets a stream of a language model go on at another replica after its own is lost;
#: by default so often, where a request may be repeated.
MIGRATION_PARAMETER, DEFAULT_MIGRATION_LIMIT = "migration_limit", 3
#: Tensors and a request parameter of a language model that goes on behind tokens of an output: the ids of new tokens,
#: and the flag that asks for them beside the default outputs; those that have come; the sum of their log probabilities.
TOKENS_OUTPUT, TOKENS_FLAG, RESUME_INPUT = "output_ids", "return_output_ids", "resume_token_ids"
CONTINUED_LOGPROB, RESUME_LOGPROB = "cumulative_logprob", "resume_cumulative_logprob"
#: Model parameter that is there, not "false", if requests may have a batch of no rows.
EMPTY_BATCH_PARAMETER = "allow_empty_batch"
#: Begins the names of model parameters that note where a version comes from, before its number; no backend reads them.
PROVENANCE_PARAMETER = "provenance_of_version_"

#: Parameter of a graph's configuration: sha256 of its file, of the graphs that it contains, and of what the models that
#: it calls are; set by its router.
GRAPH_DIGEST_PARAMETER = "graph_digest"
#: Parameter of a model's configuration: sha256 of the version's files, of large ones in samples; set by its server.
VERSION_DIGEST_PARAMETER = "version_digest"
#: Begins the names of model parameters with the labels of an output, a line each, before its name; set by its server.
LABELS_PARAMETER = "labels_of_output_"
#: Fields of a configuration that say how requests are scheduled, not how they are answered.
_SCHEDULING_FIELDS = ("instance_group", "dynamic_batching", "model_warmup", "response_cache", "version_policy")

_DATATYPE_BY_ENUM: dict[int, str] = {
    number: ("BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_"))
    for name, number in model_config_pb2.DataType.items()
}


def parameter_text(config: model_config_pb2.ModelConfig, name: str) -> str:
    """Text of a model's parameter, "" if missing, which protobuf would add if it were read."""
    return config.parameters[name].string_value if name in config.parameters else ""


def answering_part(config: model_config_pb2.ModelConfig) -> bytes:
    """The part of a configuration that affects answers, as bytes for comparison."""
    part = model_config_pb2.ModelConfig()
    part.CopyFrom(config)
    for name in _SCHEDULING_FIELDS:
        part.ClearField(name)  # type: ignore[arg-type]  # the names are fields
    for name in (RETRY_PARAMETER, MIGRATION_PARAMETER):
        part.parameters.pop(name, None)
    return part.SerializeToString(deterministic=True)


def datatype_name(data_type: int) -> str:
    """V2 datatype ("FP32", "BYTES") of a ``model_config.DataType`` value; "INVALID" for TYPE_INVALID."""
    return _DATATYPE_BY_ENUM.get(data_type, "INVALID")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as clients see it.

    Attributes:
        dims: Shape without the batch dimension; -1 is any size.
        is_optional: May be left out: an input by requests, an output by answers.
        allow_ragged_batch: Inputs only: requests of different shapes may share a batch.
        labels: Outputs only: names of the classes, if the model's server has them.
        reshape: Dims inside the model, if different; invisible to clients.
        row_bytes: Bytes of one row, or of the tensor where there is no batch dimension; -1 where they vary.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    allow_ragged_batch: bool = False
    labels: tuple[str, ...] = field(default=(), compare=False, repr=False)
    reshape: tuple[int, ...] | None = field(default=None, compare=False)
    row_bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        itemsize_bytes = _itemsize_bytes(self.datatype)
        is_fixed = itemsize_bytes > 0 and -1 not in self.dims
        object.__setattr__(self, "row_bytes", math.prod(self.dims) * itemsize_bytes if is_fixed else -1)

    def fits(self, datatype: str, shape: tuple[int, ...], num_bytes: int, *, has_batch: bool) -> bool:
        """Fast check that a tensor has this type, shape and byte size; only if ``row_bytes`` is fixed.

        False is not final: slower checks, which also explain, decide.
        """
        if datatype != self.datatype or self.row_bytes < 0:
            return False
        if not has_batch:
            return shape == self.dims and num_bytes == self.row_bytes
        return shape[1:] == self.dims and shape != () and shape[0] > 0 and num_bytes == shape[0] * self.row_bytes


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Names, types and shapes of one model version.

    Attributes:
        platform: ``platform``, or ``backend`` if that is empty.
        max_batch_size: 0 means no batch dimension.
        is_decoupled: Any number of responses per request; only over ``ModelStreamInfer``, unless it ``can_collect``.
        can_collect: The model supports unary calls with one complete response, although it is decoupled.
        allows_empty_batch: A request may have a batch of no rows.
        can_repeat: A request that was lost with its connection may be sent again.
        migration_limit: Times that a stream may go on at another replica; 0 for other than language models.
        is_stateful: Requests belong to sequences, whose state the model keeps.
    """

    name: str
    version: str
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    is_decoupled: bool = False
    can_collect: bool = field(default=False, compare=False)
    can_repeat: bool = field(default=False, compare=False)
    migration_limit: int = field(default=0, compare=False)
    allows_empty_batch: bool = False
    is_stateful: bool = False

    @classmethod
    def from_config(
        cls, config: model_config_pb2.ModelConfig, version: str, labels: Mapping[str, tuple[str, ...]] | None = None
    ) -> "ModelSignature":
        """Signature of ``config`` for one of its versions; ``labels`` by output, None: those in ``config``."""
        if labels is None:
            begin = len(LABELS_PARAMETER)
            own = ((key, value) for key, value in config.parameters.items() if key.startswith(LABELS_PARAMETER))
            labels = {key[begin:]: tuple(value.string_value.split("\n")) for key, value in own}
        optional = optional_outputs(config)
        is_decoupled = config.model_transaction_policy.decoupled
        return cls(
            name=config.name,
            version=version,
            platform=config.platform or config.backend,
            max_batch_size=config.max_batch_size,
            inputs=tuple(_spec(i, i.optional, allow_ragged_batch=i.allow_ragged_batch) for i in config.input),
            outputs=tuple(_spec(o, o.name in optional, labels=labels.get(o.name, ())) for o in config.output),
            is_decoupled=is_decoupled,
            can_collect=is_decoupled and parameter_text(config, COLLECTS_PARAMETER) == "true",
            can_repeat=_can_repeat(config),
            migration_limit=_migration_limit(config),
            allows_empty_batch=allows_empty_batch(config.parameters),
            is_stateful=config.HasField("sequence_batching"),
        )

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Shape as in ``ModelMetadata``: with a leading -1 if the model batches."""
        return (-1, *spec.dims) if self.max_batch_size > 0 else spec.dims

    def for_backend(self) -> "ModelSignature":
        """The signature inside the model: ``reshape`` replaces the dims."""
        if all(spec.reshape is None for spec in (*self.inputs, *self.outputs)):
            return self
        return replace(self, inputs=_reshaped(self.inputs), outputs=_reshaped(self.outputs))


def optional_outputs(config: model_config_pb2.ModelConfig) -> tuple[str, ...]:
    """Names of the outputs that answers may lack, from the parameter ``OPTIONAL_OUTPUTS_PARAMETER``."""
    names = parameter_text(config, OPTIONAL_OUTPUTS_PARAMETER).split(",")
    return tuple(name for one in names if (name := one.strip()))


def allows_empty_batch(parameters: Mapping[str, model_config_pb2.ModelParameter]) -> bool:
    """Whether these parameters of a model or graph allow requests without rows."""
    return EMPTY_BATCH_PARAMETER in parameters and parameters[EMPTY_BATCH_PARAMETER].string_value in ("", "true")


def _can_repeat(config: model_config_pb2.ModelConfig) -> bool:
    return parameter_text(config, RETRY_PARAMETER) == "once"


def _migration_limit(config: model_config_pb2.ModelConfig) -> int:
    if not any(tensor.name == RESUME_INPUT for tensor in config.input):
        return 0
    if MIGRATION_PARAMETER in config.parameters:
        text = parameter_text(config, MIGRATION_PARAMETER)
        return int(text) if text.isdecimal() else 0
    return DEFAULT_MIGRATION_LIMIT * _can_repeat(config)


def _spec(
    tensor: model_config_pb2.ModelInput | model_config_pb2.ModelOutput, is_optional: bool, **more: Any
) -> TensorSpec:
    reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
    kind = datatype_name(tensor.data_type)
    return TensorSpec(tensor.name, kind, tuple(tensor.dims), is_optional, reshape=reshape, **more)


def _reshaped(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec if spec.reshape is None else replace(spec, dims=spec.reshape, reshape=None) for spec in specs)


def _itemsize_bytes(datatype: str) -> int:
    """Bytes of one element, whose bits are in the name of every numeric datatype; 0 of BYTES."""
    num_bits = datatype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(num_bits) // 8 if num_bits.isdecimal() else int(datatype == "BOOL")
