"""What a ``config.pbtxt`` means, and what is said about a wrong one."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.core import InferCall
from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError
from weft.base.tensors import Array, decode
from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.base import InstanceContext, TensorBackend
from weft.serving.config import ModelDefinition, define_model, parse_override
from weft.serving.config.placement import count_gpus
from weft.serving.queues.settings import WaitPolicy
from weft_protos.model_config_pb2 import DataType, ModelConfig, ModelInput

BASE = """\
backend: "echo"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
WARMUP = """\
model_warmup { batch_size: %d count: %d inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 %s } } }
"""


class Echo(TensorBackend):
    """Output Y is input X."""

    def load(self) -> None:
        """Nothing to load."""

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Y = X."""
        return {"Y": inputs["X"]}


class SelfDescribing(Echo):
    """Knows its own tensors."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """One input, one output, batches of 4."""
        tensor = {"data_type": "TYPE_FP32", "dims": ["-1"]}
        return {**config, "max_batch_size": 4, "input": [{"name": "X", **tensor}], "output": [{"name": "Y", **tensor}]}


class Failing(Echo):
    """Raises while it is asked for its tensors."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """As user code does."""
        raise SystemExit("secret detail")


class Decoupled(SelfDescribing):
    """Finds out that it is decoupled."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """As ``set_model_transaction_policy`` of a Python model does."""
        completed = SelfDescribing.auto_complete(config, directory)
        return {**completed, "model_transaction_policy": {"decoupled": True}}


class CpuOnly(Echo):
    """Has no use for a GPU."""

    can_use_gpu = False


BACKENDS = {"echo": Echo, "described": SelfDescribing, "failing": Failing, "decoupled": Decoupled, "cpu_only": CpuOnly}


def define(
    tmp_path: Path,
    text: str,
    *,
    versions: tuple[int, ...] = (1,),
    num_gpus: int = 0,
    override: str | None = None,
) -> ModelDefinition:
    """Definition of a model ``m`` with this configuration."""
    directory = tmp_path / "m"
    directory.mkdir(exist_ok=True)
    (directory / "config.pbtxt").write_text(text)
    return define_model(directory, versions, BACKENDS, num_gpus=num_gpus, override=override)


def test_missing_file(tmp_path: Path) -> None:
    """A folder without config.pbtxt and without a file that tells the backend is no model; the error names both."""
    (tmp_path / "m").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"m has no config.pbtxt, and the .* has none of model.onnx, "):
        define_model(tmp_path / "m", [1], BACKENDS, num_gpus=0)
    with pytest.raises(InvalidArgumentError, match=r"there is no .*m/config.pbtxt; .*--disable-auto-complete-config"):
        define_model(tmp_path / "m", [1], BACKENDS, num_gpus=0, completes=False)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [9]),
        ("version_policy { latest { num_versions: 2 } }", [3, 9]),
        ("version_policy { latest { num_versions: 99 } }", [1, 3, 9]),
        ("version_policy { all { } }", [1, 3, 9]),
        ("version_policy { specific { versions: [ 3, 1, 3 ] } }", [1, 3]),
    ],
)
def test_version_policy(tmp_path: Path, policy: str, expected: list[int]) -> None:
    """The policy picks versions by number; without one the highest is served."""
    definition = define(tmp_path, BASE + policy, versions=(9, 1, 3))
    assert expected == list(definition.contexts)
    assert expected == [int(context.signature.version) for context in definition.contexts.values()]
    assert [tmp_path / "m" / str(version) for version in expected] == [
        context.directory for context in definition.contexts.values()
    ]


def test_scheduler_settings(tmp_path: Path) -> None:
    """Every field of dynamic_batching reaches the scheduler, with its unit."""
    settings = define(
        tmp_path,
        BASE
        + """dynamic_batching { preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: 300 priority_levels: 3
             default_priority_level: 2 default_queue_policy { max_queue_size: 5 }
             priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 7
                                                    allow_timeout_override: true } } }""",
    ).settings
    assert settings.is_batching
    assert settings.max_batch_size == 8
    assert settings.preferred_batch_sizes == (2, 6)
    assert settings.max_queue_delay_us == 300
    assert (settings.priority_levels, settings.default_priority_level) == (3, 2)
    assert settings.default_policy == WaitPolicy(max_queue_size=5)
    assert settings.policies == {1: WaitPolicy("DELAY", 7, allow_timeout_override=True)}


def test_model_without_dynamic_batching(tmp_path: Path) -> None:
    """Without dynamic_batching each request is executed alone."""
    assert not define(tmp_path, BASE).settings.is_batching


def test_context_has_configuration_and_parameters(tmp_path: Path) -> None:
    """A backend sees the completed configuration with the names of config.pbtxt, and parameters as strings."""
    text = BASE.replace('backend: "echo"', 'backend: "echo" parameters { key: "k" value { string_value: "v" } }')
    context = define(tmp_path, text).contexts[1]
    assert context.parameters == {"k": "v"}
    assert context.config["name"] == "m"
    assert context.config["max_batch_size"] == 8
    assert context.config["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": ["4"]}]


def test_platform_names_the_backend(tmp_path: Path) -> None:
    """The platform names of Triton Inference Server stand for backends."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.pbtxt").write_text(BASE.replace('backend: "echo"', 'platform: "onnxruntime_onnx"'))
    definition = define_model(directory, [1], {"onnxruntime": Echo}, num_gpus=0)
    assert definition.config.backend == "onnxruntime"
    assert definition.backend is Echo
    assert definition.contexts[1].signature.platform == "onnxruntime_onnx"


