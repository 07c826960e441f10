"""A virtual machine with a kernel that makes DMA-BUFs, for tests that real machines may lack.

    python tests/vm/machine.py COMMAND ...

boots a Debian kernel with this machine's root file system, read-only, and runs a command in it as
root, in this directory; the exit code is the command's. It needs root, and Debian's packages:
what is missing is installed, and the kernel kept in .cache/vm. Without hardware virtualisation
the machine is emulated, and slow.

Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("KMESH_VM_CACHE", ROOT / ".cache" / "vm"))
MEMORY = "1G"
#: Seconds that a whole run may take.
TIMEOUT = float(os.environ.get("KMESH_VM_TIMEOUT", "2400"))

SUITE = "bookworm-backports"
#: The one that the tests were written with. Archives drop old kernels: then the suite's present
#: one is taken, and said.
PACKAGE = "linux-image-6.12.95+deb12-cloud-amd64"
SHA256 = "69c92f43b23821de79576fa4d7c86e2924ae2c1b247a47cc5ed9339e220fbcb7"
META = "linux-image-cloud-amd64"

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_VIRTIOFSD = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
_MARK = "vm-exit-status:"
_ELF, _ZSTD = b"\x7fELF", b"\x28\xb5\x2f\xfd"
_NOISE = re.compile(r"^\[ *[0-9.]+\] (sysrq|reboot|virtio-fs): ")

_INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup /sys/fs/cgroup
ip link set lo up 2>/dev/null
cd {directory}
{command}
echo "{mark}$?"
echo o >/proc/sysrq-trigger
sleep 60
"""


class VmError(Exception):
    """The machine could not be made or did not end as it should; the message says why."""


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return run(sys.argv[1:], kernel())
    except VmError as failed:
        print(f"vm: {failed}", file=sys.stderr)
        return 99


# What it is made of.


