"""Scheduler settings: which are refused, and how a test holds batches back."""

import pytest

from weft.base.errors import InvalidArgumentError
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy, num_to_hold

DELAY = WaitPolicy("DELAY", default_timeout_us=5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_batch_size": -1}, "max_batch_size: must be at least 0, got -1"),
        ({"preferred_batch_sizes": (2, 9)}, r"must be in 1..max_batch_size \(8\), got 9"),
        ({"preferred_batch_sizes": (0,)}, "got 0"),
        ({"max_queue_delay_us": -5}, "max_queue_delay_microseconds: must be at least 0, got -5"),
        ({"priority_levels": 3}, r"default priority level must be provided and in range \[1, 3\], got 0"),
        ({"priority_levels": 3, "default_priority_level": 4}, r"in range \[1, 3\], got 4"),
        (
            {"priority_levels": 3, "default_priority_level": 1, "policies": {4: WaitPolicy()}},
            r"priority level must be in range \[1, 3\], got 4",
        ),
        ({"policies": {1: WaitPolicy()}}, "needs priority_levels > 0, got 1"),
        (
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "Only one priority level is allowed when 'preserve_ordering' is true, got 2",
        ),
        ({"preserve_ordering": True, "default_policy": DELAY}, "can not have DELAY as timeout action"),
        (
            {
                "preserve_ordering": True,
                "priority_levels": 1,
                "default_priority_level": 1,
                "policies": {1: DELAY},
            },
            r"priority_queue_policy\[1\]: Queue policy can not have DELAY",
        ),
        ({"default_policy": WaitPolicy("DROP")}, "must be REJECT or DELAY, got 'DROP'"),
        ({"default_policy": WaitPolicy(max_queue_size=-1)}, "must be at least 0"),
    ],
)
def test_faults_are_refused(settings, text):
    """Settings that cannot be served are refused, with the model, the field, the value got and the values allowed."""
    with pytest.raises(InvalidArgumentError, match=text) as raised:
        SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}).validate("m")
    assert raised.value.message.startswith("model 'm': ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preferred_batch_sizes": (1, 8), "max_queue_delay_us": 100},
        {"preserve_ordering": True, "priority_levels": 1, "default_priority_level": 1},
        {"preserve_ordering": True, "default_policy": WaitPolicy("DELAY")},
        {"priority_levels": 2**64 - 1, "default_priority_level": 1, "policies": {2**64 - 1: DELAY}},
        {"is_batching": False, "preferred_batch_sizes": (99,)},
    ],
)
def test_legal_settings_pass(settings):
    """What Triton Inference Server accepts is accepted."""
    SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}).validate("m")


def test_every_fault_is_named():
    """Two faults are told at once."""
    with pytest.raises(InvalidArgumentError, match=r"got -5; .*got 9"):
        SchedulerSettings(8, is_batching=True, preferred_batch_sizes=(9,), max_queue_delay_us=-5).validate("m")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"WEFT_DELAY_SCHEDULER": ""}, 0),
        ({"WEFT_DELAY_SCHEDULER": "6"}, 6),
        ({"TRITONSERVER_DELAY_SCHEDULER": "4"}, 4),
        ({"WEFT_DELAY_SCHEDULER": "6", "TRITONSERVER_DELAY_SCHEDULER": "4"}, 6),
    ],
)
def test_num_to_hold(environment, expected):
    """Either environment variable holds batches back; neither does by default."""
    assert expected == num_to_hold(environment)


@pytest.mark.parametrize("value", ["six", "-1", "1.5"])
def test_num_to_hold_must_be_a_number(value):
    """A value that is no whole number is refused, with the name of the variable."""
    with pytest.raises(InvalidArgumentError, match="WEFT_DELAY_SCHEDULER must be a whole number"):
        num_to_hold({"WEFT_DELAY_SCHEDULER": value})
