"""Reads, completes and checks a model's configuration: ``define_model`` makes a ``ModelDefinition`` of its folder."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from weft.base.core import ParameterValue
from weft.base.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    WeftError,
)
from weft.base.observing.failures import caused_by
from weft.base.observing.logs import get_logger
from weft.base.repository.layout import CONFIG_FILENAME as CONFIG_FILENAME  # read from here too
from weft.base.repository.layout import read_label_file, versions_to_serve
from weft.base.signature import (
    COLLECTS_PARAMETER,
    EMPTY_BATCH_PARAMETER,
    LABELS_PARAMETER,
    OPTIONAL_OUTPUTS_PARAMETER,
    PROVENANCE_PARAMETER,
    RETRY_PARAMETER,
    VERSION_DIGEST_PARAMETER,
    ModelSignature,
)
from weft.base.text.pbtxt import parse
from weft.serving.backends.base import (
    Backend,
    InstanceContext,
    MetricExports,
    MetricSink,
    ModelCaller,
    ModelContext,
    RepositoryControl,
    TensorBackend,
)
from weft.serving.backends.sequences import sequenced
from weft.serving.config import checks
from weft.serving.config.batching import LAYOUT_PARAMETERS, SCHEDULING_PARAMETERS, batch_layout, scheduler_settings
from weft.serving.config.checks import ConfigReport, path_fault
from weft.serving.config.given_inputs import drop_added, sequence_inputs, warmed, warmup_samples
from weft.serving.config.placement import (
    EXECUTION,
    INLINE,
    MAX_INSTANCES,
    PROCESS,
    check_execution,
    execution_of,
    place_instances,
)
from weft.serving.queues.settings import SchedulerSettings
from weft_protos.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from weft.serving.block_exchange import BlockExchange

#: What protobuf's parser in C++, which Triton Inference Server has, takes beside JSON: names without quotes, strings in
#: single quotes, a comma before the end. Strings in double quotes match first, and stay. A string that nothing closes
#: goes on to the end: were it no match, the next quote would be tried, and so on, in quadratic time.
_LENIENT = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|(\'(?:\\.|[^\'\\])*(?:\'|\\?\Z))|([A-Za-z_]\w*)|(,)(?=\s*[}\]])', re.DOTALL
)
_MAX_CONFIG_CHARS = 1 << 20
_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def config_override(name: str, parameters: Mapping[str, ParameterValue | bytes]) -> str | None:
    """The configuration sent with a load, in place of ``config.pbtxt``. Raises for other parameters but files."""
    for key in parameters:
        if key != "config" and not key.startswith("file:"):
            raise InvalidArgumentError(
                f"failed to load '{name}': unknown parameter '{key}'; a load takes 'config', and files as 'file:PATH'"
            )
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InvalidArgumentError(
            f"failed to load '{name}': parameter 'config' must be a string, a configuration in JSON"
        )
    if config is not None and len(config) > _MAX_CONFIG_CHARS:
        raise InvalidArgumentError(
            f"failed to load '{name}': parameter 'config' has {len(config)} characters, {_MAX_CONFIG_CHARS} are "
            "allowed; put the configuration into the repository"
        )
    return config


def parse_override(text: str) -> ModelConfig:
    """Parse a configuration in JSON as protobuf's C++ parser does. Raises InvalidArgumentError.

    Of repeated names the last counts, and a single value may stand for a list.
    """
    try:
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            data = json.loads(_LENIENT.sub(_strict_json, text))
        if not isinstance(data, dict):
            raise json_format.ParseError(f"it is a {type(data).__name__}, not an object")
        return json_format.ParseDict(_with_lists(data, ModelConfig.DESCRIPTOR), ModelConfig())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"parameter 'config' is not a model configuration in JSON: {error}") from None


def _strict_json(match: re.Match[str]) -> str:
    single, word, comma = match.groups()
    if single is not None:
        inner = single[1:-1].replace("\\'", "'")
        return f'"{_QUOTE.sub(lambda found: found[0] if len(found[0]) == 2 else chr(92) + found[0], inner)}"'
    if word is not None:
        return word if word in ("true", "false", "null") else f'"{word}"'
    return "" if comma is not None else match[0]


def _with_lists(data: Mapping[str, Any], message: Descriptor) -> dict[str, Any]:
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    return {key: value if key not in fields else _value(fields[key], value) for key, value in data.items()}


def _value(field: Any, value: Any) -> Any:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        of_value = inner.fields_by_name["value"]
        return {k: _value(of_value, v) for k, v in value.items()} if isinstance(value, dict) else value
    if field.is_repeated and not isinstance(value, list) and value is not None:
        value = [value]
    if inner is None:
        return value
    if isinstance(value, list):
        return [_with_lists(item, inner) if isinstance(item, dict) else item for item in value]
    return _with_lists(value, inner) if isinstance(value, dict) else value


_log = get_logger("weft.serving.config")


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """A model's configuration, completed and checked, before loading; ``contexts`` by version, lowest first."""

    config: ModelConfig
    backend: type[Backend]
    settings: SchedulerSettings
    instances: tuple[InstanceContext, ...]
    contexts: Mapping[int, ModelContext]


