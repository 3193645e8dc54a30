"""A placement as ``instance_group`` of ``config.pbtxt``, for model services that run on the hosts themselves."""

from collections import Counter, defaultdict

from google.protobuf import text_format

from weft.capacity.placement.problem import Device, Problem
from weft.capacity.placement.solution import Bin, Solution
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup


def instance_groups(problem: Problem, solution: Solution) -> dict[tuple[str, str], str]:
    """The text of ``instance_group`` by host and model.

    ``count`` is the number of instances on each of ``gpus``. A process sees one MIG slice, as GPU 0, so that a host
    with slices runs a service for each; what is the same in all of them is there once.

    Raises:
        KeyError: The placement is of another problem.
    """
    devices = {device.name: device for device in problem.devices}
    held: dict[tuple[str, str], Counter[Bin]] = defaultdict(Counter)
    num_instances = {workload.name: workload.num_instances for workload in problem.workloads}
    for name, _, bin in solution.assignments:
        held[devices[bin.device].on_host, name][bin] += num_instances[name]
    return {key: text_of(counter, devices) for key, counter in sorted(held.items())}


def text_of(instances: Counter[Bin], devices: dict[str, Device]) -> str:
    """The groups of a model with so many instances in devices and slices of one host."""
    gpus: dict[int, set[int]] = defaultdict(set)  # instances on each -> GPUs
    num_on_cpu = 0
    for bin, number in instances.items():
        index = devices[bin.device].index
        if index is None:
            num_on_cpu += number
        else:
            gpus[number].add(0 if bin.profile else index)
    config = ModelConfig()
    for number in sorted(gpus):
        config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, count=number, gpus=sorted(gpus[number]))
    if num_on_cpu:
        config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=num_on_cpu)
    return text_format.MessageToString(config)
