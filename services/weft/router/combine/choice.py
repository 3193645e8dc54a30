"""Nothing is computed: every step's tensor is an output of its own, or the one that comes first, or next, is taken."""

from weft.router.combine.method import CombineMethod

KEYED = CombineMethod("KEYED", is_keyed=True)
FIRST = CombineMethod("FIRST", is_first=True)
MERGE = CombineMethod("MERGE", is_merged=True)
