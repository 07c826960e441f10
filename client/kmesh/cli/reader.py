"""The second process of ``kmesh doctor``: reads one span and prints it as JSON.

python -m kmesh.cli.reader SOCKET_DIR KEY TIMEOUT
"""

from __future__ import annotations

import json
import sys

from kmesh import errors
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.store import read_span


def main() -> None:
    socket_dir, key, timeout = sys.argv[1:]
    try:
        with (
            Session.connect(
                socket_dir, role=Role.TOOL, client_name="kmesh doctor", timeout=float(timeout)
            ) as session,
            session.acquire(bytes.fromhex(key), [Shard(0, 1, 0, 1)]) as lease,
        ):
            payload = read_span(session, lease, 0)
    except (errors.KMeshError, LookupError) as failed:
        sys.exit(f"{type(failed).__name__}: {failed}")
    print(json.dumps({"payload": payload.hex()}))


if __name__ == "__main__":
    main()
