"""Which calls of a target share the exchange."""

import asyncio
from typing import Any

import pytest
from tests.unit.weft_router.targets.test_target import TinyCore, call, serving

from weft_common.client.wires import WireName
from weft_common.core import CallContext
from weft_router.targets.grpc_target import GrpcTarget


async def num_exchanged(wire: WireName, num_at_once: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of so many calls at once went through an exchange that is open."""
    core = TinyCore()
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}", wire=wire)
        exchange = target._exchange
        assert exchange is not None
        while not exchange.is_open:
            await target.infer(call(), CallContext())
        begun: list[Any] = []
        begin = exchange.begin
        monkeypatch.setattr(exchange, "begin", lambda *args: begun.append(begin(*args)) or begun[-1])
        await asyncio.gather(*(target.infer(call(), CallContext()) for _ in range(num_at_once)))
        await target.close()
    return sum(pending is not None for pending in begun)


@pytest.mark.parametrize(
    ("wire", "num_at_once", "expected"),
    [(WireName.WEFT, 1, 0), (WireName.WEFT, 3, 0), (WireName.WEFT, 10, 7), (WireName.GRPCIO, 1, 1)],
)
async def test_few_calls_at_once_are_unary(
    wire: WireName, num_at_once: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Weft's own wire a lone call is cheaper by itself, many are cheaper together; on grpcio's a lone one too."""
    assert expected == await num_exchanged(wire, num_at_once, monkeypatch)
