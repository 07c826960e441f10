"""deploy/kubernetes.yaml says what the daemon reads, and its probes are answered."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from daemon_process import ROOT, Daemon, environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kmesh_spand.units import parse_size

MANIFEST = (ROOT / "deploy" / "kubernetes.yaml").read_text()
IMAGE = (ROOT / "deploy" / "Containerfile").read_text()
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST)}
SETTINGS = OBJECTS["ConfigMap"]["data"]["spand.toml"]
POD = OBJECTS["DaemonSet"]["spec"]["template"]["spec"]
(DAEMON,) = POD["containers"]
(PREPARE,) = POD["initContainers"]


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_parts_fit_each_other(tmp_path: Path) -> None:
    said = tomllib.loads(SETTINGS)
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert mounts(DAEMON) == {"sockets": said["socket_dir"], "settings": "/etc/kmesh"}
    assert mounts(PREPARE)["sockets"] == PREPARE["command"][-1] == said["socket_dir"]
    assert volumes["sockets"]["hostPath"]["path"] == said["socket_dir"]
    assert volumes["settings"]["configMap"]["name"] == OBJECTS["ConfigMap"]["metadata"]["name"]
    assert DAEMON["args"] == ["--config", "/etc/kmesh/spand.toml"]
    assert 'ENTRYPOINT ["kmesh-spand"]' in IMAGE
    user, group = (DAEMON["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    assert f"USER {user}:{group}\n" in IMAGE
    assert user in said["allow_uids"]
    assert PREPARE["command"][4:8] == ["-o", str(user), "-g", str(group)]
    (port,) = DAEMON["ports"]
    assert said["metrics_listen"] == f"0.0.0.0:{port['containerPort']}"
    limit = re.fullmatch(r"(\d+)Gi", DAEMON["resources"]["limits"]["memory"])
    assert limit
    spare = (int(limit[1]) << 30) - sum(
        parse_size(said[name]) for name in ("host_memory", "staging_memory")
    )
    assert spare >= 1 << 30
    file = tmp_path / "spand.toml"
    file.write_text(SETTINGS)
    line = [sys.executable, "-m", "kmesh_spand", "--config", str(file), "--print-config"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_image_is_made_of_what_exists() -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", IMAGE, re.MULTILINE)
    sources = " ".join(copied).split()
    assert {"pyproject.toml", "client", "kmesh_spand", "vllm_connector"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source


def needed(name: str, extras: set[str]) -> dict[str, str]:
    """Versions of all that a distribution here needs, by canonical name."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    due = [(name, extra) for extra in ("", *extras)]
    while due:
        one, extra = due.pop()
        if (one, extra) in seen:
            continue
        seen.add((one, extra))
        for text in metadata.requires(one) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                there = canonicalize_name(wanted.name)
                found[there] = metadata.version(there)
                due += [(there, further) for further in ("", *wanted.extras)]
    return found


def test_the_image_has_the_versions_of_the_lock() -> None:
    assert "COPY requirements/lock.txt /src/requirements/lock.txt\n" in IMAGE
    installs = re.findall(r"pip install (.*?)(?=&&|\n\n|\Z)", IMAGE, re.DOTALL)
    assert installs
    for arguments in installs:
        assert "-c /src/requirements/lock.txt" in arguments
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    locked = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE)
    }
    (extra,) = re.findall(r"'/src\[(\w+)\]'", IMAGE)
    here = needed("kmesh", {extra})
    assert {"grpcio", "uvloop", "pydantic-core"} <= here.keys()
    assert here.items() <= locked.items()
    assert "setuptools" in locked


def test_what_prepares_the_folder_has_no_more_rights_than_it_needs() -> None:
    for container in (DAEMON, PREPARE):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["capabilities"]["drop"] == ["ALL"]
    assert POD["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_the_probes_are_answered_with_these_settings(
    start_spand: Callable[..., Daemon],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = tomllib.loads(SETTINGS)
    said.pop("socket_dir")
    small = {"host_memory": "64MiB", "staging_memory": "16MiB", "slab_size": "8MiB"}
    users = ",".join(map(str, [*said["allow_uids"], os.geteuid()]))
    here = {**said, **small, "allow_uids": users, "metrics_listen": f"127.0.0.1:{port}"}
    start_spand(**here).wait_populated()
    for name in ("livenessProbe", "readinessProbe"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", DAEMON[name]["httpGet"]["path"])
        assert connection.getresponse().status == 200, name
        connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_the_folder_is_prepared_whoever_made_it(tmp_path: Path) -> None:
    folder = tmp_path / "kmesh"
    for _ in range(2):
        folder.mkdir(exist_ok=True)
        subprocess.run([*PREPARE["command"][:-1], str(folder)], check=True, timeout=30)
        found = folder.stat()
        assert found.st_mode & 0o777 == 0o750
        assert (found.st_uid, found.st_gid) == (10001, 10001)


def test_engines_of_the_page_may_enter() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("## In Kubernetes\n")[2]
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    pod = yaml.safe_load(example)["spec"]
    said = tomllib.loads(SETTINGS)
    assert pod["securityContext"]["runAsUser"] in said["allow_uids"]
    assert pod["securityContext"]["supplementalGroups"] == [DAEMON["securityContext"]["runAsGroup"]]
    (volume,) = pod["volumes"]
    assert volume["hostPath"]["path"] == said["socket_dir"]
    (container,) = pod["containers"]
    assert mounts(container) == {volume["name"]: said["socket_dir"]}
