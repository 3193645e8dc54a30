"""Caches, metrics, trace and log settings, cancels, and the tests of Triton's Python backend that are clients."""

from collections.abc import Callable
from typing import Final

from tests.compat.triton_qa.repositories import Repository
from tests.compat.triton_qa.rows import ON_8002, Row, adds

_EXPLICIT: Final = ("--model-control-mode=explicit",)
#: With one, ``trace_level`` begins as ``TIMESTAMPS``; nobody is there.
_COLLECTOR: Final = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
_LATENCIES: Final = ("counters_exist", "histograms_missing", "summaries_missing")


def _cache(repository: Repository) -> None:
    repository.add("qa_model_repository/onnx_float32_float32_float32")
    repository.add("qa_ensemble_model_repository/qa_model_repository/simple_onnx_float32_float32_float32")


def _simple(repository: Repository) -> None:
    repository.add("qa_model_repository/onnx_int32_int32_int32", name="simple")
    repository.edit("simple", ("version_policy.*", "version_policy: { specific { versions: [1] } }"))


def _queue_sizes(repository: Repository) -> None:
    delay = "max_queue_delay_microseconds: 100000"
    dynamic = f"dynamic_batching {{ {delay} }}"
    for name, batching in {
        "default": "",
        "default_composing": "",
        "dynamic": dynamic,
        "dynamic_composing": dynamic,
        "max_queue_size": f"dynamic_batching {{ {delay} default_queue_policy {{ max_queue_size: 4 }} }}",
        "sequence_direct": f"sequence_batching {{ direct {{ {delay} minimum_slot_utilization: 1.0 }} }}",
        "sequence_oldest": f"sequence_batching {{ oldest {{ {delay} max_candidate_sequences: 4 }} }}",
    }.items():
        repository.add("identity_delay", name=name)
        repository.append(name, batching)
    repository.add("ensemble_delay", name="ensemble")


def _identity(name: str, datatype: str, max_batch_size: int, delay_ms: int, more: str = "") -> str:
    tensors = "".join(
        f'{kind} [{{ name: "{kind.upper()}0" data_type: {datatype} dims: [ -1 ] }}]\n' for kind in ("input", "output")
    )
    delay = f'parameters [{{ key: "execute_delay_ms" value: {{ string_value: "{delay_ms}" }} }}]'
    return f'name: "{name}"\nbackend: "identity"\nmax_batch_size: {max_batch_size}\n{tensors}{more}\n{delay}\n'


def _write(repository: Repository, name: str, config: str) -> None:
    (repository.path / name).mkdir()
    (repository.path / name / "config.pbtxt").write_text(config)
    repository.complete(name)


def _cancelled(repository: Repository) -> None:
    name = "custom_identity_int32"
    _write(repository, name, _identity(name, "TYPE_INT32", 1024, 10_000))


def _cancelled_in_schedulers(repository: Repository) -> None:
    idle = "max_sequence_idle_microseconds: 6000000"
    for name, max_batch_size, batching in (
        ("dynamic_batch", 2, "dynamic_batching { max_queue_delay_microseconds: 600000 }"),
        ("sequence_direct", 1, f"sequence_batching {{ direct {{ }} {idle} }}"),
        ("sequence_oldest", 1, f"sequence_batching {{ oldest {{ max_candidate_sequences: 1 }} {idle} }}"),
    ):
        _write(repository, name, _identity(name, "TYPE_FP32", max_batch_size, 6000, batching))
    step = 'model_name: "dynamic_batch" model_version: -1 input_map {{ key: "INPUT0" value: "{}" }} '
    step += 'output_map {{ key: "OUTPUT0" value: "{}" }}'
    steps = ", ".join(f"{{ {step.format(*names)} }}" for names in (("INPUT0", "out"), ("out", "OUTPUT0")))
    config = _identity("ensemble_model", "TYPE_FP32", 1, 0).replace('backend: "identity"', 'platform: "ensemble"')
    _write(repository, "ensemble_model", f"{config}ensemble_scheduling {{ step [ {steps} ] }}\n")


def _response_senders(repository: Repository) -> None:
    for decoupled in ("", "_decoupled"):
        for program in ("", "_async"):
            for batching in ("", "_batching"):
                name = f"response_sender{decoupled}{program}{batching}"
                repository.add("python_models/response_sender", name=name)
                folder = repository.path / name
                (folder / "model_common.py").rename(folder / "1" / "model_common.py")
                if program:
                    (folder / "model_async.py").rename(folder / "1" / "model.py")
                if decoupled:
                    repository.append(name, "model_transaction_policy { decoupled: True }")
                if batching:
                    repository.append(name, "dynamic_batching { max_queue_delay_microseconds: 500000 }")


def _errors(repository: Repository) -> None:
    names = "error_code execute_cancel execute_error execute_grpc_error decoupled_grpc_error execute_return_error"
    repository.add(*(f"python_models/{name}" for name in f"{names} wrong_model".split()))
    for name, delay_us in (("execute_error", 12_000_000), ("execute_grpc_error", 1_200_000)):
        repository.edit(name, ("(?m)^max_batch_size:.*", "max_batch_size: 8"))
        batching = f"preferred_batch_size: [8], max_queue_delay_microseconds: {delay_us}"
        repository.append(name, f"dynamic_batching {{ {batching} }}")
    repository.edit("wrong_model", ("TYPE_FP32", "TYPE_UINT32"))


def _streams(repository: Repository) -> None:
    repository.add("models/*", *(f"python_models/{name}" for name in ("identity_fp32", "execute_cancel")))
    repository.add("python_models/response_sender_until_cancelled", "python_models/dlpack_add_sub")
    repository.append("execute_cancel", "model_transaction_policy { decoupled: True }")


