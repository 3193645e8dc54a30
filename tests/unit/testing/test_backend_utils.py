"""``import triton_python_backend_utils`` outside of a service, and beside Triton Inference Server's own."""

import subprocess
import sys

import pytest
import triton_python_backend_utils as pb_utils

from weft.serving.backends.python import pb_utils as served


def python(text, *arguments):
    """What a new interpreter prints."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_has_what_a_model_imports():
    """The module has every name that a ``model.py`` gets in a service, the same objects, and says what is not there."""
    names = {name for name in vars(served) if not name.startswith("_")}
    assert all(getattr(pb_utils, name) is getattr(served, name) for name in names)
    with pytest.raises(AttributeError, match="IPCMessage is not supported by this version"):
        pb_utils.IPCMessage  # noqa: B018  # it is looked up


def test_it_is_there_before_and_after_a_model_is_loaded():
    """Importing it loads nothing of a service but what models see, and a test may import it before Weft."""
    assert "Tensor\n" == python("import triton_python_backend_utils as u; print(u.Tensor.__name__)")


def test_within_triton_it_is_tritons_own(tmp_path):
    """In a process of Triton Inference Server, which appends its folder to the path, its own module is executed."""
    (tmp_path / "triton_python_backend_utils.py").write_text("WHOSE = 'Triton'\n")
    found = python(
        "import sys; sys.builtin_module_names += ('c_python_backend_utils',); sys.path.append(sys.argv[1])\n"
        "import triton_python_backend_utils as u; print(u.WHOSE, hasattr(u, 'Tensor'), 'weft' in sys.modules)",
        tmp_path,
    )
    assert "Triton False False\n" == found
