"""What a benchmark hands over: rows of raw samples, and how a figure follows from them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Significant digits of a sample that is written down; figures follow from these.
DIGITS = 5


def p99(values: Sequence[float]) -> float:
    """The smallest value that at least 99 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


#: How a row's figure follows from its first one to three series, by name.
REDUCE: dict[str, Callable[..., float]] = {
    "median": lambda a, *_: statistics.median(a),
    "p99": lambda a, *_: p99(a),
    "max": lambda a, *_: max(a),
    # Both sides were measured in turn, so that entry i of each saw the same machine.
    "median of a/b": lambda a, b, *_: _pairs(a, b),
    "median a / median b": lambda a, b, *_: statistics.median(a) / statistics.median(b),
    "sum a / sum b": lambda a, b, *_: sum(a) / sum(b),
    "median a - median b": lambda a, b, *_: statistics.median(a) - statistics.median(b),
    "median a - median b - 1.1 median c": lambda a, b, c, *_: (
        statistics.median(a) - statistics.median(b) - 1.1 * statistics.median(c)
    ),
    "min / mean": lambda a, *_: min(a) / statistics.fmean(a),
}


@dataclass(slots=True)
class Row:
    """One figure.

    Attributes:
        name: as in ``targets.toml``.
        unit: of the figure.
        reduce: key of ``REDUCE``; empty if the figure can't be had here, and ``note`` says why.
        samples: raw series by name, in the order that ``reduce`` takes them; further ones are
            shown only.
        note: what the figure needs to be understood, with sizes.
        interval: bounds of the figure's 95 % bootstrap interval, where one was asked for.
    """

    name: str
    unit: str
    reduce: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.samples = {name: [_round(v) for v in values] for name, values in self.samples.items()}

    @property
    def value(self) -> float | None:
        """The figure; None where it can't be had."""
        return REDUCE[self.reduce](*self.samples.values()) if self.reduce else None

    def to_json(self) -> dict[str, Any]:
        """For the result file: the figure, each series' summary, and every sample."""
        return {
            "row": self.name,
            "value": self.value,
            "unit": self.unit,
            "reduce": self.reduce,
            "note": self.note,
            "interval": list(self.interval) if self.interval else None,
            "series": {
                name: {
                    "n": len(values),
                    "median": statistics.median(values),
                    "p99": p99(values),
                    "values": values,
                }
                for name, values in self.samples.items()
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """Inverse of ``to_json``; the figure is computed again."""
        return cls(
            data["row"],
            data["unit"],
            data["reduce"],
            {name: series["values"] for name, series in data["series"].items()},
            data["note"],
            tuple(data["interval"]) if data["interval"] else None,
        )


def unavailable(name: str, unit: str, why: str) -> Row:
    """A figure that this machine does not give."""
    return Row(name, unit, "", note=why)


def bootstrap(
    ours: Sequence[float], theirs: Sequence[float], rounds: int = 2000
) -> tuple[float, float]:
    """95 % interval of ``median of a/b``, by drawing pairs anew; the same for the same samples."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(1)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return _round(drawn[rounds * 25 // 1000]), _round(drawn[rounds * 975 // 1000])


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
