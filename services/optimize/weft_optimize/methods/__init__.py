"""Methods of optimisation by name, in the order in which they are tried; a new one is a module and a line here."""

from collections.abc import Mapping

from weft_optimize.methods.int8_dynamic import Int8Dynamic
from weft_optimize.methods.method import OptimizationMethod

METHODS: Mapping[str, OptimizationMethod] = {method.name: method for method in (Int8Dynamic(),)}
