"""A placement as configuration and files, read by those that take them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.unit.capacity.placement.problems import GIB, H100, gpus, problems

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import parse
from weft.capacity.placement import Device, Problem, Workload, place
from weft.capacity.placement.outputs import from_json, instance_groups, load, save, to_json
from weft.serving.config.checks import ConfigReport
from weft.serving.config.placement import place_instances
from weft_protos.model_config_pb2 import ModelConfig


@settings(max_examples=12, deadline=None)
@given(problems())
def test_instance_groups_are_those_of_a_configuration(problem: Problem) -> None:
    """The model service's own parser makes as many instances of them as replicas were placed on the host."""
    solution = place(problem, time_limit_s=0.1)
    host_of = {device.name: device.on_host for device in problem.devices}
    placed = Counter((host_of[e.bin.device], e.workload) for e in solution.assignments if not e.bin.profile)
    has_slices = {(host_of[e.bin.device], e.workload) for e in solution.assignments if e.bin.profile}
    texts = instance_groups(problem, solution)
    assert {(host_of[entry.bin.device], entry.workload) for entry in solution.assignments} == texts.keys()
    for key, text in texts.items():
        config = ModelConfig()
        parse(text, config, file="config.pbtxt")
        report = ConfigReport("config.pbtxt")
        instances = place_instances(config, num_gpus=8, can_use_gpu=True, report=report)
        assert key in has_slices or placed[key] == len(instances)


def test_an_instance_group_names_count_and_gpus() -> None:
    """Two replicas on GPU 0 and one on GPU 1 are two groups, on a CPU all instances are one of KIND_CPU."""
    problem = Problem((Workload("m", 30 * GIB, {H100: 0.3}, 3),), gpus(2))
    assert (
        "instance_group [\n  { count: 1 kind: KIND_GPU gpus: [ 1 ] },\n  { count: 2 kind: KIND_GPU gpus: [ 0 ] }\n]\n"
    ) == instance_groups(problem, place(problem))["h0", "m"]
    problem = Problem((Workload("m", GIB, {"cpu": 0.3}, 3, num_instances=2),), (Device("c", "cpu", 64 * GIB),))
    text = instance_groups(problem, place(problem))["c", "m"]
    assert "instance_group [ { count: 6 kind: KIND_CPU } ]\n" == text


@settings(max_examples=12, deadline=None)
@given(problems())
def test_a_plan_is_read_as_it_was_written(problem: Problem) -> None:
    """Problem and placement come back the same from JSON, also where an older version wrote more of a workload."""
    solution = place(problem, time_limit_s=0.1)
    values = json.loads(json.dumps(to_json(problem, solution)))
    values["workloads"] = [entry | {"apart_from": [], "cpus": 1.0} for entry in values["workloads"]]
    assert (problem, solution) == from_json(values)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ('"num_replicas": -1', "workload 'm': num_replicas is -1"),
        ('"num_replicass": 1', "unexpected keyword argument 'num_replicass'"),
        ('"num_replicas": 1, "apart_from": ["m"]', "unexpected keyword argument 'apart_from'"),
    ],
)
def test_a_saved_plan_with_a_wrong_value_is_refused(tmp_path: Path, written: str, fault: str) -> None:
    """Values that make no sense are named as in any other problem, and so is what is no field of a workload."""
    path = tmp_path / "plan.json"
    problem = Problem((Workload("m", GIB, {"*": 0.1}),), gpus(1))
    save(path, problem, place(problem))
    path.write_text(path.read_text().replace('"num_replicas": 1', written))
    with pytest.raises(InvalidArgumentError, match=rf"plan\.json'.*{fault}"):
        load(path)
