"""Batchers, sequences, streams, the life of models, warm-up, caches and metrics."""

import shutil
from collections.abc import Callable, Iterator
from typing import Final

from tests.compat.triton_qa.repositories import Repository
from tests.compat.triton_qa.rows import ON_8002, Row

_FLOAT: Final = "float32_float32_float32"
_DELAY: Final = "TRITONSERVER_DELAY_SCHEDULER"
_BACKLOG: Final = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
_RAGGED: Final = ('name: "INPUT0"', 'name: "INPUT0"\nallow_ragged_batch: true')
_ANY_DIMS: Final = (r"dims:.*\[.*\]", "dims: [ -1 ]")


def _batcher(source: str, preferred: str, delay_us: int) -> Callable[[Repository], None]:
    batching = f"preferred_batch_size: [ {preferred} ]"
    batching = f"dynamic_batching {{ {batching} max_queue_delay_microseconds: {delay_us} }}"

    def models(repository: Repository) -> None:
        repository.add(f"{source}/onnx_{_FLOAT}")
        repository.add(f"{source}/onnx_{_FLOAT}", name=f"python_{_FLOAT}")
        program = repository.path / f"python_{_FLOAT}" / "1" / "model.py"
        program.write_bytes((repository.qa / "python_models" / "add_sub" / "model.py").read_bytes())
        repository.edit("python_*", ("platform:.*", 'backend: "python"'))
        repository.edit("*", ("max_batch_size:.*", "max_batch_size: 8"))
        repository.edit("*", ("version_policy:.*", "version_policy: { specific { versions: [1] }}"))
        if "variable" in source:
            repository.edit("*", ("16", "-1"))
            identity = "qa_identity_model_repository/onnx_nobatch_zero_1_float32"
            repository.add(identity, name="onnx_zero_1_float32")
            repository.add("custom_models/custom_zero_1_float32")
            repository.edit("*zero_1*", ("max_batch_size:.*", "max_batch_size: 8"), _RAGGED)
            repository.edit("custom_zero_1_float32", _ANY_DIMS)
            scatter = 'target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0"'
            repository.append("onnx_zero_1_float32", f"batch_output [{{ {scatter} }}]")
        repository.append("*", batching)

    return models


def _delayed(delay_us: int) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        name = "custom_zero_1_float32"
        repository.add(f"custom_models/{name}")
        repository.edit(name, _ANY_DIMS, ("max_batch_size:.*", "max_batch_size: 100"))
        delay = 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'
        repository.append(name, f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }} {delay}")

    return models


_BATCHES: Final = (
    "static_batch_preferred static_batch_lt_any_preferred static_batch_not_preferred static_batch_gt_max_preferred "
    "multi_batch_not_preferred multi_batch_gt_max_preferred multi_batch_sum_gt_max_preferred multi_same_output0 "
    "multi_same_output1 multi_different_outputs multi_different_output_order"
)
_HELD: Final = {
    "multi_batch_delayed_sum_gt_max_preferred": 2,
    "multi_batch_use_biggest_preferred": 6,
    "multi_batch_use_best_preferred": 3,
    "multi_batch_delayed_use_max_batch": 3,
}
_SHAPES: Final = {
    "multi_batch_not_preferred_different_shape": 0,
    "multi_batch_preferred_different_shape": 0,
    "multi_batch_different_shape_allow_ragged": 0,
    "multi_batch_different_shape": 0,
    "multi_batch_delayed_preferred_different_shape": 4,
}
_PREFERRED: Final = {"aligned": 4, "unaligned": 5, "use_biggest_preferred": 7, "use_no_preferred_size": 3}


def _held(num_requests: int, backlog: int | None = None) -> dict[str, str]:
    held = {_DELAY: str(num_requests)} if num_requests else {}
    return held if backlog is None else held | {_BACKLOG: str(backlog)}


def _held_in_weft(held: dict[str, str]) -> dict[str, str]:
    """The same for Weft, whose setting counts the requests of the backlog too."""
    return _held(int(held[_DELAY]) + int(held[_BACKLOG])) if held else {}