def _ensemble(repository: Repository) -> None:
    repository.add("python_models/ensemble")
    for name in ("add_sub_1", "add_sub_2"):
        repository.add("python_models/add_sub", name=name)


def _ready(repository: Repository) -> None:
    repository.add("python_models/identity_fp32", "test_models/is_ready_fn_returns_true_decoupled")
    for name, value, delay_s in (
        ("returns_true", "true", 0.1),
        ("returns_false", "false", 0.1),
        ("raises_error", "exception", 0.1),
        ("returns_non_boolean", "non_boolean", 0.1),
        ("timeout", "true", 8),
        ("coroutine_returns_true", "coroutine", 0.1),
    ):
        model = f"is_ready_fn_{name}"
        repository.add("python_models/identity_fp32", name=model)
        kind = "readiness_coroutine_model" if value == "coroutine" else "readiness_model"
        program = repository.qa / repository.folder / "test_models" / f"{kind}.py"
        (repository.path / model / "1" / "model.py").write_bytes(program.read_bytes())
        for key, parameter in (("RETURN_VALUE", value), ("DELAY_SECS", delay_s)):
            text = f'key: "READINESS_FN_{key}" value: {{ string_value: "{parameter}" }}'
            repository.append(model, f"parameters: {{ {text} }}")


def _python(repository: Repository) -> None:
    names = "identity_fp32 identity_bf16 delayed_model init_args optional non_contiguous string string_fixed"
    repository.add(*(f"python_models/{name}" for name in f"{names} dlpack_identity".split()))
    for name, datatype in (("uint8", "UINT8"), ("uint8_nobatch", "UINT8"), ("uint32", "UINT32"), ("bool", "BOOL")):
        repository.add("python_models/identity_fp32", name=f"identity_{name}")
        repository.edit(f"identity_{name}", ("TYPE_FP32", f"TYPE_{datatype}"))
    repository.edit("identity_uint8", ("(?m)^max_batch_size:.*", "max_batch_size: 8"))
    batching = "preferred_batch_size: [8], max_queue_delay_microseconds: 12000000"
    repository.append("identity_uint8", f"dynamic_batching {{ {batching} }}")
    repository.edit("identity_uint8_nobatch", ("(?m)^max_batch_size:.*", ""))


def _backend(folder: str, test: str, models: Callable[[Repository], None], cases: tuple[str, ...] = ()) -> Row:
    environment = {"TEST_JETSON": "1"}  # without the monitor of memory, which is part of Triton's backend
    return Row(f"L0_backend_python{folder}", test, models, folder.strip("/"), cases, environment=environment)


def _metrics(title: str, model: str, *cases: str) -> Row:
    names = tuple(f"MetricsConfigTest.test_{case}" for case in cases)
    options = (*_EXPLICIT, f"--load-model={model}")
    return Row("L0_metrics", "metrics_config_test.py", adds("unit_test_models/*"), title, names, options)


_CANCELS: Final = ("grpc_async_infer", "grpc_stream_infer", "aio_grpc_async_infer", "aio_grpc_stream_infer")
_CACHES: Final = ("top_level_response_cache", "all_models_cache_enabled", "composing_model_cache_enabled")
_PYTHON: Final = ("growth_error", "async_infer", "bool", "bf16", "init_args", "unicode", "optional_input", "string")

ROWS: Final = (
    *(
        Row(
            "L0_response_cache", "ensemble_cache_test.py", _cache, case, (f"EnsembleCacheTest.test_ensemble_{case}",),
            _EXPLICIT, repository="models/ensemble_models",
        )
        for case in _CACHES
    ),
    _metrics("counters", "identity_cache_off", *(f"inf_{case}" for case in _LATENCIES), "cache_counters_missing"),
    _metrics("cache", "identity_cache_on", "cache_counters_exist"),
    *(
        Row(
            "L0_metrics", "metrics_queue_size_test.py", _queue_sizes, case,
            (f"MetricsPendingRequestCountTest.{case}",), ON_8002,
        )
        for case in (
            "test_default_scheduler", "test_dynamic_batch_scheduler", "test_fail_max_queue_size",
            "test_sequence_batch_scheduler_direct", "test_sequence_batch_scheduler_oldest", "test_ensemble_scheduler",
        )
    ),
    Row("L0_trace", "trace_endpoint_test.py", _simple, server_environment=_COLLECTOR),
    Row("L0_logging", "logging_endpoint_test.py", _simple),
    Row(
        "L0_request_cancellation", "grpc_cancellation_test.py", _cancelled, "calls",
        tuple(f"GrpcCancellationTest.test_{case}" for case in _CANCELS),
    ),
    Row("L0_request_cancellation", "scheduler_test.py", _cancelled_in_schedulers, "schedulers"),
    _backend("", "python_test.py", _python, tuple(f"PythonTest.test_{case}" for case in (*_PYTHON, "non_contiguous"))),
    _backend(
        "/parameters", "response_parameters_test.py",
        adds(*(f"python_models/response_parameters{kind}" for kind in ("", "_decoupled", "_bls"))),
    ),
    _backend("/response_sender", "response_sender_test.py", _response_senders),
    _backend("/lifecycle", "lifecycle_test.py", _errors),
    _backend("/decoupled", "decoupled_test.py", _streams),
    _backend("/ensemble", "ensemble_test.py", _ensemble, ("EnsembleTest.test_ensemble",)),
    _backend("/model_readiness", "test_model_readiness.py", _ready, ("TestUserDefinedModelReadinessFunction",)),
    _backend(
        "/async_execute", "concurrency_test.py",
        adds("python_models/async_execute_decouple", "python_models/async_execute_decouple_bls"),
    ),
)  # fmt: skip