def define_model(
    directory: Path,
    versions: Sequence[int],
    backends: Mapping[str, type[Backend]],
    *,
    num_gpus: int,
    completes: bool = True,
    text: str | None = None,
    override: str | None = None,
    max_override_instances: int = MAX_INSTANCES,
    caller: ModelCaller | None = None,
    metrics: MetricSink | None = None,
    control: RepositoryControl | None = None,
    exports: MetricExports | None = None,
    mesh_key: str = "",
    blocks: "BlockExchange | None" = None,
) -> ModelDefinition:
    """Define the model in ``directory``, ``<repository>/<model>``. Blocks: reads files, may import a backend.

    Args:
        versions: Numbers of the version folders.
        backends: By name; reading a value may import it.
        num_gpus: CUDA devices of this process.
        completes: Fill in missing configuration, up to the whole file, from the model's files.
        text: What ``config.pbtxt`` is to say; None: what it says.
        override: A configuration as JSON, in place of ``config.pbtxt``.
        max_override_instances: Limit of the instances that ``override`` may ask for.

    Raises:
        PbtxtError: Every fault of the configuration, each with file, line and column.
        WeftError: The backend could not complete the configuration.
    """
    config, report = _read(directory, text, override, completes=completes)
    if completes and versions:
        checks.name_backend(config, directory / str(max(versions)))
    is_given = text is not None or override is not None
    if not is_given and not config.backend and not (directory / CONFIG_FILENAME).exists():
        raise InvalidArgumentError(f"{directory} has no {CONFIG_FILENAME}, and {checks.TELLING_FILES}")
    checks.check_declared(config, directory.name, backends, report)
    selected = _select_versions(config, versions, report)
    if completes and not report.diagnostics:  # user code sees sound configurations only
        backend = _imported(backends, config.backend)
        if backend.completes_always or checks.is_incomplete(config):
            declared = {tensor.name for tensor in config.input} | {tensor.name for tensor in config.output}
            config = _complete(config, backend, directory / str(selected[-1]))
            drop_added(config, declared)
            checks.check_declared(config, directory.name, backends, report)
    backend = _imported(backends, config.backend) if config.backend in backends else Backend
    checks.check_tensors(config, report, may_lack=backend.may_lack)
    settings = scheduler_settings(config, report)
    samples = warmup_samples(config, directory, report)
    labels = {version: _read_labels(config, directory, version, report) for version in selected}
    execution = execution_of(config, backend.execution_modes)
    instances = place_instances(
        config,
        num_gpus=num_gpus,
        can_use_gpu=backend.can_use_gpu,
        is_inline=execution == INLINE,
        max_instances=MAX_INSTANCES if override is None else min(max_override_instances, MAX_INSTANCES),
        report=report,
    )
    check_execution(config, settings, backend.execution_modes, report)
    checks.check_features(config, backend, report)
    layout = batch_layout(config, report, has_tensor_backend=issubclass(backend, TensorBackend))
    inputs = sequence_inputs(config, directory, report)
    if inputs is not None:
        backend = sequenced(backend, inputs)
        layout = replace(layout, added_inputs=inputs.input_specs, added_outputs=inputs.output_specs)
    report.raise_if_any()
    for key in list(config.parameters):  # of a configuration that a client read and gives back
        if key in (COLLECTS_PARAMETER, VERSION_DIGEST_PARAMETER) or key.startswith(LABELS_PARAMETER):
            del config.parameters[key]
    if backend.can_collect and config.model_transaction_policy.decoupled:
        config.parameters[COLLECTS_PARAMETER].string_value = "true"  # a router asks the configuration
    if RETRY_PARAMETER not in config.parameters and backend.has_no_effects and not config.HasField("sequence_batching"):
        config.parameters[RETRY_PARAMETER].string_value = "once"
    if ignored := checks.ignored_fields(config):
        _log.warning("%s: ignored, without effect in this version: %s", config.name, ", ".join(ignored))
    as_json = _to_json(config)
    ours = {*SCHEDULING_PARAMETERS, *LAYOUT_PARAMETERS, COLLECTS_PARAMETER, OPTIONAL_OUTPUTS_PARAMETER}
    ours |= {EMPTY_BATCH_PARAMETER, RETRY_PARAMETER}
    parameters = {
        key: parameter.string_value
        for key, parameter in config.parameters.items()
        if key not in ours and not key.startswith(PROVENANCE_PARAMETER)
    }
    parameters.pop(EXECUTION, None)
    if execution == PROCESS:  # the backend's own affair
        parameters[EXECUTION] = PROCESS
    return ModelDefinition(
        config=config,
        backend=warmed(backend, samples) if samples else backend,
        settings=settings,
        instances=instances,
        contexts={
            version: ModelContext(
                ModelSignature.from_config(config, str(version), labels[version]),
                directory / str(version),
                as_json,
                parameters,
                report.fault,
                layout,
                caller,
                metrics,
                control,
                exports,
                mesh_key,
                blocks,
            )
            for version in selected
        },
    )


