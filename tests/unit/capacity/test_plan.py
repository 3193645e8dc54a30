"""``weft plan``: what it prints of a repository, and what it says to bad input."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.case_files import says, table

from weft.capacity.costs import BatchCost, Operation
from weft.capacity.estimates import PlanOptions, estimate
from weft.capacity.machine.profile import EngineTimes, LinearTimes, MachineProfile, Runtimes, Times, TorchTimes
from weft.capacity.machine.torch_times import measure_device
from weft.capacity.roofline import ThisMachine
from weft.capacity.subjects import find_subjects
from weft.cli.__main__ import main

SAMPLES = Path(__file__).resolve().parents[3] / "model_repository"
SIDE = 512
CONFIG = """
backend: "{backend}"
max_batch_size: 16
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product of fixed and one of open shape, a Python model, and a language model with random weights."""
    root = tmp_path_factory.mktemp("repository")
    for name, backend, dims, count in (
        ("fixed", "onnxruntime", str(SIDE), 2), ("open", "onnxruntime", f"-1, {SIDE}", 1), ("code", "python", "4", 1),
    ):  # fmt: skip
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(CONFIG.format(backend=backend, dims=dims, count=count))
    for name, shape in (("fixed", ["b", SIDE]), ("open", ["b", "n", SIDE])):
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["X", "w"], ["Y"])],
            name,
            [helper.make_tensor_value_info("X", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("Y", TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(np.ones((SIDE, SIDE), np.float32), "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        (root / name / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (root / "code" / "1" / "model.py").write_text("class TritonPythonModel: ...")
    (root / "chat" / "1").mkdir(parents=True)
    (root / "chat" / "1" / "config.json").write_text(json.dumps(LLAMA))
    (root / "chat" / "config.pbtxt").write_text(
        'backend: "llm"\nparameters { key: "load_format" value { string_value: "dummy" } }\n'
    )
    return root


def planned(repository: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit status of ``weft plan --json``, and what it prints."""
    status = main(["plan", "--repository", str(repository), "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def told(repository: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a plan that fails says."""
    assert main(["plan", "--repository", str(repository), *arguments]) == 1
    return capsys.readouterr().err


def test_a_model_is_planned_for_a_gpu(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of both instances, cost by the hour's price, and a place."""
    status, report = planned(repository, capsys, "fixed", "--device", "T4", "--cost-per-hour", "3.6")
    (one,) = report["estimates"]
    assert status == 0
    assert one["memory"]["weights"] == 2 * 4 * SIDE * SIDE  # on a GPU nothing is packed
    assert one["memory"]["activations"] == 2 * 2 * 4 * 16 * SIDE
    assert one["cost_per_million"] == pytest.approx(3.6 / 3600 / (2 * one["rate_per_s"]) * 1e6)
    assert [entry[0] for entry in report["placement"]["assignments"]] == ["fixed"]


def test_a_rate_asks_for_as_many_replicas_as_it_needs(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each device is planned to 70 %; what has no place makes the exit status 1."""
    _, report = planned(repository, capsys, "fixed", "--device", "T4")
    rate = report["estimates"][0]["requests_per_s"]
    status, report = planned(
        repository, capsys, "fixed", "--device", "T4", "--rate", f"fixed={rate}", "--num-devices", "2"
    )
    assert status == 0
    assert sorted({entry[2][0] for entry in report["placement"]["assignments"]}) == ["T4-0", "T4-1"]
    status, report = planned(repository, capsys, "fixed", "--device", "T4", "--rate", f"fixed={rate}")
    assert status == 1
    assert report["placement"]["unplaced"]


def test_open_shapes_are_asked_for_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And taken for one model or for all."""
    for name in ("X", "open.X"):
        status, report = planned(repository, capsys, "open", "--device", "T4", "--shape", f"{name}=7x{SIDE}")
        assert status == 0
        assert report["estimates"][0]["memory"]["activations"] == 2 * 4 * 16 * 7 * SIDE


def test_one_model_that_cannot_be_planned_leaves_the_others(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told with its cause and the status is 1; no half of a plan is saved or compared; declared it is planned."""
    (broken := repository / "fixed" / "config.pbtxt").write_text((text := broken.read_text()) + "nonsense: 1")
    try:
        status = main(["plan", "--repository", str(repository), "--device", "H100"])
    finally:
        broken.write_text(text)
    out = capsys.readouterr().out
    assert status == 1
    assert "open is not planned: model 'open' has inputs of open shape; give what your requests have" in out
    assert "fixed is not planned: " in out
    assert "nonsense" in out
    assert "H100-80GB-0: chat" in out
    saved = tmp_path / "plan.json"
    assert f"--shape X=Nx{SIDE}" in told(repository, capsys, "--device", "H100", "--save", str(saved))
    assert not saved.exists()
    declared = ("--device", "H100", "--declare", "open=10:1")
    assert planned(repository, capsys, *declared, "--save", str(saved))[0] == 0
    assert f"--shape X=Nx{SIDE}" in told(repository, capsys, "--device", "H100", "--check", str(saved))


def test_a_graph_is_planned_by_the_models_that_it_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, also of one version of it; what is neither graph nor model gets a hint from both."""
    for name in ("digits_cascade", "digits_cascade/1"):
        _, report = planned(SAMPLES, capsys, name, "digits_tiny", "--device", "T4")
        assert len(report["estimates"]) == len({one["model"] for one in report["estimates"]})
        assert {"digits_tiny", "digits_committee", "decode_digit"} <= {one["model"] for one in report["estimates"]}
    assert "did you mean 'digits_cascade'?" in told(SAMPLES, capsys, "digits_cascad", "--device", "T4")


def test_a_python_model_is_declared(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is guessed of it; and nothing is declared of what is known."""
    _, report = planned(repository, capsys, "code", "--device", "T4")
    assert report["estimates"][0]["memory"] is None
    assert "placement" not in report
    _, report = planned(repository, capsys, "code", "--device", "T4", "--declare", "code=100:2")
    assert report["estimates"][0]["memory"]["weights"] == 100 << 20
    assert report["estimates"][0]["rate_per_s"] == pytest.approx(500)


def test_a_language_model_is_planned_by_context(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values of the sequences that run at once; twice the context takes twice the memory."""
    found = []
    for context in (1024, 2048):
        _, report = planned(repository, capsys, "chat", "--device", "H100", "--context", str(context))
        found.append(report["estimates"][0])
    assert found[0]["unit"] == "tokens"
    assert found[1]["memory"]["kv"] == 2 * found[0]["memory"]["kv"] == 64 * 2048 * 2 * 2 * 128 * 4
    assert found[0]["largest_context"] == 4096


def test_ranks_of_a_language_model_have_a_device_each(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one host, side by side; they share its heads and cost as many devices; the CPU has all of them."""
    copytree(repository / "chat", tmp_path / "chat")
    with (tmp_path / "chat" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "tensor_parallel_size" value { string_value: "4" } }\n')
    options = ["chat", "--device", "H100", "--cost-per-hour", "3.6"]
    _, alone = planned(repository, capsys, *options)
    status, report = planned(tmp_path, capsys, *options, "--num-devices", "4", "--link", "pcie5")
    (whole,), (one,) = alone["estimates"], report["estimates"]
    assert (status, one["num_ranks"], 4 * one["memory"]["kv"]) == (0, 4, whole["memory"]["kv"])
    assert 0 < one["exchange_share"] < 1
    assert one["cost_per_million"] == pytest.approx(4 * 3.6 / 3600 / one["rate_per_s"] * 1e6)
    assert [entry[2][0] for entry in report["placement"]["assignments"]] == ["H100-80GB-0"]
    assert [device["host"] for device in report["placement"]["devices"]] == ["host-0"] * 4
    assert planned(tmp_path, capsys, *options, "--num-devices", "3")[0] == 1
    cpu = "memory_gib = 64\nbandwidth_gb_per_s = 50\nis_cpu = true\nnum_cores = 8\ntflops = { fp32 = 1 }\n"
    (tmp_path / "cpu.toml").write_text(cpu)
    status, report = planned(tmp_path, capsys, "chat", "--device", str(tmp_path / "cpu.toml"))
    (workload,), (one,) = report["placement"]["workloads"], report["estimates"]
    assert (status, workload["num_devices"]) == (0, 1)
    own = sum(size for name, size in one["memory"].items() if name != "runtime")
    assert workload["memory_bytes"] == 4 * own


def test_what_does_not_fit_is_told_by_how_much(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit status is 1."""
    small = "memory_gib = 0.001\nbandwidth_gb_per_s = 10\nruntime_mib = 0.001\ntflops = { fp32 = 1 }\n"
    (tmp_path / "small.toml").write_text(small)
    assert main(["plan", "--repository", str(repository), "fixed", "--device", str(tmp_path / "small.toml")]) == 1
    assert "fixed does not fit into small: 1 MiB are missing" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "words"), table(Path(__file__).with_name("refused.txt"), "weft plan"))
def test_what_cannot_be_planned_is_told(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    """Models, devices, shapes, declarations and rates, with a hint; the exit status is 1."""
    assert says(words, told(repository, capsys, "--device", "T4", *arguments.split()))


def test_what_is_not_there_is_told(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A repository, and the files of a model."""
    assert "no folder" in told(repository / "missing", capsys, "--device", "T4")
    (repository / "fixed" / "1").rename(repository / "fixed" / "gone")
    try:
        assert "build or fetch the model" in told(repository, capsys, "fixed", "--device", "T4")
    finally:
        (repository / "fixed" / "gone").rename(repository / "fixed" / "1")


@pytest.mark.parametrize("wrong", ["fixed", "fixed=0", "fixed=-1", "fixed=x", "fixed=inf", "=1"])
def test_a_wrong_rate_is_wrong_usage(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of every command."""
    with pytest.raises(SystemExit) as end:
        main(["plan", "--device", "T4", "--rate", wrong])
    assert end.value.code == 2
    assert "--rate" in capsys.readouterr().err


class MadeUpProfile(MachineProfile):
    """Figures of a machine that does 1e11 operations and moves 1e10 bytes a second."""

    FIGURES: ClassVar[dict[str, Any]] = {
        "onnx": Times(
            {"element": [(1.0, 1e-7), (1e6, 1e-4)]},
            [(rows, side, 2 * rows * side**2 / 1e11) for rows in (1.0, 1024.0) for side in (16.0, 1024.0)],
            [(8.0, 1e-7), (512.0, 1e-4)],
            [(64.0, 9.0, 16.0, 1e-6)],
            [(16e6, 1.0, 5e9), (16e6, 1024.0, 1e11), (64e6, 1.0, 5e9), (64e6, 1024.0, 1e11)],
            1e-7, 3e-6, 1e-7,
        ),
        "torch": TorchTimes([(1.0, 16.0, 1e-6)], 1e-6, 1e-5, {"fp32": 1.0, "bf16": 50.0}),
        "linear": LinearTimes(
            {"float32": [(4e6, 1.0, 1e10), (4e6, 128.0, 1e11), (64e6, 1.0, 1e10), (64e6, 128.0, 1e11)]},
            [(64.0, 1e10)], [(64.0, 1e11)],
        ),
        "runtimes": Runtimes({"": 60 << 20, "onnxruntime": 90 << 20}, {"onnxruntime": 3e-4}, {"onnxruntime": 2e-4}, 0),
        "engine": EngineTimes(1e-4, 1e-5, 1e-6, 1e-3, 1e-4, 400 << 20),
    }  # fmt: skip

    def section(self, name: str, num_threads: int = 1) -> Any:
        return self.FIGURES[name]


def test_this_machine_is_planned_by_what_was_measured(repository: Path, tmp_path: Path) -> None:
    """A batch takes the time of its product and of the call; weights count twice, because they are packed."""
    device = ThisMachine(MadeUpProfile(tmp_path / "machine.json"))
    one = estimate(find_subjects(repository, ["fixed"])[0], device, PlanOptions(repository))
    assert one.memory.runtime == 90 << 20
    assert one.memory.weights == 2 * 2 * 4 * SIDE * SIDE
    assert one.time_max.seconds == pytest.approx(2 * 16 * SIDE**2 / 1e11 + 3e-6 + 2e-7, rel=0.01)
    assert one.rate_per_s == pytest.approx(1 / 2e-4, rel=0.01)  # what requests take is more than what rows take
    chat = estimate(find_subjects(repository, ["chat"])[0], device, PlanOptions(repository, context=128))
    assert chat.memory.kv == (256 << 20) // (8 * chat_token_bytes()) * 8 * chat_token_bytes()
    assert chat.time_1.seconds < chat.time_max.seconds


def test_a_product_costs_what_numbers_of_its_type_were_measured_to(tmp_path: Path) -> None:
    """On a machine whose torch takes 50 times as long for bfloat16, a product of it takes 50 times that of float32."""
    device = ThisMachine(MadeUpProfile(tmp_path / "machine.json"))
    products = (Operation("product", 2e9, 4000, 4000, kind, (1000, 1000, 1000)) for kind in ("fp32", "bf16"))
    wide_s, narrow_s = (device.batch("pytorch", 1, BatchCost(1, (one,), 0, 0, 0)).seconds for one in products)
    assert narrow_s == pytest.approx(50 * wide_s, rel=0.01)


def test_figures_of_other_instructions_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that was measured with all instructions is not read where libraries are held to older ones."""
    measured = []
    monkeypatch.setattr(
        "weft.capacity.machine.profile._measured",
        lambda *what: measured.append(what) or TorchTimes([], 0, 0, {})._asdict(),
    )
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    for held_to, num_measured in ((None, 1), (None, 1), ("avx2", 2)):
        if held_to is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", held_to)
        MachineProfile(tmp_path / "machine.json").section("torch")
        assert num_measured == len(measured)


def chat_token_bytes() -> int:
    """Of keys and values of two layers, 128 numbers each."""
    return 2 * 2 * 128 * 4


def test_a_profile_of_another_machine_or_a_broken_one_is_measured_anew(tmp_path: Path) -> None:
    """It is not used, and not complained of."""
    file = tmp_path / "machine.json"
    for text in ("", "{", "[]", '{"of": {"cpu": "another"}, "sections": {"onnx/1": {"measured": "2020-01-01"}}}'):
        file.write_text(text)
        assert MachineProfile(file).measured == ""


def test_a_machine_without_a_gpu_says_so(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of what measures."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "torch sees no GPU here" in told(repository, capsys, "fixed", "--device", "this-gpu")
    assert not (tmp_path / "weft").exists()


def test_a_gpu_is_measured_by_products_copies_and_kernels() -> None:
    """The same calls, on what torch has here."""
    flops, moved, kernel_s = measure_device(torch.device("cpu"), 64, 1 << 16)
    assert set(flops) == {"fp32", "fp16", "bf16"}
    assert min(*flops.values(), moved, kernel_s) > 0
