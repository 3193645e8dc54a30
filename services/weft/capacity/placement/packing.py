"""A placement while it is made: what is left in each device and slice, and where one more replica may go."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from weft.capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft.capacity.placement.solution import TOLERANCE, Bin, capacity


class Room(NamedTuple):
    """What is left in a device or slice: bytes, share of the device's compute, replicas that may still join."""

    memory_bytes: int
    load: float
    num_models: int


class Packing:
    """Replicas in devices; only what every rule of the problem allows can be put.

    Args:
        problem: Workloads and devices.

    Attributes:
        rooms: What is left in each device and slice that holds something.
        counts: The replicas by workload and by what holds them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rooms: dict[Bin, Room] = {}
        self.counts: dict[str, Counter[Bin]] = {workload.name: Counter() for workload in problem.workloads}
        self.bins_of: dict[str, list[Bin]] = {device.name: [] for device in problem.devices}
        self._devices = {device.name: device for device in problem.devices}
        self._workloads = {workload.name: workload for workload in problem.workloads}
        self._profiles = {device.name: {entry.name: entry for entry in device.mig} for device in problem.devices}
        self._domains = {workload.name: problem.domains_of(workload) for workload in problem.workloads}
        self._in_domain: dict[str, Counter[str]] = defaultdict(Counter)  # workload -> domain
        self._on_host: dict[str, Counter[str]] = defaultdict(Counter)  # host -> workload
        self._enemies: dict[str, set[str]] = defaultdict(set)
        for workload in problem.workloads:
            for other in workload.apart_from:
                self._enemies[workload.name].add(other)
                self._enemies[other].add(workload.name)

    def is_open(self, device: str) -> bool:
        """Whether it holds something."""
        return bool(self.bins_of[device])

    def domains_for(self, workload: Workload) -> set[str] | None:
        """The failure domains that its next replica may be in; None: any."""
        if not workload.spread:
            return None
        placed = self._in_domain[workload.name]
        fewest = min((placed[domain] for domain in self._domains[workload.name]), default=0)
        return {domain for domain in self._domains[workload.name] if placed[domain] == fewest}

    def admits(self, workload: Workload, device: Device, domains: set[str] | None) -> bool:
        """Whether class, failure domain and host allow a replica on the device; its room is not looked at."""
        return (
            workload.load_on(device.device_class) is not None
            and (domains is None or device.in_domain in domains)
            and not any(self._on_host[device.on_host][enemy] for enemy in self._enemies[workload.name])
        )

    def open_bins(self, workload: Workload, device: Device) -> Iterator[Bin]:
        """What already holds something on a device, and has room for a replica."""
        for bin in self.bins_of[device.name]:
            if _fits(workload, device, self.rooms[bin]):
                yield bin

    def whole(self, workload: Workload, device: Device) -> Bin | None:
        """The whole device, if it holds nothing and a replica fits."""
        bin = Bin(device.name)
        return bin if not self.is_open(device.name) and _fits(workload, device, self._empty(device, "")) else None

    def new_slice(self, workload: Workload, device: Device) -> Bin | None:
        """The smallest MIG slice that can still be made and holds a replica, where it leaves most other slices."""
        if Bin(device.name) in self.rooms:
            return None
        taken = self._taken(device)
        fitting = [profile for profile in device.mig if _fits(workload, device, self._empty(device, profile.name))]
        for profile in sorted(fitting, key=lambda entry: (entry.num_slices, entry.compute_share, entry.memory_bytes)):
            starts = [start for start in profile.starts if not _mask(profile, start) & taken]
            if starts:
                best = max(starts, key=lambda start: (_freedom(device, taken | _mask(profile, start)), start))
                return Bin(device.name, profile.name, best)
        return None

    def fits_at(self, workload: Workload, bin: Bin) -> bool:
        """Whether a replica may be put there: the rules, the room, and that the slice can be made."""
        device = self._devices.get(bin.device)
        if device is None or not self.admits(workload, device, self.domains_for(workload)):
            return False
        if bin in self.rooms:
            return _fits(workload, device, self.rooms[bin])
        if not bin.profile:
            return not self.is_open(bin.device) and _fits(workload, device, self._empty(device, ""))
        profile = self._profiles[bin.device].get(bin.profile)
        if profile is None or bin.start not in profile.starts or Bin(bin.device) in self.rooms:
            return False
        return not _mask(profile, bin.start) & self._taken(device) and _fits(
            workload, device, self._empty(device, bin.profile)
        )

    def put(self, workload: Workload, bin: Bin) -> None:
        """Put a replica where it fits."""
        device = self._devices[bin.device]
        room = self.rooms.get(bin)
        if room is None:
            room = self._empty(device, bin.profile)
            self.bins_of[bin.device].append(bin)
        self._count(workload, device, bin, 1)
        load = workload.load_on(device.device_class) or 0.0
        self.rooms[bin] = Room(room.memory_bytes - workload.memory_bytes, room.load - load, room.num_models - 1)

    def take(self, workload: Workload, bin: Bin) -> None:
        """Take a replica away; a slice that holds nothing is given up."""
        device = self._devices[bin.device]
        self._count(workload, device, bin, -1)
        room, load = self.rooms[bin], workload.load_on(device.device_class) or 0.0
        self.rooms[bin] = Room(room.memory_bytes + workload.memory_bytes, room.load + load, room.num_models + 1)
        if room.num_models + 1 == device.max_models:
            del self.rooms[bin]
            self.bins_of[bin.device].remove(bin)

    def held(self, device: str) -> list[tuple[Workload, Bin]]:
        """The replicas on a device."""
        return [
            (self._workloads[name], bin)
            for bin in self.bins_of[device]
            for name, counter in self.counts.items()
            for _ in range(counter[bin])
        ]

    def _count(self, workload: Workload, device: Device, bin: Bin, number: int) -> None:
        self.counts[workload.name][bin] += number
        self._in_domain[workload.name][device.in_domain] += number
        self._on_host[device.on_host][workload.name] += number

    def _empty(self, device: Device, profile: str) -> Room:
        return Room(*capacity(self.problem, device, profile), device.max_models)

    def _taken(self, device: Device) -> int:
        profiles = self._profiles[device.name]
        return sum(_mask(profiles[bin.profile], bin.start) for bin in self.bins_of[device.name] if bin.profile)


def _fits(workload: Workload, device: Device, room: Room) -> bool:
    load = workload.load_on(device.device_class)
    return (
        load is not None
        and room.num_models > 0
        and workload.memory_bytes <= room.memory_bytes
        and load <= room.load + TOLERANCE
    )


def _mask(profile: MigProfile, start: int) -> int:
    """The memory slices of a MIG slice, as bits."""
    return ((1 << profile.num_slices) - 1) << start


def _freedom(device: Device, taken: int) -> int:
    """How many slices could still be made, each for itself, weighted by their size."""
    return sum(
        profile.num_slices for profile in device.mig for start in profile.starts if not _mask(profile, start) & taken
    )
