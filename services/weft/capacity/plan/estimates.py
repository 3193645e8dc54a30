"""Estimates of models on a target, whatever their backend."""

import math
from collections.abc import Mapping
from dataclasses import replace

from weft.backends.llm.settings import read_settings
from weft.base.errors import InvalidArgumentError
from weft.capacity.costs.formats import FILENAMES, cost_model
from weft.capacity.costs.language_model import read_language_model
from weft.capacity.costs.operation import BatchCost, CostModel
from weft.capacity.devices.device import DeviceSpec
from weft.capacity.plan.estimate import Assumptions, Estimate, MemoryUse, cost_per_million
from weft.capacity.plan.subjects import Subject
from weft.capacity.plan.target import PlannedDevice

_LLM = "llm"
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_MIB = 2**20


def estimate(subject: Subject, target: PlannedDevice, assumptions: Assumptions) -> Estimate:
    """What a model needs and achieves.

    Raises:
        InvalidArgumentError: A dimension of an input is open; the message says which, and how to give it.
        NotFoundError: The model's file is missing.
        UnsupportedError: What reads it is not installed, or this machine cannot be measured.
    """
    if subject.backend == _LLM:
        return _language(subject, target, assumptions)
    file = subject.context.directory / (subject.filename or FILENAMES.get(subject.backend, ""))
    model = cost_model(subject.backend, file, subject.context.signature)
    if model is None:
        note = f"{subject.backend}: its memory and time cannot be told from its files; declare them with --declare"
        return Estimate(
            subject.name, subject.backend, target.spec.name, subject.num_instances,
            max_batch=assumptions.batch or subject.max_batch_size, notes=(note,),
        )  # fmt: skip
    return _tensor(subject, model, target, assumptions)


