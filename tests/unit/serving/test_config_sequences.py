"""``sequence_batching`` and ``rate_limiter`` of ``config.pbtxt``: what they become, and every fault."""

from pathlib import Path

import numpy as np
import pytest

from weft.base.tensors import Array, WireTensor, encode
from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.base import TensorBackend
from weft.serving.backends.layout import file_signature
from weft.serving.config import ModelDefinition, define_model
from weft.serving.config.checks import ConfigReport
from weft.serving.config.given_inputs import sequence_inputs
from weft.serving.queues.settings import SequenceSettings
from weft.serving.scheduler.rate_limiter import RateLimit

BASE = """\
backend: "echo"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
STATE = 'input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 2 ]'


class Echo(TensorBackend):
    """Output Y is input X."""

    can_stream = True

    def load(self) -> None:
        """Nothing to load."""

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Y = X."""
        return {"Y": inputs["X"]}


def define(tmp_path: Path, text: str, base: str = BASE) -> ModelDefinition:
    """The definition of a model ``m``."""
    directory = tmp_path / "m"
    directory.mkdir(exist_ok=True)
    (directory / "config.pbtxt").write_text(base + text)
    return define_model(directory, (1,), {"echo": Echo}, num_gpus=0)


def control(text: str, name: str = "C") -> str:
    """A model with one control input."""
    return f'sequence_batching {{ control_input {{ name: "{name}" control {{ {text} }} }} }}'


def initial(text: str) -> str:
    """A model whose state has an initial state."""
    return f"sequence_batching {{ state {{ {STATE} initial_state {{ data_type: TYPE_INT32 {text} }} }} }}"


@pytest.mark.parametrize(
    ("text", "expected", "delay_us", "preferred"),
    [
        ("", SequenceSettings(num_slots=8), 0, ()),
        ("direct { }", SequenceSettings(num_slots=8), 0, ()),
        (
            "max_sequence_idle_microseconds: 5 "
            "direct { max_queue_delay_microseconds: 7 minimum_slot_utilization: 0.5 }",
            SequenceSettings(num_slots=8, max_idle_us=5, max_queue_delay_us=7, minimum_slot_utilization=0.5),
            7,
            (),
        ),
        ("oldest { }", SequenceSettings(is_direct=False, num_slots=8), 0, ()),
        (
            "oldest { max_candidate_sequences: 30 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 9 "
            "preserve_ordering: true }",
            SequenceSettings(is_direct=False, num_slots=30),
            9,
            (2, 4),
        ),
        (
            'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }',
            SequenceSettings(num_slots=8, id_datatype="BYTES"),
            0,
            (),
        ),
    ],
)
def test_settings(
    tmp_path: Path, text: str, expected: SequenceSettings, delay_us: int, preferred: tuple[int, ...]
) -> None:
    """Both strategies, their defaults, and what the dynamic batcher of ``oldest`` gets."""
    settings = define(tmp_path, f"sequence_batching {{ {text} }}").settings
    assert (expected, delay_us, preferred) == (
        settings.sequences, settings.max_queue_delay_us, settings.preferred_batch_sizes,
    )  # fmt: skip


