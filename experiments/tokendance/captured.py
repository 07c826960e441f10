"""Siblings with the state of a real model: one document's passage inside prompts of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from demo.prompts import DOCUMENT, QUESTIONS
from experiments.tokendance.reference import Computed, Reference, divergence
from experiments.tokendance.workload import (
    BLOCKS,
    Member,
    Prompt,
    SegmentState,
    State,
    check_unaligned,
    describe,
    turned,
)
from kmesh.codec import Provenance
from kmesh.kernels.rotary import Rotary
from kmesh.keys import Namespace


class CapturedShape:
    """As ``workload.Shape``, of a checkpoint."""

    def __init__(self, reference: Reference, model: str) -> None:
        self.rotary: Rotary = reference.rotary
        self.layers, self.heads = reference.layers, reference.heads
        self.head_dim = reference.head_dim
        self.namespace = Namespace(
            model,
            "not digested",
            "bfloat16",
            layers=self.layers,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            rope=json.dumps(reference.rope, sort_keys=True),
        ).digest()


class Captured:
    """Ragged prompts: own notes, the shared passage, an own question. The first one primes.

    Args:
        path: of the checkpoint.
        shared: tokens of the passage.
        prompts: how many, at most as many as there are questions.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, path: str, shared: int, prompts: int) -> None:
        self.path = path
        self._reference = Reference.load(path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.shape = CapturedShape(self._reference, Path(path).name)
        text = self._tokens(DOCUMENT.read_text())
        self._passage, rest = text[:shared], text[shared:]
        self.prompts = [self._prompt(number, rest) for number in range(prompts)]
        check_unaligned(self.prompts)
        primer, start = self._full(0), self.prompts[0].starts[0]
        state = np.ascontiguousarray(primer.state[:, :, :, start : start + shared])
        described = describe(self.shape, self._passage, start, "segment")
        self.segments = [SegmentState("segment-0", described, state)]

    def rebase(self, state: State) -> None:
        """Siblings are recovered from this state of the passage from now on, whoever computed it
        in the primer's frame."""
        (segment,) = self.segments
        if state.shape != segment.state.shape:
            raise ValueError(f"state of {state.shape}, not of {segment.state.shape}")
        self.segments = [replace(segment, state=state)]

    @property
    def own(self) -> list[int]:
        """Own tokens of each prompt."""
        return [len(prompt.tokens) - len(self._passage) for prompt in self.prompts]

    def siblings(self, percent: int, *, against_prefill: bool = True) -> Iterator[Member]:
        """Recovered, with that share of the shared tokens computed anew.

        Args:
            against_prefill: say how far they are from what computing everything gives.
        """
        for number in range(1, len(self.prompts)):
            tokens, start = self.prompts[number].tokens, self.prompts[number].starts[0]
            (segment,) = self.segments
            delta = start - segment.description.position
            count = len(self._passage)
            shape = (*segment.state.shape[:3], len(tokens), segment.state.shape[4])
            cached = np.zeros(shape, dtype=np.uint16)
            part = cached[:, :, :, start : start + count]
            part[:, 0] = turned(segment.state[:, 0], self.shape.rotary, delta)
            part[:, 1] = segment.state[:, 1]
            own = np.ones(len(tokens), dtype=np.bool_)
            own[start : start + count] = False
            recovered = self._reference.recover(tokens, cached, own, count * percent // 100)
            yield self._member(number, recovered, self._full(number) if against_prefill else None)

    def computed(self) -> Iterator[Member]:
        """The same siblings, all of whose tokens were computed; told where they could share."""
        for number in range(1, len(self.prompts)):
            full = self._full(number)
            yield self._member(number, full, full)

    @cached_property
    def _prefilled(self) -> dict[int, Computed]:
        return {}

    def _full(self, number: int) -> Computed:
        if number not in self._prefilled:
            self._prefilled[number] = self._reference.prefill(self.prompts[number].tokens)
        return self._prefilled[number]

    def _member(self, number: int, computed: Computed, full: Computed | None) -> Member:
        prompt, (segment,) = self.prompts[number], self.segments
        start, frame = prompt.starts[0], segment.description
        told = Provenance(start, frame.tokens, frame.key, 0, start - frame.position)
        first = int(computed.log_probabilities.argmax())
        seen: dict[str, Any] = {"first_token": first}
        if full is not None:
            seen["divergence_from_full_prefill"] = round(divergence(full, computed), 6)
            seen["same_first_token"] = int(full.log_probabilities.argmax()) == first
        return Member(
            f"member-{number}",
            describe(self.shape, prompt.tokens, 0, "member"),
            computed.state,
            (told,),
            computed.tokens,
            seen,
        )

    def _prompt(self, number: int, rest: npt.NDArray[np.uint32]) -> Prompt:
        """Notes end so that passages begin at places that differ modulo every block."""
        length = 3 * BLOCKS[0] + (BLOCKS[0] + 1) * number
        notes = rest[256 * number : 256 * number + length]
        question = self._tokens(f"\n\nAnswer in one sentence. {QUESTIONS[number]}\n")
        return Prompt(np.concatenate([notes, self._passage, question]), (length,))

    def _tokens(self, text: str) -> npt.NDArray[np.uint32]:
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array(ids, dtype=np.uint32)
