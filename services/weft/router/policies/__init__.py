"""Step policies (cache, retry, hedge), a module each; this table is the only list of them.

A policy wraps the step's action; ``weft.router.steps`` shows the whole chain.
"""

from weft.language.syntax.file import PolicyKind
from weft.router.policies.cache import CachePolicy
from weft.router.policies.hedge import HedgePolicy
from weft.router.policies.retry import RetryPolicy

#: By their field in ``Policy`` of ``graph.proto``, from the outermost action to the innermost.
POLICIES: dict[str, PolicyKind] = {policy.field: policy for policy in (CachePolicy(), RetryPolicy(), HedgePolicy())}
