"""One chaos run from its beginning to its summary."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_cast import total
from chaos_events import Events
from chaos_storm import Storm
from chaos_watch import Broken


def run(
    seed: int, seconds: float, shape: str, show: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """One run; its directory is kept if it fails.

    Raises:
        Broken: something did not hold; the text has the seed and the last events.
    """
    directory = Path(tempfile.mkdtemp(prefix="kmesh-chaos-"))
    events = Events(directory / "events.jsonl", show)
    storm = Storm(directory, events, seed=seed, seconds=seconds, shape=shape)
    began = time.monotonic()
    try:
        storm.run()
        done = summary(storm, time.monotonic() - began)
    except Broken as broken:
        raise Broken(
            f"{broken}\n\nthe last events:\n{events.last(40)}\n\n"
            f"SEED={seed} ({shape}, {seconds:g} s); logs and events are in {directory}"
        ) from None
    except KeyboardInterrupt:
        storm.close()
        shutil.rmtree(directory)
        raise
    finally:
        storm.close()
        events.close()
    shutil.rmtree(directory)
    return done


def summary(storm: Storm, took: float) -> dict[str, Any]:
    house, counts = storm.house, total(storm.clients)
    return {
        "seed": storm.seed,
        "shape": storm.shape,
        "seconds": storm.seconds,
        "took_seconds": round(took, 1),
        "faults": dict(sorted(storm.done.items())),
        "missed": dict(sorted(storm.missed.items())),
        "clients": dict(sorted(counts.items())),
        "daemon": {
            "lives": house.lives,
            "lives_with_memory": house.kept,
            "keepsakes": storm.keepsakes,
            "deaths": house.restarts,
            "recovery_seconds": house.recoveries,
            "counters_seen": house.counters,
        },
        "corruptions_explained": storm.explained,
        "reports": dict(Counter(row["report"] for row in storm.events.rows if "report" in row)),
        "latest_call_seconds": round(max(client.latest for client in storm.clients), 2),
        "ledger": storm.ledger,
    }


def evidence(runs: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Runs in the form of evidence/README.md."""
    from demo.evidence import functional
    from tools.verify_evidence import derive

    made = {**functional("chaos", command), "raw": {"runs": runs}}
    return {**made, "derived": derive(made)}
