"""Benchmarks of serving and placement: each program runs in small, and its report says what it must."""

import random
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import (
    buckets,
    calls,
    executor,
    fused,
    gpu,
    llm_scheduler,
    overload,
    priorities,
    scheduler,
    transport,
)
from benchmarks.calls import MODEL_SERVICE, ROUTER, Line
from benchmarks.executor_cases import CASES, Case
from benchmarks.kube_scheduler import schedule
from benchmarks.language_model import __main__ as language_model
from benchmarks.language_model import gpu_steps, losses
from benchmarks.report import table
from benchmarks.wire import __main__ as wire
from tests.unit.llm.quantized_folders import CONFIG, gptq, save_folder

from weft.base.text.pbtxt import parse
from weft.capacity.placement import Device, Problem, Workload
from weft.capacity.placement.solution import faults
from weft_protos.model_config_pb2 import ModelConfig

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30
torch.set_num_threads(1)
_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("program", "arguments", "status", "words"),
    [
        (executor, "--only nothing", 2, "no case has 'nothing' in its name: sequence of 1, "),
        (fused, "--only nothing", 2, "no case has 'nothing' in its name: identity_py, "),
        (wire, "--only nothing", 2, "MiniLM texts"),
        (wire, "nothing", 2, "servers, burst, pace, hop"),
        (wire, "--wire http", 2, "weft, grpcio"),
        (wire, "--sender nothing", 2, "tritonclient"),
        (language_model, "--only C0", 2, "no case C0; there are C1, C2, C3"),
        pytest.param(gpu, "", 0, "no GPU here: nothing was measured\n", marks=_NO_GPU),
        pytest.param(gpu_steps, "", 2, "sees no CUDA device", marks=_NO_GPU),
        (executor, "--profile --quick --only random", 0, "router/executor.py"),
        (fused, "--profile --quick --only", 0, "router/core.py"),
    ],
)
def test_command_line(
    program: Any, arguments: str, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is asked for must exist, and a GPU be there, or the message lists what there is; a profile has functions."""
    given = arguments.split()
    if given[-1:] == ["--only"]:
        given += ["identity_py, graph of 1", "--load", "1 at once"]
    try:
        ended = program.main(given)
    except SystemExit as end:
        ended = end.code
    output = capsys.readouterr()
    assert ended == status
    assert words in output.out + output.err


@pytest.mark.parametrize(
    ("program", "case", "starts"),
    [
        (executor, "ensemble", ["ensemble of 3, AVERAGE  ", "ensemble of 3, AVERAGE, RouterCore.infer"]),
        (
            fused,
            "identity_py, graph of 1",
            [f"identity_py, graph of 1 step  {load.name} " for load in fused.LOADS],
        ),
    ],
)
def test_a_quick_run_prints_a_line_for_each_case(
    program: Any, case: str, starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Machine, header, and figures of the case in each way; no file is written."""
    assert 0 == program.main(["--quick", "--only", case])
    lines = capsys.readouterr().out.splitlines()[-len(starts) :]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_every_case_of_the_executor_does_what_its_name_says(case: Case) -> None:
    """Its graph compiles, and a request makes the calls that are counted as its; one that does not is refused."""
    await (await executor.prepare(case))()
    with pytest.raises(RuntimeError, match=rf"{case.num_calls} calls, not 77"):
        await executor.prepare(replace(case, num_calls=77))


async def test_the_calls_are_subtracted_and_the_rest_is_divided_by_the_steps() -> None:
    """Three steps: added is CPU less three calls, and three times what a step adds."""
    (row, router) = await executor.measure([CASES[1]], num_rounds=2, num_requests=20)
    assert ("sequence of 3", 3, 3) == (row.case, row.num_steps, row.num_calls)
    assert 0 < row.added_us < row.cpu_us < router.cpu_us
    assert abs(row.added_us - 3 * row.added_per_step_us) < 0.1
    assert "sequence of 3, RouterCore.infer" == router.case


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Flush right, except for those that are said to be flush left; no blanks at the end."""
    assert "a    bb\nccc   d" == table([["a", "bb"], ["ccc", "d"]], left_columns={0})
    assert "  a  bb\nccc  d" == table([["a", "bb"], ["ccc", "d"]], left_columns={1})


def test_what_a_step_costs_is_the_distance_of_two_graphs() -> None:
    """A third of that between four steps and one, of the same model and load."""
    rows = [
        fused.Row(f"m, graph of {steps}", load, cpu_us, 0.0, 0.0, 0.0, 0.0)
        for load in ("1x1", "4x8")
        for steps, cpu_us in (("1 step", 40.0), ("4 steps", 100.0 if load == "1x1" else 70.0))
    ]
    assert [None, "20.0", None, "10.0"] == [
        line.split()[-1] if "4 steps" in line else None for line in fused.render(rows).splitlines()[1:]
    ]


def test_every_case_for_a_gpu_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case answers its batches; a small picture is enough to see that."""
    cases = [
        type(case)(case.name, case.backend, case.file, case.optimization, case.num_instances, dims)
        for case, dims in ((case, (3, 8, 8) if case.dims == gpu._PICTURE else case.dims) for case in gpu.CASES)
    ]
    monkeypatch.setattr(gpu, "_PICTURE", (3, 8, 8))
    monkeypatch.setattr(gpu, "CASES", cases)
    assert 0 == gpu.main(["--cpu", "--rounds", "1", "--batches", "1"])
    out = capsys.readouterr().out
    assert all(case.name in out for case in cases)


async def test_a_hop_is_measured_by_each_way(tmp_path: Path) -> None:
    """A row for each bare connection and each of a target's, against real processes; the first is the unit of all."""
    rows = await transport.hops(tmp_path, 1, 0.05, [transport.Case(64, 2)])
    places = [f"{wire}, {place}" for wire in ("grpcio", "weft") for place in ("TCP", "Unix socket")]
    ways = ["bare, framed, Unix socket", *(f"{caller}, {place}" for caller in ("bare", "target") for place in places)]
    assert ways == [row.way for row in rows]
    assert all(row.rate_per_s > 0 for row in rows)
    measured = [transport.Measured(10, 0.3, 0.5), transport.Measured(30, 0.1, 0.9), transport.Measured(20, 0.2, 0.8)]
    first, other = transport.summary("c", "grpcio", measured), transport.summary("c", "weft", measured[:1])
    assert (20, 0.2, 0.8) == (first.rate_per_s, first.caller_s, first.service_s)
    assert ["1.00", "1.25"] == [line.split()[-1] for line in transport.render([first, other], {}).splitlines()[-2:]]


@pytest.mark.parametrize(
    ("case", "has_buckets", "is_batching"),
    [("buckets", True, True), ("exact shapes", False, True), ("batching off", False, False)],
)
def test_cases_of_buckets(tmp_path: Path, case: str, has_buckets: bool, is_batching: bool) -> None:
    """Each case takes away what its name says from the repository's model, and nothing else."""
    buckets.write_repository(REPOSITORY, tmp_path, case)
    text = (tmp_path / "model" / "minilm" / "config.pbtxt").read_bytes()
    config, _ = parse(text, ModelConfig(), file="config.pbtxt")
    assert has_buckets == any(key.startswith("batch_buckets") for key in config.parameters)
    assert is_batching == config.HasField("dynamic_batching")
    assert (2, "1") == (config.instance_group[0].count, config.parameters["intra_op_thread_count"].string_value)
    assert (tmp_path / "graphs" / "embed" / "1" / "graph.pbtxt").is_file()


def test_scheduler_measures_every_case() -> None:
    """A row for each case and part; with 32 at once batches are formed, and without dynamic_batching they are not."""
    rows = scheduler.measure(num_rounds=1, num_requests=128)
    assert len(rows) == 3 * len(scheduler.CASES)
    batches = {(row.case, row.part): row.mean_batch for row in rows}
    assert 1 == batches["one by one", "model, 32 at once"]
    assert batches["batching", "model, 32 at once"] > 8
    assert re.search(r"batching, 3 levels, ageing +policy +\d", scheduler.render(rows))


def test_models_of_priorities(tmp_path: Path) -> None:
    """The same model with and without levels."""
    priorities.write_repository(tmp_path)
    configs = {path.parent.name: path for path in tmp_path.glob("*/config.pbtxt")}
    parsed = {name: parse(path.read_bytes(), ModelConfig(), file=str(path))[0] for name, path in configs.items()}
    levels = {name: config.dynamic_batching.priority_levels for name, config in parsed.items()}
    assert {"levels": 2, "first_come": 0} == levels


def test_the_report_of_overload_says_what_is_left(tmp_path: Path) -> None:
    """A share of each router's peak at three times the capacity, and a well-formed picture whose points lie in it."""
    shares = dict.fromkeys(overload.SHARES, 0.5), dict.fromkeys(overload.SHARES, 9.0)
    rows = [
        overload.Row(router, sent, factor, 100 * factor, good, *shares, {}, 5, 0.1)
        for router, goods in (("no limits", (100.0, 20.0)), ("limits", (100.0, 95.0)))
        for sent in (True, False)
        for factor, good in zip((1.0, 3.0), goods, strict=True)
    ]
    text = overload.render(rows, 100.0)
    assert "no limits, deadline sent: 0.20 of the peak is left at 3 x" in text
    assert "limits, deadline kept: 0.95 of the peak is left at 3 x" in text
    root = ET.fromstring(overload.draw(rows, 100.0))
    lines = root.findall(f"{SVG}polyline")
    assert 4 + len(overload.SHARES) + 1 == len(lines)
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < float(root.attrib["width"])
            assert 0 < y < float(root.attrib["height"])
    overload.write_repository(tmp_path)
    assert (tmp_path / "model/work_model/1/model.py").is_file()
    assert "work_model" in (tmp_path / "graphs/work/1/graph.pbtxt").read_text()


def test_a_load_of_the_language_model_scheduler_stays_full() -> None:
    """Who ends is replaced, so that there are always as many; with levels and scarce blocks some lose their slots."""
    load = llm_scheduler.Load(llm_scheduler.Case("small", num_running=8, num_waiting=20, mean_output=4), seed=0)
    assert sum(load.step()[3] for _ in range(20)) > 0
    assert 28 == load.scheduler.num_running + load.scheduler.num_waiting
    assert load.scheduler.schedule() is not None
    assert 8 == load.scheduler.num_running
    load.scheduler.check()
    case = llm_scheduler.Case("scarce", num_running=8, num_waiting=20, mean_output=60, num_blocks=80, num_levels=3)
    row = llm_scheduler.measure(case, num_rounds=1, num_warm=0, num_steps=200)
    assert row.num_preemptions > 0
    assert row.step_us <= row.step_p99_us
    assert re.search(r"scarce +\d+", llm_scheduler.render([row]))


def nodes(number: int, *, per_zone: int = 1) -> tuple[Device, ...]:
    """Alike devices, each a node."""
    return tuple(Device(f"d{i}", "gpu", 80 * GIB, f"h{i}", f"z{i // per_zone}") for i in range(number))


def test_kubernetes_puts_replicas_where_most_is_free() -> None:
    """LeastAllocated takes an empty node for each of three replicas; MostAllocated puts them together."""
    problem = Problem((Workload("m", 10 * GIB, {"*": 0.1}, 3),), nodes(3))
    assert 3 == len(schedule(problem, random.Random(1)).devices)
    models = tuple(Workload(f"m{i}", 10 * GIB, {"*": 0.125}) for i in range(3))
    assert 1 == len(schedule(Problem(models, nodes(3)), random.Random(1), packs=True).devices)


def test_kubernetes_takes_the_balanced_node() -> None:
    """Of two nodes with as much free on average, a pod goes where memory and compute are then used alike."""
    memory, compute = Workload("a", 40 * GIB, {"x": 0.0, "gpu": 0.0}), Workload("b", 0, {"y": 0.5, "gpu": 0.5})
    devices = (Device("x", "x", 80 * GIB, "hx", "z"), Device("y", "y", 80 * GIB, "hy", "z"))
    problem = Problem((memory, compute, Workload("c", 40 * GIB, {"*": 0.0})), devices)
    last = [schedule(problem, random.Random(seed)).assignments[-1] for seed in range(20)]
    assert {"y"} == {entry.bin.device for entry in last if entry.workload == "c"}


def test_kubernetes_keeps_spread_constraints_and_leaves_pending_what_fits_nowhere() -> None:
    """Five replicas with maxSkew 1 in three zones never break a rule; what does not fit is told and blocks no other."""
    models = (Workload("m", GIB, {"*": 0.1}, 5, spread=True), Workload("n", 70 * GIB, {"*": 0.8}, 3))
    problem = Problem(models, nodes(6, per_zone=2))
    for seed in range(20):
        assert [] == faults(problem, schedule(problem, random.Random(seed)))
    problem = Problem((Workload("large", 90 * GIB, {"*": 0.1}, 2), Workload("m", GIB, {"*": 0.1})), nodes(2))
    solution = schedule(problem, random.Random(1))
    assert [("large", 2)] == [entry[:2] for entry in solution.unplaced]
    assert ["m"] == [entry.workload for entry in solution.assignments]


def test_a_plan_has_every_token_in_a_block_of_its_own_sequence() -> None:
    """Positions end with the context, cache slots follow from the tables, and no block is shared or the null block."""
    plan = gpu_steps.step_plan(3, 5, 40)
    assert [40, 40, 40] == plan.ctx_len.tolist()
    assert [*range(35, 40)] * 3 == plan.positions.tolist()
    tables = {(slot, index): block for slot, index, block in plan.table_delta.tolist()}
    assert set(range(1, 10)) == set(tables.values())
    rows = zip(np.repeat(plan.slots, 5).tolist(), plan.positions.tolist(), strict=True)
    assert [tables[slot, at // 16] * 16 + at % 16 for slot, at in rows] == plan.slot_mapping.tolist()
    assert [4, 9, 14] == plan.sample_rows.tolist()


def test_every_figure_is_made_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, prompts, fewer bits: one line each, so that the program runs where there is a GPU."""
    monkeypatch.setattr(gpu_steps, "_STEPS", 1)
    monkeypatch.setattr(gpu_steps, "_ROUNDS", 1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    model = replace(gpu_steps.LLAMA_8B, vocab_size=128, num_layers=1, dtype="float32", **sizes)  # type: ignore[arg-type]
    bench = gpu_steps.Bench(model, "cpu", 1e9, 1e9)
    assert 2 == len(list(gpu_steps.decode_figures(bench, ((1, 20), (3, 40)))))
    assert 1 == len(list(gpu_steps.prompt_figures(bench, ((2, 24),))))
    assert ["bf16", "W8", "W4", "KV"] == [line.split()[1] for line in gpu_steps.lowbit_figures(bench, ((2, 20),))]


def test_lines_of_the_table(tmp_path: Path) -> None:
    """Each kind is beside float32; errors of normal weights are within their bounds, and 4 bits have more than 8."""
    save_folder(tmp_path / "model", gptq(), None, is_plain=lambda module: True)
    lines = losses.measure(tmp_path / "model", [torch.arange(50) * 7 % CONFIG.vocab_size])
    assert ["float32", "int8", "int4", "int4", "nf4", "KV"] == [loss.kind.split(",")[0].split()[0] for loss in lines]
    errors = {loss.kind: loss.weight_error for loss in lines if loss.weight_error is not None}
    assert all(loss.weight_error <= loss.weight_error_bound for loss in lines if loss.weight_error_bound)
    assert errors["int8, scale by output"] < 0.2 * errors["int4, groups of 32"]
    assert all(0 <= loss.agreement <= 1 and loss.perplexity > 1 for loss in lines)
    assert 1.0 == lines[0].agreement
    assert "int4, groups of 32" in losses.render(lines)


@pytest.mark.long
async def test_requests_take_as_many_python_calls_as_the_goals_allow() -> None:
    """The counts are exact, add up by function, and each that has a goal is within it."""
    counts = await calls.count(num_requests=3)
    assert all(case.is_exact for case in (counts.alone, counts.passed_through, counts.one_step, counts.three_steps))
    assert 0 == counts.alone.router < counts.one_step.router < counts.three_steps.router
    assert counts.one_step.both < counts.three_steps.both
    assert 1 < counts.nesting
    assert [] == [f"{line.case}: {line.value}, at most {line.goal}" for line in counts.lines() if not line.is_met]
    sides: Counter[str] = Counter()
    for (side, _), number in counts.one_step.by_function.items():
        sides[side] += number
    assert {MODEL_SERVICE: counts.one_step.model_service, ROUTER: counts.one_step.router} == sides


@pytest.mark.long
def test_a_table_shows_calls_beside_their_goals(capsys: pytest.CaptureFixture[str]) -> None:
    """A missed goal is marked, and the exit status says so; ``--verbose`` lists functions."""
    lines = [Line("alone", 101, 100, 141), Line("graph", 400, 400, 697), Line("through", 7, is_exact=False)]
    assert [False, True, True] == [line.is_met for line in lines]
    header, *rows = calls.render(lines).splitlines()
    assert ["now", "goal", "before"] == header.split()[-3:]
    assert [["alone", "101", "100", "141", "missed"], ["graph", "400", "400", "697"], ["through", "7", "(varies)"]] == [
        row.split() for row in rows
    ]
    status = calls.main(["--verbose"])
    shown = capsys.readouterr().out
    assert status == int("missed" in shown)
    assert "V2Servicer.ModelInfer" in shown
