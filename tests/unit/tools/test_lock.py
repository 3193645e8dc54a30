"""`weft lock`: signatures of what runs, as a file, and how what runs differs from it."""

import dataclasses
from pathlib import Path

import grpc
import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.base.signature import ModelSignature, TensorSpec
from weft.cli.__main__ import main
from weft.tools.lock import LockCatalog, drift, lock_text, read_lock
from weft.v2.server.servicer import Extension
from weft_protos import graph_service_pb2 as pb
from weft_protos import graph_service_pb2_grpc as pb_grpc

TEXT = TensorSpec("TEXT", "BYTES", (1,))
MASK = TensorSpec("MASK", "INT64", (-1,), is_optional=True)
BERT = ModelSignature("bert", "3", "", 8, (TEXT, MASK), (TensorSpec("P", "FP32", (3,)),))
ECHO = ModelSignature("echo", "1", "", 0, (TEXT,), (TEXT,), is_decoupled=True)
MODELS = {("echo", "1"): ECHO, ("bert", "10"): dataclasses.replace(BERT, version="10"), ("bert", "3"): BERT}

LOCK = """
model {
  name: "bert" version: "3" target: "m" max_batch_size: 8
  input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
  input { name: "MASK" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
  output { name: "P" data_type: TYPE_FP32 dims: [ 3 ] }
}
"""


def test_the_file_says_what_the_targets_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sorted by name, then version as a number; the compiler finds there what it would find at the target."""
    path = tmp_path / "signatures.lock"
    with serving(ListingCore(MODELS)) as url:
        assert main(["lock", "--target", f"m={url}", "-o", str(path)]) == 0
        assert capsys.readouterr().err == f"{path}: 3 models\n"
        assert main(["lock", "--target", f"m={url}", "--check", str(path)]) == 0
        assert capsys.readouterr() == ("", f"{path}: no differences\n")
    text = path.read_text()
    assert LOCK in text
    assert ['"bert" version: "3"', '"bert" version: "10"', '"echo" version: "1"'] == [
        line.strip().removeprefix("name: ").partition(" target")[0] for line in text.splitlines() if "version:" in line
    ]
    assert f"weft lock -o {path} --target m={url}" in text
    assert [path] == list(tmp_path.iterdir())
    catalog = LockCatalog(path)
    assert ("m", BERT) == catalog.find("bert", "3")
    assert ("m", "10") == (catalog.find("bert", "")[0], catalog.find("bert", "")[1].version)
    assert ("m", ECHO) == catalog.find("echo", "1")
    assert catalog.find("bert", "4") is None
    assert ["bert", "echo"] == catalog.names()


def test_a_router_is_asked_for_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says is taken as it is; a server that is no router is told."""

    class Service(pb_grpc.GraphServiceServicer):
        async def TargetSignatures(  # noqa: N802  # the protocol's name
            self, request: object, context: object
        ) -> pb.TargetSignaturesResponse:
            return pb.TargetSignaturesResponse(
                model=[pb.ModelSignature(name="bert", version="3", target="m")], not_ready=["echo/1 on m"]
            )

        def add_to(self, server: grpc.aio.Server) -> tuple[str]:
            pb_grpc.add_GraphServiceServicer_to_server(self, server)
            return ("weft.graph.GraphService",)

    with serving(ListingCore({}), Extension(Service().add_to)) as url:
        assert main(["lock", "--url", url]) == 0
    told = capsys.readouterr()
    assert 'name: "bert" version: "3" target: "m"' in told.out
    assert told.err == "weft lock: left out, because it is not ready: echo/1 on m\n"
    with serving(ListingCore(MODELS)) as url:
        assert main(["lock", "--url", url]) == 1
    assert f"weft lock: '{url}' is no router of Weft; give each service with --target NAME=ADDRESS" in (
        capsys.readouterr().err
    )