def _batcher_rows() -> Iterator[Row]:
    fixed = _batcher("qa_model_repository", "2, 6", 10_000_000)
    variable = _batcher("qa_variable_model_repository", "2, 6", 10_000_000)
    cases = [
        (kind, models, f"test_{case}", held)
        for kind, models in (("FIXED", fixed), ("VARIABLE", variable))
        for case, held in (dict.fromkeys(_BATCHES.split(), 0) | _HELD).items()
    ]
    cases += [("VARIABLE", variable, f"test_{case}", held) for case, held in _SHAPES.items()]
    preferred = _batcher("qa_model_repository", "4, 6", 0)
    cases += [("FIXED", preferred, f"test_preferred_batch_only_{case}", held) for case, held in _PREFERRED.items()]
    for name, delay_us in (("default", 0), ("non_default", 20_000)):
        cases.append(("FIXED", _delayed(delay_us), f"test_max_queue_delay_only_{name}", 0))
    for kind, models, case, held in cases:
        environment = {"BATCHER_TYPE": kind, "BACKENDS": "onnx python"} | _held(held)
        yield Row(
            "L0_batcher", "batcher_test.py", models, f"{kind} {case}", (f"BatcherTest.{case}",),
            environment=environment, server_environment=_held(held),
        )  # fmt: skip


def _sequences(trial: str, *, delay: bool = False) -> Callable[[Repository], None]:
    kind, infix = "variable_" if trial == "v" else "", "nobatch_" if trial == "0" else ""
    max_batch, count = {"0": (0, 4), "1": (4, 1), "2": (2, 2), "4": (1, 4), "v": (4, 1)}[trial]

    def models(repository: Repository) -> None:
        base = f"qa_{kind}sequence_model_repository"
        ensembles = f"qa_ensemble_model_repository/{base}"
        repository.add(*(f"{base}/onnx_{infix}sequence_{dtype}" for dtype in ("int32", "bool")))
        if not delay:
            repository.add(f"{ensembles}/*_onnx_{infix}sequence_int32")
            repository.add("qa_ensemble_model_repository/qa_sequence_model_repository/nop_*")
        for onnx in list(repository.path.glob("*onnx_*")):
            name = onnx.name.replace("onnx", "python")
            repository.add(
                f"{base}/{onnx.name}" if onnx.name.startswith("onnx") else f"{ensembles}/{onnx.name}", name=name
            )
            if onnx.name.startswith("onnx"):
                program = repository.qa / "python_models" / "sequence_int32" / "model.py"
                (repository.path / name / "1" / "model.py").write_bytes(program.read_bytes())
            repository.edit(name, ("platform:.*onnxruntime.*", 'backend: "python"'), ("onnx", "python"))
        repository.edit("*sequence_*", ("kind: KIND_CPU", f"kind: KIND_CPU\ncount: {count}"))
        if trial != "0":
            repository.edit("*sequence_*", ("max_batch_size:.*", f"max_batch_size: {max_batch}"))
        if delay:
            for model in list(repository.path.iterdir()):
                for suffix, utilization in (("_half", "0.5"), ("_full", "1"), ("", "0")):
                    direct = f"max_queue_delay_microseconds: 3000000 minimum_slot_utilization: {utilization}"
                    if suffix:
                        repository.copy(model.name, model.name + suffix)
                    changed = (r"sequence_batching \{", f"sequence_batching {{ direct {{ {direct} }}")
                    repository.edit(model.name + suffix, changed)

    return models


_SEQUENCES: Final = (
    "simple_sequence length1_sequence batch_size no_sequence_start no_sequence_start2 no_sequence_end no_correlation_id"
)
#: Requests that the scheduler waits for, and sequences in the backlog.
_HELD_SEQUENCES: Final = {
    "backlog_fill": (10, 2),
    "backlog_fill_no_end": (10, 3),
    "backlog_same_correlation_id": (12, 2),
    "backlog_same_correlation_id_no_end": (16, 0),
    "backlog_sequence_timeout": (4, 0),
    "half_batch": (8, 0),
    "skip_batch": (12, 0),
    "full_batch": (12, 0),
    "ragged_batch": (12, 0),
    "backlog": (12, 0),
}


