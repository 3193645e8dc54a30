"""``weft stubs``: what mypy and pyright then know."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.authoring.stubs import stubs_text
from weft.base.signature import ModelSignature, TensorSpec
from weft.cli.__main__ import main

ROOT = Path(__file__).parents[3]
SOURCES = [str(ROOT / folder) for folder in ("services", "protos", "kernels")]
RIGHT = '''\
"""Uses what there is."""
from typing import TYPE_CHECKING, Annotated, Any

import weft
from weft import INT64, STRING, Tensor

if TYPE_CHECKING:
    from models import AsyncClient, Client, Models

m: "Models" = weft.models("model_repository")


@weft.graph(max_batch_size=32)
def readings(IMAGE: Tensor[STRING, 1]) -> Annotated[Any, weft.Outputs(LABEL=Tensor[INT64, 1])]:
    pixels = m.decode_digit(IMAGE, timeout_ms=300).PIXELS
    small = m.digits_tiny(PIXELS=pixels)
    large = m.digits_cnn(pixels, fallback=m.digits_mlp).soft()
    return weft.cascade(small, large, accept=large.PROBS.max() >= 0.8, per_row=True)


client: "Client" = weft.connect("127.0.0.1:8001", timeout_s=3)
with client as opened:
    answer = opened.digits(IMAGE=[b""], timeout_s=1, priority=2)
    label: int = answer.LABEL.tolist()[0]
    print(answer.path, answer["LABEL"], client["digits", 2](IMAGE=[b""]), client.names())
    for part in client.writer.stream(text_input="a", parameters={"max_tokens": 3}):
        print(part.text_output[0])
print(weft.connect("127.0.0.1:8001").anything(X=1).Y)


async def run() -> None:
    """The same, awaited."""
    aio: "AsyncClient" = weft.connect_async("127.0.0.1:8001")
    async with aio:
        print((await aio.digits(IMAGE=[b""])).PROBS)
        async for part in aio.writer.stream(text_input="a"):
            print(part.text_output)
'''
#: Each line with a comment has that fault, and no other line has one.
WRONG = """\
from typing import TYPE_CHECKING

import weft

if TYPE_CHECKING:
    from models import AsyncClient, Client, Models

m: "Models" = weft.models("model_repository")
m.digits_cnn(PIXLES=1)  # input
m.digits_cnn(PIXELS=1).PROB  # output
m.digits_cn(PIXELS=1)  # model
m.digits_cnn(1, timeout=3)  # field

client: "Client" = weft.connect("127.0.0.1:8001")
client.digits(IMAG=[b""])  # input
client.digits(IMAGE=[b""]).LABL  # output
client.digit(IMAGE=[b""])  # model
client.digits()  # missing input
client.digits(IMAGE=[b""], timeout=3)  # option
weft.connect("127.0.0.1:8001", timeout=3)  # option


async def run() -> None:
    aio: "AsyncClient" = weft.connect_async("127.0.0.1:8001")
    (await aio.digits(IMAGE=[b""])).LABL  # output
"""


def lines_with_comments(text: str) -> set[int]:
    """Numbers of the lines of a program that must have a fault."""
    return {number for number, line in enumerate(text.splitlines(), start=1) if "  # " in line}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """A user's folder, with the stubs of the sample repository and two programs."""
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["stubs", str(repository)])
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


@pytest.fixture
def repository() -> Path:
    """The sample repository."""
    return ROOT / "model_repository"


@pytest.mark.long
def test_mypy_knows_models_tensors_and_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In strict mode it accepts what is right, the stubs among it, and finds each wrong name on its line."""
    monkeypatch.setenv("MYPYPATH", ":".join(SOURCES))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "right.py", "wrong.py", "models.pyi"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    faults = re.findall(r"(?m)^([\w.]+):(\d+): error: ", found)
    assert lines_with_comments(WRONG) == {int(line) for file, line in faults if file == "wrong.py"}, found
    assert {"wrong.py"} == {file for file, _ in faults}, found
    assert "PIXLES" in found


@pytest.mark.long
def test_pyright_knows_models_tensors_and_options(folder: Path) -> None:
    """The same for pyright, which VS Code runs."""
    pytest.importorskip("basedpyright")
    settings = {"typeCheckingMode": "standard", "extraPaths": SOURCES, "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, "enableTypeIgnoreComments": True}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "."]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    faults = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    shown = json.dumps(faults, indent=1)
    assert {"wrong.py"} == {Path(one["file"]).name for one in faults}, shown
    assert lines_with_comments(WRONG) == {one["range"]["start"]["line"] + 1 for one in faults}, shown


def test_the_stubs_are_a_module(folder: Path) -> None:
    """``-o models.py`` can be imported by a program; each model is an attribute of the classes."""
    assert 0 == main(["stubs", str(ROOT / "model_repository"), "-o", "models.py"])
    program = "import models; print(all(hasattr(kind, 'digits') for kind in (models.Models, models.Client)))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "True\n" == shown
    assert (folder / "models.py").read_text() == (folder / "models.pyi").read_text()


def test_odd_names_are_left_out() -> None:
    """Names that are no identifiers, or taken, are no attributes; the text stays Python."""
    tensors = tuple(TensorSpec(name, "FP32", (1,)) for name in ("a:0", "class", "headers", 'q"""\\', "X", "timeout_ms"))
    outputs = tuple(TensorSpec(name, "FP32", (1,)) for name in ("path", "soft", "Y"))
    models = [ModelSignature(name, "1", "p", 8, tensors, outputs) for name in ("a-b", "import", "names", "m")]
    text = stubs_text(models, "here")
    compile(text, "models.pyi", "exec")
    assert "def __call__(self, headers: Any = ..., X: Any = ..., **fields" in text
    assert "def __call__(self, *, X: ArrayLike, timeout_ms: ArrayLike, **options" in text
    assert "def names(self) -> _names_Target" in text
    assert "def names(self) -> _names:" not in text
    assert "    path: NDArray" not in text
    assert "    soft: Symbol" not in text


def test_a_server_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--url`` takes what is ready there, and says what is not."""
    model = ModelSignature("m", "1", "p", 0, (TensorSpec("X", "FP32", (2,)),), (TensorSpec("Y", "FP32", (2,)),))
    with serving(ListingCore({("m", "1"): model, ("m", ""): model, ("broken", "1"): None})) as address:
        assert 1 == main(["stubs", "--url", address, "-o", str(tmp_path / "models.pyi")])
    assert "X FP32[2] -> Y FP32[2]" in (tmp_path / "models.pyi").read_text()
    assert "left out: 'broken': no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "there is no nowhere"), (["--lock", "nowhere.lock"], "there is no nowhere.lock")],
)
def test_what_is_not_there(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder or file that does not exist is named, without a place in this program; nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert 1 == main(["stubs", *arguments])
    assert f"weft: NOT_FOUND: {message}; " in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())
