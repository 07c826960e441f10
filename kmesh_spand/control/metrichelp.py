"""What each metric means: the page's HELP lines, which the tables of ``docs/metrics.md`` repeat.

Some names share a sentence. ``NAME`` and ``CODE`` stand for many.
"""

from __future__ import annotations

Table = dict[tuple[str, ...], str]

GAUGES: Table = {
    ("up",): "1",
    ("draining",): (
        "1 while the daemon takes no new spans: an operator drains it, or it is stopping"
    ),
    ("uptime_seconds",): "of the control process",
    ("spans", "span_bytes"): "stored spans, and the bytes of their payloads",
    ("max_spans",): "catalog records",
    ("ready",): "1 while there is no reason for not_ready",
    ("not_ready", "warning"): "for each reason: 1 while it holds",
    ("sessions",): "open sessions",
    ("sessions_by_role",): "open sessions for each role: scheduler, worker, tool",
    ("catalog_records",): "catalog records in use",
    ("recovering_spans",): "spans of an earlier epoch that were not verified yet",
    ("leased_spans",): "spans that at least one lease holds",
    ("leases", "leased_bytes"): "open leases; payload bytes that at least one of them holds",
    ("reservations",): "reserved ranges that were neither committed nor given up",
    ("staging_bytes", "max_staging_bytes"): "staging that exists, and its limit",
    ("index_entries",): "keys that are published",
    ("families",): "families that are declared",
    ("mirrors", "mirror_bytes", "mirror_dense_bytes", "mirror_used_bytes"): (
        "spans that are kept as recipes, bytes of these, bytes that they would take dense, "
        "and memory that they take: whole tiles"
    ),
    ("base_spans",): "spans that mirrors refer to, and hold",
    ("flights",): "runs of spans that one session computes for all; see states.md",
    ("flight_waits",): "requests that wait for them",
    ("tenant_quota", "tenant_used", "tenant_spans", "tenant_span_bytes", "tenant_slabs"): (
        "for each tenant (by its name, see configuration.md): its quota (0: none) and what it "
        "uses, in bytes of whole tiles; its spans, the bytes of their payloads, and its slabs"
    ),
    ("population_paused",): "1 while slabs don't grow because memory is short",
    ("slab_size_bytes", "slab_capacity_bytes", "slab_populated_bytes", "slab_used_bytes"): (
        "for each slab: its size, bytes for payloads, those with pages behind them, and those "
        "in use by spans, reservations and ranges that may not be reused yet"
    ),
    ("slab_hugepages",): "for each slab: 1 if the kernel granted huge pages",
    ("slab_read_only",): "for each slab: 1 if an earlier daemon sealed it (operations)",
    ("gpu_ready",): (
        "for each device (UUID of a GPU): 1 while its device worker runs and has all slabs"
    ),
    ("gpu_slabs", "gpu_slab_bytes"): ("for each device: the daemon's slabs on it, and their bytes"),
    ("gpu_free_bytes", "gpu_total_bytes"): (
        "for each device: memory of the whole GPU, whoever uses the rest; free is 0 while "
        "there is no device worker"
    ),
    ("disk_capacity_bytes", "disk_used_bytes"): (
        "with a disk tier: disk_bytes; what files take of it, headers and rounding included"
    ),
    ("disk_spans", "disk_span_bytes"): "spans in files, and the bytes of their payloads",
    ("disk_writing", "disk_queued"): "files being written; spans that wait to be",
    ("disk_reading", "disk_wanted"): "files being read; those that wait for their turn",
    ("disk_waits",): "Acquires that wait for files",
    ("disk_held",): "files that could not be fetched and are left alone for a while",
    ("disk_ready", "disk_direct"): (
        "1 once the directory was looked through; 1 if files are read and written past the "
        "page cache"
    ),
    ("disk_away_seconds",): (
        "for how long the disk has been treated as not there, since it did not answer; 0: it "
        "answers"
    ),
    ("disk_failing_seconds",): "for how long no file could be written; 0: it can",
    ("disk_tenant_quota", "disk_tenant_used", "disk_tenant_spans"): (
        "for each tenant: its quota on disk (0: none), the bytes of its files, and how many "
        "they are"
    ),
    ("worker_up",): "1 while there is a store worker that was not given up",
    ("worker_copies", "worker_checks"): (
        "its queue: copies and verifications that it was given and has not done"
    ),
    ("worker_silent_seconds",): "for how long it has owed a heartbeat; 0 if it owes none",
    ("worker_owed_seconds",): "for how long no copy was done while some were owed",
    ("process_resident_bytes", "process_private_bytes"): (
        "for each process (supervisor, control, worker, and gpu0 … for device workers): "
        "memory with, and without, what it shares with others, such as slabs"
    ),
    ("process_open_files", "process_max_files"): (
        "file descriptors of each process; the limit of all"
    ),
}

