"""Who has which GPUs on this node. The one writer of assignments, over the pure `place`.

All instances that want GPUs are placed in one call, so that what one of them gets does not depend on which asked first;
what comes out is kept before anything is awaited, so that two launches can never get one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import evolve, frozen

from llmgw.board import Cell
from llmgw.config.model import Config
from llmgw.discovery.pins import unseen
from llmgw.domain.problem import Problem, Reason
from llmgw.domain.shard import ShardId, ShardSpec
from llmgw.placement.model import Assignment, NodeView, Request, Slot, by_turns
from llmgw.placement.place import place
from llmgw.placement.view import node_view, request_of
from llmgw.supervisor.node_look import NodeFacts
from llmgw.supervisor.node_watch import NodeWatch


@frozen
class Holding:
    """Cards of an engine that runs, or is about to: what it was launched with, whatever the file says by now.

    `shared` is the MiB of each card that it has beside others; None: its cards are its own.
    """

    uuids: tuple[str, ...]
    shared: int | None = None


@frozen
class Claim:
    """One instance, as the supervisor knows it. `holds` is None when no engine of it runs; of one that does not run
    and does not want to (`wanted` False) only the cards that it names are kept for it."""

    id: ShardId
    spec: ShardSpec
    wanted: bool
    holds: Holding | None = None


class Unplaced(Exception):
    """There are no GPUs for an instance now; `reason` says why, counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Refused(Exception):
    """A GPU that the file names is none."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.cause)
        self.reason = reason


@frozen
class _Solved:
    """One placement of everything, seen from the instance that asks: its cards, or why it gets none."""

    given: Mapping[ShardId, tuple[str, ...]]
    uuids: tuple[str, ...] = ()
    insists: bool = False
    """It names cards that placement would not give, and no engine of ours is in the way."""
    unplaced: str | None = None


class Assigner:
    """Assignments of instances that do not run yet; those of running engines are in their records."""

    def __init__(self, config: Cell[Config], node: NodeWatch) -> None:
        self._config = config
        self._node = node
        self._given: dict[ShardId, tuple[str, ...]] = {}
        self._insisted: dict[ShardId, tuple[str, ...]] = {}
        """Cards that their shards name and placement would not give: for preflight to judge, and for nobody else."""
        self.claims: Callable[[], Iterable[Claim]] = tuple
        """Every instance; set by the supervisor, who knows them."""

    async def assign(self, id_: ShardId, spec: ShardSpec) -> tuple[str, ...]:
        """UUIDs of the cards for a launch of this instance, by the node as it is now.

        Raises Unplaced and Refused.
        """
        facts = await self._node.refresh()
        return self.decide(facts, id_, spec)

    def decide(self, facts: NodeFacts, id_: ShardId, spec: ShardSpec) -> tuple[str, ...]:
        """`assign` by given facts. Synchronous: the decision stands when it returns."""
        claims = self._with(id_, spec)
        solved = self._solve(facts, id_, spec, claims)
        wanted = {claim.id for claim in claims if claim.wanted}
        self._given = {other: uuids for other, uuids in solved.given.items() if other in wanted}
        self._insisted = {other: uuids for other, uuids in self._insisted.items() if other in wanted and other != id_}
        if solved.unplaced is not None:
            raise Unplaced(solved.unplaced)
        if solved.insists:
            self._insisted[id_] = solved.uuids
        return solved.uuids

    def fits(
        self, id_: ShardId, without: frozenset[ShardId] = frozenset(), beside: frozenset[ShardId] = frozenset()
    ) -> bool:
        """Whether an instance would get its cards now, were the engines `without` gone and those `beside` about to run;
        decides nothing.

        By the facts that are known: the launch looks again, and says what is wrong with the cards themselves.
        """
        facts = self._node.facts.value
        claims = {
            claim.id: evolve(claim, wanted=True) if claim.id in beside and not claim.wanted else claim
            for claim in self.claims()
        }
        mine = claims.get(id_)
        if mine is None:
            return False
        if mine.spec.gpus in (0, ()):
            return True
        if facts is None:
            # The launch finds out what there is; of several that nobody can tell apart one goes first.
            return not any(
                claim.wanted and claim.spec.gpus not in (0, ()) for claim in claims.values() if claim != mine
            )
        # Of those that take turns like this one, only who runs or is about to is in its way; there may be many others.
        is_pinned_turn = mine.spec.idle_timeout is not None and bool(mine.spec.pinned_gpus)
        others = [
            _as_if(claim, without, facts)
            for claim in claims.values()
            if claim.id != id_ and (not is_pinned_turn or claim.wanted or claim.holds is not None)
        ]
        try:
            solved = self._solve(facts, id_, mine.spec, [*others, Claim(id_, mine.spec, wanted=True)])
        except Unplaced:
            return False
        except Refused:
            return True
        return solved.unplaced is None

    def _solve(self, facts: NodeFacts, id_: ShardId, spec: ShardSpec, claims: Sequence[Claim]) -> _Solved:
        """Place everything. Raises Unplaced where nobody can say what there is, and Refused."""
        nobody_knows = unseen(facts.inventory, spec) if isinstance(spec.gpus, int) else None
        if nobody_knows is not None:
            raise Unplaced(f"{nobody_knows.message}; {nobody_knows.hint}")
        requests: list[Request] = []
        current: dict[ShardId, Assignment] = {}
        for claim in claims:
            request = self._request(claim, facts)
            if isinstance(request, Problem):
                if claim.id == id_:
                    raise Refused(Reason(request.code, request.message, request.hint))
                continue
            if request is None:
                continue
            requests.append(request)
            uuids = claim.holds.uuids if claim.holds is not None else self._given.get(claim.id)
            if uuids:
                current[claim.id] = _assignment(claim.id, uuids, facts)
        node = self._config.value.node
        view = node_view(facts.node, facts.availability, labels=node.labels, allowed=node.gpus)
        result = place([view], requests, current)
        given = {other: found.uuids for other, found in result.assignments.items()}
        mine = next((request for request in requests if request.id == id_), None)
        if mine is None or id_ in given:
            return _Solved(given, given.get(id_, ()))
        if mine.pinned and not self._taken(mine, requests, result.assignments, view):
            # Nobody of ours has them: what is wrong with the cards themselves is for preflight to say.
            return _Solved(given, mine.pinned, insists=True)
        return _Solved(given, unplaced=result.reasons[id_])

    def _taken(
        self, mine: Request, requests: Iterable[Request], assignments: Mapping[ShardId, Assignment], view: NodeView
    ) -> bool:
        """Whether an instance of ours is in the way: one that does not share, or sharers that leave no room."""
        room = {card.uuid: card.usable_memory for card in view.cards}
        asked = dict.fromkeys(mine.pinned, mine.memory or 0)
        for other in requests:
            has = assignments[other.id].uuids if other.id in assignments else self._insisted.get(other.id, ())
            is_in_the_way = other.id != mine.id and not by_turns(other, mine)
            both = set(mine.pinned).intersection(has) if is_in_the_way else set()
            if both and not (mine.share and other.share):
                return True
            for uuid in both:
                asked[uuid] += other.memory or 0
        # On a card that nobody of ours shares its size is for preflight to judge.
        return any(
            size > (mine.memory or 0) and (known := room.get(uuid)) is not None and size > known
            for uuid, size in asked.items()
        )

    def _with(self, id_: ShardId, spec: ShardSpec) -> Sequence[Claim]:
        """Every instance; the one that asks is wanted, with the keys that it is launched with."""
        others = [claim for claim in self.claims() if claim.id != id_]
        return [*others, Claim(id_, spec, wanted=True)]

    def _request(self, claim: Claim, facts: NodeFacts) -> Request | Problem | None:
        if claim.holds is not None:
            holds = claim.holds
            if not holds.uuids:
                return None
            shares = holds.shared is not None
            return Request(claim.id, len(holds.uuids), memory=holds.shared, share=shares, running=True)
        if not claim.wanted and not claim.spec.pinned_gpus:
            return None
        return request_of(claim.id, claim.spec, facts.inventory)


def _as_if(claim: Claim, without: frozenset[ShardId], facts: NodeFacts) -> Claim:
    """The claim once those `without` have given up theirs; who is about to run has the cards that it names."""
    if claim.id in without:
        return evolve(claim, wanted=False, holds=None)
    if claim.wanted and claim.holds is None and claim.spec.idle_timeout is not None:
        request = request_of(claim.id, claim.spec, facts.inventory)
        if isinstance(request, Request) and request.pinned:
            return evolve(claim, holds=Holding(request.pinned, request.memory if request.share else None))
    return claim


def _assignment(id_: ShardId, uuids: tuple[str, ...], facts: NodeFacts) -> Assignment:
    return Assignment(id_, (Slot(facts.node.node, uuids),), _class_of(uuids, facts))


def _class_of(uuids: Sequence[str], facts: NodeFacts) -> str | None:
    found = (facts.inventory.by_uuid(uuid) for uuid in uuids)
    classes = {card.gpu_class for card in found if card is not None}
    return classes.pop() if len(classes) == 1 else None
