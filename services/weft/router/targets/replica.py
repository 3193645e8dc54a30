"""One replica of a target: what it serves, whether it is well, and what was asked of it."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from weft.base.errors import UnavailableError
from weft.base.signature import ModelSignature
from weft.base.versions import version_order
from weft.router.target import Target, TargetModel
from weft.router.targets.balancing.rule import ResponseTime
from weft.router.targets.ejection import Record

ModelVersion = tuple[str, str]


class Health(StrEnum):
    """What ``grpc.health.v1`` says of a replica.

    UNKNOWN: nothing yet, or it has no health service; then its answers to discovery decide.
    """

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNREACHABLE = "unreachable"


class Replica:
    """State of one replica.

    Attributes:
        address: Its name in metrics and spans.
        target: Calls it.
        record: How it has answered.
        response: How long its answers take.
        health: As it says itself.
        models: What it said when it was asked last; not ready where it did not answer.
        is_due: It is to be asked at the next discovery: it is new, its health changed, or it did not answer.
        asked_ns: When it was asked last.
        failure: Why it did not answer then; None where it did.
        odd: Of these, what it is not called for, because most replicas have another signature.
        num_inflight: Calls that wait for its answer.
        num_picks: Calls that it was chosen for.
        num_by_status: Calls that are over.
        num_ejections_told: Of its ejections, those that are in the log.
        is_leaving: It is no longer among the addresses; it gets no new calls and goes when it has none.
    """

    def __init__(self, address: str, target: Target, record: Record, clock_ns: Callable[[], int]) -> None:
        self.address = address
        self.target = target
        self.record = record
        self.response = ResponseTime(clock_ns)
        self.health = Health.UNKNOWN
        self.models: dict[ModelVersion, TargetModel] = {}
        self.is_due = True
        self.asked_ns = 0
        self.failure: Exception | None = UnavailableError(f"replica {address} has not answered yet")
        self.odd: frozenset[ModelVersion] = frozenset()
        self.num_inflight = 0
        self.num_picks = 0
        self.num_by_status: dict[str, int] = {}
        self.num_ejections_told = 0
        self.is_leaving = False

    @property
    def is_reachable(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self.health is not Health.UNREACHABLE

    @property
    def is_healthy(self) -> bool:
        """Whether it takes calls, as far as it says itself."""
        return self.health in (Health.SERVING, Health.UNKNOWN)

    def learn(self, models: Sequence[TargetModel]) -> None:
        """It serves these; it is not called for what is new until ``merged`` has held it against the other replicas."""
        before = self.models
        self.models = {(model.signature.name, model.signature.version): model for model in models}
        self.failure = None
        self.odd |= {
            key for key, model in self.models.items() if key not in before or before[key].signature != model.signature
        }

    def lose_models(self) -> None:
        """It does not answer: no model of it is ready."""
        self.models = {key: model._replace(is_ready=False) for key, model in self.models.items()}

    def has_ready(self, key: ModelVersion) -> bool:
        """Whether it may be called for a model version."""
        model = self.models.get(key)
        return model is not None and model.is_ready and key not in self.odd


class Ready(NamedTuple):
    """Replicas that have a model, those that may be called before those that may not.

    Attributes:
        well: Healthy and not ejected.
        ill: Those that are ejected, or else those that can be reached at all; called where there is none that is well.
        is_everywhere: Every replica that is healthy has it.
    """

    well: Sequence[Replica]
    ill: Sequence[Replica]
    is_everywhere: bool


def having(replicas: Collection[Replica], name: str, version: str) -> list[Replica]:
    """The replicas that have a model version ready and are not about to leave.

    Without a version those whose default version, the highest that is ready, looks like the highest of all: while
    replicas are replaced one by one, old and new version share the calls if their signatures are equal.
    """
    staying = [replica for replica in replicas if not replica.is_leaving]
    if version:
        return [replica for replica in staying if replica.has_ready((name, version))]
    defaults = [(replica, found) for replica in staying if (found := _default_version(replica, name)) is not None]
    if not defaults:
        return []
    highest = max((signature for _, signature in defaults), key=_number)
    wanted = _anonymous(highest)
    return [replica for replica, found in defaults if found == highest or _anonymous(found) == wanted]


def merged(replicas: Sequence[Replica]) -> list[TargetModel]:
    """The models of all replicas together; each is ready where one replica has it ready.

    Of signatures that differ the one that most replicas have ready is that of the model, and of several such the
    first; ``odd`` of every replica is filled in.
    """
    found: dict[ModelVersion, list[tuple[Replica, TargetModel]]] = {}
    for replica in replicas:
        for key, model in replica.models.items():
            found.setdefault(key, []).append((replica, model))
    odd: dict[Replica, set[ModelVersion]] = {replica: set() for replica in replicas}
    models: list[TargetModel] = []
    for key, listed in found.items():
        offers = [offer for offer in listed if offer[1].is_described] or listed
        num_ready: Counter[ModelSignature] = Counter()
        for _, model in offers:
            num_ready[model.signature] += model.is_ready
        signature = max(num_ready, key=lambda one: num_ready[one])
        chosen = next(model for _, model in offers if model.signature == signature)
        models.append(chosen._replace(is_ready=num_ready[signature] > 0))
        for replica, model in offers if len(num_ready) > 1 else ():
            if model.signature != signature:
                odd[replica].add(key)
    for replica in replicas:
        replica.odd = frozenset(odd[replica])
    return models


def _default_version(replica: Replica, name: str) -> ModelSignature | None:
    ready = [model.signature for key, model in replica.models.items() if key[0] == name and replica.has_ready(key)]
    return max(ready, key=_number, default=None)


def _number(signature: ModelSignature) -> int:
    return version_order(signature.version)


def _anonymous(signature: ModelSignature) -> ModelSignature:
    return replace(signature, version="")
