"""The parameter ``EXECUTION``: where the instances of a model execute."""

from pathlib import Path

import pytest
from tests.unit.serving.test_config_faults import BASE, Echo, faults

from weft.serving.backends.python import PythonBackend
from weft.serving.config import define_model

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