def _sequence_rows() -> Iterator[Row]:
    for trial in "0124v":
        fixed = {
            "BACKENDS": "onnx python", "ENSEMBLES": "1", "IMPLICIT_STATE": "0", "INITIAL_STATE_FILE": "0",
            "NO_BATCHING": str(int(trial == "0")), "MODEL_INSTANCES": {"0": "4", "v": "1"}.get(trial, trial),
            "BATCHER_TYPE": "VARIABLE" if trial == "v" else "FIXED",
        }  # fmt: skip
        cases = {case: _held(0) for case in _SEQUENCES.split()}
        cases |= {case: _held(*held) for case, held in _HELD_SEQUENCES.items()}
        for case, held in cases.items():
            yield Row(
                "L0_sequence_batcher", "sequence_batcher_test.py", _sequences(trial), f"{trial} {case}",
                (f"SequenceBatcherTest.test_{case}",), environment=fixed | held, server_environment=_held_in_weft(held),
            )  # fmt: skip
        for case in ("no_min_util", "half_min_util", "full_min_util") if trial == "1" else ():
            yield Row(
                "L0_sequence_batcher", "sequence_batcher_test.py", _sequences(trial, delay=True), f"queue delay {case}",
                (f"SequenceBatcherTest.test_queue_delay_{case}",), environment=fixed | _held(2, 0),
                server_environment=_held(2, 0),
            )  # fmt: skip


def _dyna(*, batching: bool) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        repository.add("qa_dyna_sequence_model_repository/onnx_*")
        repository.edit("*", ("kind: KIND_CPU", "kind: KIND_CPU\ncount: 1"))
        if batching:
            delay = ("max_queue_delay_microseconds:.*", "max_queue_delay_microseconds: 5000000")
            repository.edit("*", ("max_candidate_sequences:.*", "max_candidate_sequences: 4"), delay)

    return models


def _dyna_rows() -> Iterator[Row]:
    for batching, cases in (
        (False, "simple_sequence length1_sequence"),
        (
            True,
            "multi_sequence_different_shape multi_sequence multi_parallel_sequence backlog backlog_fill "
            "backlog_fill_no_end backlog_sequence_timeout",
        ),
    ):
        environment = {"BACKENDS": "onnx", "IMPLICIT_STATE": "0", "NO_BATCHING": str(int(not batching))}
        for case in cases.split():
            yield Row(
                "L0_dyna_sequence_batcher", "dyna_sequence_batcher_test.py", _dyna(batching=batching), case,
                (f"DynaSequenceBatcherTest.test_{case}",), environment=environment,
            )  # fmt: skip


def _corrid(datatype: str) -> Callable[[Repository], None]:
    control = f"kind: CONTROL_SEQUENCE_CORRID data_type: {datatype}"

    def models(repository: Repository) -> None:
        repository.add("python_models/add_sub")
        repository.append(
            "add_sub", f'sequence_batching {{ control_input [{{ name: "CORRID" control [{{ {control} }}] }}] }}'
        )

    return models


def _decoupled(repository: Repository) -> None:
    repository.add("models/*", "test/repeat_int32", "test/square_int32")
    adder = "libtorch_nobatch_int32_int32_int32"  # one in Python under this name: TorchScript is not served
    repository.add("python_models/add_sub", name=adder)
    program = repository.qa / "python_models" / "sub_add" / "model.py"
    (repository.path / adder / "1" / "model.py").write_bytes(program.read_bytes())
    repository.edit(adder, ("TYPE_FP32", "TYPE_INT32"), (r"dims: *\[ *\d+ *\]", "dims: [ 1 ]"))
    repository.edit("fan_repeat", ("OUTPUT__", "OUTPUT"))


def _non_decoupled(repository: Repository) -> None:
    repository.add("test/repeat_int32")
    repository.edit("*", ("decoupled: True", "decoupled: False"))


