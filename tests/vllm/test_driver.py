"""What tests of engines are made with."""

from __future__ import annotations

from driver import VOCABULARY, tokens


def test_prompts_of_different_seeds_share_no_prefix() -> None:
    seeds = [seed + turn * VOCABULARY for turn in range(3) for seed in range(0, VOCABULARY, 7)]
    assert len({tuple(tokens(16, seed)) for seed in seeds}) == len(seeds)
    assert all(3 <= token < VOCABULARY + 3 for token in tokens(500, 4100))
