"""Ragged batches, length buckets and the scheduler's parameters in ``config.pbtxt``: what is read, what is refused."""

from pathlib import Path

import pytest

from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.base import Backend, TensorBackend
from weft.serving.backends.layout import BatchInput
from weft.serving.config import define_model
from weft.serving.queues.settings import LengthBuckets

BASE = """\
backend: "tensors"
max_batch_size: 8
input { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "MASK" data_type: TYPE_BOOL dims: [ -1 ] optional: true }
input { name: "FIXED" data_type: TYPE_FP32 dims: [ 4 ] }
input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }
input { name: "RAGGED" data_type: TYPE_FP32 dims: [ -1, 3 ] allow_ragged_batch: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PLAIN = BASE.replace(" allow_ragged_batch: true", "")


class Tensors(TensorBackend):
    """Takes arrays."""

    def load(self):
        """Nothing to load."""

    def run(self, inputs, num_rows):
        """Never called."""


class Requests(Backend):
    """Takes requests."""

    def load(self):
        """Nothing to load."""

    def execute(self, batch):
        """Never called."""


def parameters(**values):
    """Parameters in text form."""
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n' for key, text in values.items()
    )


def defined(tmp_path: Path, text: str):
    """The definition of a model ``m`` with this configuration."""
    directory = tmp_path / "m"
    directory.mkdir(exist_ok=True)
    (directory / "config.pbtxt").write_text(text)
    return define_model(directory, (1,), {"tensors": Tensors, "requests": Requests}, num_gpus=0)


def faults(tmp_path: Path, text: str):
    """``line: message`` of each fault."""
    with pytest.raises(PbtxtError) as caught:
        defined(tmp_path, text)
    return [f"{found.line}: {found.message}" for found in caught.value.diagnostics]


def test_scheduler_parameters(tmp_path):
    """Ageing and splitting are settings of the scheduler, and the backend does not see them."""
    levels = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n"
    text = BASE + levels + parameters(priority_aging_us="2000000", split_large_requests="True", own="1")
    definition = defined(tmp_path, text)
    assert (2_000_000, True) == (definition.settings.priority_aging_us, definition.settings.can_split)
    assert {"own": "1"} == definition.contexts[1].parameters
    definition = defined(tmp_path, BASE)
    assert (0, False) == (definition.settings.priority_aging_us, definition.settings.can_split)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            parameters(priority_aging_us="0"),
            "10: parameter 'priority_aging_us' must be a whole number of at least 1, got '0'",
        ),
        (
            parameters(priority_aging_us="1s"),
            "10: parameter 'priority_aging_us' must be a whole number of at least 1, got '1s'",
        ),
        (
            parameters(priority_aging_us="5") + "dynamic_batching { }",
            "10: parameters[priority_aging_us]: needs dynamic_batching with priority_levels > 1, got 0",
        ),
        (
            parameters(split_large_requests="yes"),
            "10: parameter 'split_large_requests' must be true or false, got 'yes'",
        ),
    ],
)
def test_scheduler_parameter_faults(tmp_path, text, expected):
    """A parameter of the scheduler that makes no sense is a fault at its place."""
    assert [expected] == faults(tmp_path, BASE + text)


def test_outputs_that_answers_may_lack(tmp_path):
    """The parameter names outputs; the signature says it of them, and the backend does not see the parameter."""
    definition = defined(tmp_path, BASE + parameters(optional_outputs=" Z ,"))
    assert ["Z"] == [spec.name for spec in definition.contexts[1].signature.outputs if spec.is_optional]
    assert {} == definition.contexts[1].parameters
    text = "parameter 'optional_outputs': the model has no output 'ZZ'; did you mean 'Z'?"
    assert [f"10: {text}"] == faults(tmp_path, BASE + parameters(optional_outputs="ZZ"))
    text = "parameter 'optional_outputs' must name outputs, separated by commas: Y, Z"
    assert [f"10: {text}"] == faults(tmp_path, BASE + parameters(optional_outputs=" "))


def test_a_batch_of_no_rows(tmp_path):
    """The parameter needs no value, and is refused where there are no batches; the backend does not see it."""
    for value, expected in (("", True), ("true", True), ("false", False)):
        definition = defined(tmp_path, BASE + parameters(allow_empty_batch=value))
        assert expected == definition.contexts[1].signature.allows_empty_batch
        assert {} == definition.contexts[1].parameters
    text = "parameter 'allow_empty_batch' is 'yes'; give \"true\" or \"false\", or no value"
    assert [f"10: {text}"] == faults(tmp_path, BASE + parameters(allow_empty_batch="yes"))
    single = BASE.replace("max_batch_size: 8", "max_batch_size: 0") + parameters(allow_empty_batch="true")
    text = "parameter 'allow_empty_batch' has no effect for a model without batch dimension; remove it"
    assert f"10: {text}" in faults(tmp_path, single)


def test_split_needs_rows(tmp_path):
    """Without a batch dimension there is nothing to split."""
    text = PLAIN.replace("max_batch_size: 8", "max_batch_size: 0") + parameters(split_large_requests="true")
    expected = "parameters[split_large_requests]: needs max_batch_size > 0: without rows there is nothing to split"
    assert [f"10: {expected}"] == faults(tmp_path, text)


def test_buckets(tmp_path):
    """Bounds, pad values and the mask are read; the mask is padded with 0 unasked."""
    text = PLAIN + parameters(
        batch_buckets="16, 32,64",
        batch_buckets_pad=" IDS = 7",
        batch_buckets_mask="MASK",
        batch_buckets_max_elements="99",
    )
    definition = defined(tmp_path, text + "dynamic_batching { }")
    assert LengthBuckets((16, 32, 64), {"IDS": 7, "MASK": 0}, "MASK", 99) == definition.contexts[1].layout.buckets
    assert {} == definition.contexts[1].parameters
    assert defined(tmp_path, PLAIN).contexts[1].layout.buckets is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"batch_buckets": "16,16"},
            "10: parameter 'batch_buckets' must be lengths that rise, such as '16,32,64', got '16,16'",
        ),
        (
            {"batch_buckets": "0,8"},
            "10: parameter 'batch_buckets' must be lengths that rise, such as '16,32,64', got '0,8'",
        ),
        (
            {"batch_buckets": "a"},
            "10: parameter 'batch_buckets' must be lengths that rise, such as '16,32,64', got 'a'",
        ),
        ({"batch_buckets_pad": ""}, "10: parameter 'batch_buckets' needs the inputs to pad"),
        ({"batch_buckets_pad": "FIXED=0,IDS=0"}, "11: input 'FIXED' has no -1 in its dims [4]; nothing to pad"),
        (
            {"batch_buckets_pad": "IDS=0,IDZ=0"},
            "11: parameter 'batch_buckets_pad': the model has no input 'IDZ'; did you mean 'IDS'",
        ),
        (
            {"batch_buckets_pad": "IDS=0,TEXT=0"},
            "11: input 'TEXT' is BYTES and cannot be padded with '0'; write 'TEXT=0' or another value of that type",
        ),
        (
            {"batch_buckets_pad": "IDS=0,MASK=2"},
            "11: input 'MASK' is BOOL and cannot be padded with '2'; write 'MASK=0' or another value of that type",
        ),
        (
            {"batch_buckets_pad": "RAGGED=nan,IDS=1"},
            "11: input 'RAGGED' is FP32 and cannot be padded with 'nan'; write 'RAGGED=0'",
        ),
        (
            {"batch_buckets_max_elements": "-1"},
            "12: parameter 'batch_buckets_max_elements' must be a whole number of at least 0",
        ),
        ({"batch_buckets_mask": "TEXT"}, "12: the mask 'TEXT' must hold numbers"),
        (
            {"batch_buckets_pad": "IDS=0,MASK=1", "batch_buckets_mask": "MASK"},
            "11: the mask 'MASK' is padded with 0, got 1",
        ),
    ],
)
def test_bucket_faults(tmp_path, values, expected):
    """What is wrong with buckets is said with the value got and the value allowed, at the parameter."""
    text = PLAIN + parameters(**{"batch_buckets": "8", "batch_buckets_pad": "IDS=0", **values})
    (fault,) = faults(tmp_path, text + "dynamic_batching { }")
    assert fault.startswith(expected)


def test_buckets_need_company(tmp_path):
    """Buckets without dynamic batching, details without buckets, and padding beside ragged inputs are faults."""
    buckets = parameters(batch_buckets="8", batch_buckets_pad="IDS=0")
    assert ["10: parameter 'batch_buckets' needs dynamic_batching"] == faults(tmp_path, PLAIN + buckets)
    alone = parameters(batch_buckets_mask="MASK")
    assert ["10: parameter 'batch_buckets_mask' needs parameter 'batch_buckets'"] == faults(tmp_path, PLAIN + alone)
    (fault,) = faults(tmp_path, BASE + buckets + "dynamic_batching { }")
    assert "ragged batches exclude each other" in fault


def test_ragged(tmp_path):
    """Batch inputs and outputs are read, and the signature says which inputs are ragged."""
    text = BASE + (
        'batch_input { kind: BATCH_ITEM_SHAPE target_name: "A" target_name: "B"'
        ' data_type: TYPE_INT32 source_input: "RAGGED" }\n'
        'batch_output { target_name: "Y" source_input: "RAGGED" }\n'
    )
    context = defined(tmp_path, text).contexts[1]
    assert (BatchInput("BATCH_ITEM_SHAPE", ("A", "B"), "INT32", "RAGGED"),) == context.layout.batch_inputs
    assert {"Y": "RAGGED"} == context.layout.scattered
    assert [False] * 4 + [True] == [spec.allow_ragged_batch for spec in context.signature.inputs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'batch_input { target_name: "A" data_type: TYPE_INT64 source_input: "IDS" }',
            "10: batch input must be TYPE_INT32 or TYPE_FP32, got INT64",
        ),
        (
            'batch_input { target_name: "A" data_type: TYPE_INT32 }',
            "10: batch input must have one of the inputs as 'source_input', got none",
        ),
        (
            'batch_input { data_type: TYPE_INT32 source_input: "IDS" }',
            "10: batch input must specify 'target_name', the input of the model that gets it",
        ),
        (
            'batch_input { target_name: "IDS" data_type: TYPE_INT32 source_input: "IDS" }',
            "10: batch input 'IDS' is an input already; its name must differ",
        ),
        (
            'batch_input { target_name: "A" target_name: "A" data_type: TYPE_INT32 source_input: "IDS" }',
            "10: batch input 'A' is an input already; its name must differ",
        ),
        ('batch_output { source_input: "IDS" }', "10: batch output must specify 'target_name', the output that is cut"),
        (
            'batch_output { target_name: "Y" source_input: "IDZ" }',
            "10: batch output must have one of the inputs as 'source_input', got IDZ; did you mean 'IDS'?",
        ),
        ('batch_output { target_name: "X" source_input: "IDS" }', "10: the model has no output 'X'; it is 'Y' or 'Z'"),
        (
            'batch_output { target_name: "Y" source_input: "IDS" }',
            "10: output 'Y' has 2 dims, its source 'IDS' has 1; they must be as many",
        ),
    ],
)
def test_ragged_faults(tmp_path, text, expected):
    """A batch input or output that names nothing sound is a fault at its place."""
    (fault,) = faults(tmp_path, BASE + text)
    assert expected.split("; it is")[0] in fault


def test_ragged_needs_batches(tmp_path):
    """Without a batch dimension there is nothing to lay out."""
    text = (
        BASE.replace("max_batch_size: 8", "max_batch_size: 0")
        + 'batch_output { target_name: "Y" source_input: "RAGGED" }'
    )
    assert [
        "7: input[4].allow_ragged_batch needs max_batch_size > 0",
        "10: batch_output needs max_batch_size > 0",
    ] == faults(tmp_path, text)


def test_backend_that_gets_requests(tmp_path):
    """A backend that gets each request by itself can take ragged ones, and has no use for anything else."""
    text = BASE.replace("tensors", "requests")
    assert defined(tmp_path, text).contexts[1].signature.inputs[4].allow_ragged_batch
    (fault,) = faults(tmp_path, text + 'batch_output { target_name: "Y" source_input: "RAGGED" }')
    assert "10: backend 'requests' gets each request by itself and has no use for batch_output; remove it" == fault
