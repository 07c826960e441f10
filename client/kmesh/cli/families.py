"""``kmesh families``: which spans are kept as recipes over which, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.tree import Tree

from kmesh import errors
from kmesh.cli import render
from kmesh.cli.app import AsJson, app, connected
from kmesh.families import Description
from kmesh.v1 import families_pb2


@app.command()
def families(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Draw this family: its name, or its number with a #.")
    ] = "",
    members: Annotated[int, typer.Option(min=1, help="At most so many members.")] = 50,
    device: Annotated[
        str, typer.Option(help="Count spans on this GPU (UUID), not those in host memory.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Lists families, or draws one: its base, its members, dense and stored bytes."""
    with connected(context) as tool:
        found = tool.families(device)
        if not name:
            if as_json:
                render.print_json({"families": [family_json(family) for family in found]})
            else:
                _print(found)
            return
        named = [family for family in found if name in (family.name, f"#{family.id}")]
        if not named:
            raise errors.NotFound(f"there is no family {name!r}", field="family")
        if len(named) > 1:
            numbers = ", ".join(f"#{family.id} ({family.tenant})" for family in named)
            raise typer.BadParameter(f"several tenants have a family {name!r}: {numbers}")
        described = tool.family(named[0].id, members, device)
    if as_json:
        document = family_json(described.family)
        document["of_members"] = [member_json(member) for member in described.members]
        render.print_json(document)
    else:
        render.console().print(_tree(described))


def family_json(family: families_pb2.FamilyInfo) -> render.Json:
    """One family, by the keys of ``docs/cli.md``."""
    return {
        "family": family.name,
        "id": family.id,
        "tenant": family.tenant,
        "namespace": family.namespace.hex(),
        "dtype": family.dtype,
        "head_dim": family.head_dim,
        "shards": [
            {
                "layers": [shard.layer_begin, shard.layer_end],
                "heads": [shard.head_begin, shard.head_end],
            }
            for shard in family.shards
        ],
        "base_spans": family.base_spans,
        "base_stored": family.base_stored,
        "base_bytes": family.base_bytes,
        "members": family.members,
        "spans": family.spans,
        "mirrors": family.mirrors,
        "dense_bytes": family.dense_bytes,
        "stored_bytes": family.stored_bytes,
        "recipe_bytes": family.recipe_bytes,
        "used_bytes": family.used_bytes,
        "age_ms": family.age_ms,
        "devices": list(family.devices),
    }


def member_json(member: families_pb2.MemberInfo) -> render.Json:
    """One member, by the keys of ``docs/cli.md``."""
    return {
        "member": member.name,
        "parent": member.parent,
        "master": member.master,
        "spans": member.spans,
        "base": member.base,
        "mirrors": member.mirrors,
        "dense": member.dense,
        "waiting": member.waiting,
        "refused": member.refused,
        "refusal": member.refusal,
        "dense_bytes": member.dense_bytes,
        "stored_bytes": member.stored_bytes,
        "recipe_bytes": member.recipe_bytes,
        "used_bytes": member.used_bytes,
    }


def _print(found: Sequence[families_pb2.FamilyInfo]) -> None:
    columns = (
        *(">id", "family", "tenant", ">members", ">base", ">spans", ">mirrors"),
        *(">dense", ">stored", ">recipes", ">in memory", ">of dense", ">age", ">GPUs"),
    )
    rows = [
        (
            str(family.id),
            _plain(family.name),
            family.tenant,
            f"{family.members:,}",
            f"{family.base_stored} of {family.base_spans}",
            f"{family.spans:,}",
            f"{family.mirrors:,}",
            render.size(family.dense_bytes),
            render.size(family.stored_bytes),
            render.size(family.recipe_bytes),
            render.size(family.used_bytes),
            _share(family.used_bytes, family.dense_bytes),
            render.age(family.age_ms),
            str(len(family.devices) or "–"),
        )
        for family in found
    ]
    console = render.console()
    if rows:
        console.print(render.table("families", columns, rows))
    else:
        console.print("no family is declared")


def _tree(described: Description) -> Tree:
    family = described.family
    head = f"{_plain(family.name)} (#{family.id}, tenant {family.tenant}): "
    tree = Tree(head + _bytes(family))
    base = f"base: {family.base_stored} of {family.base_spans} spans stored"
    tree.add(f"{base}, {render.size(family.base_bytes)}")
    drawn: dict[str, Tree] = {}
    for member in described.members:
        line = f"{_plain(member.name)}{' (master)' if member.master else ''}: "
        line += _bytes(member)
        counts = [
            f"{getattr(member, kind)} {kind}"
            for kind in ("base", "mirrors", "dense", "waiting")
            if getattr(member, kind)
        ]
        line += f"; of {member.spans} spans {', '.join(counts) or 'none'}"
        if member.refused:
            line += f" ({member.refused} stay dense: {_plain(member.refusal)})"
        drawn[member.name] = drawn.get(member.parent, tree).add(line)
    for device in family.devices:
        tree.add(f"also on {device}: see --device")
    left = family.members - len(described.members)
    if left > 0:
        tree.add(f"… and {left:,} more")
    return tree


def _bytes(of: families_pb2.FamilyInfo | families_pb2.MemberInfo) -> str:
    """A daemon of before this was counted says nothing of memory."""
    dense, used = of.dense_bytes, of.used_bytes or of.stored_bytes
    text = f"{render.size(dense)} dense, {render.size(of.stored_bytes)} stored"
    if of.recipe_bytes:
        text += f" ({render.size(of.recipe_bytes)} of recipes)"
    return f"{text}, {render.size(used)} in memory, {_share(used, dense)}"


def _share(stored: int, dense: int) -> str:
    return f"{100 * stored / dense:.1f} %" if dense else "–"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
