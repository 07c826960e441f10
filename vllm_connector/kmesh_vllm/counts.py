"""What the connector counts, as vLLM collects it: numbers by name, since the last collection."""

from __future__ import annotations

import threading

#: Every name that is counted, and what it means.
NAMES = {
    "restores": "loads that ended well",
    "restored_tokens": "tokens restored from KMesh",
    "restored_bytes": "bytes copied from KMesh into KV pages",
    "restored_bytes_kernel": "of those, from host memory to a GPU by the restore kernel",
    "restored_bytes_copy": "of those, from host memory to a GPU by its copy engine",
    "restored_bytes_gpu": "of those, from GPU memory to pages on that GPU",
    "restored_bytes_recipes": "of all restored bytes, those of spans that are kept as recipes",
    "restore_read_bytes": "bytes of payloads that restores read, each tile of 64 KiB whole",
    "recipes_decoded": "spans decoded on the host out of their recipes",
    "host_memory_unreadable": "workers whose GPU can't read the daemon's host memory",
    "calibrated": "workers whose restores choose by rates that were measured on their GPU",
    "calibration_failed": "workers whose GPU's rates could not be measured",
    "load_failed_corrupt": "spans whose bytes did not match their checksums",
    "load_failed_late": "loads that had not begun to copy in time",
    "load_failed_lost": "loads whose memory was gone: the daemon ended or restarted",
    "load_failed_error": "loads that failed for another reason",
    "stored_spans": "spans stored in KMesh",
    "stored_tokens": "tokens of those spans",
    "stored_bytes": "bytes of those spans",
    "store_skipped_exists": "spans that another engine had stored meanwhile",
    "store_skipped_full": "spans not stored: no memory in the daemon",
    "store_skipped_staging": "spans not stored: no room in staging",
    "store_skipped_late": "spans not stored: no reservation, or no kernels, in time",
    "store_skipped_error": "spans not stored for another reason",
    "acquire_refused": "hits of the index that gave no lease",
    "acquire_late": "leases that did not come in time",
    "flight_leads": "misses that this engine computed for others too",
    "flight_joins": "misses for which a request waited while another engine computed",
    "flight_landed": "waits that ended with something to restore",
    "flight_promoted": "waits that ended with this engine in the place of one that failed",
    "flight_ended": "waits that ended without anything, for a reason of the daemon",
    "flight_left": "waits that this engine gave up: too long, or the request ended",
    "flight_declined": "misses that another engine computed and this one too, as the faster way",
    "flight_late": "claims that were not answered in time",
    "flight_refused": "claims or waits that the daemon refused",
    "segment_requests": "requests of which a family, segments or separators were made use of",
    "segment_refused": (
        "requests whose segments or family could not be used; none of them is in segment_requests"
    ),
    "segment_hits": "shared segments of such requests that were stored whole already",
    "segment_misses": "shared segments of such requests that were not",
    "segment_spans": "spans of segments that were given to the workers to be stored",
    "family_joins": "requests that joined their family",
    "family_failed": "requests that could not join their family",
}


class Counts:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to a counter; KeyError for a name that is not in ``NAMES``."""
        if name not in NAMES:
            raise KeyError(name)
        if amount:
            with self._lock:
                self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
