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
    _path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
    if (_spec := PathFinder.find_spec(__name__, _path)) is not None and _spec.loader is not None:
        _spec.loader.exec_module(sys.modules[__name__])
else:
    from weft.serving.backends.python.pb_utils import *  # noqa: F403  # all that models use
    from weft.serving.backends.python.pb_utils import __getattr__  # noqa: F401
