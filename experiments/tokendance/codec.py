"""Encodes the workloads, and writes what came out: a bundle, and ``codec.json`` with all sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from experiments import checkpoint, profile
from experiments.profile import CHECKPOINT, GENERATED, Profile
from experiments.tokendance.bundle import Bundle, described
from experiments.tokendance.cutting import Parts
from experiments.tokendance.workload import Member, Shape, Workload
from kmesh.codec import Base, Encoder, Form, Segment

if TYPE_CHECKING:
    from experiments.tokendance.captured import Captured

FORMS = {"addressable": Form.ADDRESSABLE, "cold": Form.COLD}


def controlled(config: Profile) -> Workload:
    """Five prompts of 512 tokens, of which 416 are the same text, elsewhere in each."""
    own = config.prompt_tokens - config.shared_tokens
    return Workload(shape_of(config), [config.shared_tokens], own, config.prompts, config.seed)


def long(config: Profile) -> Workload:
    """Two prompts of 16,384 tokens with the same share of own ones; of one layer, to stay small."""
    tokens = 16384
    own = tokens * (config.prompt_tokens - config.shared_tokens) // config.prompt_tokens
    return Workload(shape_of(config, layers=1), [tokens - own], own, 2, config.seed + 1)


def gathered(config: Profile) -> Workload:
    """Ten prompts of 20,000 tokens: 5.7 % are own, the rest is four texts in another order."""
    return Workload(shape_of(config, layers=1), [4715] * 4, 1140, 10, config.seed + 2)


def captured(config: Profile) -> Captured:
    """Five ragged prompts with the state of a checkpoint, one passage in all of them."""
    from experiments.tokendance.captured import Captured

    return Captured(checkpoint.path_of(config), config.shared_tokens, config.prompts)


def shape_of(config: Profile, layers: int = 0) -> Shape:
    return Shape(layers or config.layers, config.kv_heads, config.head_dim, config.rope_theta)


Maker: TypeAlias = "Callable[[Profile], Workload | Captured]"
Step: TypeAlias = Callable[[str], AbstractContextManager[object]]

WORKLOADS: dict[str, dict[str, Maker]] = {
    GENERATED: {"controlled": controlled, "long": long, "gathered": gathered},
    CHECKPOINT: {"captured": captured},
}


class Run:
    """One run of the codec over all workloads of a profile.

    Args:
        step: says, while the block lasts, what is done in it.
    """

    def __init__(self, config: Profile, folder: Path, step: Step = nullcontext) -> None:
        self._config = config
        self._step = step
        self._bundle = Bundle(folder)
        self._segments: dict[str, Any] = {}
        self._arms: dict[str, Any] = {}

    def run(self, workloads: Mapping[str, Maker] | None = None) -> dict[str, Any]:
        """Encodes everything, or those workloads; returns what ``codec.json`` holds."""
        for name, make in (workloads or WORKLOADS[self._config.model]).items():
            with self._step(f"{name}: prompts and state"):
                workload = make(self._config)
            base = self._base(name, workload)
            if isinstance(workload, Workload) and name != "controlled":
                self._arm(name, name, base, workload, workload.siblings(0))
                continue
            for percent in self._config.recompute_percent:
                arm = f"recompute-{percent}"
                self._arm(arm, name, base, workload, workload.siblings(percent))
            if isinstance(workload, Workload):
                self._arm("primer", name, base, workload, [workload.primer()])
                members = workload.siblings(0)
                self._arm("by-content", name, base, workload, members, by_content=True)
            else:
                self._arm("computed", name, base, workload, workload.computed())
                self._spans(name, workload)
        return self._close()

    def run_spans(self, name: str, workload: Workload | Captured) -> dict[str, Any]:
        """As ``run``, only the arm of siblings in spans."""
        self._spans(name, workload)
        return self._close()

    def _close(self) -> dict[str, Any]:
        result = {
            "executed_kv_reuse": self._config.model != GENERATED,
            "segments": self._segments,
            "arms": self._arms,
        }
        self._bundle.document("codec", result)
        self._bundle.close(
            {
                "format": "docs/recipe-format.md",
                "profile": self._config.profile,
                "seed": self._config.seed,
                "checkpoint": Path(self._config.checkpoint).name,
                "checkpoint_digest": self._config.checkpoint_digest,
                "source": profile.source(),
                "versions": profile.versions(),
                "executed_kv_reuse": result["executed_kv_reuse"],
            }
        )
        return result

    def _spans(self, name: str, workload: Workload | Captured) -> None:
        parts = Parts(workload.shape, workload.segments)
        base = self._base(f"{name}-spans", parts)
        members = parts.members(workload.siblings(0))
        self._arm("spans", f"{name}-spans", base, parts, members)

    def _base(self, name: str, workload: Workload | Captured | Parts) -> Base:
        """A base, and how it is kept: dense, or each segment as a recipe without segments."""
        base = Base(Segment(one.description, one.state) for one in workload.segments)
        cold = Encoder(Base(), form=Form.COLD)
        tensors: dict[str, Any] = {}
        with self._step(f"{name}: base"):
            for one in workload.segments:
                tensors[one.name] = one.state
                recipe = cold.encode(one.description, one.state).data
                tensors[f"cold/{one.name}"] = np.frombuffer(recipe, dtype=np.uint8)
                self._segments[f"{name}/{one.name}"] = {
                    "span": described(one.description),
                    "dense_bytes": one.state.nbytes,
                    "cold_bytes": len(recipe),
                }
        self._bundle.tensors(f"base-{name}", tensors)
        return base

    def _arm(
        self,
        arm: str,
        base_name: str,
        base: Base,
        workload: Workload | Captured | Parts,
        members: Iterable[Member],
        *,
        by_content: bool = False,
    ) -> None:
        encoders = {
            name: Encoder(
                base, workload.shape.rotary, block_tokens=self._config.block_tokens, form=form
            )
            for name, form in FORMS.items()
        }
        dense, recipes, rows = {}, {}, {}
        with self._step(f"{base_name}: {arm}"):
            for member in members:
                provenance = () if by_content else member.provenance
                row = rows[member.name] = _dense(member)
                dense[member.name] = member.state
                for name, encoder in encoders.items():
                    began = time.perf_counter()
                    encoded = encoder.encode(member.description, member.state, provenance)
                    seconds = time.perf_counter() - began
                    recipes[f"{name}/{member.name}"] = np.frombuffer(encoded.data, dtype=np.uint8)
                    keys, values = encoded.recipe.plane_bytes()
                    row[name] = {
                        "bytes": len(encoded.data),
                        "k_bytes": keys,
                        "v_bytes": values,
                        "table_bytes": len(encoded.data) - keys - values,
                        "ops": len(encoded.recipe.ops),
                        "lists": len(encoded.recipe.lists),
                        "depends_on_base": encoded.depends,
                        "seconds": round(seconds, 6),
                    }
        self._bundle.tensors(f"members-{arm}", dense)
        self._bundle.tensors(f"recipes-{arm}", recipes)
        self._arms[arm] = {
            "base": base_name,
            "segments": [f"{base_name}/{one.name}" for one in workload.segments],
            "members": rows,
        }


def _dense(member: Member) -> dict[str, Any]:
    state = member.state
    return {
        "span": described(member.description),
        "dense_bytes": state.nbytes,
        "dense_k_bytes": state[:, 0].nbytes,
        "dense_v_bytes": state[:, 1].nbytes,
        "computed_tokens": member.computed,
        **member.seen,
    }


def totals(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each arm: dense bytes, stored bytes of both forms, and their ratios.

    The base counts once, if any member needs it.
    """
    summed = {}
    for name, arm in result["arms"].items():
        rows = arm["members"].values()
        dense = sum(row["dense_bytes"] for row in rows)
        segments = [result["segments"][one] for one in arm["segments"]]
        addressable, cold = (
            sum(row[form]["bytes"] for row in rows)
            + sum(one[kept] for one in segments) * any(row[form]["depends_on_base"] for row in rows)
            for form, kept in (("addressable", "dense_bytes"), ("cold", "cold_bytes"))
        )
        summed[name] = {
            "members": len(arm["members"]),
            "dense": dense,
            "addressable": addressable,
            "cold": cold,
            "addressable_ratio": addressable / dense,
            "cold_ratio": cold / dense,
        }
    return summed
