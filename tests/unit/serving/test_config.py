"""What a ``config.pbtxt`` means, and what is said about a wrong one: cases in ``configs/``."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.case_files import Case, cases

from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError
from weft.base.tensors import Array, decode
from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.base import Backend, TensorBackend
from weft.serving.backends.python import PythonBackend
from weft.serving.config import ModelDefinition, define_model, parse_override
from weft.serving.config.checks import ConfigReport
from weft.serving.config.given_inputs import sequence_inputs
from weft.serving.config.placement import count_gpus
from weft.serving.scheduler.rate_limiter import RateLimit
from weft_protos.model_config_pb2 import DataType, ModelConfig, ModelInput

CONFIGS = Path(__file__).parent / "configs"
BASE = """\
backend: "echo"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


class Echo(TensorBackend):
    """Output Y is input X."""

    def load(self) -> None:
        """Nothing to load."""

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Y = X."""
        return {"Y": inputs["X"]}


class CpuOnly(Echo):
    """Has no use for a GPU."""

    can_use_gpu = False


class Streams(Echo):
    """May answer a request several times."""

    can_stream = True


class SelfDescribing(Echo):
    """Knows its own tensors."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """One input, one output, batches of 4."""
        tensor = {"data_type": "TYPE_FP32", "dims": ["-1"]}
        return {**config, "max_batch_size": 4, "input": [{"name": "X", **tensor}], "output": [{"name": "Y", **tensor}]}


class Decoupled(SelfDescribing):
    """Finds out that it is decoupled."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """As ``set_model_transaction_policy`` of a Python model does."""
        completed = SelfDescribing.auto_complete(config, directory)
        return {**completed, "model_transaction_policy": {"decoupled": True}}


class Failing(Echo):
    """Raises while it is asked for its tensors."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        """As user code does."""
        raise SystemExit("secret detail")


class Requests(Backend):
    """Takes requests, not arrays."""

    def load(self) -> None:
        """Nothing to load."""

    def execute(self, batch: Any) -> Any:
        """Never called."""


BACKENDS: dict[str, type[Backend]] = {
    "echo": Echo,
    "cpu_only": CpuOnly,
    "streams": Streams,
    "described": SelfDescribing,
    "decoupled": Decoupled,
    "failing": Failing,
    "requests": Requests,
    "python": PythonBackend,
    "onnxruntime": Echo,
}


def define(tmp_path: Path, text: str, *, versions: tuple[int, ...] = (1,), **options: Any) -> ModelDefinition:
    """Definition of a model ``m`` with this configuration."""
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    return define_model(tmp_path / "m", versions, **{"backends": BACKENDS, "num_gpus": 0, **options})


def shown(value: Any) -> str:
    """A value as text; of a dataclass the fields that are not their defaults."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {shown(each)}' for key, each in value.items())}}}"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = {
        field.name: (getattr(value, field.name), field.default)
        for field in dataclasses.fields(value)
        if field.repr and field.name != "token"
    }
    given = [f"{name}={shown(each)}" for name, (each, default) in fields.items() if each != default]
    return f"{type(value).__name__}({', '.join(given)})"


def facts(definition: ModelDefinition, directory: Path) -> dict[str, str]:
    """All that a definition says, by name."""
    context = list(definition.contexts.values())[-1]
    parts: dict[str, Any] = {"settings": definition.settings, "layout": context.layout, "signature": context.signature}
    found = {
        f"{part}.{field.name}": getattr(value, field.name)
        for part, value in parts.items()
        for field in dataclasses.fields(value)
        if field.name not in ("inputs", "outputs", "version")
    }
    found |= {f"input {spec.name}": spec for spec in context.signature.inputs}
    found |= {f"output {spec.name}": spec for spec in context.signature.outputs}
    for version, one in definition.contexts.items():
        assert (str(version), directory / str(version)) == (one.signature.version, one.directory)
    found |= {f"instance {place.name}": place for place in definition.instances}
    inputs = sequence_inputs(definition.config, directory, ConfigReport("again"))
    states = inputs.states if inputs else ()
    found |= {f"state {state.spec.name} begins with": decode(state.initial).tolist() for state in states}
    found |= {"versions": list(definition.contexts), "parameters": context.parameters}
    found |= {"backend": definition.config.backend}
    return {name: shown(value) for name, value in found.items()}


@cases(*(CONFIGS / f"{name}.txt" for name in ("batching", "placement", "sequences", "tensors")))
def test_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Case) -> None:
    """A configuration makes a model that differs as the case says from the one without it, or has these faults."""
    base = "" if case.option("alone", "-") == "" else case.header + "\n"
    for name, value in case.options:
        if name == "replace":
            old, _, new = value.partition(" =>")
            assert old in base
            base = base.replace(old, new.removeprefix(" "))
        elif name == "file":
            path, _, data = value.partition(" ")
            (tmp_path / "m" / path).parent.mkdir(parents=True)
            (tmp_path / "m" / path).write_bytes(bytes.fromhex(data))
    versions = tuple(map(int, case.option("versions", "1").split()))
    plain = facts(define(tmp_path, case.header), tmp_path / "m")
    with caplog.at_level(logging.WARNING):
        try:
            found = define(tmp_path, base + case.text + "\n", versions=versions, num_gpus=int(case.option("gpus", "0")))
        except PbtxtError as error:
            faults = error.diagnostics
        else:
            faults = []
    assert {str(tmp_path / "m" / "config.pbtxt")} >= {fault.file for fault in faults}
    told = {} if faults else facts(found, tmp_path / "m")
    lines = [f"{fault.line}:{fault.column}: {fault.message.replace(f'{tmp_path}/', '')}" for fault in faults]
    lines += [f"{name} = {value}" for name, value in told.items() if value != plain.get(name)]
    lines += [f"no {name}" for name in plain if told and name not in told]
    case.check("\n".join(lines + [f"log: {record.getMessage()}" for record in caplog.records]))


