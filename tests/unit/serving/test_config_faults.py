"""What is said about a wrong ``config.pbtxt``: every fault, each with its place and the cure."""

from pathlib import Path

import pytest

from weft.base.tensors import Array
from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.base import TensorBackend
from weft.serving.backends.python import PythonBackend
from weft.serving.config import define_model

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


def error_of(tmp_path: Path, text: str, *, versions: tuple[int, ...] = (1,), num_gpus: int = 0) -> PbtxtError:
    """The error of a model ``m`` with this configuration."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.pbtxt").write_text(text)
    with pytest.raises(PbtxtError) as caught:
        define_model(directory, versions, {"echo": Echo, "cpu_only": CpuOnly}, num_gpus=num_gpus)
    return caught.value


def faults(tmp_path: Path, text: str, *, versions: tuple[int, ...] = (1,), num_gpus: int = 0) -> list[str]:
    """``line:column: message`` of each fault."""
    diagnostics = error_of(tmp_path, text, versions=versions, num_gpus=num_gpus).diagnostics
    assert {found.file for found in diagnostics} == {str(tmp_path / "m" / "config.pbtxt")}
    return [f"{found.line}:{found.column}: {found.message}" for found in diagnostics]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('name: "other"', "5:7: name is 'other', but the model's folder is 'm'; make them equal or leave name out"),
        (
            'platform: "pytorch_libtorch"',
            "5:11: platform 'pytorch_libtorch' means backend 'pytorch', but backend is 'echo'",
        ),
        (
            'parameters { key: "load_timeout_s" value { string_value: "soon" } }',
            "5:36: parameter 'load_timeout_s' must be seconds from 0 (no limit) to 86400, got 'soon'",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: [ 4, 0 ] }',
            "5:51: input 'Z' dimension must be integer >= 1, or -1 for any size, got 0",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: -2 }',
            "5:46: input 'Z' dimension must be integer >= 1, or -1 for any size, got -2",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 }',
            "5:1: input 'Z' must specify 'dims'; for one value per row use dims: [ 1 ]",
        ),
        ('input { name: "Z" dims: 1 }', "5:1: input 'Z' must specify 'data_type', for example TYPE_FP32"),
        ("output { data_type: TYPE_FP32 dims: 1 }", "5:1: output must specify 'name'"),
        (
            'output { name: "Y" data_type: TYPE_INT64 dims: 1 }',
            "5:16: output 'Y' is declared twice, and not alike; leave one out",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: 1 reshape { shape: [ 1, 0 ] } }',
            "5:67: input 'Z' reshape dimensions must be integer >= 1, or -1 for any size, got [1, 0]",
        ),
        (
            'output { name: "Z" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 2 ] } }',
            "5:57: output 'Z' has different number of variable-size dimensions for dims and reshape: [2, -1] has 1 "
            "and [2] has 0; each -1 of one is a -1 of the other, in order",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: [ 2, -1, 3 ] reshape { shape: [ 3, -1, 2 ] } }',
            "5:59: input 'Z' has different size for dims and reshape: [2, -1, 3] and [3, -1, 2]; the number of "
            "elements must be the same, also between each two -1",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: 2 reshape { } }',
            "5:48: input 'Z' has different size for dims and reshape: [2] and []; the number of elements must be the "
            "same, also between each two -1",
        ),
        (
            'output { name: "Z" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }',
            "5:66: output 'Z': is_shape_tensor is not supported by this version; remove it",
        ),
        (
            'output { name: "Z" data_type: TYPE_STRING dims: 1 label_filename: "../labels.txt" }',
            "5:67: '../labels.txt' leaves the model's folder; give a relative path without '..'",
        ),
        (
            'default_model_filename: "/etc/passwd"',
            "5:25: '/etc/passwd' leaves the model's folder; give a relative path without '..'",
        ),
        (
            "model_repository_agents { agents { name: 'x' } }",
            "5:1: model_repository_agents is not supported by this version; agents are plug-ins that change a model's "
            "files at load; change them before they come into the repository, and remove it",
        ),
        (
            "model_transaction_policy { decoupled: true }",
            "5:39: backend 'echo' answers each request once; remove model_transaction_policy.decoupled",
        ),
        (
            "dynamic_batching { preferred_batch_size: [ 9 ] }",
            "5:44: dynamic_batching.preferred_batch_size: dynamic batching preferred size must be "
            "in 1..max_batch_size (8), got 9",
        ),
        (
            "dynamic_batching { priority_levels: 2 }",
            "5:1: dynamic_batching.default_priority_level: default priority level must be "
            "provided and in range [1, 2], got 0",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value { } } }",
            "5:65: dynamic_batching.priority_queue_policy: priority level must be in range [1, 2], got 3",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "5:39: dynamic_batching.preserve_ordering: Only one priority level is allowed when "
            "'preserve_ordering' is true, got 2",
        ),
        ("instance_group { count: -1 }", "5:25: count must be at least 1, got -1"),
        ("instance_group { count: 1025 }", "5:25: count must be at most 1024, got 1025"),
        (
            "instance_group [ { count: 1000 }, { count: 25 } ]",
            "5:44: the groups make 1025 instances; at most 1024 are allowed",
        ),
        (
            f'default_model_filename: "{"a" * 256}"',
            "5:25: a path of 256 bytes; at most 255 are allowed",
        ),
        (
            f'output {{ name: "Z" data_type: TYPE_STRING dims: 1 label_filename: "{"ä" * 128}" }}',
            "5:67: a path of 256 bytes; at most 255 are allowed",
        ),
        (
            'model_warmup { batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 input_data_file: '
            f'"{"a" * 256}" }} }} }}',
            "5:48: warm-up input 'X': a path of 256 bytes; at most 255 are allowed",
        ),
        (
            "instance_group { kind: KIND_MODEL }",
            "5:24: KIND_MODEL is not supported by this version; use KIND_AUTO, KIND_CPU or KIND_GPU",
        ),
        (
            "instance_group { kind: KIND_GPU }",
            "5:24: KIND_GPU asked for, but this machine has no GPU that is visible; use KIND_AUTO or KIND_CPU",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "5:39: gpus [0] are given for KIND_CPU; use KIND_GPU or remove gpus",
        ),
        (
            "instance_group { passive: true }",
            "5:27: instance_group passive is not supported by this version; remove it",
        ),
        (
            'instance_group [ { name: "a" }, { name: "a" } ]',
            "5:41: two instance groups are named 'a'; names must differ",
        ),
        ("version_policy { latest { } }", "5:18: num_versions must be at least 1, got 0"),
        ("version_policy { specific { } }", "5:18: specific names no version; list at least one"),
        ("version_policy { specific { versions: [ 1, 7 ] } }", "5:44: version 7 has no folder; there is 1"),
        ("model_warmup { batch_size: 9 }", "5:1: the warm-up lacks input 'X', which the model needs"),
        (
            'model_warmup { batch_size: 9 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }',
            "5:28: warm-up batch_size must be between 1 and 8, got 9",
        ),
        (
            'model_warmup { batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 5 zero_data: true } } }',
            "5:48: warm-up input 'X' has FP32 [5], but the model takes FP32 [4], each dimension at least 1",
        ),
    ],
)
def test_fault_is_reported_at_its_place(tmp_path: Path, line: str, expected: str) -> None:
    """Each wrong or unsupported field is an error with file, line, column and cure."""
    assert expected in faults(tmp_path, BASE + line + "\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE.replace('"echo"', '"ehco"'), ["1:10: unknown backend 'ehco'; did you mean 'echo'?"]),
        (
            BASE.replace('backend: "echo"', 'platform: "tensorrt_plan"'),
            ["1:11: unknown platform 'tensorrt_plan'; use one of: cpu_only, echo"],
        ),
        (
            BASE.replace('backend: "echo"', ""),
            [
                "0:0: neither backend nor platform is set, and the latest version folder has none of model.onnx, "
                "model.pt2, model.pt, model.py, which would tell the backend; use one of: cpu_only, echo"
            ],
        ),
        (BASE.replace("8", "-1"), ["2:17: max_batch_size: must be at least 0, got -1"]),
        (
            'backend: "echo"',
            [
                "0:0: model must have at least one input; backend 'echo' does not name them, so declare it",
                "0:0: model must have at least one output; backend 'echo' does not name them, so declare it",
            ],
        ),
        (
            'platform: "ensemble"\nensemble_scheduling { step { model_name: "a" } }',
            [
                "2:1: ensemble_scheduling is not supported by this version; an ensemble is a graph: move it to the "
                "repository of the router"
            ],
        ),
        (BASE.replace("output", "outputs"), ["4:1: unknown field 'outputs' in ModelConfig; did you mean 'output'?"]),
        (
            BASE.replace("TYPE_FP32", "TYPE_FP33", 1),
            ["3:30: unknown value 'TYPE_FP33' of DataType; did you mean 'TYPE_FP32'?"],
        ),
    ],
)
def test_faulty_file(tmp_path: Path, text: str, expected: list[str]) -> None:
    """A file that is wrong as a whole gives exactly these errors."""
    assert expected == faults(tmp_path, text)


@pytest.mark.parametrize(
    ("data_type", "data", "num_elements", "num_bytes"),
    [("FP32", "zero_data", 1 << 25, 1 << 30), ("STRING", "random_data", 12_201_611, 1_073_741_768)],
)
def test_warm_up_of_many_bytes(tmp_path: Path, data_type: str, data: str, num_elements: int, num_bytes: int) -> None:
    """An input of a sample has at most 1 GiB, of strings too; what has more is refused before it is made."""
    base = BASE.replace("TYPE_FP32", f"TYPE_{data_type}").replace("dims: [ 4 ]", "dims: [ -1 ]")
    text = (
        f'{base}model_warmup {{ batch_size: 8 inputs {{ key: "X" value {{ data_type: TYPE_{data_type} '
        f"dims: {num_elements + 1} {data}: true }} }} }}"
    )
    over = num_bytes + num_bytes // num_elements
    assert [f"5:48: warm-up input 'X' has {over} bytes; at most {1 << 30} are allowed"] == faults(tmp_path, text)


def test_all_faults_at_once_in_order_of_the_file(tmp_path: Path) -> None:
    """A configuration with several faults is refused once, with all of them."""
    text = (
        'name: "n"\nbackend: "eco"\nmax_batch_size: -3\nmodel_repository_agents { agents { name: "a" } }\n'
        'input { name: "X" dims: 0 }\n'
    )
    assert [int(fault.split(":")[0]) for fault in faults(tmp_path, text)] == [1, 2, 3, 4, 5, 5]


def test_message_shows_the_line_with_a_caret(tmp_path: Path) -> None:
    """The error's text is readable in a terminal and names the file."""
    first, source, caret = error_of(tmp_path, BASE.replace('"echo"', '"ehco"')).message.splitlines()
    assert first == f"{tmp_path}/m/config.pbtxt:1:10: error: unknown backend 'ehco'; did you mean 'echo'?"
    assert source == 'backend: "ehco"'
    assert caret == " " * 9 + "^"


