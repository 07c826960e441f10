"""Five siblings: one long document, each with a question of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).with_name("data") / "handbook.md"

QUESTIONS = (
    "What is the name of the ferry, and where was she built?",
    "How many life jackets for children are on board?",
    "What happened to the tablet in 2018?",
    "How long does the boat wait for the doctor?",
    "Who is the harbour master, and on which channel does she answer?",
)


def messages(question: str) -> list[dict[str, str]]:
    """One chat: the document, then the question."""
    content = f"{DOCUMENT.read_text()}\n\nAnswer from the handbook in one sentence. {question}"
    return [{"role": "user", "content": content}]


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all prompts have in common."""
    columns = enumerate(zip(*prompts, strict=False))
    shortest = min(len(prompt) for prompt in prompts)
    return next((at for at, column in columns if len(set(column)) > 1), shortest)
