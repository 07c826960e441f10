"""Starts the engines that are measured, and talks to them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.spand import environment

START_SECONDS = 300.0
RUN_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to; seconds. See ``engine_child.Engine.run``."""

    seconds: float
    hooks: float
    calls: int
    added: float
    steps: list[tuple[float, float]]
    named: list[dict[str, float]]
    first: float
    cached: int
    last: int
    firsts: list[float] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    ends: list[tuple[float, float]] = field(default_factory=list)


class Engine:
    """One engine process. Making it returns at once; ``up`` waits until it has started.

    Args:
        transfer: vLLM's KV transfer config, or None for an engine without a connector.
        env: further variables of its environment.
        arguments: vLLM's.
    """

    def __init__(
        self,
        model: str,
        transfer: dict[str, Any] | None,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = self._start(
            environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                VLLM_CPU_KVCACHE_SPACE="1",
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                VLLM_NO_USAGE_STATS="1",
                VLLM_LOGGING_LEVEL="WARNING",
                TORCHDYNAMO_DISABLE="1",
                HF_HUB_OFFLINE="1",
                **(env or {}),
            )
        )
        self._send({"model": model, "transfer": transfer, **arguments})

    def _start(self, env: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def up(self) -> Engine:
        """Waits until it has started.

        Raises:
            RuntimeError: it could not; the end of its log says why.
        """
        self._receive(START_SECONDS)
        return self

    def run(self, prompts: list[list[int]], max_tokens: int = 1) -> Run:
        """Runs prompts together; errors as ``up``."""
        self.order(prompts, max_tokens)
        return self.answer()

    def order(self, prompts: list[list[int]], max_tokens: int = 1, at: float | None = None) -> None:
        """Has it run prompts, at that moment of the monotonic clock; ``answer`` has the run."""
        self._send({"prompts": prompts, "max_tokens": max_tokens, "at": at})

    def answer(self, wait: float = RUN_SECONDS) -> Run:
        """Waits so many seconds for what was ordered; errors as ``up``."""
        return Run(**self._receive(wait))

    def reset(self) -> None:
        """Empties the engine's own prefix cache."""
        self._send({"command": "reset"})
        if not self._receive(RUN_SECONDS):
            raise RuntimeError("the prefix cache can't be emptied")

    def counted(self) -> dict[str, float]:
        """The connector's counters of all ranks together; see ``engine_child.Engine.counted``."""
        self._send({"command": "counted"})
        return dict(self._receive(RUN_SECONDS))

    def namespace(self) -> bytes:
        """Digest of the namespace of its requests."""
        self._send({"command": "namespace"})
        return bytes.fromhex(self._receive(RUN_SECONDS))

    def said(self, text: str) -> bool:
        """Whether that is in its log."""
        size = os.fstat(self._log.fileno()).st_size
        return text in os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def copies(self, size: int, count: int) -> list[float]:
        """Seconds of copies of so many bytes from pinned memory to the engine's GPU."""
        self._send({"command": "copies", "size": size, "count": count})
        return list(self._receive(RUN_SECONDS))

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _receive(self, wait: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], wait)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"the engine gave no answer\n{tail}")
        return json.loads(line)


def transfer(socket_dir: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's KV transfer config for KMesh."""
    return {
        "kv_connector": "KMeshConnector",
        "kv_connector_module_path": "kmesh_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket_dir": str(socket_dir), **settings},
    }
