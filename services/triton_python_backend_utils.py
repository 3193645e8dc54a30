"""What a ``model.py`` imports, also outside of a service: in tests, notebooks and editors.

Services give each model that they load a module of its own under this name. Triton Inference Server has a module of
this name too, and its processes look for it behind what is installed: there, where ``c_python_backend_utils`` is built
in, its own is executed in this place.

PYTEST_DONT_REWRITE: see ``weft``.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if "c_python_backend_utils" in sys.builtin_module_names:
    for _folder in sys.path:
        _spec = PathFinder.find_spec(__name__, [_folder])
        if (
            _spec is not None and _spec.origin and b"weft.serving" not in Path(_spec.origin).read_bytes()
        ):  # not this file
            _spec.loader.exec_module(sys.modules[__name__])  # type: ignore[union-attr]
            break
else:
    from weft.serving.backends.python.pb_utils import *  # noqa: F403  # all that models use
    from weft.serving.backends.python.pb_utils import __getattr__  # noqa: F401