def test_the_model_file_has_more_inputs_than_clients_see(tmp_path: Path) -> None:
    """Controls and states are inputs of the file, and a state that is not declared an output of it."""
    controls = control("kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]").removesuffix("}")
    (context,) = define(tmp_path, f"{controls} state {{ {STATE} }} }}").contexts.values()
    signature = file_signature(context.signature, context.layout)
    assert ["X", "C", "S"] == [spec.name for spec in signature.inputs]
    assert ["Y", "T"] == [spec.name for spec in signature.outputs]
    assert ["X"] == [spec.name for spec in context.signature.inputs]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", encode(np.zeros((1, 2), np.int32))),
        ("initial_state { data_type: TYPE_INT32 dims: [ 2 ] zero_data: true }", encode(np.zeros((1, 2), np.int32))),
        (
            'initial_state { data_type: TYPE_INT32 dims: [ 2 ] data_file: "seven" }',
            encode(np.array([[7, 8]], np.int32)),
        ),
    ],
)
def test_initial_state(tmp_path: Path, given: str, expected: WireTensor) -> None:
    """Zeros, or the content of a file."""
    folder = tmp_path / "m" / "initial_state"
    folder.mkdir(parents=True)
    (folder / "seven").write_bytes(np.array([7, 8], np.int32).tobytes())
    report = ConfigReport("test")
    config = define(tmp_path, f"sequence_batching {{ state {{ {STATE} {given} }} }}").config
    inputs = sequence_inputs(config, folder.parent, report)
    assert inputs is not None
    assert expected == inputs.states[0].initial


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sequence_batching { iterative_sequence: true }", "backend 'echo' executes each request once; remove"),
        (
            'sequence_batching { } parameters { key: "max_sequence_backlog" value { string_value: "0" } }',
            "parameter 'max_sequence_backlog' must be a whole number of at least 1, got '0'",
        ),
        (
            'dynamic_batching { } parameters { key: "max_sequence_backlog" value { string_value: "1" } }',
            "parameter 'max_sequence_backlog' needs sequence_batching",
        ),
        ("sequence_batching { oldest { max_candidate_sequences: -1 } }", "between 1 and 65536, got -1"),
        ("sequence_batching { oldest { preferred_batch_size: 9 } }", "no larger than max_batch_size (8), got 9"),
        ("sequence_batching { direct { minimum_slot_utilization: 1.5 } }", "must be in range [0.0, 1.0], got 1.5"),
        (control("kind: CONTROL_SEQUENCE_START"), "must specify exactly one of int32_false_true"),
        (
            control("kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"),
            "must specify exactly one of int32_false_true, fp32_false_true, bool_false_true, got 2",
        ),
        (
            control("kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1, 2 ]"),
            "'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END, got 3",
        ),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"), "or TYPE_STRING, got FP32"),
        (control("kind: CONTROL_SEQUENCE_CORRID"), "or TYPE_STRING, got INVALID"),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 bool_false_true: [ false, true ]"),
            "has a data_type, and no false and true values",
        ),
        (control("kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]", "X"), "'X' is an input already"),
        (control("kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]", ""), "must specify a name"),
        ('sequence_batching { control_input { name: "C" } }', "control input 'C' must have one control, got 0"),
        (
            "sequence_batching { "
            + 'control_input { name: "A" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } } '
            + 'control_input { name: "B" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } } }',
            "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors, 'B' is one",
        ),
        ('sequence_batching { state { input_name: "S" data_type: TYPE_FP32 dims: 1 } }', "must specify output_name"),
        ('sequence_batching { state { input_name: "S" output_name: "T" dims: 1 } }', "must specify 'data_type'"),
        (
            'sequence_batching { state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: 0 } }',
            "dims of state 'S' must be at least 1",
        ),
        (
            'sequence_batching { state { input_name: "S" output_name: "Y" data_type: TYPE_FP32 dims: 1 } }',
            "state 'S' is FP32 [1], but output 'Y', which it is, is FP32 [4]",
        ),
        (
            f"sequence_batching {{ state {{ {STATE} use_growable_memory: true }} }}",
            "use_growable_memory needs use_same_buffer",
        ),
        (
            'sequence_batching { state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: 268435457 } }',
            "state 'S' has 1073741828 bytes; at most 1073741824 are allowed",
        ),
        (
            initial("dims: 1000000000000 zero_data: true").replace("dims: [ 2 ]", "dims: [ -1 ]"),
            "state 'S' has 4000000000000 bytes; at most 1073741824 are allowed",
        ),
        (
            initial("dims: 1000000000000 zero_data: true")
            .replace("dims: [ 2 ]", "dims: [ -1 ]")
            .replace("INT32", "STRING"),
            "state 'S' has 4000000000000 bytes; at most 1073741824 are allowed",
        ),
        (
            initial(f'dims: 2 data_file: "{"a" * 256}"'),
            "a path of 256 bytes; at most 255 are allowed",
        ),
        (
            initial("dims: 3 zero_data: true"),
            "initial_state of 'S' is INT32 [3], but the state is INT32 [2]",
        ),
        (
            initial("dims: 2"),
            "must specify zero_data or data_file",
        ),
        (
            initial('dims: 2 data_file: "../x"'),
            "'../x' leaves the folder 'initial_state'",
        ),
        (
            initial('dims: 2 data_file: "x"'),
            "No such file or directory",
        ),
        (
            f"sequence_batching {{ state {{ {STATE} }} }} model_transaction_policy {{ decoupled: true }}",
            "state is not possible for a decoupled model",
        ),
        (
            'sequence_batching { } model_warmup { batch_size: 2 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 '
            "zero_data: true } } }",
            "takes one row at a time; batch_size must be 1, got 2",
        ),
        (
            'sequence_batching { } parameters { key: "split_large_requests" value { string_value: "true" } }',
            "parameter 'split_large_requests' is not possible with sequence_batching",
        ),
        (
            'instance_group { rate_limiter { resources { name: "R" } } }',
            "resource 'R' must specify a count of at least 1, got 0",
        ),
        ("instance_group { rate_limiter { resources { count: 1 } } }", "a resource must specify 'name'"),
        (
            'instance_group { rate_limiter { resources { name: "R" count: 1 } resources { name: "R" count: 2 } } }',
            "resource 'R' is named twice",
        ),
    ],
)
def test_fault(tmp_path: Path, text: str, expected: str) -> None:
    """A wrong field is named with what is wrong and what is allowed."""
    with pytest.raises(PbtxtError) as caught:
        define(tmp_path, text)
    assert [expected in diagnostic.message for diagnostic in caught.value.diagnostics] == [True]


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_slots_of_a_large_batch(tmp_path: Path, strategy: str) -> None:
    """Sequences have at most 65536 slots; what max_batch_size makes more of is refused, as each takes memory."""
    base = BASE.replace("max_batch_size: 8", "max_batch_size: 65537")
    with pytest.raises(PbtxtError, match=r"2:17: .*with sequence_batching max_batch_size must be between 1 and 65536"):
        define(tmp_path, f"sequence_batching {{ {strategy} {{ }} }}", base)
    batching = "sequence_batching { oldest { max_candidate_sequences: 4 } }"
    assert 4 == define(tmp_path, batching, base).settings.sequences.num_slots


def test_rate_limiter_of_each_group(tmp_path: Path) -> None:
    """Instances have the limit of their group; the priority is 1 where none is given."""
    limits = 'rate_limiter { resources { name: "R" count: 2 } resources { name: "G" count: 1 global: true } }'
    instances = define(
        tmp_path, f"instance_group {{ count: 2 {limits} }} instance_group {{ rate_limiter {{ priority: 3 }} }}"
    ).instances
    both = RateLimit(1, (("R", 2),), (("G", 1),))
    assert [both, both, RateLimit(3)] == [place.rate_limit for place in instances]
    assert {("R", 5): 2, ("G", None): 1} == both.demands(5)
