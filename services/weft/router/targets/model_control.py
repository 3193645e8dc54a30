"""Forwards loads, unloads and statistics of models to the services that have them."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import chain

from weft.base.core import ParameterValue
from weft.base.errors import UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.router.target import Target
from weft.router.targets.grpc_target import GrpcTarget
from weft.router.targets.replicated import CHOSEN_BY_GRPC, ReplicatedTarget
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.wire import summed
from weft_protos import grpc_service_pb2 as pb

#: How long a service may take to say what its repository has, in seconds, to load a model, and to give its counters.
INDEX_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 3600.0
STATISTICS_TIMEOUT_S = 1.0
MODEL_TARGET = "model"

_log = get_logger("weft.router")


class TargetModelControl:
    """Forwards model control to every replica of the service that has the model in its repository.

    The service's own control mode decides whether it is allowed. Services in this process are not included. If several
    targets have the model, the first is used.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._changing = asyncio.Lock()

    @property
    def for_new_models(self) -> str:
        """The target that models without a folder are loaded at: ``model``, else the first; "" if there is none."""
        names = [target.name for target in self._targets if _clients_of(target)]
        return MODEL_TARGET if MODEL_TARGET in names else next(iter(names), "")

    async def holder(self, name: str) -> str:
        """The target whose service lists a model, loaded or not; "" if none that answers does."""
        clients = [(target.name, client) for target in self._targets for client in _clients_of(target)]
        lists = await asyncio.gather(*(_has(client, name) for _, client in clients))
        return next((target for (target, _), has in zip(clients, lists, strict=True) if has), "")

    async def load(self, target: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a model at every replica. Raises the error of one; the others have finished or failed too."""
        await _all(client.load(name, parameters, timeout_s=LOAD_TIMEOUT_S) for client in self._clients(target))

    async def unload(self, target: str, name: str, *, unload_dependents: bool) -> None:
        """Unload a model at every replica. Raises as ``load``."""
        await _all(
            client.unload(name, unload_dependents=unload_dependents, timeout_s=LOAD_TIMEOUT_S)
            for client in self._clients(target)
        )

    async def statistics(self, name: str, version: str) -> list[pb.ModelStatistics]:
        """A model's counters ("": all models) as its services keep them, summed over replicas that answer."""
        found: dict[tuple[str, str], pb.ModelStatistics] = {}
        for target in self._targets:
            works = (_statistics(client, name, version) for client in _clients_of(target))
            for one in summed(chain.from_iterable(await asyncio.gather(*works))):
                found.setdefault((one.name, one.version), one)
        return list(found.values())

    async def change_settings(self, request: pb.TraceSettingRequest | pb.LogSettingsRequest, model: str) -> None:
        """Change settings of traces or logs at every replica of each service, or of that which has ``model``.

        Changes are passed on one after another, so that replicas agree on the latest.

        Raises:
            UnavailableError: Some did not change them; names these, the others have changed.
        """
        method = "TraceSetting" if isinstance(request, pb.TraceSettingRequest) else "LogSettings"
        async with self._changing:
            clients = self._clients(await self.holder(model) if model else None)
            calls = (client.call(method, request, timeout_s=INDEX_TIMEOUT_S) for client in clients)
            answers = await asyncio.gather(*calls, return_exceptions=True)
        found = list(zip(clients, answers, strict=True))
        failed = [f"{client.where}: {error}" for client, error in found if isinstance(error, Exception)]
        done = [client.where for client, error in found if not isinstance(error, Exception)]
        where = ", ".join(("the router", *done))
        _log.info("settings changed at %s", where, extra={"settings": sorted(request.settings)})
        if failed:
            raise UnavailableError(f"settings changed at {where}, but not at {'; '.join(failed)}")

    def _clients(self, target: str | None) -> list[V2Client]:
        """Clients of each server of a target; None: of all targets."""
        return [client for one in self._targets if target in (None, one.name) for client in _clients_of(one)]


def _clients_of(target: Target) -> list[V2Client]:
    servers = [target]
    if isinstance(target, ReplicatedTarget):
        servers = [replica.target for replica in target.replicas if replica.address != CHOSEN_BY_GRPC]
    return [server.client for server in servers if isinstance(server, GrpcTarget)]


async def _has(client: V2Client, name: str) -> bool:
    try:
        return any(model.name == name for model in await client.index(timeout_s=INDEX_TIMEOUT_S))
    except WeftError:
        return False


async def _statistics(client: V2Client, name: str, version: str) -> Sequence[pb.ModelStatistics]:
    try:
        return await client.statistics(name, version, timeout_s=STATISTICS_TIMEOUT_S)
    except WeftError:
        return ()


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Await all; then raise the first failure."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
