"""The table of backends."""

import subprocess
import sys

import pytest

from weft.base.errors import UnavailableError
from weft.serving.backends.loading import require

LIGHT = (
    "import sys, {}; print(sorted({{'torch', 'onnxruntime', 'tokenizers', 'PIL', 'safetensors'}} & set(sys.modules)))"
)


@pytest.mark.parametrize("module", ["weft.backends", "weft.backends.preprocess", "weft.backends.postprocess"])
def test_table_of_backends_imports_no_framework(module):
    """A service pays for torch, onnxruntime, tokenizers or Pillow only when a model needs it."""
    done = subprocess.run([sys.executable, "-c", LIGHT.format(module)], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


def test_missing_package_is_named_with_the_command():
    """A package that is not installed is UNAVAILABLE, with the extra that brings it."""
    with pytest.raises(UnavailableError, match=r"cannot import 'no_such_package': .* pip install 'weft-mesh\[model\]'"):
        require("no_such_package", "model")