HISTOGRAMS: Table = {
    ("request_seconds",): (
        "for each request (acquire, reserve, commit): from reading it to its answer. Commit "
        "waits for its copies"
    ),
    ("copy_seconds",): "the store worker's time for a copy, with its checksums",
    ("copy_wait_seconds",): "time for a copy with what it waits for its turn, and both ways",
    ("copy_bytes",): "lengths of copies",
    ("disk_read_seconds", "disk_write_seconds"): (
        "the store worker's time for a file, with its checksums"
    ),
}

COUNTERS: Table = {
    ("control_restarts", "worker_restarts"): (
        "processes that were started again, since the daemon's start"
    ),
    ("gpu_restarts",): (
        "for each device: device workers that were started again, since the daemon's start"
    ),
    ("process_cpu_seconds",): "for each process: processor time since its start",
    ("slow_calls",): "calls that took longer than slow_call_ms",
    ("fallback_hugepages",): "slabs that got small pages although huge ones were asked for",
    ("fallback_populate",): (
        "slabs that were filled through their file, because the kernel can't fill a mapping"
    ),
    ("fallback_encode",): (
        "spans on a GPU that the processor encoded, and not the GPU: nobody has said where "
        "they come from, or the kernels can't be compiled or run, which the device worker's "
        "log explains once"
    ),
    ("populate_failed",): "times that pages for a slab could not be had",
    ("handle_fallbacks",): (
        "tiers of sessions that got a lesser kind of handle than the first that they named; "
        "see handles.md"
    ),
    ("dma_buf_slabs", "dma_buf_spans", "dma_buf_failed"): (
        "whole slabs and single spans given as DMA-BUF; exports that were permitted and failed"
    ),
    ("sessions_opened", "sessions_closed"): "sessions",
    ("connections_refused",): (
        "connections that were not let in: uid, max_sessions, file descriptors; gRPC "
        "connections over the limit"
    ),
    ("protocol_errors",): (
        "packets that broke the protocol: their connection was ended, or their gRPC call refused"
    ),
    ("requests_NAME",): "requests by their name in kmesh.v1.Request, from both sockets",
    ("refused_CODE",): (
        "calls and connections that were refused, by their kmesh.v1.Code in lower case"
    ),
    ("index_full",): "keys that found no place in the index: stored, but never found",
    ("spans_acquires",): "calls of Acquire",
    ("spans_hits", "spans_misses", "spans_pending"): (
        "entries of Acquire that were leased, are not stored, are being written or verified"
    ),
    ("spans_released", "spans_release_refused"): (
        "leases released; releases of leases that were unknown or another's"
    ),
    ("spans_reserve_ok",): "entries of Reserve that got a range",
    ("spans_reserve_exists", "spans_reserve_pending"): (
        "entries of Reserve that are stored already, or are being written"
    ),
    (
        "spans_reserve_pool_full",
        "spans_reserve_not_ready",
        "spans_reserve_too_large",
        "spans_reserve_catalog_full",
    ): ("entries of Reserve that could not be stored, by kmesh.v1.Reason"),
    ("spans_reserve_quota",): (
        "entries of Reserve that could not be stored because the tenant is at its quota"
    ),
    ("spans_committed",): "spans that became visible",
    ("spans_commit_stale", "spans_commit_aborted", "spans_copy_failed"): (
        "entries of Commit that failed, by kmesh.v1.Reason"
    ),
    ("spans_aborted",): "reservations that ended without a commit",
    ("spans_evicted", "spans_evicted_bytes"): "spans that made room for others",
    ("spans_discarded", "spans_discarded_bytes"): "spans that an operator evicted",
    ("spans_policy_faults",): "errors of the eviction policy that were survived",
    ("spans_reported",): "spans that a reader reported as wrong",
    ("spans_corrupt", "spans_corrupt_false"): (
        "spans whose verification failed; reports that were wrong"
    ),
    ("spans_verified",): "spans that were verified after a restart",
    ("spans_recovered", "spans_recovered_dropped"): (
        "catalog records of an earlier epoch that were taken over, or could not be"
    ),
    ("spans_slabs_given_up",): "slabs of an earlier daemon, sealed, that were given back",
    ("spans_wiped", "spans_wipe_failed"): (
        "slabs that were wiped for another tenant; that could not be, and are not used any more"
    ),
    ("population_pauses",): (
        "times that slabs stopped growing because memory was short, since control's start"
    ),
    (
        "tenant_acquires",
        "tenant_hits",
        "tenant_misses",
        "tenant_committed",
        "tenant_evicted",
        "tenant_evicted_bytes",
        "tenant_reserve_quota",
        "tenant_reserve_pool_full",
    ): (
        "for each tenant, as the counters spans_…. Of tenants without a slab the last 256 are kept"
    ),
    ("spans_refused",): "requests for spans or flights that the core refused",
    ("disk_found", "disk_found_dropped"): (
        "files that were there already; those of them that had no room, or were there twice, "
        "and were removed"
    ),
    ("disk_removed",): (
        "files that were none, in the scan at start: damaged, cut short, of another directory"
    ),
    ("disk_spilled", "disk_spilled_bytes"): (
        "spans that were written to files; bytes of their payloads"
    ),
    ("disk_spill_missed",): (
        "spans that were evicted before they were written: the disk is too slow for what is stored"
    ),
    ("disk_spill_refused",): ("spans too large for the disk, the tenant's quota or disk_spans"),
    ("disk_spill_failed", "disk_full"): (
        "files that could not be written; those for which the file system had no room"
    ),
    ("disk_fetch_leads", "disk_fetch_joins"): (
        "fetches that were asked for; sessions that joined one under way"
    ),
    ("disk_fetch_promotions", "disk_fetch_leaves"): (
        "fetches whose leader's session ended, and another leads; Acquires that stopped "
        "waiting for one"
    ),
    ("disk_fetched", "disk_fetched_bytes"): "files that were read; bytes of their payloads",
    ("disk_fetch_shared", "disk_fetch_shared_bytes"): (
        "sessions that were served by a read that another asked for; bytes that were not read again"
    ),
    ("disk_fetch_no_room", "disk_fetch_failed"): (
        "fetches for which memory had no room; that could not be read"
    ),
    ("disk_corrupt",): (
        "files that were not what they should be when they were read: removed, a miss"
    ),
    ("disk_waits", "disk_hurried"): (
        "Acquires that waited for files; those that were answered before all had come"
    ),
    ("disk_outages", "disk_outage_misses"): (
        "times that the disk did not answer and was treated as not there; entries of Acquire "
        "that were misses because of it"
    ),
    ("disk_evicted", "disk_evicted_bytes", "disk_discarded"): (
        "files that made room for others; that an operator removed"
    ),
    ("disk_unlink_failed",): "files that could not be removed",
    ("spans_encodes",): "recipes that took a dense span's place",
    ("spans_encode_refused",): (
        "spans that stay dense: they share nothing with their base that is worth a recipe, it "
        "would not be smaller by 64 KiB, they have another layout, or nothing of them was "
        "recovered"
    ),
    ("spans_encode_failed", "spans_encode_spoiled", "spans_encode_no_room"): (
        "encodings whose worker ended or could not do them; that found bytes changed since "
        "they were stored, which are then read again; recipes for which there was no room"
    ),
    ("spans_densified", "spans_densify_failed", "spans_densify_no_room"): (
        "recipes that were made dense again; whose worker ended or could not; for which there "
        "was no room"
    ),
    ("spans_mirrors_dropped",): (
        "recipes that are not served any more: their base was bad or is not there after a "
        "restart, they did not give their payload, or an operator wanted it so"
    ),
    ("spans_families_forgotten",): (
        "families of whose names nobody made use for longest, forgotten for newer ones"
    ),
    ("flight_claims",): "calls of Claim: misses that engines asked about",
    ("flight_leads",): "calls of Claim that made their caller the one that computes",
    ("flight_joins", "flight_leaves"): (
        "waits for flights; those that ended by Leave or by their deadline"
    ),
    ("flight_promotions",): "waiters that took a failed leader's place",
    ("flight_landed",): "flights of which every key was stored",
    ("flight_ended_aborted", "flight_ended_preempted", "flight_ended_closed"): (
        "flights that ended because their leader's request was aborted or preempted, or its "
        "session ended, and nobody waited"
    ),
    ("flight_ended_not_stored",): (
        "flights that ended because there was no room, a copy failed, or the leader had "
        "nothing more"
    ),
    ("flight_ended_back_off", "flight_ended_draining"): (
        "flights that ended because two leaders died of the same key, or the daemon takes no "
        "new spans"
    ),
    ("flight_shared",): "waits that ended with something to restore",
    ("flight_shared_tokens", "flight_shared_bytes"): (
        "tokens that did not have to be computed once more, and the bytes of their KV state"
    ),
}


def _by_name(table: Table) -> dict[str, str]:
    return {
        name: f"{', '.join(names)}: {text}" if len(names) > 1 else text
        for names, text in table.items()
        for name in names
    }


_GAUGES, _HISTOGRAMS, _COUNTERS = map(_by_name, (GAUGES, HISTOGRAMS, COUNTERS))
_MANY = {"requests_": "requests_NAME", "refused_": "refused_CODE"}


def gauge(name: str) -> str:
    """The sentence of a gauge; its name for one that has none."""
    return _GAUGES.get(name, name)


def histogram(name: str) -> str:
    """That of a histogram."""
    return _HISTOGRAMS.get(name, name)


def counter(name: str) -> str:
    """That of a counter, by its name without ``_total``."""
    for begin, pattern in _MANY.items():
        if name.startswith(begin):
            name = pattern
    return _COUNTERS.get(name, name)
