"""The unit in ``deploy/``, under the machine's own systemd: spans outlive restarts."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import ROOT, environment, wait_for
from rawclient import RawClient
from real_systemd import Systemd, Unable, systemd
from stored import COUNT, key, payload, read

from kmesh.v1 import common_pb2

STORED = (common_pb2.REASON_OK, common_pb2.REASON_EXISTS)
UNIT = "kmesh-spand.service"
#: What this checkout and its interpreter need beside the unit, which is as it is.
DROP_IN = f"""
[Service]
ExecStart=
ExecStart={sys.executable} -m kmesh_spand --host-memory=32MiB --staging-memory=16MiB \
  --slab-size=8MiB --max-spans=512 --socket-dir=/run/kmesh
Environment="PYTHONPATH={environment()["PYTHONPATH"]}" PYTHONDONTWRITEBYTECODE=1
User=root
Group=root
ProtectHome=read-only
PrivateTmp=no
StandardOutput=append:/run/service.log
StandardError=append:/run/service.log
"""


@pytest.fixture
def manager() -> Iterator[Systemd]:
    unit = (ROOT / "deploy" / UNIT).read_text()
    try:
        with systemd({UNIT: unit, f"{UNIT}.d/here.conf": DROP_IN}) as running:
            yield running
    except Unable as why:
        pytest.skip(str(why))


def stored(manager: Systemd) -> int:
    """File descriptors that systemd keeps for the service."""
    return int(manager.show(UNIT, "NFileDescriptorStore"))


@pytest.mark.timeout(300)
def test_spans_outlive_restarts_of_the_service(manager: Systemd) -> None:
    def log() -> str:
        return manager.path("/run/service.log").read_text()

    def read_all() -> None:
        with RawClient(sockets) as client:
            for number in range(COUNT):
                assert read(client, number) == payload(number)

    manager.ctl("start", UNIT)
    sockets = Path(manager.path("/run/kmesh"))
    with RawClient(sockets) as client:
        for number in range(COUNT):
            wait_for(lambda n=number: client.store(key(n), payload(n)) in STORED)
        found = client.acquire([key(3)])
        _, fd = client.attach_slab(found.slab[0])
        slab = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    at, length = found.offset[0], found.length[0]
    # Manifest, life, catalog, four slabs and an index.
    assert stored(manager) == 8
    with slab:
        manager.ctl("restart", UNIT)
        assert slab[at : at + length] == payload(3)
        read_all()
        manager.ctl("kill", "--signal=KILL", "--kill-who=main", UNIT)
        wait_for(lambda: log().count("ready: ") == 3, 60, log())
        assert slab[at : at + length] == payload(3)
        read_all()
    assert stored(manager) == 8
    assert log().count("memory of an earlier daemon, version 0.1.0, is used") == 2
    assert manager.show(UNIT, "NRestarts") == "1"
    # Stopped for good, it gives its memory back.
    manager.ctl("stop", UNIT)
    assert stored(manager) == 0
    manager.ctl("start", UNIT)
    with RawClient(sockets) as client:
        assert client.read(key(3)) == common_pb2.REASON_MISS
    assert "Traceback" not in log()
    assert " error " not in log()
