"""What runs: one row per start of the mesh, after the test.sh of Triton's folders."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.compat.triton_qa.repositories import Repository


@dataclass(frozen=True)
class Row:
    """A test file of one folder, and the mesh that it calls.

    Attributes:
        folder: In ``qa``.
        test: File in it.
        models: Fills the model repository.
        title: Tells the rows of a folder apart.
        cases: ``Class.test``; none: all of the file.
        options: Of ``weft up``.
        environment: Of the tests.
        server_environment: Of the mesh.
        repository: Folder of the models, in the test's.
    """

    folder: str
    test: str
    models: Callable[[Repository], None]
    title: str = ""
    cases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server_environment: Mapping[str, str] = field(default_factory=dict)
    repository: str = "models"

    def allows(self, case: str) -> str:
        """Why a case may fail; "": it may not."""
        found = DIFFERS.get(self.folder.partition("/")[0], {}).items()
        return next((why for pattern, why in found if re.fullmatch(pattern, case.rpartition(".")[2])), "")


SHM: Final = ("--allow-client-shm", "--service-args=model=--allow-client-shm")
#: The page of the models' service is on Triton's port, not the router's, which counts what it sees.
ON_8002: Final = ("--metrics-port=7982",)
EXPLICIT: Final = ("--model-control-mode=explicit", "--load-model=*")


def adds(*patterns: str, name: str = "") -> Callable[[Repository], None]:
    """A repository of these models (``Repository.add``)."""
    return lambda repository: repository.add(*patterns, name=name)


#: Cases that fail, by folder and regular expression, and why.
DIFFERS: Final = {
    "L0_http": {
        "test_descriptive_status_code": "a full queue is 429 with Retry-After, not 503",
        "test_negative_dimensions": "a client's fault is 400, not 500",
        "test_load_oversized_file_parameter": "files of clients are taken with --allow-load-files alone, else 501",
        "test_json_recursion_depth_limit": "JSON that nests deeper than 100 is taken where the data fit",
        "test_byte_too_many_elements": "a raw body is the one string of a shape that is open",
        "test_0_dimension_output": "an output of another datatype than declared is an error",
        "test_generate_stream_response_error": "a stream that begins with an error is answered in JSON",
        "test_.*(nested|size_expansion|overflow|invalid|schema|duplicate|parameters).*": "refused, in other words",
    },
    "L0_grpc": {
        "test_bytes_contents_many_elements_serialization": "an input has at most 1,048,576 strings",
        "test_register_system_shared_memory": "a region that is not there is INVALID_ARGUMENT, not INTERNAL",
        "test_register_cuda_shared_memory": "needs a GPU",
        "test_simple_infer": "headers are not forwarded as parameters",
    },
    "L0_simple_ensemble": {
        "test_ensemble_sequence_flags": "answers do not repeat the flags of sequences",
        "test_ensemble_partial_add_sub": "reads Triton's verbose log",
    },
    "L0_shared_memory": {
        "test_unregister_shm_during.*": "a region is off the list at once; requests that run keep it",
        "test_register_(reserved_names|out_of_bound)": "refused, in other words",
        "test_infer_(offset_out_of_bound|integer_overflow)": "refused, in other words",
        "test_python_client_leak": "measures the client's memory",
    },
    "L0_sequence_batcher": {
        "test_backlog|test_backlog_same_correlation_id": "the next sequence may take another row of the batch"
    },
    "L0_sequence_corrid_batcher": {"test_corrid_data_type": "refused, in other words"},
    "L0_lifecycle": {
        "test_model_reload_fail": "refused, in other words",
        "test_model_control|test_model_control_ensemble|test_concurrent_model_load_unload": (
            "over gRPC a model that is not loaded is NOT_FOUND"
        ),
        "test_load_new_model_version": "reads Triton's log",
        "test_shutdown_.*": "a client that comes at shutdown is told that the server has stopped",
        "": "weft up refuses a repository of which no model has a file",
        "test_model_availability_on_reload": "the stand-in for Triton's C++ model needs a file in each version",
    },
    "L0_metrics": {
        "test_cache_counters_missing": "the counters of the cache are there, at 0",
        "test_ensemble_scheduler": "ensembles are on the router's page, their models on that of the models' service",
    },
    "L0_backend_python": {
        "test_growth_error": "a body has at most 64 MiB",
        "test_async_infer|test_infer_pymodel_error": "counts of models are on the page of their service",
        "test_bf16": "models get BF16 as NumPy arrays, which Triton refuses",
        "test_init_args": "expects the path of Triton's image",
        "test_setting_wrong_type_response_parameters": "an empty list stands for no parameters",
        "test_error_code": "internal errors have an error id in their text",
        "test_decoupled_bls": "needs a GPU",
        "test_decoupled_bls_stream": "an iterator of responses has no len()",
        "test_execute_cancel": "reads Triton's log",
        "test_setting_float_response_parameters": "parameters may be floats",
        "test_setting_(int_key_type|nested|null)_response_parameters": "refused, in other words",
        "test_non_decoupled_two_response_pre_return": "a model that raises before its last response fails the request",
        "test_non_decoupled_one_response_on_and_post_return": "of two responses the sent one counts",
        "test_(multiple_concurrent|concurrent_execute).*": "an output of another shape than declared is an error",
        "test_is_ready_(raises_exception|returns_false|returns_non_boolean|takes_long_time)": "models have no is_ready",
    },
    "L0_trace": {".*": "trace_mode is opentelemetry, and there is no trace_file"},
    "L0_optional_input": {
        "test_ensemble_optional_pipeline": "the stand-in for Triton's C++ model leaves out what it is not given"
    },
    "L0_decoupled": {
        "test_one_to_multi_many": "slows Triton's own answers",
        "test_wrong_shape": "tests a C++ backend's message",
    },
}

#: Folders that are not run, and why.
NOT_RUN: Final = {
    "L0_simple_example, L0_client_*, clients of L0_http and L0_grpc": "tritonclient's examples: make compat runs them",
    "L0_cuda_*, L0_trt_*, L0_libtorch_*, L0_torch_*, L0_*openvino*": "need a GPU, TensorRT, TorchScript or OpenVINO",
    "L0_warmup": "has no tests of clients: it reads Triton's verbose log",
    "L0_python_api, L0_simple_lib, L0_memory*, L0_register, L0_query": "programs linked with Triton's own library",
    "L0_backend_* but Python's, L0_batch_custom, L0_repoagent_*, L0_storage_*": "plug-ins of the server, cloud stores",
}