def _tensor(subject: Subject, model: CostModel, target: PlannedDevice, assumptions: Assumptions) -> Estimate:
    shapes = checked_shapes(subject, assumptions)
    spec = target.spec
    most = min(assumptions.batch or subject.max_batch_size, _rows_of_bucket(subject, shapes))
    if subject.context.signature.max_batch_size == 0:
        most = 1
    one, largest = model.batch(1, shapes), model.batch(most, shapes)
    timer = target.batches(subject.backend, int(subject.context.parameters.get(_THREADS[subject.backend], "1")))
    time_1, time_max = timer.batch(one, model.weights), timer.batch(largest, model.weights)
    memory = _memory(subject, model, target, largest)
    request_s = target.request_s(subject.backend, (largest.input_bytes + largest.output_bytes) // most)
    rate = most / max(time_max.seconds, most * request_s) if request_s else most / time_max.seconds
    per_row = (largest.peak_bytes - one.peak_bytes) / max(most - 1, 1)
    fixed = memory.runtime + memory.weights
    free = (spec.memory_bytes - fixed) / subject.num_instances
    return Estimate(
        subject.name,
        subject.backend,
        spec.name,
        subject.num_instances,
        memory,
        max_batch=most,
        time_1=time_1,
        time_max=time_max,
        ridge_batch=_ridge(one, largest, spec, subject.backend),
        largest_batch=max(int(free / max(per_row or one.peak_bytes, 1)), 0),
        rate_per_s=rate,
        requests_per_s=rate,
        cost_per_million=cost_per_million(assumptions.cost_per_hour, rate * subject.num_instances),
        missing_bytes=max(memory.total - spec.memory_bytes, 0),
    )


def _memory(subject: Subject, model: CostModel, target: PlannedDevice, largest: BatchCost) -> MemoryUse:
    num = subject.num_instances
    is_cpu = target.spec.is_cpu
    weights = model.weights.num_bytes + (model.weights.packed_bytes if is_cpu else 0)
    # A GPU's arena grows to powers of two; pages of a CPU's that are not written take no memory.
    arena = 0 if is_cpu else (1 << max(largest.peak_bytes - 1, 0).bit_length()) - largest.peak_bytes
    return MemoryUse(target.runtime_bytes(subject.backend), num * weights, num * largest.peak_bytes, num * arena)


def _ridge(one: BatchCost, largest: BatchCost, spec: DeviceSpec, backend: str) -> int | None:
    """Batch at which the operations of all rows take as long as the weights and activations to move."""
    weights = sum(operation.weight_bytes for operation in one.operations)
    kind = "tf32" if backend == "onnxruntime" and "tf32" in spec.flops_per_s else "fp32"
    rows = max(largest.num_rows, 1)
    intensity = spec.ridge(kind)
    per_row = largest.num_flops / rows - intensity * (largest.moved_bytes - weights) / rows
    return max(1, round(intensity * weights / per_row)) if per_row > 0 else None


def _rows_of_bucket(subject: Subject, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows that ``batch_buckets_max_elements`` allows in a batch of these lengths."""
    parameters = subject.context.config.get("parameters", {})
    limit = parameters.get("batch_buckets_max_elements", {}).get("string_value", "")
    longest = max((math.prod(dims) for dims in shapes.values()), default=1)
    return max(int(limit) // longest, 1) if limit.isdecimal() else 1 << 30


def checked_shapes(subject: Subject, assumptions: Assumptions) -> dict[str, tuple[int, ...]]:
    """Dims of inputs, without the batch.

    Raises:
        InvalidArgumentError: Open dims without ``--shape``, or one that does not fit the declaration.
    """
    shapes, missing = {}, []
    for spec in subject.context.signature.inputs:
        dims = spec.reshape if spec.reshape is not None else spec.dims
        given = assumptions.shapes.get(f"{subject.name}.{spec.name}", assumptions.shapes.get(spec.name))
        if given is None:
            if -1 in dims and not spec.is_optional:
                missing.append(f"--shape {spec.name}={'x'.join('N' if dim < 0 else str(dim) for dim in dims)}")
            continue
        if len(given) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, given, strict=True)):
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


def _language(subject: Subject, target: PlannedDevice, assumptions: Assumptions) -> Estimate:
    spec = target.spec
    settings = read_settings(subject.context, subject.instance(on_gpu=not spec.is_cpu))
    engine = settings.engine
    model = read_language_model(
        subject.context.directory,
        replace(engine, dtype="float32") if engine.dtype == "auto" else engine,
        needs_files=settings.has_weights,
    )
    if engine.dtype == "auto":
        model = replace(model, engine=replace(engine, dtype=_dtype(model.config.dtype, target)))
    longest = engine.max_model_len or model.config.max_context_len
    context = assumptions.context or max(longest // 4, 2)
    if context > longest:
        raise InvalidArgumentError(
            f"--context {context} is longer than model '{subject.name}' allows; give at most {longest}"
        )
    runtime = target.runtime_bytes(_LLM)
    taken = runtime + model.weight_bytes
    room = max(int((spec.memory_bytes - taken - model.activation_bytes) * 0.9), 0)
    num_fit = room // model.sequence_bytes(context)
    declared = bool(engine.num_blocks or engine.kv_cache_bytes or spec.is_cpu)
    most = min(assumptions.batch or engine.max_num_seqs, max(num_fit, 1))
    kv = model.kv_bytes(spec.memory_bytes, taken) if declared else most * model.sequence_bytes(context)
    notes = []
    if declared and kv // model.sequence_bytes(context) < most:
        most = max(kv // model.sequence_bytes(context), 1)
        notes.append(f"its KV cache of {kv / _MIB:.0f} MiB holds {most} sequences of {context} tokens")
    if not declared:
        notes.append(f"set kv_cache_bytes to {kv}, or the engine takes 90 % of what is free")
    memory = MemoryUse(
        runtime,
        subject.num_instances * model.weight_bytes,
        subject.num_instances * model.activation_bytes,
        0,
        subject.num_instances * kv,
    )
    timer = target.steps(engine.num_threads)
    one, step = timer.decode(model, 1, context), timer.decode(model, most, context)
    chunk = min(engine.max_num_batched_tokens, context)
    prefill = timer.prefill(model, chunk, chunk)
    num_output = min(assumptions.num_output_tokens, context - 1)
    prompt_s = (context - num_output) / chunk * prefill.seconds
    rate = most / step.seconds
    return Estimate(
        subject.name,
        subject.backend,
        spec.name,
        subject.num_instances,
        memory,
        unit="tokens",
        max_batch=most,
        time_1=one,
        time_max=step,
        ridge_batch=timer.ridge(model),
        largest_batch=num_fit,
        context=context,
        largest_context=model.largest_context(room),
        prefill_per_s=chunk / prefill.seconds,
        rate_per_s=rate,
        requests_per_s=1 / (prompt_s + num_output / rate),
        cost_per_million=cost_per_million(assumptions.cost_per_hour, rate * subject.num_instances),
        missing_bytes=max(memory.total - spec.memory_bytes, 0),
        notes=tuple(notes),
    )


def _dtype(published: str, target: PlannedDevice) -> str:
    """The type that the engine computes in: on a CPU float32 where that is faster."""
    if not target.spec.is_cpu or published == "float32":
        return published
    timer = target.steps(1)
    rates = getattr(getattr(timer, "products", None), "products", {})
    own, wide = ([rate for _, rows, rate in rates.get(kind, ()) if rows in (1, 32)] for kind in (published, "float32"))
    is_slower = not own or any(a * 1.1 < b for a, b in zip(own, wide, strict=True))
    return "float32" if is_slower else published