def kernel() -> Path:
    """An uncompressed kernel image, made at the first call."""
    CACHE.mkdir(parents=True, exist_ok=True)
    _packages()
    image = CACHE / "vmlinux"
    if not image.exists():
        began = time.monotonic()
        package = _download()
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _call("dpkg-deb", "-x", str(package), folder)
            compressed = next(Path(folder).glob("boot/vmlinuz-*")).read_bytes()
        part = CACHE / "vmlinux.part"
        part.write_bytes(_unpack(compressed))
        part.replace(image)
        package.unlink()
        print(f"vm: kernel made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return image


def _packages() -> None:
    """Installs the emulator, where it is missing."""
    needed = {"qemu-system-x86_64": "qemu-system-x86", "zstd": "zstd"}
    missing = [package for tool, package in needed.items() if not shutil.which(tool)]
    if not missing:
        return
    if os.geteuid():
        raise VmError(f"install {' '.join(missing)}, or run this as root")
    _call("apt-get", "update", "-q")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _call("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing, env=quiet)


def _download() -> Path:
    """The kernel's package, with apt's own state beside it and not in the system's."""
    if not Path(_KEYRING).exists():
        raise VmError(f"{_KEYRING} is missing: this needs Debian's package debian-archive-keyring")
    state = CACHE / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    sources = state / "sources.list"
    sources.write_text(f"deb [arch=amd64 signed-by={_KEYRING}] {_mirror()} {SUITE} main\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "3",
    }
    flags = [f"-o{name}={value}" for name, value in options.items()]
    _call("apt-get", *flags, "update", "-q")
    depends = _call("apt-cache", *flags, "depends", META)
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise VmError(f"{SUITE} has no {META}")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # apt checks it against the signed index.
        package = PACKAGE
        try:
            _call("apt-get", *flags, "download", "-q", package, cwd=folder)
        except VmError:
            package = found[1]
            _call("apt-get", *flags, "download", "-q", package, cwd=folder)
        path = next(Path(folder).glob("*.deb"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != SHA256:
            print(f"vm: {PACKAGE} is gone, this is {package}, sha256 {digest}", file=sys.stderr)
            if package == PACKAGE:
                raise VmError(f"{PACKAGE} is not the package that it was: sha256 {digest}")
        kept = CACHE / "kernel.deb"
        path.replace(kept)
    return kept


def _mirror() -> str:
    """Where this machine gets its own packages from."""
    for path in [
        *Path("/etc/apt/sources.list.d").glob("debian.sources"),
        Path("/etc/apt/sources.list"),
    ]:
        if path.exists():
            found = re.search(
                r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+)", path.read_text(), re.MULTILINE
            )
            if found:
                return found[1]
    raise VmError("no Debian archive is named in /etc/apt")


def _unpack(image: bytes) -> bytes:
    """The ELF file in a bzImage. Booted itself, it need not unpack itself in a slow machine."""
    at = image.find(_ZSTD)
    while at >= 0:
        done = subprocess.run(
            ["zstd", "-dc"], input=image[at:], capture_output=True, check=False
        ).stdout
        if done.startswith(_ELF):
            return done
        at = image.find(_ZSTD, at + 1)
    raise VmError("the kernel's package holds no image that is packed with zstd")


def _call(*command: str, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise VmError(f"{command[0]}: {' / '.join(last)}")
    return done.stdout


# Running it.


def run(command: Sequence[str], image: Path) -> int:
    """Runs a command in the machine; its exit code."""
    if os.geteuid():
        raise VmError("sharing the root file system needs root")
    with tempfile.TemporaryDirectory(prefix="vm-", dir=CACHE) as folder:
        init = Path(folder, "init")
        init.write_text(
            _INIT.format(
                directory=shlex.quote(os.getcwd()), command=shlex.join(command), mark=_MARK
            )
        )
        init.chmod(0o755)
        share = Path(folder, "fs.sock")
        with _file_server(share):
            return _boot(image, init, share)


@contextlib.contextmanager
def _file_server(path: Path) -> Iterator[None]:
    """Shares the root file system with the machine."""
    program = next((p for p in _VIRTIOFSD if os.access(p, os.X_OK)), None)
    if program is None:
        raise VmError("no virtiofsd: it comes with Debian's qemu-system-common, or virtiofsd")
    options = ["-o", "source=/", "-o", "cache=auto", "-o", "sandbox=chroot"]
    log = path.with_suffix(".log")
    with log.open("wb") as out:
        server = subprocess.Popen(
            [program, f"--socket-path={path}", *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        until = time.monotonic() + 60
        while not path.is_socket():
            if server.poll() is not None or time.monotonic() > until:
                raise VmError(f"virtiofsd: {log.read_text().strip() or 'no socket'}")
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait()


def _boot(image: Path, init: Path, share: Path) -> int:
    """Prints what the machine says."""
    kernel_line = (
        "root=rootfs rootfstype=virtiofs ro console=ttyS0 quiet loglevel=3 panic=-1 "
        f"mitigations=off lsm= audit=0 random.trust_cpu=on init={init}"
    )
    machine = subprocess.Popen(
        [
            "qemu-system-x86_64",
            *_processor(),
            *("-M", "q35,memory-backend=m", "-m", MEMORY),
            *("-object", f"memory-backend-memfd,id=m,size={MEMORY},share=on"),
            *("-chardev", f"socket,id=c,path={share}"),
            *("-device", "vhost-user-fs-pci,queue-size=1024,chardev=c,tag=rootfs"),
            *("-kernel", str(image), "-append", kernel_line),
            *("-display", "none", "-serial", "stdio", "-monitor", "none"),
            *("-nodefaults", "-no-reboot"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    status, last = None, ""
    timer = _Timer(machine)
    try:
        assert machine.stdout is not None
        for raw in machine.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if line.startswith(_MARK):
                status = int(line.removeprefix(_MARK))
            elif not _NOISE.match(line):
                last = line
                print(line, flush=True)
    finally:
        late = timer.stop()
        machine.kill()
        machine.wait()
    if status is None:
        when = f" in {TIMEOUT:.0f} s" if late else ""
        raise VmError(f"no result{when}; last words: {last}")
    return status


class _Timer:
    """Ends a process when it takes too long."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._late = False
        self._process = process
        self._timer = threading.Timer(TIMEOUT, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self._late = True
        self._process.kill()

    def stop(self) -> bool:
        """Whether it took too long."""
        self._timer.cancel()
        return self._late


def _processor() -> list[str]:
    """The machine's own, where it lends one; else an emulated one."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    able = flags is not None and {"vmx", "svm"} & set(flags[1].split())
    if able and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "host", "-smp", "2"]
    # QEMU 7.2 gets cmpxchg16b wrong; nothing here needs it.
    return ["-accel", "tcg,thread=multi", "-cpu", "max,-cx16", "-smp", "2"]


if __name__ == "__main__":
    sys.exit(main())
