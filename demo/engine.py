"""A vLLM server and what is asked of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.processes import Process

SERVED_NAME = "demo"
START_TIMEOUT = 600.0
REQUEST_TIMEOUT = 600.0
_SOURCE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} ([0-9.e+]+)$', re.M
)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        text, tokens: what the engine said.
        prompt_tokens, completion_tokens, cached_tokens: from the answer's usage.
        computed, restored: prompt tokens by source, as the engine's metrics counted them.
        ttft: seconds from sending the request to the first piece of text.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed: int
    restored: int
    ttft: float
    tokens: tuple[int, ...] = ()


class Engine:
    """Talks to a vLLM server on the loopback address."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._port = port

    def is_healthy(self) -> bool:
        try:
            with self._call("GET", "/health") as response:
                return response.status == 200
        except OSError:
            return False

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, with the model's template."""
        body = {"model": SERVED_NAME, "messages": messages, "add_generation_prompt": True}
        with self._call("POST", "/tokenize", body) as response:
            tokens: list[int] = json.load(response)["tokens"]
        return tokens

    def complete(
        self, tokens: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Completion:
        """A greedy completion, streamed. Nobody else may use the engine meanwhile.

        Args:
            params: ``kv_transfer_params`` of the request.
        """
        before = self._tokens_by_source()
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        said: list[int] = []
        text, usage, ttft = "", None, 0.0
        began = time.monotonic()
        with self._call("POST", "/v1/completions", body) as response:
            for chunk in _events(response):
                for choice in chunk["choices"]:
                    ttft = ttft or time.monotonic() - began
                    text += choice["text"]
                    said += choice.get("token_ids") or ()
                usage = chunk.get("usage") or usage
        if usage is None:
            raise RuntimeError(f"{self.name}: the answer ended without its usage")
        after = self._tokens_by_source()
        return Completion(
            text=text,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            computed=after["local_compute"] - before["local_compute"],
            restored=after["external_kv_transfer"] - before["external_kv_transfer"],
            ttft=ttft,
            tokens=tuple(said),
        )

    def _tokens_by_source(self) -> dict[str, int]:
        with self._call("GET", "/metrics") as response:
            page = response.read().decode()
        return {source: int(float(value)) for source, value in _SOURCE.findall(page)}

    @contextmanager
    def _call(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(2000).decode(errors="replace")
                raise ConnectionError(f"{self.name} {path}: status {response.status}: {said}")
            yield response
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The JSON bodies of a stream of server-sent events, up to its end mark."""
    for line in response:
        field, _, data = line.decode().strip().partition(": ")
        if field == "data" and data != "[DONE]":
            yield json.loads(data)


def connector_config(socket_dir: Path) -> str:
    """What ``--kv-transfer-config`` takes."""
    return json.dumps(
        {
            "kv_connector": "KMeshConnector",
            "kv_connector_module_path": "kmesh_vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket_dir": str(socket_dir)},
        }
    )


@contextmanager
def serve(
    name: str, model: str, folder: Path, *, socket_dir: Path | None, dtype: str = "float32"
) -> Iterator[tuple[Engine, Process]]:
    """Starts a server, with the connector if ``socket_dir`` is given. It is not ready yet.

    The engine's own prefix cache is off, so that a prompt token is either computed or comes from
    KMesh, and nothing else can be taken for it.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--block-size", "32", "--enforce-eager"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "4"]
    command += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
    if socket_dir is not None:
        command += ["--kv-transfer-config", connector_config(socket_dir)]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    if os.path.isdir(model):
        env["HF_HUB_OFFLINE"] = "1"
    with Process(name, command, folder / f"{name.replace(' ', '-')}.log", env=env) as process:
        yield Engine(name, port), process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
