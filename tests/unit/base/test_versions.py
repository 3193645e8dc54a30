"""Versions of models and graphs."""

import pytest

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import is_version, version_number, version_order, versions_to_serve
from weft_protos.model_config_pb2 import ModelVersionPolicy


@pytest.mark.parametrize(("version", "number"), [("1", 1), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_a_version_is_a_number_of_at_least_one(version: str, number: int) -> None:
    """Leading zeros mean nothing."""
    assert number == version_number(version)


@pytest.mark.parametrize("version", ["", "0", "00", "-1", "+1", "1.0", "1 ", "latest", "²", "\u0661", "9" * 5_000])
def test_anything_else_is_no_version(version: str) -> None:
    """The text is that of Triton Inference Server; of a long value it has the beginning."""
    with pytest.raises(InvalidArgumentError) as caught:
        version_number(version)
    assert caught.value.message.startswith(
        f"failed to get model version from specified version string '{version[:80]}'"
    )
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("10", True), *((text, False) for text in ("", "0", "01", "1 ", "\u0661", "v1"))],
)
def test_a_version_folder_has_no_leading_zeros(text: str, expected: bool) -> None:
    """As in Triton Inference Server."""
    assert expected is is_version(text)


def test_versions_are_ordered_by_number() -> None:
    """What is no number comes first."""
    assert ["latest", "2", "10"] == sorted(["10", "latest", "2"], key=version_order)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ModelVersionPolicy(), [10]),
        (ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=2)), [2, 10]),
        (ModelVersionPolicy(latest=ModelVersionPolicy.Latest()), [10]),
        (ModelVersionPolicy(all=ModelVersionPolicy.All()), [1, 2, 10]),
        (ModelVersionPolicy(specific=ModelVersionPolicy.Specific(versions=[2, 3, 1])), [1, 2]),
    ],
)
def test_the_policy_picks_versions(policy: ModelVersionPolicy, expected: list[int]) -> None:
    """Of those that are there, lowest first; without a policy the highest."""
    assert expected == versions_to_serve(policy, [10, 1, 2])
    assert [] == versions_to_serve(policy, [])
