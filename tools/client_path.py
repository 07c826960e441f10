"""Puts ``client/`` on the path of the environment that runs this; standard library only.

git names a clone `kmesh`, and an editable install finds packages by a hook that Python asks last.
So a program that is run from the folder above would take the clone itself for the package `kmesh`,
with nothing in it. A package in a folder of the path goes before such a folder.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

CLIENT = Path(__file__).resolve().parent.parent / "client"


def write(site: Path) -> Path:
    """Writes the ``.pth`` file into a folder of site packages."""
    file = site / "kmesh-client.pth"
    file.write_text(f"{CLIENT}\n")
    return file


if __name__ == "__main__":
    write(Path(sysconfig.get_path("purelib")))
