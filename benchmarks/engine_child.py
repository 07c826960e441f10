"""A vLLM engine in a process of its own, which times its steps and the connector's hooks in them.

Each line on stdin holds a command's arguments as JSON; each answer is a line on the stdout that
the process was started with. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class HookClock:
    """Seconds that the engine's thread spends inside the connector's methods.

    Attributes:
        named: seconds in each of them, by name, since somebody last emptied it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self.named: dict[str, float] = {}
        self._inside = False

    def watch(self, connector: type) -> None:
        """Times every public method of the connector that an engine calls while it serves."""
        for name, method in vars(connector).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(connector, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def hook(*arguments: Any, **more: Any) -> Any:
            if self._inside:
                return method(*arguments, **more)
            self._inside = True
            begin = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                took = time.perf_counter() - begin
                self.seconds += took
                self.calls += 1
                name = method.__name__
                self.named[name] = self.named.get(name, 0.0) + took
                self._inside = False

        return hook


class Engine:
    """The commands; the scheduler, the worker and the model run in this thread.

    A message's ``command`` is a method's name, ``run`` if there is none.
    """

    def __init__(self, transfer: dict[str, Any] | None, **arguments: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._clock = HookClock()
        if transfer is not None:
            from kmesh_vllm.connector import KMeshConnector

            self._clock.watch(KMeshConnector)
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._engine = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            **{"enable_prefix_caching": False, **arguments},
        ).llm_engine
        self._count = 0

    def run(
        self, prompts: list[list[int]], max_tokens: int, at: float | None = None
    ) -> dict[str, Any]:
        """Runs prompts together, at that moment of the monotonic clock if one is given.

        Returns seconds of all, of the hooks in them, of adding the prompts, and of each step and
        its hooks, by name too; seconds until the first token of any, and of each prompt; prompt
        tokens that came from a cache, of all and of each prompt; for each step, seconds until its
        end, and processor seconds of this process until then. Seconds count from that moment, even
        if the engine was late.
        """
        from vllm import SamplingParams

        options = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        clock = self._clock
        steps, named, cached, first, last = [], [], 0, 0.0, 0
        firsts, shares = [0.0] * len(prompts), [0] * len(prompts)
        ends = []
        hooks, calls, before = clock.seconds, clock.calls, self._count + 1
        if at is not None:
            time.sleep(max(at - time.monotonic(), 0.0))
        begin = time.perf_counter() - (0.0 if at is None else time.monotonic() - at)
        processor = time.process_time()
        for prompt in prompts:
            self._count += 1
            self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, options)
        added = time.perf_counter() - begin
        while self._engine.has_unfinished_requests():
            began, inside = time.perf_counter(), clock.seconds
            clock.named = {}
            outputs = self._engine.step()
            now = time.perf_counter()
            if outputs and not first:
                first = now - begin
            steps.append((now - began, clock.seconds - inside))
            ends.append((now - begin, time.process_time() - processor))
            named.append(clock.named)
            for output in outputs:
                which = int(output.request_id) - before
                firsts[which] = firsts[which] or now - begin
                if output.finished:
                    shares[which] = output.num_cached_tokens or 0
                    cached += shares[which]
                    last = output.outputs[0].token_ids[-1]
        return {
            "seconds": time.perf_counter() - begin,
            "hooks": clock.seconds - hooks,
            "calls": clock.calls - calls,
            "added": added,
            "steps": steps,
            "named": named,
            "first": first,
            "cached": cached,
            "last": last,
            "firsts": firsts,
            "shares": shares,
            "ends": ends,
        }

    def reset(self) -> bool:
        """Empties the engine's own prefix cache; connectors give blocks back in steps."""
        for _ in range(50):
            if self._engine.reset_prefix_cache():
                return True
            self.run([[5, 6, 7]], 1)
        return False

    def counted(self) -> dict[str, float]:
        """The connector's counters by name; the engine needs ``disable_log_stats=False``."""
        # What was counted is told with a later step that computes something.
        self.run([[5, 6, 7]], 1)
        prefix = "vllm:kmesh_"
        return {
            metric.name.removeprefix(prefix): metric.value
            for metric in self._engine.get_metrics()
            if metric.name.startswith(prefix)
        }

    def namespace(self) -> str:
        """Digest of its requests' namespace, in hexadecimal."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return str(scheduler.connector._identity.namespace.digest().hex())

    def copies(self, size: int, count: int) -> list[float]:
        """Seconds of copies of ``size`` bytes from pinned memory to the GPU."""
        import torch

        source = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        found = []
        for _ in range(count + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
        return found[1:]


def main() -> None:
    """Serves commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(**json.loads(sys.stdin.readline()))
    print("null", file=answers)
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(getattr(engine, message.pop("command", "run"))(**message)), file=answers)


if __name__ == "__main__":
    main()
