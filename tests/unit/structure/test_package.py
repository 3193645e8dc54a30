"""The package as its users import and install it."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from weft.cli.__main__ import _EXTRAS, _clash

ROOT = Path(__file__).parents[3]
FRAMEWORKS = ("torch", "triton", "onnxruntime", "numba", "transformers", "scipy", "tokenizers")
READ = {".py", ".md", ".yaml", ".yml", ".toml", ".Dockerfile", ".pbtxt", ".txt", ".json"}
SERVING = ("weft.serving", "weft.backends", "weft.llm")
ROUTING = ("weft.router", "weft.language")
OTHERS = {  # module -> what it leaves to others, until a model or graph needs it
    "weft": ("numpy", "grpc", "weft.base", *SERVING, *ROUTING),
    "weft.v2.client.connect": (*SERVING, *ROUTING),
    "weft.services.preprocess": ROUTING,
    "weft.services.model": ROUTING,
    "weft.services.postprocess": ROUTING,
    "weft.services.router": SERVING,
    "weft.cli.commands.plan": (),
    "weft.capacity.report": (),
}


@pytest.mark.parametrize("module", OTHERS)
def test_a_process_imports_what_it_does_alone(module: str) -> None:
    """No service imports a model framework before a model needs one, nor what only other services do."""
    program = f"import sys, {module}; print([name for name in {(*FRAMEWORKS, *OTHERS[module])} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]" == answer.stdout.strip()


def _texts() -> dict[Path, str]:
    """What says how to install: pages, messages, images, deployments."""
    folders = ("services", "docs", "deploy", "examples", "benchmarks", "kernels", "protos", "model_repository")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in READ]
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "compose.yaml")]
    return {path: path.read_text() for path in files}


def test_extras_are_those_of_the_distribution() -> None:
    """Pages, messages and files say `weft-mesh[...]`: `weft` on the package index is another project."""
    assert [] == [path for path, text in _texts().items() if re.search(r"(?<![\w.-])weft\[[a-z]", text)]


def test_what_is_named_is_an_extra() -> None:
    """Each extra in a page, message, image or requirement is in pyproject.toml; names of before are in none of them."""
    project = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    old = set(re.findall(r"(?m)^([\w-]+) =", project.partition("# Names of before")[2].partition("dev = [")[0]))
    assert {"edge", "model", "model-cpu", "cel"} < old
    form = re.compile(
        r"weft-mesh\[([\w,-]+)\]|--no-cache-dir .*\"\.\[([\w,]+)\]|^ARG EXTRAS=\"\[([\w,]+)", re.MULTILINE
    )
    found = {
        (path.name, name)
        for path, text in _texts().items()
        for match in form.findall(text)
        for name in "".join(match).split(",")
    }
    assert 25 < len(found)
    allowed = {
        ("gateway.Dockerfile", "gateway"),
        *((path, name) for path, name in found if name in extras.keys() - old),
    }
    assert set() == found - allowed


def test_messages_name_the_extra_that_has_the_package() -> None:
    """Each `require(package, extra)` of the sources, and each command's extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = {"PIL": "pillow", "weft": "weft-mesh"}
    for path in (ROOT / "services").rglob("*.py"):
        for module, extra in re.findall(r'require\("([\w.]+)", "?([\w-]+)', path.read_text()):
            name = distributions.get(module.partition(".")[0], module.partition(".")[0])
            if extra in extras and name != "weft-mesh":
                assert any(text.startswith(name) for text in extras[extra]), (path, module, extra)
    assert {extra for named in _EXTRAS.values() for extra in named.split(",")} < extras.keys()


def test_onnx_and_gpu_exclude_each_other() -> None:
    """No extra brings both distributions of ONNX Runtime, which write one folder."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in extras.keys() - {"dev"}:
        names = [name]
        for one in names:  # which grows
            names += [more for text in extras[one] if text.startswith("weft-mesh[") for more in text[10:-1].split(",")]
        runtimes = {text.partition(">")[0] for one in names for text in extras[one] if text.startswith("onnxruntime")}
        assert len(runtimes) <= 1, name


def test_both_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft up`, `edge` and `check` name the clash and its cure; one alone, or none, is fine."""
    installed = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    clash = _clash()
    assert "onnxruntime 1.31.1 and onnxruntime-gpu 1.32.0 are both installed" in clash
    assert "pip uninstall both, then pip install 'weft-mesh[onnx]', or 'weft-mesh[gpu]'" in clash
    del installed["onnxruntime"]
    assert "" == _clash()
