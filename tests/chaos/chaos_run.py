"""One chaos run from its beginning to its summary."""

from __future__ import annotations

import shutil
import tempfile
import time
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
            "deaths": house.restarts,
            "recovery_seconds": house.recoveries,
            "counters_seen": house.counters,
        },
        # Each of these ends a run at once.
        "wrong_bytes": 0,
        "hung_calls": 0,
        "leaked_bytes": 0,
        "corruptions_explained": storm.explained,
    }
