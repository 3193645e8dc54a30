"""Recordings that are sent again: to graphs in this process, over gRPC, to two at once; and what is told of it."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import running
from tests.repositories import NUMBER_BATCHES, write_graph, write_model

from weft.authoring.writing import read
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import bytes_tensor, encode
from weft.changes import comparison as comparing
from weft.changes import replay as replaying
from weft.changes.replay import Recorded, Target, local_target, replay
from weft.cli.__main__ import main
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.recording import RecordingWriter, read_recording
from weft_protos import recording_pb2 as pb

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if x.max() > 90:
                return [pb_utils.InferenceResponse(error=pb_utils.TritonError("too large")) for _ in requests]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", {answer})]))
        return answers
"""


STREAMING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in {words}:
                text = np.array([word], np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("WORD", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WORDS = """parameters { key: "EXECUTION" value { string_value: "thread" } }
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""


def talk(model: str) -> str:
    return f"""name: "talk" platform: "graph"
input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} output {{ name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }}
node {{ name: "root" sequence {{ step {{ name: "{model}" model_name: "{model}" }} }} }}
"""


def graph(model: str) -> str:
    return f"""name: "pipe" platform: "graph" max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} output {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }}
node {{ name: "root" sequence {{ step {{ name: "{model}" model_name: "{model}" }} }} }}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A graph `pipe` over `double`, and the model `odd`, which answers from 10 on otherwise."""
    home = tmp_path / "repository"
    for name, answer in (("double", "2 * x"), ("odd", "np.where(x < 10, 2 * x, 0 * x)")):
        write_model(home / "model", name, MODEL.format(answer=answer), NUMBER_BATCHES)
    write_graph(home / "graphs", "pipe", graph("double"))
    (tmp_path / "odd.pbtxt").write_text(graph("odd"))
    return home


def write(path: Path, numbers: range, *, is_ended: bool = True, **header: Any) -> Path:
    """A recording of requests for these numbers, 10 ms apart, every second with priority 1."""
    entries = []
    for number in numbers:
        parameters = {"priority": 1, "timeout": 1} if number % 2 else {}
        call = InferCall("pipe", "", f"r{number}", parameters, {"X": encode(np.full((1, 1), number, np.float32))})
        record = pb.Record(arrival_unix_ns=number * 10_000_000, version="1", path="root.double", duration_ns=2_000_000)
        record.request.MergeFromString(serialize_call(call))
        result = InferResult("pipe", "1", outputs={"Y": encode(np.full((1, 1), 2 * number, np.float32))})
        record.response.add().response.MergeFromString(serialize_result(result))
        record.withheld.extend(["X"] if number == 5 else [])
        entries.append(pb.Entry(record=record))
    writer = RecordingWriter(path, pb.Header(version=1, graph="pipe", **header))
    writer.write(reversed(entries))
    writer.close(pb.End()) if is_ended else writer._file.close()
    return path


def test_a_changed_graph_is_told_from_what_was_recorded(repository: Path, tmp_path: Path, capsys: Any) -> None:
    """By file and by name: which answers change, by tensor and priority; paths; notes. The status says whether."""
    files = [str(write(tmp_path / "a", range(8))), str(write(tmp_path / "b", range(8, 16), is_ended=False))]
    base = ["replay", *files, "--repository", str(repository)]
    assert 0 == main([*base, "--against", "pipe"])
    out, err = capsys.readouterr()
    assert out.startswith("0 of 15 answers differ: recorded -> pipe\n  errors: 0 -> 0\n  CPU ms a request: unknown -> ")
    assert "1 requests were not sent: inputs or parameters are left out or hashed" in err
    assert "b' has no end: its recorder was killed" in err
    assert 1 == main([*base, "--against", str(tmp_path / "odd.pbtxt"), "--json", "--times", "2"])
    facts = json.loads(capsys.readouterr().out)
    assert (30, 12) == (facts["requests"], facts["different"])
    assert {"requests": 12, "examples": [f"r{number}: {2 * number} -> 0" for number in (10, 11, 12)]} == (
        facts["differences"]["output Y"]
    )
    assert 30 == facts["differences"]["path"]["requests"]
    assert {"0": (16, 6), "1": (14, 6)} == {
        level: (one["requests"], one["different"]) for level, one in facts["priorities"].items()
    }
    assert [2.0, 2.0] == pytest.approx([one["p99_ms"][0] for one in facts["priorities"].values()], rel=0.01)
    assert 0 == main([*base, "--against", str(tmp_path / "odd.pbtxt"), "--max-differences", "6", "--markdown"])
    assert "**6 of 15 answers differ**: recorded -> " in capsys.readouterr().out
    assert 0 == main([*base, "--against", str(tmp_path / "odd.pbtxt"), "--compare", "Y=top1"])


def test_two_graphs_are_compared_with_one_another(repository: Path, tmp_path: Path, capsys: Any) -> None:
    """Each request goes to both; hashed outputs and errors that both give are no difference."""
    file = str(write(tmp_path / "a", range(89, 93), hashed=["Y"]))
    base = ["replay", file, "--repository", str(repository), "--against", str(tmp_path / "odd.pbtxt"), "--json"]
    assert 1 == main([*base, "--and", "pipe", "--concurrency", "1"])
    facts = json.loads(capsys.readouterr().out)
    assert (2, [2, 2], ["r89: 178 -> 0", "r90: 180 -> 0"]) == (
        facts["different"],
        facts["errors"],
        facts["differences"]["output Y"]["examples"],
    )
    assert all(cpu_ms > 0 for cpu_ms in facts["cpu_ms"])
    assert 1 == main(base)  # what was recorded cannot be compared, but errors are new
    assert ["path", "status"] == sorted(json.loads(capsys.readouterr().out)["differences"])


def test_streams_are_replayed(repository: Path, tmp_path: Path, capsys: Any) -> None:
    """All responses are asked for and compared: strings as one text, however it is cut."""
    for name, words in (("said", ["to", "day"]), ("whole", ["today"]), ("late", ["to", "morrow"])):
        write_model(repository / "model", name, STREAMING.format(words=words), WORDS)
        (tmp_path / f"{name}.pbtxt").write_text(talk(name))
    record = pb.Record(version="1", is_stream=True)
    call = InferCall("talk", "", "r1", {}, {"X": encode(np.ones(1, np.float32))})
    record.request.MergeFromString(serialize_call(call))
    for word in (b"to", b"day"):
        result = InferResult("talk", "1", outputs={"WORD": bytes_tensor([word], (1,))})
        record.response.add().response.MergeFromString(serialize_result(result))
    writer = RecordingWriter(tmp_path / "a", pb.Header(version=1, graph="talk"))
    writer.write([pb.Entry(record=record)] * 3)
    writer.close(pb.End())
    base = ["replay", str(tmp_path / "a"), "--repository", str(repository), "--json", "--against"]
    assert 0 == main([*base, str(tmp_path / "whole.pbtxt")])
    assert 1 == main([*base, str(tmp_path / "whole.pbtxt"), "--compare", "WORD=exact"])
    assert 1 == main([*base, str(tmp_path / "late.pbtxt"), "--and", str(tmp_path / "said.pbtxt")])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (3, "r1: 'today' -> 'tomorrow'") == (facts["different"], facts["differences"]["output WORD"]["examples"][0])


def test_requests_keep_their_pace(repository: Path, tmp_path: Path) -> None:
    """At twice the pace the last comes half as long after the first; and then their timeouts hold, 1 us here."""

    async def run(pace: float) -> tuple[Any, float]:
        async with local_target(read(repository / "graphs" / "pipe" / "1" / "graph.pbtxt"), "pipe") as target:
            begin_s = time.monotonic()
            return await replay(recorded, [target], pace=pace), time.monotonic() - begin_s

    recorded = Recorded([write(tmp_path / "a", range(40))])
    report, took_s = asyncio.run(run(2.0))
    assert took_s >= 0.39 / 2
    assert 19 == report.differences["status"]  # of the 20 with a timeout one lacks its input
    report, _ = asyncio.run(run(0.0))
    assert 0 == report.num_different


@pytest.mark.parametrize(("pace", "num_targets", "most"), [(0.0, 1, 132), (0.0, 2, 132), (1e6, 1, 206), (1e6, 2, 206)])
def test_few_records_are_held(pace: float, num_targets: int, most: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Those that are put in order, a block or two, and those in flight, whatever a file has; all are sent."""
    counts = Counter[str]()

    def counted(path: Path) -> Iterator[pb.Entry]:
        for entry in read_recording(path):
            counts["read"] += entry.HasField("record")
            yield entry

    async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
        counts["held"] = max(counts["held"], counts["read"] - counts["answered"] // num_targets)
        for _ in range(50):  # answers come long after the next records could be read
            await asyncio.sleep(0)
        counts["answered"] += 1
        return []

    monkeypatch.setattr(replaying, "_BLOCK", 64)
    monkeypatch.setattr(replaying, "_MAX_INFLIGHT", 10)
    recorded = Recorded([write(tmp_path / name, range(begin, 2000, 2)[::-1]) for begin, name in enumerate("ab")])
    monkeypatch.setattr(replaying, "read_recording", counted)
    targets = [Target("t", "t", "", ask, lambda: None)] * num_targets
    report = asyncio.run(replay(recorded, targets, pace=pace))
    assert 1999 == recorded.num_records == report.num_requests
    assert 64 < counts["held"] <= most, counts


@pytest.mark.parametrize("num_targets", [1, 2])
def test_large_answers_are_compared_beside_requests_in_flight(num_targets: int, tmp_path: Path) -> None:
    """At a pace, so that their times have no comparison in them; each is counted once."""
    threads = Counter[bool]()

    def compared(*_: Any) -> list[tuple[str, str]]:
        threads[threading.current_thread() is threading.main_thread()] += 1
        return []

    async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
        size = (1 << 18) + 1 if call.request_id == "r0" else 1
        return [InferResult("t", "1", outputs={"Y": bytes_tensor([bytes(size)], (1,))})]

    recorded = Recorded([write(tmp_path / "a", range(4))])
    targets = [Target("t", "t", "", ask, lambda: None)] * num_targets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "compare_answers", compared)
        report = asyncio.run(replay(recorded, targets, pace=1e6))
    assert ({False: 1, True: 3}, 4) == (dict(threads), report.num_requests)


