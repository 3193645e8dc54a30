"""Plans in words: policies, targets and tensors, for drawings and explanations."""

import json

from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode
from weft.language.description import slot_name
from weft.language.plan import NodePlan, StepPlan

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


def limit_texts(timeout_ms: int, max_inflight: int) -> list[str]:
    """``timeout 400 ms`` and ``at most 8 in flight``, where they are set."""
    return [
        *([f"timeout {timeout_ms} ms"] if timeout_ms else []),
        *([f"at most {max_inflight} in flight"] if max_inflight else []),
    ]


def policy_texts(step: StepPlan) -> list[str]:
    """A step's policy, in the order in which it acts."""
    texts = limit_texts(step.timeout_ms, step.max_inflight)
    if step.min_remaining_ms:
        texts.append(f"needs {step.min_remaining_ms} ms left")
    return texts + [policy.text() for policy in step.policies]


def default_texts(step: StepPlan, frame: NodePlan) -> list[str]:
    """``LANG defaults to "en"`` for each default of a step of ``frame``."""
    return [f"{slot_name(frame, slot)} defaults to {value_text(tensor)}" for slot, tensor, _ in step.defaults]
