"""The device that is planned for: one of the table or a file, or this machine as it was measured."""

from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from weft.capacity.devices import DeviceSpec, find_device
from weft.capacity.machine.profile import ENGINE, GPU, LINEAR, ONNX, RUNTIMES, TORCH, MachineProfile, default_file
from weft.capacity.roofline import BatchTimer, LanguageHost, LanguageRoofline, OnnxHost, Roofline, StepTimer, TorchHost

#: Name of this machine.
THIS = "this"
#: Name of its GPU.
THIS_GPU = "this-gpu"


class DeviceTarget:
    """A device with the times of models on it, by its figures alone."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> DeviceSpec:
        """Its figures."""
        return self._spec

    def batches(self, backend: str, num_threads: int) -> BatchTimer:
        """Predicts batches of a backend's models; ONNX Runtime multiplies float32 as TF32 where a GPU has it."""
        return Roofline(self._spec, "tf32" if backend == "onnxruntime" and "tf32" in self._spec.flops_per_s else "")

    def steps(self, num_threads: int) -> StepTimer:
        """Predicts steps of the language-model engine."""
        return LanguageRoofline(self._spec)

    def runtime_bytes(self, backend: str) -> int:
        """Memory of the service with this backend's libraries, before a model is there."""
        return self._spec.runtime_bytes

    def request_s(self, backend: str, moved_bytes: int) -> float:
        """Seconds of the service that a request of so many bytes takes beside the model; 0: unknown."""
        return 0.0


class ThisMachine(DeviceTarget):
    """This machine's CPU, measured as far as it is asked for."""

    def __init__(self, profile: MachineProfile) -> None:
        self._profile = profile

    @property
    @override
    def spec(self) -> DeviceSpec:
        """Peaks are those of one thread of ONNX Runtime times the cores."""
        times = self._profile.section(ONNX)
        flops = max(2 * rows * side * side / seconds for rows, side, seconds in times.products)
        moved = max(2.0 * rate for _, rows, rate in times.streamed[-6:] if rows == 1)  # 4 bytes for 2 operations
        return DeviceSpec(
            THIS,
            self._profile.memory_bytes,
            moved,
            {"fp32": flops * self._profile.num_cores},
            is_cpu=True,
            num_cores=self._profile.num_cores,
            compute_share=1.0,
            bandwidth_share=1.0,
            kernel_s=times.node_s,
            runtime_bytes=0,
            source=self._profile.cpu,
            read=self._profile.measured,
        )

    @override
    def batches(self, backend: str, num_threads: int) -> BatchTimer:
        threads = min(num_threads or self._profile.num_cores, self._profile.num_cores)
        times = self._profile.section(ONNX, threads)
        return OnnxHost(times) if backend == "onnxruntime" else TorchHost(self._profile.section(TORCH, threads), times)

    @override
    def steps(self, num_threads: int) -> StepTimer:
        threads = min(num_threads, self._profile.num_cores)
        return LanguageHost(self._profile.section(LINEAR, threads), self._profile.section(ENGINE, threads))

    @override
    def runtime_bytes(self, backend: str) -> int:
        if backend == "llm":
            return int(self._profile.section(ENGINE).memory_bytes)
        memory = self._profile.section(RUNTIMES).memory_bytes
        return int(memory.get(backend, memory[""]))

    @override
    def request_s(self, backend: str, moved_bytes: int) -> float:
        runtimes = self._profile.section(RUNTIMES)
        return float(runtimes.request_cpu_s[backend] + runtimes.byte_s * moved_bytes)


def find_target(
    name: str, profile_file: Path | None = None, announce: Callable[[str], None] = lambda _: None
) -> DeviceTarget:
    """The device of that name, ``"this"`` machine, ``"this-gpu"``, or the one that a file describes.

    Raises:
        NotFoundError, InvalidArgumentError: See ``find_device``.
    """
    if name.lower() in (THIS, THIS_GPU):
        profile = MachineProfile(profile_file or default_file(), announce)
        return ThisMachine(profile) if name.lower() == THIS else DeviceTarget(_this_gpu(profile))
    return DeviceTarget(find_device(name))


def _this_gpu(profile: MachineProfile) -> DeviceSpec:
    """The GPU of this machine by what it reached, which is no peak but what good kernels do."""
    figures = profile.section(GPU)
    return DeviceSpec(
        THIS_GPU,
        figures.memory_bytes,
        figures.bytes_per_s,
        figures.flops_per_s,
        compute_share=1.0,
        bandwidth_share=1.0,
        kernel_s=figures.kernel_s,
        source=figures.name,
        read=profile.measured,
    )