@pytest.mark.parametrize("pace", [0.0, 1e6])
def test_a_file_that_is_damaged_meanwhile_ends_a_replay_with_its_fault(pace: float, tmp_path: Path) -> None:
    """Also at a pace, where a group of tasks reads it."""

    async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
        return []

    recorded = Recorded([write(tmp_path / "a", range(3))])
    (tmp_path / "a").write_bytes(b"no recording")
    with pytest.raises(InvalidArgumentError, match="is no recording"):
        asyncio.run(replay(recorded, [Target("t", "t", "", ask, lambda: None)], pace=pace))


def test_what_cannot_be_replayed_is_told(repository: Path, tmp_path: Path, capsys: Any) -> None:
    """No file, none of ours, nothing to send, no such graph, no such rule: status 2, and why."""
    file = str(write(tmp_path / "a", range(3)))
    (tmp_path / "other").write_text("no")
    for arguments, why in (
        ([str(tmp_path / "none")], "No such file"),
        ([str(tmp_path / "other")], "is no recording of weft record"),
        ([str(write(tmp_path / "c", range(5, 6)))], "of 1 recorded requests none has all of its inputs"),
        ([file, "--repository", str(repository), "--against", "pip"], "did you mean 'pipe'"),
        ([file, "--compare", "Y=near"], "'near' is no rule; use one of exact, close"),
    ):
        assert 2 == main(["replay", "--against", "pipe", *arguments])
        assert why in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="of 0 recorded requests"):
        Recorded([write(tmp_path / "d", range(0))])