def test_model_without_version_folder(tmp_path: Path) -> None:
    """A model needs at least one version folder."""
    assert faults(tmp_path, BASE, versions=()) == [
        "0:0: model 'm' has no version folder; put its files into a folder named 1"
    ]


def test_gpu_that_does_not_exist(tmp_path: Path) -> None:
    """A device number beyond those of the machine is an error."""
    assert faults(tmp_path, BASE + "instance_group { kind: KIND_GPU gpus: 1 }", num_gpus=1) == [
        "5:39: GPU 1 does not exist; this machine has 0 to 0"
    ]


def test_backend_without_use_for_a_gpu(tmp_path: Path) -> None:
    """KIND_GPU is refused for a backend that never runs there."""
    text = BASE.replace("echo", "cpu_only") + "instance_group { kind: KIND_GPU }"
    assert faults(tmp_path, text, num_gpus=1) == ["5:1: backend 'cpu_only' does not run on a GPU; use KIND_CPU"]


INLINE = 'parameters { key: "EXECUTION" value { string_value: "inline" } }\n'


@pytest.mark.parametrize(("value", "is_inline"), [("inline", True), ("thread", False)])
def test_instances_are_inline_where_the_model_says_so(tmp_path: Path, value: str, is_inline: bool) -> None:
    """Every instance is; and backends do not see the parameter."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.pbtxt").write_text(BASE + INLINE.replace("inline", value) + "instance_group { count: 2 }")
    definition = define_model(directory, (1,), {"echo": Echo}, num_gpus=0)
    assert [is_inline, is_inline] == [place.is_inline for place in definition.instances]
    assert {} == definition.contexts[1].parameters


def test_nothing_is_inline_unless_declared(tmp_path: Path) -> None:
    """The default is a thread."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.pbtxt").write_text(BASE)
    assert not any(place.is_inline for place in define_model(directory, (1,), {"echo": Echo}, num_gpus=0).instances)