def test_auto_complete_fills_in_what_is_missing(tmp_path: Path) -> None:
    """A backend that knows its tensors completes a configuration without them."""
    definition = define(tmp_path, 'backend: "described"')
    assert definition.contexts[1].signature.inputs[0].dims == (-1,)
    assert definition.settings.max_batch_size == 4
    assert definition.config.output[0].name == "Y"


def test_what_auto_complete_asks_for_is_checked(tmp_path: Path) -> None:
    """A backend cannot turn on what this version does not do."""
    with pytest.raises(PbtxtError, match="backend 'decoupled' answers each request once; remove model_transaction"):
        define(tmp_path, 'backend: "decoupled"')


def test_auto_complete_that_raises_is_an_internal_error_without_its_text(tmp_path: Path) -> None:
    """User code that fails, even by SystemExit, fails this model alone; the text stays in the log."""
    with pytest.raises(InternalError, match="auto-complete of model 'm' by backend 'failing' failed") as caught:
        define(tmp_path, 'backend: "failing"')
    assert "secret" not in caught.value.message


def test_auto_complete_is_not_run_on_a_faulty_configuration(tmp_path: Path) -> None:
    """User code sees sound configurations only, and missing tensors are then no further fault."""
    with pytest.raises(PbtxtError) as caught:
        define(tmp_path, 'backend: "failing"\ncc_model_filenames { key: "7" value: "x" }')
    assert [found.message for found in caught.value.diagnostics] == [
        "cc_model_filenames is not supported by this version; one file serves every device; use default_model_filename"
    ]


def test_backend_that_cannot_be_imported(tmp_path: Path) -> None:
    """A backend whose package is not installed is an error of the model, with the cause."""

    class Lazy(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise ImportError("No module named 'torch'")

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(BASE)
    with pytest.raises(UnavailableError, match="backend 'echo' cannot be imported: No module named 'torch'"):
        define_model(tmp_path / "m", [1], Lazy(BACKENDS), num_gpus=0)


@pytest.mark.parametrize(
    ("group", "num_gpus", "expected"),
    [
        ("", 0, [("m_0_0", "CPU", 0)]),
        ("", 2, [("m_0_0", "GPU", 0, None, True), ("m_0_1", "GPU", 1, None, True)]),
        (
            "instance_group { count: 2 gpus: [ 1, 0 ] }",
            2,
            [(f"m_0_{number}", "GPU", gpu, None, True) for number, gpu in enumerate((1, 1, 0, 0))],
        ),
        ("instance_group { count: 2 }", 0, [("m_0_0", "CPU", 0), ("m_0_1", "CPU", 0)]),
        ("instance_group { gpus: 3 }", 0, [("m_0_0", "CPU", 0)]),
        ("instance_group { kind: KIND_CPU }", 2, [("m_0_0", "CPU", 0)]),
        ("instance_group { kind: KIND_GPU count: 2 gpus: 1 }", 2, [("m_0_0", "GPU", 1), ("m_0_1", "GPU", 1)]),
        (
            'instance_group [ { kind: KIND_CPU }, { name: "fast" kind: KIND_GPU } ]',
            1,
            [("m_0_0", "CPU", 0), ("fast_0", "GPU", 0)],
        ),
    ],
)
def test_instances(tmp_path: Path, group: str, num_gpus: int, expected: list[tuple[Any, ...]]) -> None:
    """Count is per GPU of a GPU group; KIND_AUTO takes the GPUs that are there, and may still go on on the CPU."""
    definition = define(tmp_path, BASE + group, num_gpus=num_gpus)
    assert [InstanceContext(*place) for place in expected] == list(definition.instances)


def test_backend_without_use_for_a_gpu(tmp_path: Path) -> None:
    """KIND_AUTO leaves such a backend on the CPU."""
    definition = define(tmp_path, BASE.replace("echo", "cpu_only"), num_gpus=4)
    assert list(definition.instances) == [InstanceContext("m_0_0")]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("1,-1,0", 1), ("GPU-1f2e", 1)],
)
def test_count_gpus(tmp_path: Path, visible: str | None, expected: int) -> None:
    """Device files are counted, as far as CUDA_VISIBLE_DEVICES shows them."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert expected == count_gpus(environment, tmp_path)
    assert count_gpus(environment, tmp_path / "absent") == 0


def test_ignored_fields_are_named_in_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fields that only tune or label do not stop a model; the log says that they have no effect."""
    text = BASE + 'metric_tags { key: "a" value: "b" }\noptimization { eager_batching: true cuda { graphs: true } }'
    with caplog.at_level(logging.WARNING):
        define(tmp_path, text)
    assert [record.getMessage() for record in caplog.records] == [
        "m: ignored, without effect in this version: metric_tags, optimization.cuda, optimization.eager_batching"
    ]


