"""Settings: where they come from, which wins, and what is wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import COMMAND, environment
from hypothesis import given
from hypothesis import strategies as st

from kmesh.errors import ConfigError
from kmesh_spand import units
from kmesh_spand.config import Config, load
from kmesh_spand.core.tenants import SHARED
from kmesh_spand.flags import parser, to_toml
from kmesh_spand.settings import Settings


def file_with(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "spand.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("flag", "variable", "key", "wins", "origin"),
    [
        (None, None, None, 4 << 30, "default"),
        (None, None, "1GiB", 1 << 30, "FILE"),
        (None, "2GiB", "1GiB", 2 << 30, "environment"),
        ("3GiB", "2GiB", "1GiB", 3 << 30, "flag"),
        ("3GiB", None, "1GiB", 3 << 30, "flag"),
        ("3GiB", "2GiB", None, 3 << 30, "flag"),
        (None, "2GiB", None, 2 << 30, "environment"),
    ],
)
def test_precedence(
    tmp_path: Path,
    flag: str | None,
    variable: str | None,
    key: str | None,
    wins: int,
    origin: str,
) -> None:
    file = file_with(tmp_path, f'verify_rate = "{key}"' if key else "")
    loaded = load(
        {"verify_rate": flag} if flag else {},
        {"KMESH_SPAND_VERIFY_RATE": variable} if variable else {},
        file,
    )
    assert loaded.settings.verify_rate == wins
    assert loaded.origins["verify_rate"] == (str(file) if origin == "FILE" else origin)
    assert loaded.origins["log_level"] == "default"


def test_every_setting_has_all_three_forms(tmp_path: Path) -> None:
    """Each can be a flag, a variable and a key, and means the same everywhere."""
    values = {
        "socket_dir": "/tmp/kmesh-x",
        "socket_mode": "0600",
        "host_memory": "3GiB",
        "slab_size": "512MiB",
        "hugepages": "off",
        "numa_node": "0",
        "populate_threads": "3",
        "copy_threads": "5",
        "span_tokens": "128",
        "max_spans": "77",
        "allow_uids": "1,2 3",
        "max_sessions": "9",
        "staging_memory": "100MiB",
        "session_staging": "10MiB",
        "deadline_ms": "11",
        "copy_timeout_ms": "1200",
        "verify_rate": "0",
        "grace_ms": "13",
        "shutdown_timeout_ms": "14",
        "remembered_keys": "15",
        "watch_events": "16",
        "metrics_listen": "[::1]:9464",
        "memory_policy": "s3-fifo",
        "share": "all",
        "tenants": "all=1GiB,default=2GiB",
        "hardened": "true",
        "dma_buf": "slabs",
        "memory_headroom": "5MiB",
        "disk": "/tmp/kmesh-disk",
        "disk_bytes": "5GiB",
        "disk_spans": "1000",
        "disk_policy": "lru",
        "disk_threads": "7",
        "disk_sync": "all",
        "disk_tenants": "all=1GiB,default=2GiB",
        "stuck_ms": "1500",
        "slow_call_ms": "16",
        "trace": "console",
        "log_level": "debug",
        "log_format": "json",
    }
    # These don't go with ``hardened``, so they are tried by themselves.
    gpus = {"gpu": "0,1", "gpu_memory": "32MiB", "gpu_slab_size": "4MiB", "gpu_place": "host"}
    assert {*values, *gpus} == set(Config.model_fields)
    _same_in_all_forms(tmp_path, gpus)
    by_flag = _same_in_all_forms(tmp_path, values)
    assert by_flag.allow_uids == (1, 2, 3)
    assert by_flag.socket_mode == 0o600


def _same_in_all_forms(tmp_path: Path, values: dict[str, str]) -> Settings:
    known = vars(parser().parse_args([f"--{n.replace('_', '-')}={v}" for n, v in values.items()]))
    flags = {name: known[name] for name in values}
    variables = {f"KMESH_SPAND_{name.upper()}": value for name, value in values.items()}
    keys = "\n".join(f'{name} = "{value}"' for name, value in values.items())
    by_flag = load(flags, {}).settings
    assert by_flag == load({}, variables).settings
    assert by_flag == load({}, {}, file_with(tmp_path, keys)).settings
    default = load({}, {}).settings
    for name in values:
        assert getattr(by_flag, name) != getattr(default, name), name
    return by_flag


def test_printed_settings_read_back(tmp_path: Path) -> None:
    flags = {"host_memory": "8GiB", "allow_uids": "5,6", "tenants": "5=1GiB,default=0"}
    loaded = load(flags, {"KMESH_SPAND_MAX_SESSIONS": "7"})
    text = to_toml(loaded)
    assert 'host_memory = "8GiB"  # flag\n' in text
    assert "max_sessions = 7  # environment\n" in text
    assert 'tenants = { "5" = "1GiB", "default" = "0" }  # flag\n' in text
    assert "hardened = false  # default\n" in text
    assert 'socket_mode = "0660"  # default\n' in text
    again = load({}, {}, file_with(tmp_path, text))
    assert again.settings == loaded.settings


def test_defaults_follow_the_machine_and_each_other() -> None:
    settings = load({"host_memory": "8GiB"}, {"XDG_RUNTIME_DIR": "/run/user/7"}).settings
    assert settings.socket_dir == "/run/user/7/kmesh"
    assert load({}, {}).settings.socket_dir == "/run/kmesh"
    assert settings.slab_sizes() == [1 << 30] * 8
    assert settings.staging_memory == 2 << 30
    assert settings.session_staging == 512 << 20
    assert settings.allow_uids == (os.getuid(),)
    assert settings.max_spans == 32768
    assert load({"host_memory": "1GiB"}, {}).settings.slab_sizes() == [128 << 20] * 8
    assert load({"host_memory": "32MiB"}, {}).settings.slab_sizes() == [32 << 20]
    several = load({"host_memory": "32MiB", "allow_uids": "1,2,3,1"}, {}).settings
    assert several.slab_sizes() == [5 * (1 << 20) + (5 << 16)] * 6
    uneven = load({"host_memory": "10MiB", "slab_size": "4MiB"}, {}).settings
    assert uneven.slab_sizes() == [4 << 20, 4 << 20, 2 << 20]


@pytest.mark.parametrize(
    ("flags", "env", "text", "message"),
    [
        ({}, {"KMESH_SPAND_HOST_MEMROY": "1"}, "", "KMESH_SPAND_HOST_MEMROY: unknown"),
        ({}, {"KMESH_SPAND_host_memory": "1"}, "", "KMESH_SPAND_host_memory: unknown"),
        ({}, {}, "host_memroy = 1", "host_memroy: unknown setting (FILE)"),
        ({}, {}, "[daemon]\nhost_memory = 1", "daemon: unknown setting (FILE)"),
        ({}, {}, "host_memory = ", "config: FILE: "),
        ({"host_memory": "lots"}, {}, "", "host_memory: 'lots' is no size"),
        ({"host_memory": "1KiB"}, {}, "", "host_memory: '1KiB' is not at least 1MiB (flag)"),
        (
            {},
            {"KMESH_SPAND_LOG_LEVEL": "loud"},
            "",
            "log_level: 'loud' is not 'debug', 'info', 'warning' or 'error' (environment)",
        ),
        ({}, {}, 'allow_uids = ["root"]', "allow_uids: 'root' is not a whole number (FILE)"),
        ({"socket_mode": "0999"}, {}, "", "socket_mode: '0999' is no file mode"),
        ({"socket_dir": "/" + "x" * 100}, {}, "", "socket_dir: longer than"),
        ({"socket_dir": ""}, {}, "", "socket_dir: is empty (flag)"),
        ({"slab_size": "1000001"}, {}, "", "slab_size: '1000001' is not at least 1MiB (flag)"),
        ({"slab_size": "2000001"}, {}, "", "slab_size: not a multiple of 64KiB (flag)"),
        ({"slab_size": "2GiB", "host_memory": "1GiB"}, {}, "", "slab_size: over host_memory"),
        ({"span_tokens": "65"}, {}, "", "span_tokens: not a multiple of 16 (flag)"),
        ({}, {}, "span_tokens = 65", "span_tokens: not a multiple of 16 (FILE)"),
        ({"staging_memory": "1MiB", "session_staging": "2MiB"}, {}, "", "session_staging: over"),
        ({"tenants": "root=1GiB"}, {}, "", "tenants: 'root' is no tenant"),
        ({"tenants": "12345=1GiB"}, {}, "", "tenants: 12345 is not among those"),
        ({"tenants": "all=1GiB"}, {}, "", "tenants: all is not among those"),
        ({"tenants": "default"}, {}, "", "tenants: '' is no size"),
        ({}, {}, '[tenants]\ndefault = "x"', "tenants: 'x' is no size"),
        ({"share": "none"}, {}, "", "share: 'none' is not 'uid' or 'all' (flag)"),
        (
            {"allow_uids": "1,2", "host_memory": "32MiB", "slab_size": "32MiB"},
            {},
            "",
            "slab_size: 1 slabs for 2 uids",
        ),
        ({"allow_uids": "-1"}, {}, "", "allow_uids: '-1' is not at least 0 (flag)"),
        ({"allow_uids": str(1 << 32)}, {}, "", "allow_uids: '4294967296' is not below 4294967296"),
        ({}, {}, "allow_uids = 0", "allow_uids: 0 is not a list (FILE)"),
        ({"numa_node": "1024"}, {}, "", "numa_node: '1024' is not at most 1023 (flag)"),
        ({}, {}, "socket_mode = 512", "socket_mode: 512 is not at most 0777 (FILE)"),
        ({"socket_mode": "0500"}, {}, "", "socket_mode: '0500' is not at least 0600 (flag)"),
        ({}, {}, "span_tokens = 1.5", "span_tokens: 1.5 is not a whole number (FILE)"),
        ({}, {}, "span_tokens = inf", "span_tokens: inf is not a whole number (FILE)"),
        ({"span_tokens": "many"}, {}, "", "span_tokens: 'many' is not a whole number (flag)"),
        ({"span_tokens": "9" * 5000}, {}, "", f"span_tokens: '{'9' * 78}… is not a whole number"),
        ({}, {}, "span_tokens = [1]", "span_tokens: [1] is not a whole number (FILE)"),
        ({"hardened": "perhaps"}, {}, "", "hardened: 'perhaps' is not true or false (flag)"),
        ({}, {}, "socket_dir = 3", "socket_dir: 3 is not text (FILE)"),
        ({}, {}, "tenants = 4", "tenants: 4 is not a table (FILE)"),
        ({}, {}, "tenants = {default = -1}", "tenants: -1 is not at least 0 (FILE)"),
        ({"metrics_listen": "9464"}, {}, "", "metrics_listen: '9464' is no address"),
        ({"metrics_listen": "h:99999"}, {}, "", "metrics_listen: "),
        ({"trace": "on"}, {}, "", "trace: 'on' is no trace"),
        ({"trace": "file:relative"}, {}, "", "trace: "),
        ({"trace": "otlp"}, {}, "", "trace: "),
        (
            {"gpu": "0"},
            {},
            "",
            "gpu_memory: how much of each GPU? For example --gpu-memory 8GiB (gpu: flag)",
        ),
        (
            {},
            {},
            'disk = "/d"',
            "disk_bytes: how much of it? For example --disk-bytes 200GiB (disk: FILE)",
        ),
        (
            {"disk": "/d", "disk_bytes": "0"},
            {},
            "",
            "disk_bytes: how much of it? For example --disk-bytes 200GiB (flag)",
        ),
        (
            {"trace": "otlp:ftp://h:1"},
            {},
            "",
            "trace: 'otlp:ftp://h:1' is no trace: write off, console, file:/PATH, otlp:unix:/PATH, "
            "otlp:http://HOST:PORT or otlp:https://HOST:PORT (flag)",
        ),
    ],
)
def test_errors_name_the_setting(
    tmp_path: Path, flags: dict[str, str], env: dict[str, str], text: str, message: str
) -> None:
    file = file_with(tmp_path, text)
    with pytest.raises(ConfigError) as failed:
        load(flags, env, file)
    said = str(failed.value)
    assert said.startswith(message.replace("FILE", str(file)))
    assert "\n" not in said.strip()


def test_tenants_are_a_table(tmp_path: Path) -> None:
    salted = f"7:{'0123456789abcdef'}"
    text = f'allow_uids = [7]\n[tenants]\ndefault = "1GiB"\n7 = "2GiB"\n"{salted}" = 5'
    tenancy = load({}, {}, file_with(tmp_path, text)).settings.tenancy()
    assert tenancy.groups == (7,)
    assert tenancy.quotas == {"7": 2 << 30, salted: 5}
    assert tenancy.default_quota == 1 << 30
    shared = load({"share": "all", "allow_uids": "8,7"}, {}).settings.tenancy()
    assert (shared.groups, shared.group(7), shared.group(8)) == ((SHARED,), SHARED, SHARED)


@pytest.mark.parametrize("wrong", [["--host-memroy", "1GiB"], ["--host-memory"], ["1GiB"]])
def test_a_wrong_flag_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parser().parse_args(wrong)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("kmesh-spand: ")
    assert wrong[0] in said
    assert said.count("\n") == 1


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: .*No such file"):
        load({}, {}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"config: .*directory"):
        load({}, {}, tmp_path)


@given(st.integers(0, 1 << 50))
def test_sizes_read_back(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1.5gib", 3 << 29), ("64KiB", 65536)],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1GB", "1.3B", "0x10", "1e9", "8 G i B"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole"):
        units.parse_size(text)


def command(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], env=environment(**env), capture_output=True, text=True, timeout=60
    )


def test_command_line() -> None:
    wrong = command("--host-memory=lots")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("kmesh-spand: host_memory: 'lots' is no size")
    assert len(wrong.stderr.splitlines()) == 1
    unknown = command(KMESH_SPAND_COLOUR="red")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == "kmesh-spand: KMESH_SPAND_COLOUR: unknown setting (environment)\n"
    printed = command("--print-config", "--max-sessions=3", KMESH_SPAND_LOG_LEVEL="error")
    assert printed.returncode == 0
    assert "max_sessions = 3  # flag" in printed.stdout
    assert 'log_level = "error"  # environment' in printed.stdout
    assert command("--colour=red").returncode == 2
    said = command("--help").stdout
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in said
    for choices in ("--disk-sync {off,file,all}", "--log-level {debug,info,warning,error}"):
        assert choices in said
    assert "--hardened {true,false}" in said


def test_single_spans_of_sealed_slabs_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^dma_buf: hardened slabs .* \(flag\)$"):
        load({"hardened": True, "dma_buf": "spans"}, {})
    assert load({"hardened": True, "dma_buf": "slabs"}, {}).settings.dma_buf == "slabs"


def test_settings_documentation_is_complete() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for name in Config.model_fields:
        assert f"`{name}`" in text, name


def test_reading_settings_leaves_the_supervisor_light() -> None:
    script = "import kmesh_spand.__main__, kmesh_spand.supervisor, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"pydantic", "grpc", "numpy", "torch", "asyncio", "google.protobuf"}


UUID = "GPU-0a1b2c3d-0000-0000-0000-00000000000f"


def test_gpus_are_numbers_and_uuids() -> None:
    known = vars(parser().parse_args(["--gpu", "0", f"--gpu={UUID}"]))
    assert known["gpu"] == ["0", UUID]
    loaded = load({"gpu": ["0", f" {UUID}"], "gpu_memory": "21MiB"}, {})
    settings = loaded.settings
    assert settings.gpu == ("0", UUID)
    assert settings.gpu_memory == 20 << 20
    assert f'gpu = ["0", "{UUID}"]  # flag' in to_toml(loaded)
    assert 'gpu_memory = "20MiB"  # flag' in to_toml(loaded)


def test_slabs_of_gpus_come_after_those_of_host_memory() -> None:
    flags = {"host_memory": "2MiB", "slab_size": "1MiB", "gpu": "1,0"}
    settings = load({**flags, "gpu_memory": "10MiB", "gpu_slab_size": "4MiB"}, {}).settings
    sizes = [4 << 20, 4 << 20, 2 << 20]
    assert [tuple(plan) for plan in settings.gpu_slabs()] == [
        (2 + number, number // 3, sizes[number % 3]) for number in range(6)
    ]
    for memory, size in (("8GiB", 1 << 30), ("1GiB", 128 << 20), ("32MiB", 32 << 20)):
        assert load({"gpu": "0", "gpu_memory": memory}, {}).settings.gpu_slab_size == size
    assert load({}, {}).settings.gpu_slabs() == []


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"gpu": "0"}, "gpu_memory: how much of each GPU"),
        ({"gpu_memory": "1GiB"}, "gpu: which GPU"),
        ({"gpu": "x", "gpu_memory": "1GiB"}, "gpu: 'x' is no GPU: write its number, or its UUID"),
        ({"gpu": "MIG-1", "gpu_memory": "1GiB"}, "gpu: 'MIG-1' is a part of a GPU (MIG): "),
        ({"gpu": "0,00", "gpu_memory": "1GiB"}, "gpu: a GPU is named twice"),
        ({"gpu": "0", "gpu_memory": "1MiB"}, "gpu_memory: how much of each GPU"),
        ({"gpu": "0", "gpu_memory": "1GiB", "gpu_slab_size": "3MiB"}, "gpu_slab_size: not a mult"),
        ({"gpu": "0", "gpu_memory": "2MiB", "gpu_slab_size": "4MiB"}, "gpu_slab_size: over gpu_m"),
        ({"gpu": "0", "gpu_memory": "1GiB", "allow_uids": "1,2"}, "gpu: whoever maps GPU memory"),
        ({"gpu": "0", "gpu_memory": "1GiB", "hardened": "true"}, "gpu: whoever maps GPU memory"),
    ],
)
def test_gpus_that_cannot_be(flags: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError) as failed:
        load(flags, {})
    assert str(failed.value).startswith(error)