@pytest.mark.parametrize("group", ["", "instance_group { count: 2 }", "instance_group { kind: KIND_AUTO }"])
def test_inline_instances_are_on_the_cpu_unless_a_gpu_is_asked_for(tmp_path: Path, group: str) -> None:
    """A machine with GPUs takes the same configuration as one without."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.pbtxt").write_text(BASE + INLINE + group)
    definition = define_model(directory, (1,), {"echo": Echo}, num_gpus=4)
    assert {("CPU", 0)} == {(place.kind, place.device_id) for place in definition.instances}


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("", {"EXECUTION": "process"}),
        (INLINE.replace("inline", "process"), {"EXECUTION": "process"}),
        (INLINE.replace("inline", "thread"), {}),
    ],
)
def test_python_model_has_a_process_unless_it_says_otherwise(
    tmp_path: Path, text: str, parameters: dict[str, str]
) -> None:
    """The backend starts it, and is told so."""
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text("")
    (directory / "config.pbtxt").write_text(BASE.replace("echo", "python") + text)
    definition = define_model(directory, (1,), {"python": PythonBackend}, num_gpus=0)
    assert parameters == definition.contexts[1].parameters
    assert not definition.instances[0].is_inline


@pytest.mark.parametrize("value", ["process", "fast", ""])
def test_a_value_that_the_backend_does_not_have_is_refused(tmp_path: Path, value: str) -> None:
    """With those that it has."""
    (fault,) = faults(tmp_path, BASE + INLINE.replace("inline", value))
    assert fault.endswith(f"model 'm': parameter 'EXECUTION' must be thread or inline, got '{value}'")


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        ("sequence_batching { }", "sequence_batching"),
        ("instance_group { kind: KIND_GPU }", "an instance on a GPU"),
        ('instance_group { rate_limiter { resources { name: "R" count: 1 } } kind: KIND_CPU }', "rate_limiter"),
        ('parameters { key: "execution_timeout_us" value { string_value: "5" } }', "execution_timeout_us"),
    ],
)
def test_what_needs_a_thread_excludes_inline(tmp_path: Path, text: str, obstacle: str) -> None:
    """The fault is at the parameter, and names the other."""
    found = faults(tmp_path, BASE + INLINE + text, num_gpus=int("GPU" in text))
    assert [f"5:53: 'EXECUTION' inline is not possible with {obstacle}; remove one of them"] == found
