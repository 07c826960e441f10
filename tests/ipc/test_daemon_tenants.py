"""Tenants in real daemons: two users, salts, quotas, and memory that changes hands."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from foreign import NOBODY, let_in, run_as
from rawclient import DIGEST, RawClient, Refused

from kmesh.aio import AsyncSession
from kmesh.calls import ReserveBatch
from kmesh.errors import ConfigError
from kmesh.keys import salt_digest
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import common_pb2, spans_pb2

Start = Callable[..., Daemon]
KEY = b"k" * 32
A, B = b"a" * 32, b"b" * 32
MINE, THEIRS = b"what root stored" * 4096, b"what nobody stored" * 100
POOL = {"host_memory": "64MiB", "slab_size": "16MiB"}

root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")


def two_users(start_spand: Start, **settings: object) -> Daemon:
    daemon = start_spand(socket_mode="0666", allow_uids=f"0,{NOBODY}", **POOL, **settings)
    let_in(daemon)
    daemon.wait_populated()
    return daemon


_OTHER = """
key, payload = b"k" * 32, b"what nobody stored" * 100
said = {}
with RawClient(socket_dir) as client:
    handle, fds = client.call(attach_index=sessions_pb2.AttachIndex())
    index = IndexReader(Mapping(fds[0], handle.size))
    code = Shard(0, 2, 0, 1).code()
    said["live"], said["probe"] = index.live, index.probe(key, [code]).hits
    said["read"] = client.read(key)
    said["refused"] = []
    for slab in range(4):
        try:
            client.attach_slab(slab)
        except Refused as refused:
            said["refused"].append([slab, refused.code, refused.field])
    said["store"] = client.store(key, payload)
    said["own"] = client.read(key) == payload
    said["probe after"] = index.probe(key, [code]).hits
    found = client.acquire([key])
    _, fd = client.attach_slab(found.slab[0])
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as slab:
        said["leak"] = slab.find(b"root stored")
    metadata = (("kmesh-session", client.welcome.token),)
    with grpc.insecure_channel(f"unix:{socket_dir}/grpc.sock") as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        status = admin.Status(admin_pb2.StatusRequest(), metadata=metadata)
        said["tenants"] = [tenant.name for tenant in status.tenants]
        said["slabs"] = [slab.tenant for slab in status.slabs]
        listed = admin.List(admin_pb2.ListRequest(), metadata=metadata)
        said["sums"] = [status.spans, status.index_entries, len(status.counters)]
        said["used"] = [bool(slab.used) for slab in status.slabs]
        said["spans"] = [len(listed.spans), sum(space.spans for space in listed.namespaces)]
        said["denied"] = []
        for call, request in (
            (admin.Explain, admin_pb2.ExplainRequest(keys=key)),
            (admin.Drain, admin_pb2.DrainRequest()),
            (admin.Watch, admin_pb2.WatchRequest()),
        ):
            try:
                answer = call(request, metadata=metadata, timeout=10)
                said["denied"].append(str(list(answer)))
            except grpc.RpcError as failed:
                said["denied"].append(failed.code().name)
        sessions = sessions_pb2_grpc.SessionsStub(channel).List(
            sessions_pb2.ListSessionsRequest(), metadata=metadata
        )
        said["uids"] = sorted({session.uid for session in sessions.sessions})
print(json.dumps(said))
"""


@root
def test_users_see_nothing_of_each_other(start_spand: Start) -> None:
    daemon = two_users(start_spand)
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE) == 0
        said = json.loads(run_as(NOBODY, _OTHER, daemon.socket_dir))
        assert said == {
            "live": 0,
            "probe": 0,
            "read": common_pb2.REASON_MISS,
            "refused": [
                [slab, common_pb2.CODE_PERMISSION_DENIED, "attach_slab.slab"] for slab in range(4)
            ],
            "store": 0,
            "own": True,
            "probe after": 1,
            "leak": -1,
            "tenants": [str(NOBODY)],
            "slabs": ["", str(NOBODY), "", ""],
            "sums": [1, 0, 0],
            "used": [False, True, False, False],
            "spans": [1, 1],
            "denied": ["PERMISSION_DENIED"] * 3,
            "uids": [NOBODY],
        }
        assert client.read(KEY) == MINE
    status = daemon.status()
    assert [tenant.name for tenant in status.tenants] == ["0", str(NOBODY)]
    assert [slab.tenant for slab in status.slabs] == ["0", str(NOBODY), "", ""]
    assert {tenant.name: tenant.counters["hits"] for tenant in status.tenants} == {
        "0": 1,
        str(NOBODY): 2,
    }


_EVICT = """
keys = [bytes([number]) * 32 for number in range(3)]
said = {}
with RawClient(socket_dir) as client:
    for key in keys:
        client.store(key, b"what nobody stored")
    client.acquire([keys[0]])
    metadata = (("kmesh-session", client.welcome.token),)
    with grpc.insecure_channel(f"unix:{socket_dir}/grpc.sock") as channel:
        evict = admin_pb2_grpc.AdminStub(channel).Evict
        for name, chosen in (
            ("theirs", dict(keys=b"k" * 32)),
            ("both", dict(namespace=bytes.fromhex(sys.argv[2]))),
            ("one", dict(keys=b"k" * 32 + keys[1])),
            ("all", dict(all=True)),
        ):
            request = admin_pb2.EvictRequest(**chosen, dry_run=name == "both")
            found = evict(request, metadata=metadata)
            said[name] = [found.spans, found.leased, found.busy, found.disk_spans]
