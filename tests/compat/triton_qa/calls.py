"""Requests: types, shapes, shared memory, HTTP and gRPC."""

import shutil
from collections.abc import Callable
from typing import Final

from tests.compat.triton_qa.repositories import Repository
from tests.compat.triton_qa.rows import EXPLICIT, SHM, Row, adds

_CPU: Final = {"TRITON_SERVER_CPU_ONLY": "1"}


def _infer_onnx(repository: Repository) -> None:
    repository.add("qa_model_repository/onnx_*")
    ensembles = "qa_ensemble_model_repository/qa_model_repository"
    repository.add(f"{ensembles}/*onnx*", f"{ensembles}/nop_*")
    mixed = ("wrong_label_int32", "label_override_int32", "mix_type_int32", "mix_nobatch_batch_float32")
    repository.add(*(f"ensemble_models/{name}_float32_float32" for name in mixed))
    repository.add("ensemble_models/batch_to_nobatch_*", "ensemble_models/nobatch_to_batch_*")
    zero, dims = "custom_zero_1_float32", r"dims: \[ 1 \]"
    repository.add(f"custom_models/{zero}")
    repository.add(f"custom_models/{zero}", name=zero.replace("zero", "nobatch_zero"))
    repository.edit(zero, ("max_batch_size: 1", "max_batch_size: 8"), (dims, "dims: [ -1 ]"))
    repository.edit("custom_nobatch_*", ("max_batch_size: 1", "max_batch_size: 0"), (dims, "dims: [ -1, -1 ]"))


def _infer_python(kind: str) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        prefix = "" if kind == "python" else "dlpack_"
        for onnx in sorted((repository.generated / "qa_model_repository").glob("onnx_*")):
            if "bf16" in onnx.name:
                continue
            name = onnx.name.replace("onnx", kind)
            is_swapped = any(name.endswith("_".join([dtype] * 3)) for dtype in ("float32", "int32", "int16", "int8"))
            model = repository.path / name
            (model / "1").mkdir(parents=True)
            program = f"python_models/{prefix}{'sub_add' if is_swapped else 'add_sub'}/model.py"
            (model / "1" / "model.py").write_bytes((repository.qa / program).read_bytes())
            (model / "output0_labels.txt").write_bytes((onnx / "output0_labels.txt").read_bytes())
            (model / "config.pbtxt").write_text((onnx / "config.pbtxt").read_text())
        repository.edit("*", ("platform:.*", ""), ("version_policy.*", 'backend: "python"'), ("onnx", kind))

    return models


def _infer(title: str, models: Callable[[Repository], None], backends: str, *, shm: bool = False) -> Row:
    environment = {**_CPU, "BACKENDS": backends, "ENSEMBLES": str(int("onnx" in backends))}
    if shm:
        environment["TEST_SYSTEM_SHARED_MEMORY"] = "1"
    return Row("L0_infer", "infer_test.py", models, title, options=SHM if shm else (), environment=environment)


def _reshape(repository: Repository) -> None:
    repository.add("qa_reshape_model_repository/*", "qa_ensemble_model_repository/qa_reshape_model_repository/*")
    names = [f"nobatch_zero_{i}_float32" for i in (3, 4)] + [f"zero_{i}_float32" for i in (1, 2, 3, 4)]
    names += [f"{prefix}zero_{i}_int32" for i in (1, 2, 3) for prefix in ("nobatch_", "")]
    for name in names:
        repository.add(f"qa_reshape_model_repository/onnx_{name}", name=f"custom_{name}")
        repository.edit(f"custom_{name}", ("platform:.*", 'backend: "identity"'))
        repository.complete(f"custom_{name}")


def _http(repository: Repository) -> None:
    base = "qa_identity_model_repository/onnx_zero_1"
    repository.add(*(f"{base}_{dtype}" for dtype in ("float32", "object", "float16")))
    repository.add("qa_identity_model_repository/onnx_zero_3_float32", "models/simple_identity")
    repository.add(f"{base}_object", name="onnx_zero_1_object_1_element")
    path = repository.path / "onnx_zero_1_object_1_element" / "config.pbtxt"
    path.write_text(path.read_text().replace("-1", "1", 1))
    repository.add(f"{base}_float32", name="onnx_zero_1_float32_queue")
    queue = (
        "max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ] default_queue_policy { max_queue_size: 1 }"
    )
    repository.append("onnx_zero_1_float32_queue", f"dynamic_batching {{ {queue} }}")
    repository.add("models/simple_identity", name="simple_identity_int64")
    repository.edit("simple_identity_int64", ("TYPE_STRING", "TYPE_INT64"))


