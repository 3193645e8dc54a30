"""Devices: the table, and files of users."""

from pathlib import Path

import pytest

from weft.base.errors import NotFoundError
from weft.capacity.devices import TYPE_BYTES, find_device, known_devices
from weft.capacity.placement.problem import known_mig

OWN = "memory_gib = 24\nbandwidth_gb_per_s = 936\ntflops = { fp32 = 35.6, fp16 = 142 }\n"


@pytest.mark.parametrize("name", known_devices())
def test_a_known_device_has_plausible_figures_with_their_source(name: str) -> None:
    """More than 1 byte in flight for 10 000 operations, peaks that do not fall with narrower types, and a source."""
    device = known_devices()[name]
    assert 10 < device.ridge("fp16") < 1000
    assert device.source.startswith("https://")
    assert len(device.read) == len("2026-01-01")
    peaks = [device.peak(kind) for kind in ("fp32", "fp16", "int8")]
    assert peaks == sorted(peaks)
    assert all(device.peak(kind) > 0 for kind in TYPE_BYTES)


def test_profiles_of_slices_are_of_known_devices_and_fit_into_them() -> None:
    """So that a plan for a device knows its slices."""
    devices = known_devices()
    shared = known_mig().keys() & devices.keys()
    assert {"A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB"} <= shared
    assert all(p.memory_bytes <= devices[name].memory_bytes for name in shared for p in known_mig()[name])


@pytest.mark.parametrize("name", ["H100", "h100-80gb", "H100-SXM"])
def test_a_device_has_several_names(name: str) -> None:
    """In any case."""
    assert find_device(name).name == "H100-80GB"


def test_an_unknown_device_is_told_the_nearest_and_all() -> None:
    """And how another is described."""
    with pytest.raises(NotFoundError, match=r"'H10O' is not known; did you mean 'h100'\?.*MI300X.*memory_gib"):
        find_device("H10O")


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    """By what it gives, the rest as usual; its name is the file's."""
    (tmp_path / "mine.toml").write_text(OWN)
    device = find_device(str(tmp_path / "mine.toml"))
    assert (device.name, device.memory_bytes, device.bytes_per_s) == ("mine", 24 << 30, 936e9)
    assert device.peak("bf16") == 142e12


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    """Is no file that can be read."""
    for name in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(NotFoundError, match="no file that can be read"):
            find_device(str(name))