def test_override_replaces_the_file(tmp_path: Path) -> None:
    """A configuration given as JSON is used in place of config.pbtxt, and checked like it."""
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    override = {"backend": "echo", "input": [{"name": "X", **tensor}], "output": [{"name": "Y", **tensor}]}
    assert define(tmp_path, BASE, override=json.dumps(override)).settings.max_batch_size == 0
    with pytest.raises(PbtxtError, match=r"^config parameter: error: unknown backend 'nope'"):
        define(tmp_path, BASE, override=json.dumps({**override, "backend": "nope"}))
    with pytest.raises(InvalidArgumentError, match="parameter 'config' is not a model configuration in JSON"):
        define(tmp_path, BASE, override="{")


def test_warmup_runs_each_sample_before_the_model_is_ready(tmp_path: Path) -> None:
    """Load of every instance runs the samples count times, with the rows asked for."""
    seen: list[tuple[int, list[float]]] = []

    class Recording(Echo):
        def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
            seen.append((num_rows, inputs["X"][0].tolist()))
            return super().run(inputs, num_rows)

    directory = tmp_path / "m"
    (directory / "warmup").mkdir(parents=True)
    (directory / "warmup" / "row").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    text = BASE + WARMUP % (2, 2, "zero_data: true") + WARMUP % (1, 0, 'input_data_file: "row"')
    (directory / "config.pbtxt").write_text(text)
    definition = define_model(directory, [1], {"echo": Recording}, num_gpus=0)
    definition.backend(definition.contexts[1], definition.instances[0]).load()
    assert seen == [(2, [0.0] * 4), (2, [0.0] * 4), (1, [0.0, 1.0, 2.0, 3.0])]


def test_random_warmup_is_the_same_every_time(tmp_path: Path) -> None:
    """random_data comes from a fixed seed and lies in [0, 1)."""
    inputs: list[InferCall] = []

    class Recording(Echo):
        def execute(self, batch: Any) -> Any:
            inputs.append(batch.requests[0].call)
            return super().execute(batch)

    text = (
        BASE
        + 'model_warmup { batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 random_data: true } } }'
    )
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    for _ in range(2):
        definition = define_model(tmp_path / "m", [1], {"echo": Recording}, num_gpus=0)
        definition.backend(definition.contexts[1], definition.instances[0]).load()
    first, second = (decode(call.inputs["X"]) for call in inputs)
    assert first.shape == (1, 4)
    assert np.array_equal(first, second)
    assert len(np.unique(first)) == 4
    assert first.min() >= 0
    assert first.max() < 1


def test_override_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """A configuration that a client sends cannot exhaust the stack."""
    with pytest.raises(InvalidArgumentError, match="'config' is not a model configuration"):
        define(tmp_path, BASE, override='{"parameters":' * 100_000)


SIZE = ModelConfig(max_batch_size=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"max_batch_size": 3}', SIZE),
        ('{"maxBatchSize": "3"}', SIZE),
        ("{'max_batch_size': 3}", SIZE),
        ("{max_batch_size: 3,}", SIZE),
        ('{"max_batch_size": 3.0, "optimization": null}', SIZE),
        ('{"max_batch_size": 5, "max_batch_size": 3}', SIZE),
        ('{"input": {"name": "A", "dims": 2}}', ModelConfig(input=[ModelInput(name="A", dims=[2])])),
        (
            '{"input": [{"name": "A", "dims": ["2"], "data_type": 11}]}',
            ModelConfig(input=[ModelInput(name="A", dims=[2], data_type=DataType.TYPE_FP32)]),
        ),
        (r"""{'name': 'a "b" \'c\' \u0041, }'}""", ModelConfig(name="a \"b\" 'c' A, }")),
        ("""{"name": "it's, }"}""", ModelConfig(name="it's, }")),
        ("{}", ModelConfig()),
    ],
)
def test_what_is_taken(text: str, expected: ModelConfig) -> None:
    """Quotes, commas, names and lists as Triton Inference Server takes them."""
    assert expected == parse_override(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "3", "null", "{", "{'a", '{"a"', "{} {}", '{"unknown": 1}', '{"max_batch_size": true}',
        '{"max_batch_size": 99999999999}', '{"input": "x"}', '{"input": [null]}', '{"parameters": [1]}',
        '{"input": {"name": "A", "unknown": 1}}', "[" * 100_000, '{"input":' * 100_000,
        '{"max_batch_size": ' + "9" * 10_000 + "}", '{"name": "\ud800"}',
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    """INVALID_ARGUMENT, whatever it is."""
    with pytest.raises(InvalidArgumentError, match="parameter 'config' is not a model configuration in JSON"):
        parse_override(text)