def test_a_served_graph_is_recorded_and_replayed(repository: Path, tmp_path: Path, capsys: Any) -> None:
    """By the command line, over gRPC: record, status, stop, replay against the server, also beside a file."""

    async def ask(url: str) -> None:
        async with V2Client(url) as client:
            for number in range(20):
                call = InferCall("pipe", "", "", {}, {"X": encode(np.full((1, 1), number, np.float32))})
                await client.infer(call, timeout_s=30)

    arguments = ["--repository", str(repository / "graphs"), f"--record-dir={tmp_path / 'kept'}"]
    arguments += ["--in-process", f"model --repository '{repository / 'model'}'"]
    with running("weft.mesh.fused", *arguments) as served:
        url = ["--url", served.grpc]
        assert 0 == main(["record", "pipe", "--percent", "100", "--for", "1h", "--max-mib", "1", "--omit", "x", *url])
        assert "pipe: 100 % of the requests; 0 recorded, 0 dropped, 0.0 MiB\n  " in capsys.readouterr().out
        asyncio.run(ask(served.grpc))
        assert 1 == main(["record", *url])
        assert "INVALID_ARGUMENT: name the graph to record, or give --status or --stop" in capsys.readouterr().err
        assert 0 == main(["record", "--stop", *url, "--json"])
        (status,) = json.loads(capsys.readouterr().out)
        assert (20, False, "stopped") == (status["num_requests"], status["is_running"], status["end_reason"])
        assert 0 == main(["record", "pipe", "--status", *url])
        assert "pipe: ended, stopped; 20 recorded" in capsys.readouterr().out
        assert 0 == main(["replay", *status["file"], "--against", "pipe/1", *url])
        assert "0 of 20 answers differ: recorded -> pipe/1" in capsys.readouterr().out
        assert 1 == main(["replay", *status["file"], "--against", str(tmp_path / "odd.pbtxt"), "--and", "pipe", *url,
                          "--repository", str(repository)])  # fmt: skip
        assert "10 of 20 answers differ: pipe -> " in capsys.readouterr().out
        assert 2 == main(["replay", *status["file"], "--against", "nobody", *url])
        assert "'nobody' is not found" in capsys.readouterr().err
