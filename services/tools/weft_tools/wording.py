"""How plans are put into words: policies, targets and tensors, for drawings and explanations alike."""

import json

from weft_common.signature import TensorSpec
from weft_common.tensors import WireTensor, decode
from weft_router.graph.description import condition_text, counted, slot_name
from weft_router.graph.plan import CachePlan, HedgePlan, NodePlan, RetryPlan, ShadowPlan, StepPlan

MAX_SHOWN_CHARS = 60
_MAX_SHOWN_ELEMENTS = 8


def shortened(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """``text`` on one line, of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shape_text(dims: tuple[int, ...], *, is_batched: bool) -> str:
    """``[batch, 3, -1]``; -1 is any size."""
    return f"[{', '.join([*(['batch'] if is_batched else []), *map(str, dims)])}]"


def tensor_text(spec: TensorSpec, *, is_batched: bool) -> str:
    """``LANG BYTES [batch, 1]``; only the name where the type is not known."""
    return f"{spec.name} {spec.datatype} {shape_text(spec.dims, is_batched=is_batched)}" if spec.datatype else spec.name


def value_text(tensor: WireTensor) -> str:
    """The elements, the first few of many: ``"en"``, ``[0, 0.5]``."""
    elements = decode(tensor).ravel()[: _MAX_SHOWN_ELEMENTS + 1].tolist()
    values = [e.decode(errors="replace") if isinstance(e, bytes) else e for e in elements]
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    if len(texts) == 1:
        return shortened(texts[0])
    return shortened(f"[{', '.join(texts[:_MAX_SHOWN_ELEMENTS])}{', …' if len(texts) > _MAX_SHOWN_ELEMENTS else ''}]")


def retry_text(retry: RetryPlan) -> str:
    """``2 attempts on UNAVAILABLE, backoff 10 ms``."""
    backoff = f", backoff {retry.backoff_ms} ms" if retry.backoff_ms else ""
    return f"{retry.attempts} attempts on {', '.join(sorted(retry.codes))}{backoff}"


def hedge_text(hedge: HedgePlan) -> str:
    """``hedge after 40 ms, 1 extra call``."""
    return f"hedge after {hedge.after_ms} ms, {counted(hedge.max_extra, 'extra call')}"


def cache_text(cache: CachePlan) -> str:
    """``cache 60000 ms, 64 MiB``, with the key where there is one."""
    lifetime = f"{cache.ttl_ms} ms" if cache.ttl_ms else "until evicted"
    key = f", key {condition_text(cache.key)}" if cache.key is not None else ""
    stale = f", {cache.stale_if_error_ms} ms longer while unavailable" if cache.stale_if_error_ms else ""
    return f"cache {lifetime}{stale}, {cache.max_bytes / (1 << 20):g} MiB{key}"


def shadow_text(shadow: ShadowPlan) -> str:
    """``shadow of 5 % of requests, at most 4 at once``."""
    limit = f", at most {shadow.max_inflight} at once" if shadow.max_inflight else ""
    return f"shadow of {shadow.percent:g} % of requests{limit}"


def limit_texts(timeout_ms: int, max_inflight: int) -> list[str]:
    """``timeout 400 ms`` and ``at most 8 in flight``, where they are set."""
    return [
        *([f"timeout {timeout_ms} ms"] if timeout_ms else []),
        *([f"at most {max_inflight} in flight"] if max_inflight else []),
    ]


def policy_texts(step: StepPlan) -> list[str]:
    """What a step's policy says, in the order in which it acts."""
    texts = limit_texts(step.timeout_ms, step.max_inflight)
    if step.min_remaining_ms:
        texts.append(f"needs {step.min_remaining_ms} ms left")
    if step.cache is not None:
        texts.append(cache_text(step.cache))
    if step.retry is not None:
        texts.append(retry_text(step.retry))
    if step.hedge is not None:
        texts.append(hedge_text(step.hedge))
    return texts


def default_texts(step: StepPlan, frame: NodePlan) -> list[str]:
    """``LANG defaults to "en"`` for each default of a step of ``frame``."""
    return [f"{slot_name(frame, slot)} defaults to {value_text(tensor)}" for slot, tensor, _ in step.defaults]
