"""The second process of ``kmesh doctor``: maps an inherited file descriptor and says what is in it.

python -m kmesh.cli.importer KIND FD SIZE
"""

from __future__ import annotations

import json
import sys

from kmesh import errors
from kmesh.dmabuf import DmaBufMapping, look
from kmesh.handles import HandleKind
from kmesh.mapping import Mapping


def main() -> None:
    kind, fd, size = HandleKind[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    said: dict[str, object] = {}
    try:
        if kind == HandleKind.DMA_BUF:
            said["exporter"] = look(fd).exporter
            with DmaBufMapping(fd, size) as shared, shared.reading():
                said["bytes"] = bytes(shared.view()).hex()
        else:
            with Mapping(fd, size) as memory:
                said["bytes"] = bytes(memory.view()).hex()
    except (errors.KMeshError, OSError) as failed:
        sys.exit(f"{type(failed).__name__}: {failed}")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
