"""Hosts of a file become devices; what is wrong in it is named with its place."""

from pathlib import Path

import pytest
from tests.unit.capacity.placement.problems import GIB, H100

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement import Device
from weft.capacity.placement.problem import known_mig, mig_profiles, read_fleet

GPU = Device("", H100, 80 * GIB, index=0, max_models=4, cost_per_hour=2.5)


def test_hosts_are_devices(tmp_path: Path) -> None:
    """Two GPUs of one host are counted from 0, and what a host does not say is the caller's."""
    path = tmp_path / "fleet.toml"
    first = '[[host]]\nname = "a"\ndomain = "zone-a"\nnum_devices = 2\nmig = true\n'
    path.write_text(first + '[[host]]\nname = "b"\ncost_per_hour = 1\n')
    mig = known_mig()[H100]
    assert (
        Device("a-0", H100, 80 * GIB, "a", "zone-a", 0, 4, 2.5, mig),
        Device("a-1", H100, 80 * GIB, "a", "zone-a", 1, 4, 2.5, mig),
        Device("b", H100, 80 * GIB, "b", "", 0, 4, 1.0),
    ) == read_fleet(path, GPU, mig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a table"),
        ("host = 3", "needs a table"),
        ("x = 1\n[[host]]\nname = 'a'", "'x' is not known"),
        ("[[host]", "is not TOML"),
        ("[[host]]\ndomain = 'z'", "host 1: it has no name"),
        ("[[host]]\nname = 'a'\n[[host]]\nname = 'b'\nnum = 2", "host 2: 'num' is not known; allowed: name, domain"),
        ("[[host]]\nname = 3", "host 1: name is 3; allowed: a value of type str"),
        ("[[host]]\nname = 'a'\nnum_devices = true", "host 1: num_devices is True"),
        ("[[host]]\nname = 'a'\nnum_devices = 0", "num_devices is 0; allowed: from 1"),
        ("[[host]]\nname = 'a'\nnum_devices = 1500\n[[host]]\nname = 'b'\nnum_devices = 1500", "more than 2000"),
        ("[[host]]\nname = 'a'\nmig = true", "cannot be partitioned"),
        ("x" * (2 << 20), "is larger than"),
    ],
    ids=range(12),
)
def test_what_is_no_fleet_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file, the host and the value."""
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        read_fleet(path, GPU)
    assert message in caught.value.message
    assert "fleet.toml" in caught.value.message


def test_a_runtime_takes_its_part_of_each_slice() -> None:
    """What a slice has left is less by it, and a slice with nothing left is none."""
    assert {p.memory_bytes - 600 for p in known_mig()[H100]} == {p.memory_bytes for p in mig_profiles(H100, 600)}
    assert ["7g.80gb"] == [profile.name for profile in mig_profiles(H100, 60 * GIB)]
    assert () == mig_profiles("T4")
