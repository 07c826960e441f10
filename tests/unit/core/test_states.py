"""docs/states.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kmesh_spand.core.counters import COUNTERS
from kmesh_spand.core.flight import FLIGHT_TRANSITIONS, FlightState, Turn
from kmesh_spand.core.states import (
    EVICTABLE,
    FILE_EVICTABLE,
    FILE_KEYED,
    FILE_SHOWN,
    FILE_TRANSITIONS,
    KEYED,
    STORED,
    TRANSITIONS,
    FileState,
    FileTrigger,
    State,
    Trigger,
)

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "states.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading, without its head."""
    after = TEXT.split(f"\n{heading}\n", 1)[1]
    first = re.search(r"(?:^\|.*\|$\n?)+", after, re.MULTILINE)
    assert first
    lines = first.group().splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_transitions_are_those_of_the_code() -> None:
    written = {
        (State[state], Trigger(trigger)): State[after]
        for state, trigger, after, _ in table("### Transitions")
    }
    assert written == TRANSITIONS


def test_states_are_described_as_they_are() -> None:
    rows = {State[row[0]]: row for row in table("## Span")}
    assert set(rows) == set(State)
    for state, (_, ranged, found, record, _, evictable, _) in rows.items():
        assert (ranged == "yes") == (state not in (State.FREE, State.ALIAS))
        assert (found != "no") == (state in KEYED or state is State.ALIAS)
        assert (record == "yes") == (state in STORED or state is State.ALIAS)
        assert (evictable != "no") == (state in EVICTABLE)


def test_every_state_can_be_left_and_every_trigger_is_used() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert set(TRANSITIONS.values()) == set(State)
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_flights_transitions_are_those_of_the_code() -> None:
    written = {
        (FlightState[state], Turn(turn)): FlightState[after]
        for state, turn, after, _ in table("## Flight")
    }
    assert written == FLIGHT_TRANSITIONS
    assert {state for state, _ in FLIGHT_TRANSITIONS} == set(FlightState)
    assert {turn for _, turn in FLIGHT_TRANSITIONS} == set(Turn)


def test_files_transitions_are_those_of_the_code() -> None:
    written = {
        (FileState[state], FileTrigger(trigger)): FileState[after]
        for state, trigger, after, _ in table("### Files' transitions")
    }
    assert written == FILE_TRANSITIONS
    assert {state for state, _ in FILE_TRANSITIONS} == set(FileState)
    assert {trigger for _, trigger in FILE_TRANSITIONS} == set(FileTrigger)


def test_files_states_are_described_as_they_are() -> None:
    rows = {FileState[row[0]]: row for row in table("## File")}
    assert set(rows) == set(FileState)
    for state, (_, found, shown, removed, _) in rows.items():
        if state is not FileState.ALIAS:
            assert (found == "yes") == (state in FILE_KEYED)
            assert (shown == "yes") == (state in FILE_SHOWN)
        assert (removed == "yes") == (state in FILE_EVICTABLE)


def test_counters_are_listed() -> None:
    names = [name for row in table("## Counters") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(names) == sorted(COUNTERS)
