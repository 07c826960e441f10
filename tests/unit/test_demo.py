"""The demo's judgement, and that it ends what it starts."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from demo import progress
from demo.processes import Process, ProcessFailed
from demo.prompts import QUESTIONS, messages, shared_tokens
from demo.report import Report, Row
from demo.show import show

DAEMON = {
    "span_bytes": 1300,
    "span_tokens": 64,
    "counters": {"spans_hits": 5, "spans_corrupt": 0},
}


def _row(request: int, engine: str, restored: int) -> Row:
    return Row(
        request=request,
        engine=engine,
        prompt_tokens=110,
        computed=110 - restored,
        restored=restored,
        cached_tokens=restored,
        ttft=0.5,
        text=f"answer {request}",
    )


@pytest.fixture
def report() -> Report:
    """Two engines, two requests; the second engine restored 90 and 96 of 100 shared tokens."""
    rows = [_row(1, "A", 0), _row(2, "A", 96), _row(1, "B", 90), _row(2, "B", 96)]
    control = [_row(1, "control", 0), _row(2, "control", 0)]
    return Report("model", 100, 10, rows, control, DAEMON)


def test_a_good_run_has_no_problems(report: Report) -> None:
    assert report.problems() == []


@pytest.mark.parametrize(
    ("row", "change", "complaint"),
    [
        (2, {"restored": 89, "cached_tokens": 89, "computed": 21}, "less than 90%"),
        (2, {"text": "something else"}, "is not the control's"),
        (0, {"text": "something else"}, "is not the control's"),
        (3, {"cached_tokens": 0}, "the answer says 0"),
        (3, {"computed": 13}, "are not 110"),
    ],
)
def test_what_falls_short_is_named(
    report: Report, row: int, change: dict[str, int | str], complaint: str
) -> None:
    report.rows[row] = replace(report.rows[row], **change)  # type: ignore[arg-type]
    [problem] = report.problems()
    assert complaint in problem
    assert f"{report.rows[row].engine}, request {report.rows[row].request}" in problem


@pytest.mark.parametrize("counters", [{"spans_hits": 4}, {"spans_corrupt": 1}])
def test_the_daemon_has_a_say(report: Report, counters: dict[str, int]) -> None:
    """Two engines restored 282 tokens; four spans of 64 can't have been enough."""
    report.daemon = {**DAEMON, "counters": {"spans_hits": 5, "spans_corrupt": 0, **counters}}
    assert len(report.problems()) == 1


def test_empty_answers_prove_nothing(report: Report) -> None:
    for rows in (report.rows, report.control):
        rows[:] = [replace(row, text=" ") for row in rows]
    assert len(report.problems()) == len(report.rows)


def test_a_control_that_restores_is_no_control(report: Report) -> None:
    report.control[1] = _row(2, "control", 64)
    assert len(report.problems()) == 1


def test_bytes_are_compared_with_copies(report: Report) -> None:
    assert report.daemon_bytes == 1300
    assert report.engine_bytes == 2 * (100 + 10 + 10) * 10
    assert report.unshared_bytes == 4 * 110 * 10


def test_tables_show_every_request(report: Report) -> None:
    out = StringIO()
    show(report, Console(file=out, width=120))
    assert out.getvalue().count("yes") == len(report.rows)
    report.rows[0] = replace(report.rows[0], text="other")
    show(report, Console(file=out, width=120))
    assert "NO" in out.getvalue()


def test_prompts_differ_only_in_their_questions() -> None:
    prompts = [messages(question)[0]["content"] for question in QUESTIONS]
    assert len({prompt.partition("one sentence.")[0] for prompt in prompts}) == 1
    assert len(set(prompts)) == 5


def test_shared_tokens_are_a_common_prefix() -> None:
    assert shared_tokens([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert shared_tokens([[1, 2], [1, 2]]) == 2
    assert shared_tokens([[1], [2]]) == 0


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_ends_with_its_descendants(tmp_path: Path, interrupted: bool) -> None:
    """Also when the child ignores the signal and outlives its parent."""
    pids = tmp_path / "pids"
    script = (
        f'(trap "" TERM; exec sleep 300) & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait'
    )
    try:
        with Process("sh", ["sh", "-c", script], tmp_path / "log", stop_timeout=5) as process:
            process.wait_ready(pids.exists, 60)
            if interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert interrupted
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert os.getpid() not in started
    deadline = time.monotonic() + 30
    while any(map(_is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_is_running, started))


def test_a_process_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo what went wrong; exit 3"]
    with (
        Process("sh", command, tmp_path / "log") as process,
        pytest.raises(ProcessFailed, match=r"status 3\n.*\nwhat went wrong"),
    ):
        process.wait_ready(lambda: False, 10)


def test_a_log_says_each_step_and_again_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, highlight=False, width=40))
    monkeypatch.setattr(progress, "AGAIN", 0.01)
    what = "engine A: vLLM starts, and says how far it is in .demo/engine-A.log"
    with progress.step(what):
        while out.getvalue().count("\n") < 3:
            time.sleep(0.001)
    first, *again, last = out.getvalue().splitlines()
    assert re.fullmatch(rf" *\d+ s · {what} …", first)
    assert len(again) >= 2
    for line in again:
        assert re.fullmatch(rf" *\d+ s · {what} … for \d+ s", line)
    assert re.fullmatch(rf" *\d+ s ✓ {what} [0-9.]+ s", last)
    with pytest.raises(ProcessFailed), progress.step("engine B: vLLM starts"):
        raise ProcessFailed
    assert "✓ engine B" not in out.getvalue()


def test_what_is_said_goes_to_standard_error() -> None:
    """So that --json has standard output for itself."""
    assert progress.console.stderr
