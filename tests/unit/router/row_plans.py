"""Nodes in which each row of a batch goes its own way."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tests.unit.router import make
from tests.unit.router.fake_target import Answer
from tests.unit.router.outcomes import Late

from weft.base.core import CallContext, InferCall
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode, encode
from weft.language.plan import GraphPlan, NodePlan


def column(*values: float) -> WireTensor:
    """FP32, shape [rows, 1]."""
    return encode(np.array(values, np.float32).reshape(-1, 1))


def values_of(tensor: WireTensor) -> list[float]:
    return decode(tensor).ravel().tolist()


def adding(amount: float | Late) -> Answer:
    """A model that adds to each value."""
    amount, after_ms = amount if isinstance(amount, Late) else (amount, 0)

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        return {"OUT": encode(decode(call.inputs["IN"]) + np.float32(amount))}

    return answer


def per_row(kind: type[NodePlan], steps: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """Steps that call the models named like them; batches of up to 8."""
    made = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, **how) for n, how in steps.items()]
    root = make.node("root", kind, made, inputs=["X"], outputs=["Y"], max_batch_size=8, per_row=True, **options)
    specs = {slot: TensorSpec(name, "FP32", (1,)) for name, slot in (*root.inputs, *root.outputs)}
    return make.graph(replace(root, specs=specs), max_batch_size=8)
