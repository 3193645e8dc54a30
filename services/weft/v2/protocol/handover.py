"""Prefill apart from decode, as it is said between router and model services: parameters and what they hold.

The router sends a request with ``LEASE`` to a replica with the role ``prefill``. A response with ``HANDOVER`` has the
first token; the replica then holds the blocks of the prompt until the call ends or its lease does. The request goes on
at another replica, with the token as ``resume_token_ids``, and with ``SOURCE``, where the blocks are.
"""

import hmac

from weft.base.errors import InvalidArgumentError

#: Parameter of a model: which part of requests a replica is for. ``both`` is the default.
ROLE = "role"
ROLES = ("both", "prefill", "decode")
#: Parameter of a model with the role ``prefill``: shorter prompts, in tokens, are not split.
MIN_TOKENS = "prefill_min_tokens"
DEFAULT_MIN_TOKENS = 256

#: Request parameter: true, if the request may be handed over.
LEASE = "kv_lease"
#: Response parameter, with the first token: engine and lease, ``"ENGINE.LEASE"``, which nobody can guess.
HANDOVER = "kv_handover"
#: Request parameter: ``signed_source``. Of a question for blocks: the value of ``HANDOVER``.
SOURCE = "kv_source"
#: Said by routers alone; from a client they have no effect.
OF_ROUTERS = frozenset({LEASE, SOURCE})


def signed_source(key: str, address: str, source: str) -> str:
    """``"ADDRESS SOURCE SIGNATURE"``; else a client could make a service fetch wrong blocks from anywhere."""
    text = f"{address} {source}"
    return f"{text} {hmac.digest(key.encode(), text.encode(), 'sha256').hex()}"


def verified_source(key: str, text: str) -> tuple[str, str]:
    """Address and source. Raises InvalidArgumentError: the signature is not that of this mesh."""
    address, source, *_ = (*text.split(" "), "")
    signed = signed_source(key, address, source)
    if not key or not hmac.compare_digest(text.encode(errors="replace"), signed.encode(errors="replace")):
        raise InvalidArgumentError(f"parameter '{SOURCE}' is not signed with the key of this mesh")
    return address, source
