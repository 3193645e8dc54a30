"""Tests of models and graphs without a server: ``model`` runs a ``model.py``, ``cases`` a ``cases.pbtxt``.

With pytest there are fixtures: ``weft_model``, ``weft_mesh`` and ``weft_golden`` (``plugin.py``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.testing.graph_cases import cases
    from weft.testing.in_process import Call, Response, TestedModel, model

__all__ = ["Call", "Response", "TestedModel", "cases", "model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # imported when it is used: pytest imports the plugin, and so this, at each start
        raise AttributeError(f"module 'weft.testing' has no attribute {name!r}")
    module = "graph_cases" if name == "cases" else "in_process"
    return getattr(import_module(f"weft.testing.{module}"), name)
