"""Daemons whose manager keeps their memory for the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon_process import COMMAND, Daemon

from tools.service_manager import ServiceManager


class Managed(ServiceManager):
    """A manager that starts daemons by ``start``, a fixture.

    Args:
        address, size: as of ``ServiceManager``.
    """

    def __init__(self, start: Callable[..., Daemon], address: Path, size: int = 512) -> None:
        super().__init__(address, size)
        self._daemons = start

    def daemon(self, **settings: Any) -> Daemon:
        """Starts the service with what is stored."""
        how = self.start(settings.pop("command", COMMAND))
        env = {**how.env, **settings.pop("env", {})}
        return self._daemons(command=how.command, pass_fds=how.pass_fds, env=env, **settings)
