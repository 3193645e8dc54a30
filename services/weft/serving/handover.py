"""Prefill apart from decode, as it is said between router and model services: parameters and what they hold.

The router sends a request with ``LEASE`` to a replica with the role ``prefill``. A response with ``HANDOVER`` has the
first token; the replica then holds the blocks of the prompt until the call ends or its lease does. The request goes on
at another replica, with the token as ``resume_token_ids``, and with ``SOURCE``, where the blocks are.
"""

import hmac
import json
import math
from collections.abc import Mapping
from typing import NamedTuple, Self

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError

#: Parameter of a model: which part of requests a replica is for. ``both`` is the default.
ROLE = "role"
ROLES = ("both", "prefill", "decode")
#: Parameter of a model with the role ``prefill``: shorter prompts, in tokens, are not split.
MIN_TOKENS = "prefill_min_tokens"
DEFAULT_MIN_TOKENS = 256

#: Request parameter: true, if the request may be handed over.
LEASE = "kv_lease"
#: Response parameter: a ``Handover`` as JSON.
HANDOVER = "kv_handover"
#: Input and request parameter of a request that goes on: the tokens so far, and the sum of their log probabilities.
RESUME_INPUT, RESUME_LOGPROB = "resume_token_ids", "resume_cumulative_logprob"
#: Request parameter: ``signed_source``. Of a question for blocks: the ``source`` alone.
SOURCE = "kv_source"


class Handover(NamedTuple):
    """What another replica needs to go on.

    Attributes:
        token_id: The first token.
        logprob: The ``cumulative_logprob`` so far.
        source: Engine and lease, ``"ENGINE.LEASE"``; nobody can guess it.
    """

    token_id: int
    logprob: float
    source: str

    @property
    def parameters(self) -> Mapping[str, ParameterValue]:
        """Parameters of the response."""
        return {HANDOVER: json.dumps(self._asdict())}

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read the parameter. Raises InvalidArgumentError."""
        try:
            said = json.loads(str(text))
            made = cls(int(said["token_id"]), float(said["logprob"]), str(said["source"]))
            if not 0 <= made.token_id < 2**31 or not math.isfinite(made.logprob):
                raise ValueError("a number is out of range")
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(f"response parameter '{HANDOVER}' is malformed: {error!r:.200}") from None
        return made


def signed_source(key: str, address: str, source: str) -> str:
    """``"ADDRESS SOURCE SIGNATURE"``, with the key of the mesh.

    Without the signature a client could make a service fetch from anywhere, and so fill its cache with wrong blocks.
    """
    text = f"{address} {source}"
    return f"{text} {hmac.digest(key.encode(), text.encode(), 'sha256').hex()}"


def verified_source(key: str, text: str) -> tuple[str, str]:
    """Address and source. Raises InvalidArgumentError: the signature is not that of this mesh."""
    address, _, rest = text.partition(" ")
    source = rest.partition(" ")[0]
    signed = signed_source(key, address, source)
    if not key or not hmac.compare_digest(text.encode(errors="replace"), signed.encode(errors="replace")):
        raise InvalidArgumentError(f"parameter '{SOURCE}' is not signed with the key of this mesh")
    return address, source