def test_message_shows_the_line_with_a_caret(tmp_path: Path) -> None:
    """The error's text is readable in a terminal and names the file."""
    with pytest.raises(PbtxtError) as caught:
        define(tmp_path, BASE.replace('"echo"', '"ehco"'))
    first, source, caret = caught.value.message.splitlines()
    assert first == f"{tmp_path}/m/config.pbtxt:1:10: error: unknown backend 'ehco'; did you mean 'echo'?"
    assert source == 'backend: "ehco"'
    assert caret == " " * 9 + "^"


def test_missing_file(tmp_path: Path) -> None:
    """A folder without config.pbtxt and without a file that tells the backend is no model; the error names both."""
    (tmp_path / "m").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"m has no config.pbtxt, and the .* has none of model.onnx, "):
        define_model(tmp_path / "m", [1], BACKENDS, num_gpus=0)
    with pytest.raises(InvalidArgumentError, match=r"there is no .*m/config.pbtxt; .*--disable-auto-complete-config"):
        define_model(tmp_path / "m", [1], BACKENDS, num_gpus=0, completes=False)


def test_a_backend_gets_the_completed_configuration(tmp_path: Path) -> None:
    """It has the names of config.pbtxt."""
    config = define(tmp_path, BASE).contexts[1].config
    assert ("m", 8) == (config["name"], config["max_batch_size"])
    assert [{"name": "X", "data_type": "TYPE_FP32", "dims": ["4"]}] == config["input"]


def test_auto_complete_that_raises_is_an_internal_error_without_its_text(tmp_path: Path) -> None:
    """User code that fails, even by SystemExit, fails this model alone; the text stays in the log."""
    with pytest.raises(InternalError, match="auto-complete of model 'm' by backend 'failing' failed") as caught:
        define(tmp_path, 'backend: "failing"')
    assert "secret" not in caught.value.message


def test_backend_that_cannot_be_imported(tmp_path: Path) -> None:
    """A backend whose package is not installed is an error of the model, with the cause."""

    class Lazy(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise ImportError("No module named 'torch'")

    with pytest.raises(UnavailableError, match="backend 'echo' cannot be imported: No module named 'torch'"):
        define(tmp_path, BASE, backends=Lazy(BACKENDS))


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


def test_a_resource_without_a_device_is_of_all() -> None:
    """A local resource is needed on the device of the instance."""
    assert {("R", 5): 2, ("G", None): 1} == RateLimit(1, (("R", 2),), (("G", 1),)).demands(5)


def test_warmup_runs_each_sample_before_the_model_is_ready(tmp_path: Path) -> None:
    """Load of every instance runs each sample as often as its count says; random data are the same every time."""
    seen: list[tuple[int, list[float]]] = []

    class Recording(Echo):
        def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
            seen.append((num_rows, inputs["X"][0].tolist()))
            return super().run(inputs, num_rows)

    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "row").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    warmup = 'model_warmup { batch_size: %d count: %d inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 %s } } }\n'
    samples = (2, 2, "zero_data: true"), (1, 0, 'input_data_file: "row"'), (1, 1, "random_data: true")
    text = BASE + "".join(warmup % sample for sample in samples)
    for _ in range(2):
        definition = define(tmp_path, text, backends={"echo": Recording})
        definition.backend(definition.contexts[1], definition.instances[0]).load()
    *fixed, (rows, random) = seen[:4]
    assert seen[:4] * 2 == seen
    assert [(2, [0.0] * 4), (2, [0.0] * 4), (1, [0.0, 1.0, 2.0, 3.0])] == fixed
    assert (1, 4) == (rows, len(set(random)))
    assert 0 <= min(random) <= max(random) < 1


def test_override_replaces_the_file(tmp_path: Path) -> None:
    """A configuration given as JSON is used in place of config.pbtxt, and checked like it."""
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    override: dict[str, Any] = {
        "backend": "echo",
        "input": [{"name": "X", **tensor}],
        "output": [{"name": "Y", **tensor}],
    }
    assert define(tmp_path, BASE, override=json.dumps(override)).settings.max_batch_size == 0
    with pytest.raises(PbtxtError, match=r"^config parameter: error: unknown backend 'nope'"):
        define(tmp_path, BASE, override=json.dumps({**override, "backend": "nope"}))
    with pytest.raises(InvalidArgumentError, match="parameter 'config' is not a model configuration in JSON"):
        define(tmp_path, BASE, override="{")


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
