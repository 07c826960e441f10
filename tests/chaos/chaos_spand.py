"""The daemon of a chaos run, instead of ``-m kmesh_spand``: faults on demand, and GPUs that are
not there. See ``faulty`` and ``fake_gpu``."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "ipc"), str(Path(__file__).parents[1])]

import fake_gpu
import faulty

from kmesh.cuda import driver
from kmesh_spand import gpuworker
from kmesh_spand.__main__ import main

COMMAND = (sys.executable, __file__)

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # With its runner, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulty.install()
    driver.load = fake_gpu.load
    gpuworker.STATE_SECONDS = 0.5
    sys.exit(main())
