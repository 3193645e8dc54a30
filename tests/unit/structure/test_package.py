"""The package as its users import and install it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[3]
#: Public names; one more or one less is a decision, and a line of the changelog.
PUBLIC = {"InferCall", "InferResult", "V2Client", "WeftError", "__version__", "running_mesh"}
FRAMEWORKS = ("torch", "triton", "onnxruntime", "numba", "transformers", "scipy", "tokenizers")
READ = {".py", ".md", ".yaml", ".yml", ".toml", ".Dockerfile", ".pbtxt", ".txt", ".json"}
SERVING = ("weft.serving", "weft.backends", "weft.llm")
ROUTING = ("weft.router", "weft.language")
OTHERS = {  # module -> what it leaves to others, until a model or graph needs it
    "weft": ("numpy", "grpc", "weft.base", *SERVING, *ROUTING),
    "weft.services.preprocess": ROUTING,
    "weft.services.model": ROUTING,
    "weft.services.postprocess": ROUTING,
    "weft.services.router": SERVING,
    "weft.cli.commands.plan": (),
    "weft.capacity.report": (),
}


def test_the_public_names_are_those_of_the_list() -> None:
    """Each can be imported from `weft`, and is listed by `dir`."""
    assert PUBLIC == set(weft.__all__) == set(dir(weft))
    assert all(getattr(weft, name) is not None for name in PUBLIC)
    with pytest.raises(AttributeError, match="'weft' has no attribute 'nothing'"):
        weft.nothing  # noqa: B018 -- the access is what is tested


def test_no_public_name_is_a_subpackage() -> None:
    """`weft.graph` and `weft.model` will be decorators: a module of that name would take their place once imported."""
    modules = {path.stem for path in (ROOT / "services" / "weft").iterdir()}
    assert set() == (PUBLIC | {"graph", "model", "models", "Tensor"}) & modules


@pytest.mark.parametrize("module", OTHERS)
def test_a_process_imports_what_it_does_alone(module: str) -> None:
    """No service imports a model framework before a model needs one, nor what only other services do."""
    program = f"import sys, {module}; print([name for name in {(*FRAMEWORKS, *OTHERS[module])} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]" == answer.stdout.strip()


def test_extras_are_those_of_the_distribution() -> None:
    """Pages, messages and files say `weft-mesh[...]`: `weft` on the package index is another project."""
    folders = ("services", "docs", "deploy", "examples", "benchmarks", "kernels", "protos", "model_repository")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in READ]
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "compose.yaml")]
    found = [path for path in files if re.search(r"(?<![\w.-])weft\[[a-z]", path.read_text())]
    assert [] == found
