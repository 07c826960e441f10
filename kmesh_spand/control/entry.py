"""Entry of the control process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import uvloop

from kmesh.errors import ConfigError
from kmesh_spand.control.process import Control
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Shared

logger = logging.getLogger(__name__)


def run(
    settings: Settings,
    version: str,
    storage: Shared,
    listener: socket.socket,
    supervisor: socket.socket,
    restarts: int,
) -> int:
    """Runs the process; returns its exit status."""
    # It would write into our log what peers send, as it comes, lines of their own included.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    async def main() -> int:
        loop = asyncio.get_running_loop()
        try:
            control = Control(loop, settings, version, storage, listener, supervisor, restarts)
        except OSError as failed:
            logger.error("control can't have what it needs: %s", failed)
            listener.close()
            supervisor.close()
            return 1
        await control.run()
        return 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except ConfigError as wrong:
            logger.error("%s", wrong)
            return 1
