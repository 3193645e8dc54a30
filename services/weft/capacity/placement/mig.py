"""The MIG slices that NVIDIA's GPUs can be partitioned into.

A profile occupies so many of a GPU's memory slices and may begin at some of them; every set of profiles that do not
overlap is legal, and no other. Sources: the tables of
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html and the starts that
``nvidia-smi mig -lgipp`` prints, which are the same for all GPUs with eight memory slices. Memory is the usable part
that ``nvidia-smi mig -lgip`` prints, the smallest where drivers differ; compute is the number of streaming
multiprocessors (SMs) printed there, over those of the GPU with MIG off. Profiles with media engines (``+me``) are left
out: they hold what the plain ones hold. For 3g and 4g of the H200 no such listing was found: they count as twice its
2g, with the SMs of https://github.com/NVIDIA/go-nvml/blob/main/pkg/nvml/mock/shared/gpus/h200.go.
"""

from dataclasses import replace

from weft.capacity.placement.problem import MigProfile

_MIB = 1 << 20
#: Of GPUs with eight memory slices: compute slices -> (memory slices, starts); "1 wide" has the memory of two.
_EIGHT = {
    "1g": (1, (0, 1, 2, 3, 4, 5, 6)),
    "1g wide": (2, (0, 2, 4, 6)),
    "2g": (2, (0, 2, 4)),
    "3g": (4, (0, 4)),
    "4g": (4, (0,)),
    "7g": (8, (0,)),
}
_FOUR = {"1g": (1, (0, 1, 2, 3)), "2g": (2, (0, 2)), "4g": (4, (0,))}

#: Class of device -> SMs with MIG off, and by kind of slice: name of the profile, usable MiB, SMs.
_GPUS: dict[str, tuple[int, dict[str, tuple[str, int, int]]]] = {
    "A30-24GB": (56, {"1g": ("1g.6gb", 5836, 14), "2g": ("2g.12gb", 11672, 28), "4g": ("4g.24gb", 23344, 56)}),
    "A100-40GB": (
        108,
        {
            "1g": ("1g.5gb", 4864, 14),
            "1g wide": ("1g.10gb", 9856, 14),
            "2g": ("2g.10gb", 9856, 28),
            "3g": ("3g.20gb", 19968, 42),
            "4g": ("4g.20gb", 19968, 56),
            "7g": ("7g.40gb", 40192, 98),
        },
    ),
    "A100-80GB": (
        108,
        {
            "1g": ("1g.10gb", 9728, 14),
            "1g wide": ("1g.20gb", 19968, 14),
            "2g": ("2g.20gb", 19968, 28),
            "3g": ("3g.40gb", 40192, 42),
            "4g": ("4g.40gb", 40192, 56),
            "7g": ("7g.80gb", 80384, 98),
        },
    ),
    "H100-80GB": (
        132,
        {
            "1g": ("1g.10gb", 9856, 16),
            "1g wide": ("1g.20gb", 19968, 16),
            "2g": ("2g.20gb", 19968, 32),
            "3g": ("3g.40gb", 40192, 60),
            "4g": ("4g.40gb", 40192, 64),
            "7g": ("7g.80gb", 80384, 132),
        },
    ),
    "H200-141GB": (
        132,
        {
            "1g": ("1g.18gb", 16384, 16),
            "1g wide": ("1g.35gb", 33280, 16),
            "2g": ("2g.35gb", 33280, 32),
            "3g": ("3g.71gb", 66560, 48),
            "4g": ("4g.71gb", 66560, 64),
            "7g": ("7g.141gb", 143360, 132),
        },
    ),
}


def _profiles(num_sms: int, kinds: dict[str, tuple[str, int, int]]) -> tuple[MigProfile, ...]:
    geometry = _EIGHT if "7g" in kinds else _FOUR
    return tuple(
        MigProfile(name, num_mib * _MIB, sms / num_sms, *geometry[kind]) for kind, (name, num_mib, sms) in kinds.items()
    )


#: By class of device; ``Device.mig`` takes one of these, or what ``nvidia-smi mig -lgip -lgipp`` prints of another GPU.
MIG_PROFILES = {name: _profiles(*entry) for name, entry in _GPUS.items()}


def mig_profiles(device_class: str, reserved_bytes: int = 0) -> tuple[MigProfile, ...]:
    """The slices of a class of device, () for one that has none.

    Args:
        device_class: ``"H100-80GB"``.
        reserved_bytes: What the runtime takes of each slice before a model is there.
    """
    profiles = MIG_PROFILES.get(device_class, ())
    left = (replace(profile, memory_bytes=profile.memory_bytes - reserved_bytes) for profile in profiles)
    return tuple(profile for profile in left if profile.memory_bytes > 0)