def _controlled(*, is_empty: bool = False) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        repository.add(f"qa_model_repository/onnx_{_FLOAT}")
        if is_empty:
            for file in (repository.path / f"onnx_{_FLOAT}").glob("*/*"):
                file.unlink()
        else:
            repository.add(f"qa_ensemble_model_repository/qa_model_repository/simple_onnx_{_FLOAT}")
        repository.edit("*", ("max_batch_size:.*", "max_batch_size: 1"))

    return models


def _reloaded(case: str) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        name = "identity_zero_1_int32"
        repository.add(name)
        config = repository.path / name / "config.pbtxt"
        plain = config.read_text()
        versions = {number: f"version_policy: {{ specific {{ versions: [{number}] }} }}\n" for number in (1, 2)}
        if case != "model_availability_on_reload":
            repository.copy_version(name, "1", "2")
            config.write_text(f"{plain}\n{versions[1]}")
        tests = repository.path.parent
        (tests / "config.pbtxt.v2").write_text(f"{plain}\n{versions[2]}")
        (tests / "config.pbtxt.v2.gpu").write_text(f"{plain}\n{versions[2]}".replace("KIND_CPU", "KIND_GPU"))
        (tests / "config.pbtxt.new").write_text(f"{plain}\n{versions[1]}")

    return models


def _config_override(repository: Repository) -> None:
    repository.add(f"qa_model_repository/onnx_{_FLOAT}")
    for version in ("1", "3"):
        (repository.path / f"onnx_{_FLOAT}" / version / "model.onnx").unlink()


def _file_override(repository: Repository) -> None:
    repository.add(f"qa_model_repository/onnx_{_FLOAT}")
    shutil.rmtree(repository.path / f"onnx_{_FLOAT}" / "1")


def _replaced(repository: Repository) -> None:
    repository.add("identity_zero_1_int32", name="identity_model")
    later = repository._replace(path=repository.path.parent / "models_v2")
    later.path.mkdir()
    later.add("python_models/identity_fp32", name="identity_model")


def _slow_to_load(repository: Repository) -> None:
    repository.add("identity_zero_1_int32", "ensemble_zero_1_float32", "custom_models/custom_zero_1_float32")
    delay = 'parameters [{ key: "creation_delay_sec" value { string_value: "10" } }]'
    repository.append("custom_zero_1_float32", delay)


def _slow_to_end(repository: Repository) -> None:
    repository.add("ensemble_zero_1_float32", "custom_models/custom_zero_1_float32")
    delay = 'parameters [{ key: "execute_delay_ms" value { string_value: "5000" } }]'
    repository.append("custom_zero_1_float32", f"dynamic_batching {{ }} {delay}")


def _versions(repository: Repository) -> None:
    repository.add("python_models/identity_fp32")
    repository.append("identity_fp32", "version_policy: { specific: { versions: [1, 2] } }")
    program = repository.path / "identity_fp32" / "1" / "model.py"
    log = "pb_utils.Logger.log_info(f'[PB model] Loading version {args[\"model_version\"]}')"
    program.write_text(f"{program.read_text()}\n    def initialize(self, args):\n        {log}\n")
    for version in ("2", "3"):
        repository.copy_version("identity_fp32", "1", version)


