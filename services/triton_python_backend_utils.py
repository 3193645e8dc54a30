"""What a ``model.py`` imports, outside of a service too: in tests, notebooks and editors.

The services give each model they load a module of its own under this name. Triton Inference Server has a module of this
name too, and puts it at the end of ``sys.path``: within its processes, which have ``c_python_backend_utils`` built in, that
one is executed here.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if "c_python_backend_utils" in sys.builtin_module_names:
    _path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
    if (_spec := PathFinder.find_spec(__name__, _path)) is not None and _spec.loader is not None:
        _spec.loader.exec_module(sys.modules[__name__])
else:
    from weft.serving.backends.python.pb_utils import *  # noqa: F403  # it is this module
    from weft.serving.backends.python.pb_utils import __getattr__ as __getattr__
