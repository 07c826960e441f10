"""What a round saw, and whether that is what it should be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.tokendance import kept

DENSE, RECIPES = "dense spans", "recipes"
#: A prompt's last tokens are computed: those behind the last whole block that is stored.
MIN_RESTORED = 0.9


@dataclass(frozen=True, slots=True)
class Answer:
    """One request to one engine.

    Attributes:
        form: what the sibling was kept as then.
        prompt_tokens, computed, restored: tokens of the prompt, by source as the engine counts.
        tokens: ids of what the engine said, greedily.
    """

    engine: str
    member: str
    form: str
    prompt_tokens: int
    computed: int
    restored: int
    tokens: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Report:
    """A whole round.

    Attributes:
        first: the reference's own next token after each sibling.
        answers: all requests for siblings, in order.
        same: spans of siblings that a reader got back bit for bit while they were recipes.
        held: as ``kept.sizes`` gives it.
        after: what the daemon's status said when the engines had read all recipes.
    """

    model: str
    first: dict[str, int] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    same: int = 0
    held: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def pairs(self) -> list[tuple[Answer, Answer]]:
        """Each answer out of recipes, behind the same engine's out of dense spans."""
        dense = {(one.engine, one.member): one for one in self.answers if one.form == DENSE}
        return [
            (dense[who], one)
            for one in self.answers
            if one.form == RECIPES and (who := (one.engine, one.member)) in dense
        ]

    def problems(self) -> list[str]:
        """Where the round fell short, one sentence each."""
        found = kept.problems(self.held)
        spans = len(self.held["spans"])
        if self.same != spans:
            found.append(f"{self.same} of {spans} spans came back bit for bit")
        pairs = self.pairs()
        if not pairs or 2 * len(pairs) != len(self.answers):
            found.append("not every request was made of both forms")
        for dense, recipes in pairs:
            name = f"{recipes.engine}, {recipes.member}"
            if not dense.tokens or dense.tokens != recipes.tokens:
                found.append(f"{name}: {recipes.text!r} out of recipes is not {dense.text!r}")
            for one in (dense, recipes):
                if one.computed + one.restored != one.prompt_tokens:
                    found.append(f"{name}: tokens computed and restored are not the prompt's")
                if one.restored < MIN_RESTORED * one.prompt_tokens:
                    found.append(
                        f"{name}: {one.restored} of {one.prompt_tokens} tokens restored out of"
                        f" {one.form}"
                    )
        before = self.held["status"]
        if self.after["mirrors"] != before["mirrors"] or self.after["counters"]["densified"]:
            found.append("an engine had recipes made dense instead of reading them")
        if self.after["counters"]["corrupt"]:
            found.append(f"the daemon found {self.after['counters']['corrupt']} spans corrupt")
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, raw figures first."""
        return {
            "model": self.model,
            "first": self.first,
            "answers": [asdict(answer) for answer in self.answers],
            "same": self.same,
            "held": self.held,
            "after": self.after,
            "totals": kept.totals(self.held),
            "problems": self.problems(),
        }
