"""The router for Ray Serve. Each request brings its own ranking of the replicas, and Ray does everything else."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from .placing import Asked


class CacheRouter(RequestRouter):
    """Chooses a replica by what each one has cached. A call without an `Asked` goes to any replica.

    Ray pickles this module by value, so it shares no variables with the ingress. What the ingress knows of the replicas
    comes with each request, in `Asked.fleets`.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return a list of ranks, each with one replica, best first. If a replica is full, Ray tries the next rank."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked = asked_in(pending_request)
        if asked is None:
            return [candidate_replicas]
        if not asked.is_ranked:
            self._take_for_free(candidate_replicas)
        by_name = {name_of(replica.replica_id): replica for replica in candidate_replicas}
        return [[by_name[name]] for name in asked.rank(by_name)]

    def _take_for_free(self, replicas: list[RunningReplica]) -> None:
        """If Ray does not know how many requests a replica has, let Ray assume none.

        Without this assumption, Ray would first ask the replicas how many requests they have, and would skip the best
        replica if that replica's reply took 0.1 s. If Ray assumes too little and a replica is full, the replica refuses the
        request, and Ray tries another one.
        """
        for replica in replicas:
            if self.replica_queue_len_cache.get(replica.replica_id) is None:
                self.replica_queue_len_cache.update(replica.replica_id, 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record the replica that has accepted a request."""
        if (asked := asked_in(pending_request)) is not None:
            asked.accepted_by(name_of(replica_id))


def asked_in(pending: PendingRequest) -> Asked | None:
    """Return the request that a call of `Engine.answer` carries; None if the call carries no `Asked`."""
    first = pending.args[0] if pending.args else None
    return first if isinstance(first, Asked) else None


def name_of(replica_id: ReplicaID) -> str:
    return replica_id.unique_id
