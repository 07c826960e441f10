"""docs/operations.md: its commands and messages exist, and its commands run."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

from daemon_process import ROOT, Daemon, environment
from google.protobuf import json_format, message_factory
from test_cli import SHARD, kmesh, store
from test_operator import SPACE, engine

from kmesh.v1 import admin_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
_FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
BLOCKS = [text for language, text in _FENCED if not language]


def test_grpcurl_examples_name_methods_and_fields_that_exist() -> None:
    examples = [block for block in BLOCKS if "grpcurl" in block]
    methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name
    asked = set()
    for block in examples:
        (name,) = re.findall(r"kmesh\.v1\.Admin/(\w+)'", block)
        (body,) = re.findall(r"<<'JSON'\n(.*?)JSON\n", block, re.DOTALL)
        message = message_factory.GetMessageClass(methods[name].input_type)()
        json_format.Parse(body, message)
        asked.add(name)
    assert asked == {"Explain", "Evict", "Drain", "Watch"}


def test_grpcurl_gets_the_token_from_its_environment_alone(spand: Daemon, tmp_path: Path) -> None:
    """The examples as a shell runs them, with a grpcurl that says what it was given."""
    fake = tmp_path / "grpcurl"
    fake.write_text('#!/bin/sh\nfor word; do echo "arg $word"; done\necho "env $KMESH_TOKEN"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    command = next(block for block in BLOCKS if "Admin/Evict" in block and "grpcurl" in block)
    words = shlex.split(command.partition("<<'JSON'")[0].replace("\\\n  -H", "\\\n  -H"))
    assert words[:4] == ["kmesh", "token", "--", "sh"]
    words[5] = f"PATH={tmp_path}:$PATH; {words[5]}"
    done = kmesh(*words[1:], socket_dir=spand.socket_dir)
    assert done.returncode == 0, done.stderr
    token = re.search(r"^env (.{40,})$", done.stdout, re.MULTILINE)
    assert token
    arguments = re.findall(r"^arg (.*)$", done.stdout, re.MULTILINE)
    assert "kmesh-session: ${KMESH_TOKEN}" in arguments
    assert str(spand.socket_dir / "grpc.sock") in arguments
    assert not any(token[1] in word for word in arguments)


def test_commands_of_the_page(spand: Daemon) -> None:
    """Each with --json, as it stands, but for the namespace and the file that it names."""
    commands = [
        line
        for block in BLOCKS
        for line in block.splitlines()
        if re.match(r"kmesh (explain|evict|drain|call)", line)
    ]
    assert len(commands) >= 8
    with engine(spand) as session:
        keys = store(session, 2)
        with session.acquire(keys, [SHARD]) as lease:
            assert lease.hits == 2
            for line in commands:
                words = shlex.split(line)[1:]
                words = [SPACE.digest().hex()[:8] if word == "1f3a" else word for word in words]
                if words[0] == "explain":
                    file = spand.socket_dir.parent / "prompt.json"
                    file.write_text("[1, 2, 3]")
                    words = [str(file) if word == "prompt.json" else word for word in words]
                if "--stop" in words:
                    continue
                done = kmesh(*words, socket_dir=spand.socket_dir)
                # Both spans are leased: nothing may be dropped.
                leased = words[0] == "evict" and "--dry-run" not in words and "--idle" not in words
                assert done.returncode == (1 if leased else 0), (line, done.stderr)
    assert spand.status().spans == 2


def test_the_service_is_installed_where_its_unit_looks() -> None:
    unit = (ROOT / "deploy" / "kmesh-spand.service").read_text()
    service = PAGE.partition("## As a service\n")[2].partition("\n## ")[0]
    install, check, *_, remove = re.findall(r"^```\n(.*?)^```", service, re.DOTALL | re.MULTILINE)
    program, _, settings = unit.partition("ExecStart=")[2].partition("\n")[0].split()
    user = re.search(r"^User=(\w+)\nGroup=\1$", unit, re.MULTILINE)
    assert user
    assert f"-m venv {Path(program).parents[1]}\n" in install
    assert f"{program} --config {settings} --print-config\n" in install
    assert f"deploy/spand.toml {settings}\n" in install
    assert re.search(rf"useradd .*--user-group .*{user[1]}\n", install)
    for line in re.findall(r"deploy/[a-z.-]+", install):
        assert (ROOT / line).is_file(), line
    documents = Path(unit.partition("Documentation=file://")[2].partition("\n")[0])
    assert (ROOT / documents.name).is_file()
    assert f"sudo cp -r {documents.name} docs {documents.parent}/\n" in install
    assert "RuntimeDirectory=kmesh\nRuntimeDirectoryMode=0750\n" in unit
    assert f"sudo -u {user[1]} {Path(program).with_name('kmesh')} doctor" in check
    folders = Path(program).parents[1], Path(settings).parent, documents.parent
    for path in (*map(str, folders), "kmesh-spand.service"):
        assert path in remove


def test_the_services_settings_are_read() -> None:
    given = ROOT / "deploy" / "spand.toml"
    line = [sys.executable, "-m", "kmesh_spand", "--config", str(given), "--print-config"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = {one.partition(" = ")[0]: one for one in done.stdout.splitlines()}
    for name, value in tomllib.loads(given.read_text()).items():
        assert str(given) in said[name], "it is not what is in force"
        assert str(value).strip("[]") in said[name]
    assert said["socket_dir"].startswith('socket_dir = "/run/kmesh"')
