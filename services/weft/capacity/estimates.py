"""Estimates memory and speed of one model on one device, for any backend."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.backends.llm.settings import read_settings
from weft.base.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from weft.base.signature import ModelSignature
from weft.base.tensors import fits
from weft.capacity.costs import BatchCost, CostModel
from weft.capacity.costs.language_model import read_language_model
from weft.capacity.devices import DeviceSpec
from weft.capacity.ranks import RankTarget, find_link
from weft.capacity.roofline import DeviceTarget, Timing
from weft.capacity.subjects import Subject

#: File of a version folder by backend, unless the configuration names another.
FILENAMES = {"onnxruntime": "model.onnx", "pytorch": "model.pt2"}
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a model with all its instances, bytes.

    Attributes:
        runtime: Of the service and its libraries, once for all models of a backend.
        weights: With the copies that the runtime packs.
        activations: Of the largest batch, all at the same time.
        arena: Overhead of the allocator.
    """

    runtime: int
    weights: int
    activations: int = 0
    arena: int = 0
    kv: int = 0

    @property
    def own(self) -> int:
        """Memory without the runtime."""
        return self.weights + self.activations + self.arena + self.kv

    @property
    def total(self) -> int:
        """Memory with the runtime."""
        return self.runtime + self.own


@dataclass(frozen=True)
class Estimate:
    """A model on a device.

    Attributes:
        memory: Of ``num_instances``; None: unknown.
        unit: Unit of ``rate_per_s``: ``"requests"`` of one row, or ``"tokens"``.
        time_1, time_max: Of a batch of one and of the largest; for language models of a decode step.
        ridge_batch: Batch from which compute, not memory, bounds the time; None: never.
        largest_batch: Rows, or sequences of ``context`` tokens, that fit into the device's memory.
        context, largest_context: Tokens of a sequence: planned, and possible; of language models.
        prefill_per_s: Tokens of prompts per second; of language models.
        requests_per_s: Requests of one instance: of one row, or of a prompt and its answer.
        num_ranks: Processes of an instance, each on a device of its own, on a CPU all on one; ``memory`` is of the one
            that takes most.
        exchange_share, prefill_exchange_share: Part of the time of the largest decode step, and of a prompt, in which
            ranks send to one another.
        cost_per_million: Of requests or tokens, in the currency of ``--cost-per-hour``; None: unknown.
        missing_bytes: Memory that the device lacks; 0: the model fits.
        fault: Why a valid question could not be estimated; "": nothing is wrong.
    """

    model: str
    backend: str
    device: str
    num_instances: int
    memory: MemoryUse | None = None
    unit: str = "requests"
    max_batch: int = 1
    time_1: Timing | None = None
    time_max: Timing | None = None
    ridge_batch: int | None = None
    largest_batch: int = 0
    context: int = 0
    largest_context: int = 0
    prefill_per_s: float = 0.0
    rate_per_s: float = 0.0
    requests_per_s: float = 0.0
    num_ranks: int = 1
    exchange_share: float = 0.0
    prefill_exchange_share: float = 0.0
    cost_per_million: float | None = None
    missing_bytes: int = 0
    notes: tuple[str, ...] = ()
    fault: str = ""

    def priced(self, cost_per_hour: float) -> "Estimate":
        """A copy with the cost of a million units, if price and rate are known."""
        rate = self.rate_per_s * self.num_instances
        cost = cost_per_hour * self.num_ranks / 3600 / rate * 1e6 if cost_per_hour and rate else None
        return replace(self, cost_per_million=cost)


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``weft plan``.

    Attributes:
        context: Tokens of a sequence of language models, prompt and answer; 0: a quarter of the model's maximum.
        link: Between the devices of a model's ranks, of ``links.toml``; "": that of the device.
        profile_file: Where figures of this machine are kept; None: the user's cache folder.
        fleet: A file of hosts with such devices; None: ``num_devices`` hosts.
        max_models: Models that may share a device or slice; 0: eight, or all if they are more.
    """

    repository: Path
    models: Sequence[str] = ()
    device: str = "this"
    num_devices: int = 1
    batch: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    context: int = 0
    num_output_tokens: int = 128
    link: str = ""
    cost_per_hour: float = 0.0
    profile_file: Path | None = None
    fleet: Path | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    max_models: int = 0
    check: Path | None = None


def estimate(subject: Subject, target: DeviceTarget, options: PlanOptions) -> Estimate:
    """Estimate memory and speed of a model.

    Raises:
        InvalidArgumentError: A dimension of an input is open; the message says which, and how to give it.
        NotFoundError: The model's file is missing.
        UnsupportedError: The package that reads it is not installed, or this machine cannot be measured.
    """
    blank = Estimate(subject.name, subject.backend, target.spec.name, subject.num_instances)
    if subject.backend == "llm":
        return _language(blank, subject, target, options).priced(options.cost_per_hour)
    file = subject.context.directory / (subject.filename or FILENAMES.get(subject.backend, ""))
    model = cost_model(subject.backend, file, subject.context.signature)
    if model is None:
        note = f"{subject.backend}: its memory and time cannot be told from its files; declare them with --declare"
        return replace(blank, max_batch=options.batch or subject.max_batch_size, notes=(note,))
    return _tensor(blank, subject, model, target, options).priced(options.cost_per_hour)


def _tensor(
    blank: Estimate, subject: Subject, model: CostModel, target: DeviceTarget, options: PlanOptions
) -> Estimate:
    shapes = _checked_shapes(subject, options)
    spec, num = target.spec, subject.num_instances
    most = min(options.batch or subject.max_batch_size, _rows_of_bucket(subject, shapes))
    if subject.context.signature.max_batch_size == 0:
        most = 1
    one, largest = model.batch(1, shapes), model.batch(most, shapes)
    num_threads = int(subject.context.parameters.get(_THREADS[subject.backend], "1"))
    time_1, time_max = (target.batch(subject.backend, num_threads, cost) for cost in (one, largest))
    weights = model.weights.num_bytes + (model.weights.packed_bytes if spec.is_cpu else 0)
    # A GPU's arena grows to powers of two; pages of a CPU's that are not written take no memory.
    arena = 0 if spec.is_cpu else (1 << max(largest.peak_bytes - 1, 0).bit_length()) - largest.peak_bytes
    runtime = target.runtime_bytes(subject.backend)
    memory = MemoryUse(runtime, num * weights, num * largest.peak_bytes, num * arena)
    request_s = target.request_s(subject.backend, (largest.input_bytes + largest.output_bytes) // most)
    rate = most / max(time_max.seconds, most * request_s) if request_s else most / time_max.seconds
    per_row = (largest.peak_bytes - one.peak_bytes) / max(most - 1, 1)
    free = (spec.memory_bytes - memory.runtime - memory.weights) / num
    return replace(
        blank,
        memory=memory,
        max_batch=most,
        time_1=time_1,
        time_max=time_max,
        ridge_batch=_ridge(one, largest, spec, subject.backend),
        largest_batch=max(int(free / max(per_row or one.peak_bytes, 1)), 0),
        rate_per_s=rate,
        requests_per_s=rate,
        missing_bytes=max(memory.total - spec.memory_bytes, 0),
    )


def _ridge(one: BatchCost, largest: BatchCost, spec: DeviceSpec, backend: str) -> int | None:
    """Batch size at which computing all rows takes as long as moving weights and activations."""
    weights = sum(operation.weight_bytes for operation in one.operations)
    kind = "tf32" if backend == "onnxruntime" and "tf32" in spec.flops_per_s else "fp32"
    rows = max(largest.num_rows, 1)
    intensity = spec.ridge(kind)
    num_flops = sum(operation.num_flops for operation in largest.operations)
    moved_bytes = sum(operation.weight_bytes + operation.moved_bytes for operation in largest.operations)
    per_row = num_flops / rows - intensity * (moved_bytes - weights) / rows
    return max(1, round(intensity * weights / per_row)) if per_row > 0 else None


def _rows_of_bucket(subject: Subject, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows that ``batch_buckets_max_elements`` allows in a batch of these lengths."""
    parameters = subject.context.config.get("parameters", {})
    limit = parameters.get("batch_buckets_max_elements", {}).get("string_value", "")
    longest = max((math.prod(dims) for dims in shapes.values()), default=1)
    return max(int(limit) // longest, 1) if limit.isdecimal() else 1 << 30


def _checked_shapes(subject: Subject, options: PlanOptions) -> dict[str, tuple[int, ...]]:
    """Dims of inputs, without the batch."""
    shapes, missing = {}, []
    for spec in subject.context.signature.inputs:
        dims = spec.reshape if spec.reshape is not None else spec.dims
        given = options.shapes.get(f"{subject.name}.{spec.name}", options.shapes.get(spec.name))
        if given is None:
            if -1 in dims and not spec.is_optional:
                missing.append(f"--shape {spec.name}={'x'.join('N' if dim < 0 else str(dim) for dim in dims)}")
            continue
        if not fits(given, dims):
            raise InvalidArgumentError(
                f"--shape {spec.name}={'x'.join(map(str, given))} does not fit model '{subject.name}', whose input "
                f"'{spec.name}' has the dims {list(dims)} without the batch"
            )
        shapes[spec.name] = given
    if missing:
        raise InvalidArgumentError(
            f"model '{subject.name}' has inputs of open shape; give what your requests have, without the batch: "
            f"{' '.join(missing)}"
        )
    return shapes


def _language(blank: Estimate, subject: Subject, target: DeviceTarget, options: PlanOptions) -> Estimate:
    spec, num = target.spec, subject.num_instances
    settings = read_settings(subject.context, subject.instance(on_gpu=not spec.is_cpu))
    engine = settings.engine
    is_auto = engine.dtype == "auto"
    model = read_language_model(
        subject.context.directory,
        replace(engine, dtype="float32") if is_auto else engine,
        needs_files=settings.has_weights,
    )
    if is_auto:
        model = replace(model, engine=replace(engine, dtype=target.compute_dtype(model.config.dtype)))
    longest = engine.max_model_len or model.config.max_context_len
    context = options.context or max(longest // 4, 2)
    if context > longest:
        raise InvalidArgumentError(
            f"--context {context} is longer than model '{subject.name}' allows; give at most {longest}"
        )
    sizes = engine.parallel_sizes
    parts = model.parts(sizes)
    place = RankTarget(target, parts, find_link(options.link or spec.link))
    runtime = target.runtime_bytes("llm")
    device_bytes = spec.memory_bytes // (sizes.num_ranks if spec.is_cpu else 1)
    rooms = [max(int((device_bytes - runtime - part.weight_bytes - part.activation_bytes) * 0.9), 0) for part in parts]
    num_fit = min(room // part.sequence_bytes(context) for room, part in zip(rooms, parts, strict=True))
    declared = bool(engine.num_blocks or engine.kv_cache_bytes or spec.is_cpu)
    most = min(options.batch or engine.max_num_seqs, max(num_fit, 1))
    kvs = [
        part.kv_bytes(device_bytes, runtime + part.weight_bytes) if declared else most * part.sequence_bytes(context)
        for part in parts
    ]
    largest = max(range(len(parts)), key=lambda index: parts[index].weight_bytes + kvs[index])
    part, kv = parts[largest], kvs[largest]
    notes = [] if declared else [f"set kv_cache_bytes to {kv}, or the engine takes 90 % of what is free"]
    num_held = min(held // each.sequence_bytes(context) for held, each in zip(kvs, parts, strict=True))
    if declared and num_held < most:
        most = max(num_held, 1)
        notes = [f"its KV cache of {kv / _MIB:.0f} MiB holds {most} sequences of {context} tokens"]
    memory = MemoryUse(runtime, num * part.weight_bytes, num * part.activation_bytes, 0, num * kv)
    (one, _), (step, exchange_s) = place.decode(1, context), place.decode(most, context)
    chunk = min(engine.max_num_batched_tokens, context)
    prefill, prefill_exchange_s = place.prefill(chunk, chunk)
    shares = exchange_s / step.seconds, prefill_exchange_s / prefill.seconds
    if sizes.num_ranks > 1:
        where = "on one machine" if spec.is_cpu else f"on as many devices, with {place.link.name} between them"
        notes.append(
            f"{sizes.num_ranks} ranks (tensor {sizes.tensor}, pipeline {sizes.pipeline}, context {sizes.context}) "
            f"{where}; memory is of the largest; exchanges are {shares[0]:.0%} of the time of the largest step and "
            f"{shares[1]:.0%} of a prompt's"
        )
    num_output = min(options.num_output_tokens, context - 1)
    prompt_s = (context - num_output) / chunk * prefill.seconds
    rate = most / step.seconds
    return replace(
        blank,
        memory=memory,
        unit="tokens",
        max_batch=most,
        time_1=one,
        time_max=step,
        ridge_batch=target.ridge(parts[-1]),
        largest_batch=num_fit,
        context=context,
        largest_context=min(each.largest_context(room) for room, each in zip(rooms, parts, strict=True)),
        prefill_per_s=chunk / prefill.seconds,
        rate_per_s=rate,
        requests_per_s=1 / (prompt_s + num_output / rate),
        num_ranks=sizes.num_ranks,
        exchange_share=shares[0],
        prefill_exchange_share=shares[1],
        missing_bytes=max(memory.total - device_bytes, 0),
        notes=tuple(notes),
    )


def with_declared(each: Estimate, text: str, spec: DeviceSpec, cost_per_hour: float) -> Estimate:
    """Add memory of an instance and time of a row, given as ``MIB:MS``, to an estimate.

    Raises:
        InvalidArgumentError: The text is not of that form, or the model's files already tell.
    """
    if each.memory is not None:
        raise InvalidArgumentError(f"--declare: what '{each.model}' needs is known from its files; leave it out")
    mib, separator, ms = text.partition(":")
    try:
        numbers = float(mib), float(ms)
    except ValueError:
        numbers = math.nan, math.nan
    if not separator or not all(0 < number < 1e9 for number in numbers):
        raise InvalidArgumentError(
            f"--declare {each.model}={text} is not of the form MODEL=MIB:MS, memory of an instance and milliseconds of "
            f"a row, such as {each.model}=150:2.5"
        )
    seconds = numbers[1] / 1e3
    memory = MemoryUse(0, int(numbers[0] * 2**20) * each.num_instances)
    return replace(
        each,
        memory=memory,
        time_1=Timing(seconds, "declared"),
        time_max=Timing(seconds * each.max_batch, "declared"),
        rate_per_s=1 / seconds,
        requests_per_s=1 / seconds,
        missing_bytes=max(memory.total - spec.memory_bytes, 0),
        notes=("as declared",),
    ).priced(cost_per_hour)


def cost_model(backend: str, file: Path, signature: ModelSignature) -> CostModel | None:
    """Cost of a model file; None for backends whose models are opaque.

    Raises:
        NotFoundError: The file does not exist.
        InvalidArgumentError: It is not such a model.
        UnsupportedError: The package that reads it is not installed.
    """
    if backend not in FILENAMES:
        return None
    if not file.is_file():
        raise NotFoundError(f"there is no {file}; build or fetch the model")
    try:
        if backend == "onnxruntime":
            from weft.capacity.costs.onnx_model import OnnxModel  # noqa: PLC0415  # optional, and slow to import

            return OnnxModel(file, signature)
        from weft.capacity.costs.torch_model import TorchModel  # noqa: PLC0415  # same

        return TorchModel(file, signature)
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, without which {file} cannot be read; pip install 'weft-mesh[plan,torch]'"
        ) from error
