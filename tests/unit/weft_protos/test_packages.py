"""The packages that the distribution lists can be imported, and the light ones stay light."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "packages"
]
HEAVY = ("torch", "triton", "onnxruntime", "transformers", "sklearn")

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize("path", PACKAGES)
def test_listed_package_imports_from_its_own_folder(path):
    """Each package of the wheel imports under its name, from the folder that pyproject names."""
    package = importlib.import_module(Path(path).name)
    assert [str(ROOT / path)] == list(package.__path__)


@pytest.mark.parametrize("path", PACKAGES)
def test_listed_package_says_that_it_is_typed(path):
    """Each package has a ``py.typed``, so that a type checker reads its annotations where it is installed."""
    assert (ROOT / path / "py.typed").is_file()


def test_every_package_in_the_tree_is_listed():
    """No folder with an ``__init__.py`` under services/ or protos/ is left out of the wheel, nor the kernels."""
    found = {
        str(init.parent.relative_to(ROOT))
        for top in ("services", "protos")
        for init in (ROOT / top).glob("**/__init__.py")
    }
    top_level = {path for path in found if str(Path(path).parent) not in found}
    assert sorted(PACKAGES) == sorted({"kernels/weft_kernels", *top_level})


def test_one_module_stands_beside_the_packages():
    """The wheel has one module beside its packages, under the name that a ``model.py`` imports."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"services/triton_python_backend_utils.py": "triton_python_backend_utils.py"} == wheel["force-include"]
    assert ["triton_python_backend_utils.py"] == [path.name for path in (ROOT / "services").glob("*.py")]


@pytest.mark.parametrize("package", ["weft_protos", "weft.base", "weft.router"])
def test_light_package_imports_no_framework(package):
    """Importing every module of the package loads no machine-learning framework, so a router image stays small."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, *HEAVY], check=False, capture_output=True, text=True
    )
    assert (0, "\n", "") == (done.returncode, done.stdout, done.stderr)
