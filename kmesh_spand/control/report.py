"""What an operator sees, as messages of ``kmesh.v1``."""

from __future__ import annotations

from collections.abc import Mapping

from kmesh import errors, negotiation
from kmesh.handles import HandleKind
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.v1 import admin_pb2, flights_pb2, sessions_pb2
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.control.diskreport import disk_info, fetches
from kmesh_spand.control.families import seen_by
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.control.growth import Growth
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.observer import Observer
from kmesh_spand.control.readiness import Readiness
from kmesh_spand.control.registry import Member
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.core.codes import Reason

_DEFAULT_LIMIT = 1000
_ROLES: dict[int, str] = {
    sessions_pb2.ROLE_SCHEDULER: "scheduler",
    sessions_pb2.ROLE_WORKER: "worker",
    sessions_pb2.ROLE_TOOL: "tool",
}
_MAX_LIMIT = 10_000
#: What an answer says of namespaces: gRPC takes 4 MiB, and spans are in it too.
_MAX_FIELD_BYTES = 1 << 20


class Report:
    """Reads core, sessions and store worker; changes nothing.

    Args:
        restarts: how often control was started again.
    """

    def __init__(
        self,
        handler: Handler,
        worker: StoreWorker,
        growth: Growth,
        restarts: int,
        readiness: Readiness,
        gpus: Gpus,
        disk: DiskJobs | None = None,
    ) -> None:
        self.gpus = gpus
        self.readiness = readiness
        self._handler = handler
        self._worker = worker
        self._growth = growth
        self._restarts = restarts
        self.disk = disk
        self._started_ms = handler.now_ms()

    def counters(self) -> dict[str, int]:
        """All counters, by the names of ``docs/metrics.md``."""
        found = {
            name if name.startswith(("flight_", "disk_")) else f"spans_{name}": value
            for name, value in self._handler.core.counters.items()
        }
        found.update(self._handler.counters)
        found.update(self._growth.counters)
        found["disk_removed"] = self.disk.removed if self.disk else 0
        found["index_full"] = self._handler.applier.index_full
        found["population_pauses"] = self._growth.pauses
        found["slow_calls"] = self._handler.observer.slow_calls
        return found

    def group(self, member: Member) -> int | None:
        """Whose spans and sessions a member may see: None is everybody's.

        Root and the daemon's own user could read all of it anyway.
        """
        return seen_by(self._handler.core.tenancy, member.peer.uid)

    def status(self, member: Member | None = None) -> admin_pb2.StatusResponse:
        """Answer of Admin.Status: what the member may see.

        Sums over all tenants would tell one when another is served: they are left out.
        """
        group = None if member is None else self.group(member)
        handler, core = self._handler, self._handler.core.views.status()
        tenants = [
            admin_pb2.TenantInfo(
                name=row.name,
                quota=row.quota,
                used=row.used,
                spans=row.spans,
                span_bytes=row.stored_bytes,
                slabs=row.slabs,
                counters=row.counters,
            )
            for row in handler.core.views.tenants(group)
        ]
        shown = {tenant.name for tenant in tenants}
        status = admin_pb2.StatusResponse(
            version=self._handler.version,
            epoch=handler.epoch,
            uptime_ms=handler.now_ms() - self._started_ms,
            draining=handler.draining or core.draining,
            socket_dir=handler.settings.socket_dir,
            slabs=[
                admin_pb2.SlabInfo(
                    slab=slab.slab,
                    kind=HandleKind.MEMFD.name,
                    size=state.size,
                    capacity=slab.capacity,
                    populated=slab.populated,
                    used=slab.used,
                    hugepages=state.hugepages,
                    read_only=slab.sealed,
                    tenant=slab.tenant if slab.tenant in shown or group is None else "",
                )
                for slab in core.slabs
                if (state := self._growth.slabs.get(slab.slab)) is not None
            ]
            + self.gpus.slab_rows(core.slabs),
            spans=core.spans,
            span_bytes=core.span_bytes,
            max_spans=core.max_spans,
            sessions=core.sessions,
            leases=core.leases,
            leased_bytes=core.leased_bytes,
            reservations=core.reservations,
            staging_bytes=handler.staging.used,
            max_staging_bytes=handler.staging.total,
            index_entries=core.index_entries,
            counters=self.counters(),
            control_restarts=self._restarts,
            worker_restarts=self._worker.restarts,
            span_tokens=handler.settings.span_tokens,
            tenants=tenants,
            paused=self._growth.paused,
            hardened=handler.settings.hardened,
            handles=[negotiation.to_message(a) for a in handler.broker.everything()],
            families=core.families,
            mirrors=core.mirrors,
            mirror_bytes=core.mirror_bytes,
            mirror_dense_bytes=core.mirror_dense_bytes,
            mirror_used_bytes=core.mirror_used_bytes,
            base_spans=core.base_spans,
            gpus=self.gpus.rows(),
            not_ready=_conditions(self.readiness.reasons()),
            warnings=_conditions(self.readiness.warnings()),
        )
        if handler.core.disk is not None:
            directory = handler.settings.disk
            status.disk.CopyFrom(disk_info(handler.core.disk, self.disk, directory, group))
        if group is not None:
            status.ClearField("sessions")
            status.ClearField("leases")
            status.ClearField("leased_bytes")
            status.ClearField("reservations")
            status.ClearField("staging_bytes")
            status.ClearField("index_entries")
            for name in ("families", "mirrors", "mirror_bytes", "mirror_dense_bytes", "base_spans"):
                status.ClearField(name)
            status.ClearField("mirror_used_bytes")
            status.ClearField("counters")
            status.spans = sum(tenant.spans for tenant in tenants)
            status.span_bytes = sum(tenant.span_bytes for tenant in tenants)
            for info in status.slabs:
                if info.tenant not in shown:
                    info.ClearField("used")
        return status

    def sessions_by_role(self) -> dict[str, int]:
        """Open sessions by role, in lower case."""
        found = {name: 0 for name in _ROLES.values()}
        for member in self._handler.registry.members.values():
            found[_ROLES[member.role]] += 1
        return found

    def catalog(self) -> tuple[int, int, int]:
        """Catalog records in use, spans that are leased, spans that wait to be verified."""
        core = self._handler.core.views.status()
        return core.slots, core.leased_spans, core.recovering

    def flying(self) -> tuple[int, int]:
        """Flights in the air, and Awaits that wait for them."""
        flights = self._handler.core.flights.by_id.values()
        return len(flights), sum(len(flight.waiters) for flight in flights)

    @property
    def observer(self) -> Observer:
        return self._handler.observer

    @property
    def worker(self) -> StoreWorker:
        return self._worker

    def spans(
        self, request: admin_pb2.ListRequest, member: Member | None = None
    ) -> admin_pb2.ListResponse:
        """Answer of Admin.List: what the member may see.

        Raises:
            InvalidArgument: of which field.
        """
        core, now = self._handler.core, self._handler.now_ms()
        if len(request.namespace) not in (0, KEY_BYTES):
            raise errors.InvalidArgument(f"not {KEY_BYTES} bytes", field="namespace")
        after, limit = _page(request)
        group = None if member is None else self.group(member)
        rows = core.views.spans(after, limit + 1, request.namespace, now_ms=now, group=group)
        answer = admin_pb2.ListResponse()
        if len(rows) > limit:
            rows = rows[:limit]
            answer.next_page_token = str(rows[-1].slot)
        for row in rows:
            shard = Shard.from_code(row.shard)
            answer.spans.add(
                key=row.key,
                namespace=row.namespace,
                slab=row.slab,
                device=self._handler.broker.gpus.device(row.slab),
                offset=row.offset,
                length=row.length,
                start=row.start,
                tokens=row.tokens,
                layer_begin=shard.layer_begin,
                layer_end=shard.layer_end,
                head_begin=shard.head_begin,
                head_end=shard.head_end,
                generation=row.generation,
                state=row.state,
                leases=row.leases,
                age_ms=row.age_ms,
                idle_ms=row.idle_ms,
                dense_length=row.dense,
                bases=row.bases,
                mirrors=row.mirrors,
            )
        if not request.page_token:
            left = _MAX_FIELD_BYTES
            for space in core.views.namespaces(group):
                if request.namespace in (b"", space.namespace):
                    fields = self._handler.registry.namespace_fields(space.namespace)
                    left -= _size(fields)
                    answer.namespaces.add(
                        digest=space.namespace,
                        fields=fields if left >= 0 else {},
                        spans=space.spans,
                        bytes=space.bytes,
                        disk_spans=space.files,
                        disk_bytes=space.file_bytes,
                    )
            if request.remembered and group is None:
                stored = {space.digest for space in answer.namespaces}
                for digest, fields in reversed(self._handler.registry.namespaces().items()):
                    if digest not in stored and request.namespace in (b"", digest):
                        left -= _size(fields)
                        if left < 0:
                            break
                        answer.namespaces.add(digest=digest, fields=fields)
        return answer

    def flights(
        self, request: flights_pb2.ListFlightsRequest, member: Member
    ) -> flights_pb2.ListFlightsResponse:
        """Answer of Flights.List: what the member may see.

        Raises:
            InvalidArgument: of which field.
        """
        after, limit = _page(request)
        rows = self._handler.core.views.flight_rows(
            after, limit + 1, now_ms=self._handler.now_ms(), group=self.group(member)
        )
        answer = flights_pb2.ListFlightsResponse()
        if len(rows) > limit:
            rows = rows[:limit]
            answer.next_page_token = str(rows[-1].flight)
        for row in rows:
            answer.flights.add(
                flight=row.flight,
                state=row.state,
                tenant=row.tenant,
                leader=row.leader,
                keys=row.keys,
                landed=row.landed,
                waiters=row.waiters,
                deaths=row.deaths,
                age_ms=row.age_ms,
                key=row.key,
            )
        disk = self._handler.core.disk
        if disk is not None and not request.page_token:
            now, group = self._handler.now_ms(), self.group(member)
            answer.fetches.extend(fetches(disk, limit, now, group))
        return answer

    def session(self, member: Member) -> sessions_pb2.SessionInfo:
        """One session as the daemon sees it. Its token is no part of it."""
        row = self._handler.core.views.session_info(member.id)
        info = sessions_pb2.SessionInfo(
            session_id=member.id,
            role=sessions_pb2.Role.ValueType(member.role),
            engine_id=member.engine_id,
            client_name=member.client_name,
            client_version=member.client_version,
            uid=member.peer.uid,
            pid=member.peer.pid,
            age_ms=self._handler.now_ms() - member.opened_ms,
            staging_bytes=self._handler.staging.size(member.id),
            handles=[negotiation.to_message(a) for a in self._handler.broker.listed(member.id)],
        )
        if row is not None:
            info.leases = row.leases
            info.leased_spans = row.leased_spans
            info.leased_bytes = row.leased_bytes
            info.reservations = row.reservations
            info.reserved_bytes = row.reserved_bytes
            info.hits = row.hits
            info.misses = row.misses
            info.pending = row.pending
            info.committed = row.committed
            info.committed_bytes = row.committed_bytes
            for number, count in row.reasons.items():
                info.reasons[Reason(number).name.lower()] = count
        return info

    def sessions(self, member: Member) -> sessions_pb2.ListSessionsResponse:
        """Every open session that the member may see."""
        group, tenancy = self.group(member), self._handler.core.tenancy
        return sessions_pb2.ListSessionsResponse(
            sessions=[
                self.session(other)
                for other in self._handler.registry.members.values()
                if group in (None, tenancy.group(other.peer.uid))
            ]
        )


def _page(request: admin_pb2.ListRequest | flights_pb2.ListFlightsRequest) -> tuple[int, int]:
    """After what the page begins, and how long it is. InvalidArgument names the field."""
    if request.limit > _MAX_LIMIT:
        raise errors.InvalidArgument(f"over {_MAX_LIMIT}", field="limit")
    if not request.page_token.isdigit() and request.page_token:
        raise errors.InvalidArgument("not from an earlier answer", field="page_token")
    return int(request.page_token[:18] or -1), request.limit or _DEFAULT_LIMIT


def _size(fields: Mapping[str, str]) -> int:
    """Bytes of a namespace's fields, and of its digest."""
    return KEY_BYTES + sum(len(name) + len(value.encode()) for name, value in fields.items())


def _conditions(found: dict[str, str]) -> list[admin_pb2.Condition]:
    return [admin_pb2.Condition(name=name, text=text) for name, text in found.items()]
