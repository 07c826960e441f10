"""Starts engines in processes of their own and talks to them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon_process import Daemon
from nursery import Fork, Nursery

from kmesh.layout import Shard
from kmesh.session import Role, Session

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

#: The tiny model is so small that threads would only wait for each other, and for a processor.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
#: Tokens of the tiny model's vocabulary that prompts are made of.
VOCABULARY = 2000


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt; prompts of different seeds share no prefix."""
    round = seed // VOCABULARY
    return [
        (i * 7919 + seed * 104729 + i * i * (seed + 3) + round * (i + 1)) % VOCABULARY + 3
        for i in range(count)
    ]


class EngineError(Exception):
    """The engine answered with an error, or died."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a request came to."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    reason: str
    params: dict[str, Any] | None

    @property
    def restored(self) -> int:
        """Tokens that came from KMesh, as the connector says."""
        return int(((self.params or {}).get("kmesh") or {}).get("restored_tokens", 0))

    def same(self, other: Result) -> bool:
        """Equal tokens, and log-probabilities equal but for the order of float32 additions."""
        return (
            self.tokens == other.tokens
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=True))
        )


def environment(**more: str) -> dict[str, str]:
    """What engines have in common."""
    paths = [str(ROOT / "client"), str(ROOT / "vllm_connector"), str(ROOT), str(HERE)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **more,
    }


class Engine:
    """One engine process. Starting it returns at once; the first call waits until it is up.

    Args:
        hash_seed: of its interpreter, which is a new one then, also where there is a nursery.
        separate: its scheduler and its worker are in a process of their own.
        cache: where digests of weights are kept.
        env: more of its environment.
        nursery: forks it off, without the time that loading vLLM takes.
    """

    def __init__(
        self,
        model: Path,
        *,
        transfer: dict[str, Any] | None = None,
        hash_seed: int | None = None,
        separate: bool = False,
        cache: Path | None = None,
        env: dict[str, str] | None = None,
        nursery: Nursery | None = None,
        **arguments: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "num_gpu_blocks_override": 400,
        }
        variables = environment(
            PYTHONHASHSEED=str(hash_seed or 0),
            VLLM_ENABLE_V1_MULTIPROCESSING="1" if separate else "0",
            **(env or {}),
        )
        if cache is not None:
            variables["XDG_CACHE_HOME"] = str(cache)
        self._process: Fork | subprocess.Popen[str]
        if nursery is not None and hash_seed is None:
            self._process = Fork(nursery, variables)
        else:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=variables,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self._waiting = 1
        self._send("start", defaults | {"transfer": transfer} | arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    def up(self) -> Engine:
        """Waits until the engine has started.

        Raises:
            EngineError: it could not start.
        """
        while self._waiting > 0:
            self._waiting -= 1
            self._receive(400)
        return self

    def call(self, command: str, *, wait: float = 90.0, **arguments: Any) -> Any:
        """A command of ``EngineProcess``.

        Raises:
            EngineError: the command failed, or took longer than ``wait`` seconds.
        """
        self.up()
        self._send(command, arguments)
        return self._receive(wait)

    def begin(self, command: str, **arguments: Any) -> None:
        """Sends a command whose answer is fetched by ``end``."""
        self.up()
        self._send(command, arguments)

    def end(self, wait: float = 90.0) -> Any:
        """The answer to the command that was begun."""
        return self._receive(wait)

    def generate(self, *prompts: list[int], **options: Any) -> list[Result]:
        """Runs prompts together."""
        return [Result(**r) for r in self.call("generate", prompts=list(prompts), **options)]

    def one(self, prompt: list[int], **options: Any) -> Result:
        """Runs one prompt."""
        return self.generate(prompt, **options)[0]

    def close(self) -> None:
        """Ends the process and what it started."""
        self.leave()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()

    def leave(self) -> None:
        """Tells it that no more commands come, and it ends by itself."""
        self._commands.close()

    def _send(self, command: str, arguments: dict[str, Any]) -> None:
        self._commands.write(json.dumps([command, arguments]) + "\n")
        self._commands.flush()

    def _receive(self, wait: float) -> Any:
        ready, _, _ = select.select([self._answers], [], [], wait)
        line = self._answers.readline() if ready else ""
        if not line:
            raise EngineError(f"no answer within {wait} s" if not ready else "it has ended")
        kind, answer = json.loads(line)
        if kind != "ok":
            raise EngineError(answer)
        return answer


#: What is tested is what KMesh does, not how soon a busy machine lets it: spinning workers of vLLM
#: keep other processes from the CPU for more than a second where there are few cores.
PATIENT = {
    "acquire_timeout_ms": 30_000,
    "load_timeout_ms": 60_000,
    "reserve_timeout_ms": 30_000,
}


def transfer(socket_dir: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config`` for KMesh; waits long unless ``settings`` say otherwise."""
    return {
        "kv_connector": "KMeshConnector",
        "kv_connector_module_path": "kmesh_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket_dir": str(socket_dir), **PATIENT, **settings},
    }


def settled(daemon: Daemon, spans: int = 0) -> None:
    """Waits until that many spans are stored, and nothing is leased or reserved."""
    daemon.wait_status(
        lambda s: s.spans >= spans and not s.leases and not s.reservations, seconds=30
    )


def flip(daemon: Daemon, keys: list[bytes], shard: Shard) -> None:
    """Flips one bit in the payload of each of these spans, behind the daemon's back."""
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        for key in keys:
            with session.acquire(key, [shard]) as lease:
                span = lease.entry(0)
                daemon.flip(span.offset + span.length // 2, span.slab)