def _shm_delayed(repository: Repository) -> None:
    repository.add("python_models/execute_delayed_model", name="simple")


def _shm_large(repository: Repository) -> None:
    repository.add("qa_model_repository/onnx_int32_int32_int32")
    for version in ("2", "3"):
        shutil.rmtree(repository.path / "onnx_int32_int32_int32" / version)
    repository.add("python_models/add_sub", name="python_int32_int32_int32")
    repository.edit("python_*", ("TYPE_FP32", "TYPE_INT32"))
    repository.append("python_*", "max_batch_size: 8")


def _batch_input(repository: Repository) -> None:
    source = "qa_ragged_model_repository/onnx_batch_input"
    kind, zero = "BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    summed = (rf"\b{kind}\b", "BATCH_ACCUMULATED_ELEMENT_COUNT")
    for name, other in (
        ("ragged_acc_shape", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"),
        ("batch_item_flatten", "BATCH_ITEM_SHAPE_FLATTEN"),
    ):
        repository.add(source, name=name)
        repository.edit(name, (zero, other), summed)
    path = repository.path / "batch_item_flatten" / "config.pbtxt"
    path.write_text(path.read_text().replace("-1", "-1, -1", 1))
    repository.add(source, name="ragged_element_count_acc_zero")
    repository.add("qa_ragged_model_repository/onnx_batch_item", name="batch_item")
    repository.add("qa_identity_model_repository/onnx_nobatch_zero_1_float32", name="ragged_io")
    ragged = ('name: "INPUT0"', 'name: "INPUT0"\nallow_ragged_batch: true')
    repository.edit("ragged_io", ("max_batch_size:.*", "max_batch_size: 4"), ragged)
    scatter = 'target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0"'
    repository.append(
        "ragged_io", f"batch_output [{{ {scatter} }}] dynamic_batching {{ max_queue_delay_microseconds: 1000000 }}"
    )


def _grpc(repository: Repository) -> None:
    repository.add("examples/simple", "python_models/string_identity")
    repository.edit("string_identity", (r"dims: \[ 1 \]", "dims: [ -1 ]"))


def _ensemble(repository: Repository) -> None:
    repository.add("examples/simple", "models/*")
    if not (repository.path / "simple" / "2").exists():
        repository.copy_version("simple", "1", "2")


def _nan_inf(repository: Repository) -> None:
    repository.add("models/*")
    for program in repository.path.glob("*/1/model.py"):
        program.write_text(program.read_text().replace("np.NINF", "-np.inf"))  # NumPy 2 has not the former


def _string_io(repository: Repository) -> None:
    repository.add("python_models/string_identity")
    repository.edit("string_identity", (r"\[ 1 \]", "[ 8 ]"))


def _class_count(repository: Repository) -> None:
    repository.add("python_models/identity_fp32")
    repository.add("python_models/identity_fp32", name="identity_bytes")
    repository.edit("identity_bytes", ("TYPE_FP32", "TYPE_STRING"))


def _server_status(repository: Repository) -> None:
    repository.add("qa_model_repository/*")


_EXAMPLES: Final = tuple(
    f"models/{name}"
    for name in ("simple", "simple_dyna_sequence", "simple_identity", "simple_sequence", "simple_string")
)
_OPTIONAL: Final = (
    "all_inputs optional_same_input optional_mix_inputs optional_mix_inputs_2 ensemble_all_inputs "
    "ensemble_optional_same_input ensemble_optional_mix_inputs ensemble_optional_mix_inputs_2 "
    "ensemble_optional_pipeline ensemble_optional_connecting_tensor"
)
_PROTOCOLS: Final = ("http", "grpc")
_SHM_CASES: Final = (
    "invalid_create_shm valid_create_set_register unregister_before_register unregister_after_register "
    "reregister_after_register unregister_after_inference register_after_inference too_big_shm "
    "mixed_raw_shm unregisterall infer_offset_out_of_bound infer_byte_size_out_of_bound "
    "infer_integer_overflow register_out_of_bound register_reserved_names register_invalid_shm_key "
    "python_client_leak"
)

ROWS: Final = (
    _infer("ONNX and ensembles", _infer_onnx, "onnx"),
    _infer("Python", _infer_python("python"), "python"),
    _infer("Python with DLPack", _infer_python("python_dlpack"), "python_dlpack"),
    _infer("ONNX in shared memory", _infer_onnx, "onnx", shm=True),
    _infer("Python in shared memory", _infer_python("python"), "python", shm=True),
    Row("L0_infer_reshape", "infer_reshape_test.py", _reshape),
    Row(
        "L0_infer_variable",
        "infer_variable_test.py",
        adds(
            "qa_variable_model_repository/*",
            "qa_ensemble_model_repository/qa_variable_model_repository/*onnx*",
            "qa_ensemble_model_repository/qa_variable_model_repository/nop_*",
        ),
    ),
    Row(
        "L0_infer_zero",
        "infer_zero_test.py",
        adds(
            "qa_identity_model_repository/*",
            "qa_ensemble_model_repository/qa_identity_model_repository/*",
        ),
    ),
    Row("L0_client_nobatch", "client_test.py", adds("qa_model_repository/onnx_*")),
    *(
        Row("L0_simple_ensemble", "ensemble_test.py", _ensemble, case, (f"EnsembleTest.test_ensemble_{case}",))
        for case in ("add_sub", "add_sub_one_output", "sequence_flags", "partial_add_sub")
    ),
    Row("L0_http", "http_test.py", _http, "calls", options=EXPLICIT),
    Row("L0_http", "generate_endpoint_test.py", adds("python_models/generate_models/*"), "generate"),
    Row(
        "L0_http",
        "python_http_aio_test.py",
        adds(*_EXAMPLES, "models/densenet_onnx", "models/simple_string_dyna_sequence"),
        "asyncio",
        options=SHM,
    ),
    Row(
        "L0_grpc",
        "python_grpc_aio_test.py",
        adds(*_EXAMPLES, "models/simple_int8", "models/densenet_onnx", "models/simple_string_dyna_sequence"),
        "asyncio",
        options=SHM,
    ),
    Row("L0_grpc", "python_unit_test.py", _grpc, "unit", ("GrpcTest",)),
    Row("L0_grpc", "grpc_client_plugin_test.py", adds("client_plugin_models/*"), "plugin"),
    *(
        row
        for protocol in _PROTOCOLS
        for row in (
            Row(
                "L0_shared_memory",
                "shared_memory_test.py",
                adds("examples/simple"),
                f"off {protocol}",
                cases=("SharedMemoryTest.test_client_shm_disabled_by_default",),
                environment={"CLIENT_TYPE": protocol},
            ),
            *(
                Row(
                    "L0_shared_memory",
                    "shared_memory_test.py",
                    models,
                    f"{protocol} {case}",
                    options=SHM,
                    cases=(case,),
                    environment={"CLIENT_TYPE": protocol},
                )
                for models, case in (
                    *((adds("examples/simple"), f"SharedMemoryTest.test_{case}") for case in _SHM_CASES.split()),
                    *(
                        (_shm_delayed, f"TestSharedMemoryUnregister.test_unregister_shm_{case}_{protocol}")
                        for case in ("during_inference_single_req", "during_inference_multiple_req", "after_inference")
                    ),
                )
            ),
            Row(
                "L0_shared_memory",
                "shared_memory_test.py",
                _shm_large,
                f"large {protocol}",
                options=SHM,
                cases=("SharedMemoryTest.test_large_shm_register_offset",),
                environment={"CLIENT_TYPE": protocol, "BACKENDS": "onnx python"},
            ),
            Row(
                "L0_parameters",
                "class_count_test.py",
                _class_count,
                f"classes {protocol}",
                environment={"CLIENT_TYPE": protocol},
            ),
        )
    ),
    Row("L0_string_io", "string_client_test.py", _string_io),
    Row("L0_nan_inf", "nan_inf_test.py", _nan_inf),
    Row("L0_scalar_io", "scalar_test.py", adds("qa_scalar_models/*")),
    *(
        Row("L0_optional_input", "optional_input_test.py", adds("models/*"), case, (f"OptionalInputTest.test_{case}",))
        for case in _OPTIONAL.split()
    ),
    Row("L0_batch_input", "batch_input_test.py", _batch_input, environment={"BACKEND": "onnx"}),
    *(
        Row(
            "L0_parameters",
            "parameters_test.py",
            adds("model_repository/*"),
            case,
            (f"InferenceParametersTest.{case}",),
            options,
            environment={"TEST_HEADER": str(int("headers" in case or "header" in case))},
        )
        for case, options in (
            ("test_params", ()),
            ("test_params_reserved_rejected", ()),
        )
    ),
    Row("L0_input_validation", "input_validation_test.py", adds("models/*"), "values", ("InputValTest",)),
)
