"""What a step does beside acting once: each policy is one module, and this table is the only place that lists them.

A policy of a step is a wrapper around the step's action; ``weft.router.steps`` shows the whole chain.
"""

from weft.language.syntax.file import PolicyKind
from weft.router.policies.cache import CachePolicy
from weft.router.policies.hedge import HedgePolicy
from weft.router.policies.retry import RetryPolicy

#: By their field in ``Policy`` of ``graph.proto``, from the outermost action to the innermost.
POLICIES: dict[str, PolicyKind] = {policy.field: policy for policy in (CachePolicy(), RetryPolicy(), HedgePolicy())}
