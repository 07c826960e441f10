"""``kmesh families``, and what other commands say of mirrors."""

from __future__ import annotations

import re
from typing import Any

from daemon_process import Daemon, wait_for
from household import Household
from test_cli import as_json, kmesh
from test_cli_operator import explained

from kmesh.families import Family
from kmesh.layout import TILE_BYTES
from kmesh.session import Role, Session


def whole_tiles(span: dict[str, Any]) -> int:
    """Memory that a span takes."""
    return -(-int(span["length"]) // TILE_BYTES) * TILE_BYTES


def test_families_are_listed_and_drawn(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    assert "no family is declared" in kmesh("families", **where).stdout
    household = Household()
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        household.settle(session)
        household.join(session, household.primer)
        session.families.fork("round", "member-1", "a [child]")
        wait_for(lambda: session.families.describe("round").family.mirrors == 6)
        wait_for(lambda: spand.status().counters["spans_encode_refused"] == 4)
    (listed,) = as_json("families", **where)["families"]
    explained(listed)
    assert (listed["family"], listed["members"], listed["mirrors"]) == ("round", 4, 6)
    assert listed["stored_bytes"] < listed["dense_bytes"]
    drawn = as_json("families", "round", **where)
    of = {member["member"]: member for member in drawn["of_members"]}
    explained(of["member-0"])
    assert of["member-0"]["master"]
    assert (of["a [child]"]["parent"], of["a [child]"]["mirrors"]) == ("member-1", 3)
    assert of["member-1"]["refused"] == 2
    human = kmesh("families", "round", **where).stdout
    assert re.search(r"B stored \(\S+ KiB of recipes\), \S+ MiB in memory, \d+\.\d %", human)
    assert "member-0 (master)" in human
    assert re.search(r"member-1: .* of 5 spans 3 mirrors, 2 dense \(2 stay dense: ", human)
    assert human.index("member-1: ") < human.index("a [child]: ") < human.index("member-2: ")
    few = kmesh("families", "round", "--members", "1", **where).stdout
    assert "and 3 more" in few
    human = kmesh("families", **where).stdout
    assert re.search(rf"{listed['id']} +round .* 5 of 5 +10 +6 ", human), human
    refused = kmesh("families", "square", **where)
    assert refused.returncode == 4
    assert "there is no family 'square'" in refused.stderr


def test_names_of_several_tenants(spand: Daemon) -> None:
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        household = Household()
        one = session.families.declare(household.family)
        fields = {name: getattr(household.family, name) for name in Family.__slots__}
        session.families.declare(Family(**{**fields, "salt": b"s" * 32}))
    where = {"socket_dir": spand.socket_dir}
    refused = kmesh("families", "round", **where)
    assert refused.returncode == 2
    assert "several tenants" in refused.stderr
    assert as_json("families", f"#{one.id}", **where)["id"] == one.id


def test_other_commands_know_mirrors(spand: Daemon) -> None:
    household = Household()
    where = {"socket_dir": spand.socket_dir}
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        household.settle(session)
        wait_for(lambda: session.families.describe("round").family.mirrors == 6)
    status = as_json("status", **where)
    assert (status["families"], status["mirrors"]) == (1, 6)
    assert status["mirror_bytes"] < status["mirror_used_bytes"] < status["mirror_dense_bytes"]
    said = kmesh("status", **where).stdout
    took = r"6 mirrors take 384\.0 KiB instead of 768\.0 KiB, \S+ KiB of it recipes"
    assert re.search(took, said)
    spans = as_json("ls", **where)["spans"]
    mirrors = [span for span in spans if span["dense_length"]]
    assert len(mirrors) == 6
    assert status["mirror_bytes"] == sum(span["length"] for span in mirrors)
    assert status["mirror_used_bytes"] == sum(whole_tiles(span) for span in mirrors)
    (family,) = as_json("families", **where)["families"]
    assert family["recipe_bytes"] == status["mirror_bytes"]
    assert family["stored_bytes"] == sum(span["length"] for span in spans)
    assert family["used_bytes"] == sum(map(whole_tiles, spans))
    assert family["used_bytes"] == sum(slab["used"] for slab in status["slabs"])
    of = {m["member"]: m for m in as_json("families", "round", **where)["of_members"]}
    assert sum(m["recipe_bytes"] for m in of.values()) == status["mirror_bytes"]
    assert all(m["stored_bytes"] < m["used_bytes"] < m["dense_bytes"] for m in of.values())
    assert all(span["bases"] and span["length"] < span["dense_length"] for span in mirrors)
    assert sum(span["mirrors"] > 0 for span in spans) == status["base_spans"]
    human = kmesh("ls", **where).stdout
    assert re.search(r"recipe of 128\.0 KiB over [12] ", human), human
    assert re.search(r"base of \d", human)
    base = next(span["key"] for span in spans if span["mirrors"])
    answer = as_json("evict", "--key", base, "--yes", "--drop-mirrors", **where)
    assert (answer["held"], answer["spans"]) == (1, 0)
    spand.wait_status(lambda s: s.counters["spans_discarded"] == 1)