def _read(
    directory: Path, text: str | bytes | None, override: str | None, *, completes: bool
) -> tuple[ModelConfig, ConfigReport]:
    if override is not None:
        return parse_override(override), ConfigReport("config parameter")
    path = directory / CONFIG_FILENAME
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise InvalidArgumentError(f"cannot read {path}: it is no regular file")
    try:
        text = path.read_bytes() if text is None else text
    except FileNotFoundError:
        if completes:
            return ModelConfig(), ConfigReport(str(path))
        raise InvalidArgumentError(
            f"there is no {path}; a model needs this file where --disable-auto-complete-config is given"
        ) from None
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}; a model needs this file") from None
    config, positions = parse(text, ModelConfig(), file=str(path))
    return config, ConfigReport(str(path), positions)


def _imported(backends: Mapping[str, type[Backend]], name: str) -> type[Backend]:
    try:
        return backends[name]
    except ImportError as error:
        raise UnavailableError(f"backend '{name}' cannot be imported: {error}; install what it needs") from error


def _complete(config: ModelConfig, backend: type[Backend], directory: Path) -> ModelConfig:
    auto_complete = backend.auto_complete
    if auto_complete is None:
        return config
    try:
        return json_format.ParseDict(auto_complete(_to_json(config), directory), ModelConfig())
    except WeftError:
        raise
    except json_format.ParseError as error:
        raise InvalidArgumentError(
            f"auto-complete of model '{config.name}' by backend '{config.backend}' gave no valid configuration: {error}"
        ) from None
    except BaseException as error:  # user code may do anything, and a SystemExit would end the event loop
        failure = InternalError(f"auto-complete of model '{config.name}' by backend '{config.backend}' failed")
        raise caused_by(failure, error) from error


def _to_json(config: ModelConfig) -> dict[str, Any]:
    return json_format.MessageToDict(config, preserving_proto_field_name=True)


def _select_versions(config: ModelConfig, available: Sequence[int], report: ConfigReport) -> list[int]:
    """Versions that have a folder and match ``version_policy`` (default filled in), lowest first."""
    policy = config.version_policy
    if policy.WhichOneof("policy_choice") is None:
        policy.latest.num_versions = 1
    if not available:
        report.error("", f"model '{config.name}' has no version folder; put its files into a folder named 1")
    elif policy.HasField("latest"):
        fault = "num_versions must be at least 1, got 0"
        report.refuse(policy.latest.num_versions < 1, "version_policy.latest", fault)
    elif policy.HasField("specific"):
        versions, path = policy.specific.versions, "version_policy.specific"
        report.refuse(not versions, path, "specific names no version; list at least one")
        for i, version in enumerate(versions):
            fault = f"version {version} has no folder; there is {', '.join(map(str, sorted(available)))}"
            report.refuse(version not in available, f"{path}.versions[{i}]", fault)
    return versions_to_serve(policy, available)


def _read_labels(
    config: ModelConfig, directory: Path, version: int, report: ConfigReport
) -> dict[str, tuple[str, ...]]:
    labels: dict[str, tuple[str, ...]] = {}
    for i, output in enumerate(config.output):
        filename = output.label_filename
        if not filename or path_fault(filename, ""):
            continue  # the latter is reported with the other file names
        try:
            _, lines = read_label_file(directory / str(version), filename)
            labels[output.name] = tuple(line.decode() for line in lines)
            continue
        except NotFoundError:
            reason = f"there is no such file in {directory} or in its folder '{version}'"
        except UnicodeDecodeError:
            reason = "it is not UTF-8"
        except InvalidArgumentError as error:
            reason = error.message
        except OSError as error:
            reason = error.strerror or str(error)
        report.error(f"output[{i}].label_filename", f"cannot read labels '{filename}': {reason}")
    return labels
