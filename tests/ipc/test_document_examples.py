"""The Python of the documents runs as it stands, against a real daemon."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from daemon_process import ROOT, Daemon, environment
from test_operator import engine, store

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SOCKETS = '"/run/kmesh"'


def blocks(document: str) -> list[str]:
    return _BLOCK.findall((ROOT / document).read_text())


DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"))
    if blocks(str(path))
)
#: What the examples of a document print, in order; a regular expression.
SAID = {
    "README.md": r"32768 verified bytes\n",
    "docs/client.md": r"(daemon found\n)?(daemon lost\n)?",
    "docs/families.md": (
        r"False 131072 bytes\nTrue 131072 bytes\nTrue 131072 bytes\n"
        r"524288 bytes of memory for 655360\nminutes-16: 0 of 96 tokens\n"
    ),
    "docs/handles.md": r"1 Offer\(.*\)\n",
    "docs/operations.md": (
        r"a model: 128 of 256, then VERDICT_NEVER\n0 spans dropped, 0 leased\n"
        r"epoch [0-9a-f]{16}: \d+ events, lost: False\n"
    ),
}


def run(spand: Daemon, code: str) -> str:
    """What a program of its own prints."""
    line = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_examples_of_a_document_run_one_after_the_other(spand: Daemon, document: str) -> None:
    with engine(spand) as session:
        store(session, list(range(128)))
        code = "\n".join(blocks(document)).replace(SOCKETS, repr(str(spand.socket_dir)))
        said = run(spand, code)
    assert re.fullmatch(SAID[document], said), said


def test_first_examples_need_no_other(spand: Daemon) -> None:
    for document in DOCUMENTS:
        run(spand, blocks(document)[0].replace(SOCKETS, repr(str(spand.socket_dir))))


def test_every_document_with_examples_is_known() -> None:
    assert set(SAID) == set(DOCUMENTS)