def test_a_lock_has_all_that_is_compared(tmp_path: Path) -> None:
    """Also of stateful models, and of those whose answers may lack an output."""
    model = pb.ModelSignature(name="m", version="1", target="t", stateful=True, optional_output=["Y"])
    model.output.add(name="Y", data_type="TYPE_FP32", dims=[1])
    path = tmp_path / "signatures.lock"
    path.write_text(lock_text([model], path.name, ""))
    assert [model] == read_lock(path)
    assert [] == drift(read_lock(path), [model])


def test_every_difference_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One a line, in the order of the models; exit status 1."""
    path = tmp_path / "signatures.lock"
    core = ListingCore(MODELS)
    with serving(core) as url:
        assert main(["lock", "--target", f"m={url}", "-o", str(path)]) == 0
        del core.models["bert", "10"]
        core.models["new", "1"] = dataclasses.replace(ECHO, name="new")
        core.models["echo", "1"] = dataclasses.replace(ECHO, is_decoupled=False, is_stateful=True)
        core.models["bert", "3"] = dataclasses.replace(
            BERT,
            max_batch_size=4,
            inputs=(TEXT, TensorSpec("LANG", "BYTES", (1,))),
            outputs=(TensorSpec("P", "FP32", (5,)),),
        )
        capsys.readouterr()
        assert main(["lock", "--target", f"n={url}", "--check", str(path)]) == 1
    told = capsys.readouterr()
    assert [
        "model 'bert' version 3: was on target 'm', is on 'n'",
        "model 'bert' version 3: max_batch_size was 8, is 4",
        "model 'bert' version 3: input 'MASK' is gone; it was INT64[-1] optional",
        "model 'bert' version 3: input 'LANG' is new: BYTES[1]",
        "model 'bert' version 3: output 'P' was FP32[3], is FP32[5]",
        "model 'bert' version 10: no target serves it any more; it was on 'm'",
        "model 'echo' version 1: was on target 'm', is on 'n'",
        "model 'echo' version 1: decoupled was true, is false",
        "model 'echo' version 1: stateful was false, is true",
        "model 'new' version 1: is new, on 'n'",
    ] == told.out.splitlines()
    assert told.err == f"{path}: 10 differences\n"


def test_nothing_is_locked_where_something_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that does not answer, one without a model that is ready, a folder that is not there."""
    path = tmp_path / "signatures.lock"
    path.write_text("as it was")
    with serving(ListingCore(MODELS)) as url:
        assert main(["lock", "--target", f"m={url}", "--target", "n=127.0.0.1:1", "-o", str(path)]) == 1
        assert "no answer from n (127.0.0.1:1); nothing was locked or compared" in capsys.readouterr().err
        assert main(["lock", "--target", f"m={url}", "-o", str(tmp_path / "nowhere/x")]) == 1
        assert "No such file or directory" in capsys.readouterr().err
    with serving(ListingCore({("bert", "1"): None})) as url:
        assert main(["lock", "--target", f"m={url}", "-o", str(path)]) == 1
        assert "no model is ready on any target; nothing was locked or compared" in capsys.readouterr().err
    assert "as it was" == path.read_text()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model {", "1:1: error: 'model' is not closed"),
        ('model { name: "a" version: "1" }', "1:1: error: a model needs name, version (a number) and target"),
        ('model { name: "a" version: "x" target: "m" }', "1:1: error: a model needs name, version (a number)"),
        (2 * 'model { name: "a" version: "1" target: "m" }\n', "2:1: error: model 'a' version 1 is there twice"),
        ("nonsense: 1", "1:1: error: unknown field 'nonsense'"),
    ],
)
def test_a_file_that_is_no_lock_file_is_told_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, fault: str
) -> None:
    """With line and column, before anybody is asked."""
    path = tmp_path / "signatures.lock"
    path.write_text(text)
    assert main(["lock", "--target", "m=127.0.0.1:1", "--check", str(path)]) == 1
    assert fault in capsys.readouterr().err
    assert main(["lock", "--target", "m=127.0.0.1:1", "--check", str(tmp_path / "none")]) == 1
    assert "none': No such file or directory" in capsys.readouterr().err