print(json.dumps(said))
"""


@root
def test_a_user_evicts_its_own_and_nothing_else(start_spand: Start, tmp_path: Path) -> None:
    daemon = two_users(start_spand, disk=tmp_path / "disk", disk_bytes="64MiB")
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE) == 0
        daemon.wait_status(lambda s: s.disk.spans == 1)
        said = json.loads(run_as(NOBODY, _EVICT, daemon.socket_dir, DIGEST.hex()))
        assert [found[:3] for found in said.values()] == [
            [0, 0, 0],
            [3 - 1, 1, 0],
            [1, 0, 0],
            [1, 1, 0],
        ]
        assert said["theirs"][3] == 0
        assert client.read(KEY) == MINE
    status = daemon.status()
    assert [tenant.name for tenant in status.tenants if tenant.spans] == ["0", str(NOBODY)]
    assert status.disk.spans >= 1


_READ = """
with RawClient(socket_dir) as client:
    said = client.read(b"k" * 32)
print(said if isinstance(said, int) else said[:16].decode())
"""


@root
def test_users_share_if_that_is_set(start_spand: Start) -> None:
    daemon = two_users(start_spand, share="all")
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE) == 0
    assert run_as(NOBODY, _READ, daemon.socket_dir) == "what root stored"


@root
def test_spans_stay_a_users_when_control_dies(start_spand: Start) -> None:
    daemon = two_users(start_spand, errors=True, grace_ms=100)
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE) == 0
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)

    def served() -> bool:
        with RawClient(daemon.socket_dir) as client:
            return client.read(KEY) == MINE

    wait_for(served)
    assert run_as(NOBODY, _READ, daemon.socket_dir) == str(common_pb2.REASON_MISS)
    said = json.loads(run_as(NOBODY, _OTHER, daemon.socket_dir))
    assert said["leak"] == -1
    assert said["own"]


@root
def test_a_full_pool_leaves_each_user_a_slab(start_spand: Start) -> None:
    daemon = two_users(start_spand)
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        for number in range(80):
            assert client.store(number.to_bytes(32, "big"), bytes(1 << 20)) == 0
        said = json.loads(run_as(NOBODY, _OTHER, daemon.socket_dir))
        assert said["own"]
        assert client.read((79).to_bytes(32, "big")) == bytes(1 << 20)
    slabs = [slab.tenant for slab in daemon.status().slabs]
    assert sorted(slabs) == ["0", "0", "0", str(NOBODY)]


def drop(daemon: Daemon, client: RawClient, salt: bytes) -> None:
    """Makes the daemon drop the span of a salt: one bit of it is wrong, and somebody says so."""
    found = client.acquire([KEY], salt=salt)
    daemon.flip(found.offset[0] + 5, found.slab[0])
    report = spans_pb2.ReportCorruptRequest(lease=found.lease, entry=[0])
    assert client.call(report_corrupt=report)[0].accepted == 1
    client.release(found.lease)
    wait_for(lambda: client.acquire([KEY], salt=salt).reason[0] == common_pb2.REASON_MISS)


def test_a_new_tenant_never_sees_old_bytes(start_spand: Start) -> None:
    daemon = start_spand()
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE, A) == 0
        assert client.read(KEY, B) == common_pb2.REASON_MISS
        assert client.read(KEY) == common_pb2.REASON_MISS
        # There is one slab, and it is taken.
        assert client.store(KEY, THEIRS, B) == common_pb2.REASON_POOL_FULL
        drop(daemon, client, A)
        handle, fd = client.attach_slab(0)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as slab:
            assert slab.find(b"root stored") >= 0
            answers = []

            def stored() -> bool:
                answers.append(client.store(KEY, THEIRS, B))
                return answers[-1] == 0

            wait_for(stored)
            assert set(answers[:-1]) == {common_pb2.REASON_NOT_READY}
            # All of the slab, sums too: nothing but what the new tenant wrote.
            assert slab.find(b"root stored") == -1
            used = -(-len(THEIRS) // (1 << 16)) * (1 << 16)
            offset = client.acquire([KEY], salt=B).offset[0]
            assert slab[offset : offset + len(THEIRS)] == THEIRS
            rest = slab[:offset] + slab[offset + used : handle.sums_offset]
            assert not any(rest)
            sums = slab[handle.sums_offset :]
            assert len(sums) - sums.count(0) <= 8
        assert client.read(KEY, A) == common_pb2.REASON_MISS
    status = daemon.status()
    assert status.counters["spans_wiped"] == 1
    (tenant,) = [tenant for tenant in status.tenants if tenant.slabs]
    assert status.slabs[0].tenant == tenant.name
    assert tenant.name.startswith(f"{os.getuid()}:")
    assert B.hex()[:8] not in str(status)


def test_a_worker_that_dies_while_it_wipes(start_spand: Start) -> None:
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, MINE, A) == 0
        drop(daemon, client, A)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        assert client.store(KEY, THEIRS, B) == common_pb2.REASON_NOT_READY
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: client.store(KEY, THEIRS, B) == 0)
        _, fd = client.attach_slab(0)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as slab:
            assert slab.find(b"root stored") == -1


def test_quotas(start_spand: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    name = str(os.getuid())
    daemon = start_spand(
        tenants=f"{name}=1MiB,default=0", metrics_listen=f"127.0.0.1:{port}", **POOL
    )
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        for number in range(20):
            assert client.store(number.to_bytes(32, "big"), bytes(1 << 16)) == 0
        found = client.acquire([number.to_bytes(32, "big") for number in range(20)])
        assert list(found.reason) == [common_pb2.REASON_MISS] * 4 + [0] * 16
        # What is leased stays, and nothing more is let in.
        assert client.store(KEY, bytes(100)) == common_pb2.REASON_QUOTA
        assert client.store(KEY, bytes((1 << 20) + 1)) == common_pb2.REASON_QUOTA
        client.release(found.lease)
        assert client.store(KEY, bytes(100)) == 0
        # The quota is the uid's for each of its salts.
        assert client.store(KEY, bytes(1 << 20), A) == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            lines = page.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    mine = f'{{tenant="{name}"}}'
    assert {
        key.removeprefix("kmesh_tenant_").removesuffix(mine): float(value)
        for key, value in values.items()
        if key.startswith("kmesh_tenant_") and key.endswith(mine)
    } == {
        "quota": 1 << 20,
        "used": 1 << 20,
        "spans": 16,
        "span_bytes": 15 * (1 << 16) + 100,
        "slabs": 1,
        "acquires_total": 1,
        "hits_total": 16,
        "misses_total": 4,
        "committed_total": 21,
        "evicted_total": 5,
        "evicted_bytes_total": 5 << 16,
        "reserve_quota_total": 2,
        "reserve_pool_full_total": 0,
    }
    assert float(values["kmesh_spans_reserve_quota_total"]) == 2


def test_a_salt_of_the_wrong_size_is_named(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        with pytest.raises(Refused, match="32 bytes") as refused:
            client.acquire([KEY], salt=b"short")
        assert refused.value.field == "acquire.salt"
        with pytest.raises(Refused, match="32 bytes") as refused:
            client.reserve([KEY], 5, b"short")
        assert refused.value.field == "reserve.salt"


def test_eviction_of_one_salt_leaves_the_other(start_spand: Start) -> None:
    daemon = start_spand(**POOL)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        assert client.store(KEY, THEIRS, A) == 0
        for number in range(100):
            assert client.store(number.to_bytes(32, "big"), bytes(1 << 20)) == 0
        assert client.read(KEY, A) == THEIRS
    counts = {tenant.name: tenant.counters["evicted"] for tenant in daemon.status().tenants}
    assert counts.pop(str(os.getuid())) > 40
    assert list(counts.values()) == [0]


def test_the_client_states_the_salt(start_spand: Start) -> None:
    daemon = start_spand(**POOL)
    daemon.wait_populated()
    salt = bytes.fromhex(salt_digest("alice"))
    shard = Shard(0, 2, 0, 1)
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        batch = ReserveBatch(bytes(32), shard, KEY, [64], [0], [len(THEIRS)], salt=salt)
        assert put_spans(session, session.staging(1 << 20), batch, [THEIRS]) == [0]
        with session.acquire(KEY, [shard], salt=salt) as lease:
            assert read_span(session, lease, 0) == THEIRS
        assert session.acquire(KEY, [shard]).hits == 0
        assert session.acquire_async(KEY, [shard], salt=salt).result(10).hits == 1
        with pytest.raises(ConfigError, match="salt"):
            session.acquire(KEY, [shard], salt=b"alice")
        with pytest.raises(ConfigError, match="salt"):
            ReserveBatch(bytes(32), shard, KEY, [64], [0], [1], salt=b"alice")
    assert salt.hex() not in repr(batch)
    assert str(salt)[2:-1] not in repr(batch)

    async def ask() -> int:
        async with await AsyncSession.connect(daemon.socket_dir, role=Role.TOOL) as session:
            return (await session.acquire(KEY, [shard], salt=salt)).hits

    assert asyncio.run(ask()) == 1
