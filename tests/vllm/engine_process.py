"""A vLLM engine in a process of its own, told what to do by lines of JSON.

Each line on stdin is ``[command, arguments]``; each answer is a line on the stdout that the
process was started with. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any


class EngineProcess:
    """The commands; ``llm`` is vLLM's offline engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = arguments.pop("transfer", None)
        if transfer is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(
            skip_tokenizer_init=True,
            seed=0,
            disable_log_stats=False,
            **{"enforce_eager": True, **arguments},
        )
        self.adapters: dict[str, int] = {}
        self.peak = 0
        self.computed = 0
        self.outputs: dict[str, Any] = {}
        self.open: threading.Event | None = None

    def generate(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        """All prompts at once."""
        salt = options.pop("salt", None)
        adapter = options.pop("adapter", None)
        outputs = self.llm.generate(
            [self._prompt(tokens, salt) for tokens in prompts],
            self._sampling(options),
            use_tqdm=False,
            lora_request=self._adapter(adapter) if adapter else None,
        )
        return [self._result(output) for output in outputs]

    def close(self) -> None:
        """Ends the engine, and with it the connector."""
        self.llm.llm_engine.engine_core.shutdown()

    def reset(self, connector: bool = False) -> bool:
        """Empties vLLM's own prefix cache; ``connector`` resets the connector too."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """vLLM's counters of the connector and of preemptions."""
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(("vllm:kmesh", "vllm:external_prefix", "vllm:num_preempt"))
        }

    def piecewise(self, extra: dict[str, Any]) -> bool:
        """What an engine with full CUDA graphs asks the connector before it loads the model."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        transfer = KVTransferConfig(
            kv_connector="KMeshConnector",
            kv_connector_module_path="kmesh_vllm",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        connector = KVConnectorFactory.get_connector_class(transfer)
        return bool(connector.requires_piecewise_for_cudagraph(extra))

    # What follows needs the scheduler in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0).

    def state(self) -> dict[str, int]:
        """Blocks and requests that are held."""
        scheduler = self._scheduler()
        pool = scheduler.kv_cache_manager.block_pool
        connector = scheduler.connector
        half = getattr(connector, "_scheduler", None)
        return {
            "blocks": pool.num_gpu_blocks,
            "free": pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "known": len(half) if half is not None else 0,
            "peak": self.peak,
        }

    def keys(self, prompt: list[int]) -> list[str]:
        """Keys of a prompt's full spans, in hexadecimal."""
        from kmesh.keys import KeyChain

        chain = KeyChain(self._scheduler().connector._identity.namespace.digest())
        chain.extend(prompt)
        return [chain.key(i).hex() for i in range(chain.spans)]

    def ranks(self) -> list[int]:
        """Pids of the workers, where there are several."""
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return [worker.proc.pid for worker in executor.workers]

    def namespace(self) -> str:
        """Digest of the engine's namespace, in hexadecimal."""
        return str(self._scheduler().connector._identity.namespace.digest().hex())

    def gate(self, closed: bool) -> None:
        """Holds loads just before they copy, or lets them go on."""
        from kmesh_vllm import hostmover

        if self.open is None:
            self.open = opened = threading.Event()
            inner = hostmover.scatter_packed

            def scatter(*arguments: Any) -> bytes:
                opened.wait()
                return inner(*arguments)

            hostmover.scatter_packed = scatter
        if closed:
            self.open.clear()
        else:
            self.open.set()

    def watch_peak(self) -> None:
        """From now on, ``state`` says the most blocks that were in use."""
        pool = self._scheduler().kv_cache_manager.block_pool
        self.peak = 0
        inner = pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = inner(count)
            self.peak = max(self.peak, pool.num_gpu_blocks - pool.get_num_free_blocks())
            return blocks

        pool.get_new_blocks = get_new_blocks

    def count_tokens(self) -> None:
        """From now on, ``tokens`` says how many tokens steps have computed."""
        scheduler = self._scheduler()
        inner = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            output = inner(*arguments, **named)
            self.computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = schedule

    def tokens(self) -> int:
        """Tokens that the model has computed since ``count_tokens``."""
        return self.computed

    def add(self, name: str, prompt: list[int], **options: Any) -> None:
        """Adds a request without running it."""
        self.llm.llm_engine.add_request(
            name, self._prompt(prompt, options.pop("salt", None)), self._sampling(options)
        )

    def step(self, times: int = 1) -> list[str]:
        """Runs steps; returns the names of requests that ended in them."""
        ended = []
        for _ in range(times):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.outputs[output.request_id] = self._result(output)
                    ended.append(output.request_id)
        return ended

    def abort(self, name: str) -> None:
        """The client of a request goes away."""
        self.llm.llm_engine.abort_request([name])

    def statuses(self) -> list[str]:
        """vLLM's states of all requests."""
        return [request.status.name for request in self._scheduler().requests.values()]

    def run(self, seconds: float = 60.0) -> dict[str, Any]:
        """Steps until nothing is left; returns the results of requests that were added."""
        until = time.monotonic() + seconds
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"still unfinished: {self.statuses()}")
            self.step()
        outputs, self.outputs = self.outputs, {}
        return outputs

    def settle(self, seconds: float = 60.0) -> dict[str, int]:
        """Steps the core until it holds no request, as its own loop would."""
        until = time.monotonic() + seconds
        while self._scheduler().requests and time.monotonic() < until:
            self.llm.llm_engine.engine_core.get_output()
        return self.state()

    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _prompt(self, tokens: list[int], salt: str | None) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    def _sampling(self, options: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        if (params := options.pop("params", None)) is not None:
            options["extra_args"] = {"kv_transfer_params": params}
        options = {"max_tokens": 6, "ignore_eos": True, "logprobs": 1} | options
        return SamplingParams(temperature=0, detokenize=False, **options)

    def _adapter(self, path: str) -> Any:
        from vllm.lora.request import LoRARequest

        number = self.adapters.setdefault(path, len(self.adapters) + 1)
        # The same name for all: a name is no identity.
        return LoRARequest(lora_name="adapter", lora_int_id=number, lora_path=path)

    def _result(self, output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [next(iter(row.values())).logprob for row in completion.logprobs or ()],
            "cached": output.num_cached_tokens,
            "reason": completion.finish_reason,
            "params": output.kv_transfer_params,
        }


def main() -> None:
    """Serves commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: EngineProcess | None = None
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            if command == "start":
                engine = EngineProcess(arguments)
                answer: Any = None
            else:
                answer = getattr(engine, command)(**arguments)
            answers.write(json.dumps(["ok", answer]) + "\n")
        except Exception as wrong:
            import traceback

            traceback.print_exc()
            answers.write(json.dumps(["error", f"{type(wrong).__name__}: {wrong}"]) + "\n")
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