def _lifecycle_rows() -> Iterator[Row]:
    explicit = ("--model-control-mode=explicit",)
    files = (*explicit, f"--load-model=onnx_{_FLOAT}", "--service-args=model=--allow-load-files")
    identity = (*explicit, "--load-model=identity_zero_1_int32")
    rows: list[tuple[str, Callable[[Repository], None], tuple[str, ...], dict[str, str]]] = [
        ("model_control", _controlled(), explicit, {}),
        ("model_control_fail", _controlled(is_empty=True), explicit, {}),
        ("model_control_ensemble", _controlled(), explicit, {}),
        ("model_reload_fail", _reloaded("model_reload_fail"), identity, {}),
        ("config_override", _config_override, explicit, {}),
        ("file_override", _file_override, files, {}),
        ("file_override_security", _file_override, files, {}),
        ("concurrent_model_load", _replaced, explicit, {}),
        ("concurrent_model_load_unload", _slow_to_load, explicit, {}),
        ("load_new_model_version", _versions, (*explicit, "--load-model=*"), {}),
        ("shutdown_dynamic", _slow_to_end, (), {}),
        ("shutdown_ensemble", _slow_to_end, (), {}),
    ]
    for case in ("", "_2", "_3"):
        name = f"model_availability_on_reload{case}"
        rows += [(name, _reloaded(name), identity, use) for use in ({}, {"TRITONSERVER_USE_GRPC": "1"})]
    for name, models, options, environment in rows:
        yield Row(
            "L0_lifecycle", "lifecycle_test.py", models, name, (f"LifeCycleTest.test_{name}",), options,
            environment=environment,
        )  # fmt: skip


_LONG: Final = "max_queue_delay_microseconds: 10000000"
_QUEUES: Final = {
    "max_queue_size": "default_queue_policy { max_queue_size: 8 } }"
    ' parameters { key: "execute_delay_ms" value { string_value: "5000" }',
    "policy_delay": f"{_LONG} default_queue_policy {{ timeout_action: DELAY default_timeout_microseconds: 100000 }}",
    "policy_reject": f"{_LONG} default_queue_policy {{ default_timeout_microseconds: 100000 }}",
    "timeout_override": f"{_LONG} default_queue_policy {{ allow_timeout_override: true "
    "default_timeout_microseconds: 1000000 }",
    "priority_levels": f"{_LONG} priority_levels: 2 default_priority_level: 2",
    "max_priority_levels": f"{_LONG} priority_levels: 18446744073709551615 default_priority_level: 4294967296",
    "priority_with_policy": f"{_LONG} priority_levels: 2 default_priority_level: 2 default_queue_policy {{ "
    "timeout_action: DELAY allow_timeout_override: true default_timeout_microseconds: 11000000 } "
    "priority_queue_policy { key: 2 value { timeout_action: REJECT allow_timeout_override: true "
    "default_timeout_microseconds: 11000000 } }",
}


def _queued(case: str, policy: str) -> Callable[[Repository], None]:
    sizes = "4, 8, 32" if case == "priority_with_policy" else "4, 8"

    def models(repository: Repository) -> None:
        repository.add("ensemble_zero_1_float32", "custom_models/custom_zero_1_float32")
        repository.edit("custom_zero_1_float32", _ANY_DIMS, ("max_batch_size:.*", "max_batch_size: 32"))
        repository.append("custom_zero_1_float32", f"dynamic_batching {{ preferred_batch_size: [ {sizes} ] {policy} }}")

    return models


def _queue_rows() -> Iterator[Row]:
    for case, policy in _QUEUES.items():
        yield Row(
            "L0_model_queue",
            "model_queue_test.py",
            _queued(case, policy),
            case,
            (f"ModelQueueTest.test_{case}",),
            ON_8002,
        )


ROWS: Final = (
    *_sequence_rows(),
    *_dyna_rows(),
    *(
        Row(
            "L0_sequence_corrid_batcher", "sequence_corrid_batcher_test.py", _corrid(datatype), datatype,
            ("SequenceCorrIDBatcherTest.test_corrid_data_type",),
            environment={"TRITONSERVER_CORRID_DATA_TYPE": datatype, "NO_BATCHING": "0", "MODEL_INSTANCES": "4"},
        )
        for datatype in ("TYPE_STRING", "TYPE_UINT32", "TYPE_INT32", "TYPE_UINT64", "TYPE_INT64")
    ),
    *_batcher_rows(),
    Row("L0_decoupled", "decoupled_test.py", _decoupled, "decoupled", ("DecoupledTest",)),
    Row("L0_decoupled", "decoupled_test.py", _non_decoupled, "not decoupled", ("NonDecoupledTest",)),
    *_lifecycle_rows(),
    *_queue_rows(),
)  # fmt: skip
