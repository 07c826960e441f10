"""Namespaces and key chains: golden vectors, extension, and what must change a key.

``tests/data/keys.json`` was written by ``reference`` below, which shares no code with
``kmesh.keys``. To write it again: ``python tests/unit/test_keys.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kmesh.keys import (
    KEY_BYTES,
    Extra,
    KeyChain,
    Namespace,
    chain_root,
    salt_digest,
    segment_root,
)

VECTORS = Path(__file__).parents[1] / "data" / "keys.json"

NAMESPACE = {
    "model": "org/model-7b",
    "weights": "ab" * 32,
    "dtype": "bfloat16",
    "layers": "28",
    "kv_heads": "4",
    "head_dim": "128",
    "rope": '{"theta":1000000.0}',
    "adapter": "",
    "salt": "",
    "reset": "",
}


def inputs() -> list[dict[str, Any]]:
    """Requests of the golden vectors; every feature of a key is in one of them."""
    words = [(i * 2654435761) & 0xFFFFFFFF for i in range(300)]
    base: dict[str, Any] = {"namespace": NAMESPACE, "span": 64, "sub": 16, "extras": []}
    return [
        {"name": "nothing", **base, "tokens": []},
        {"name": "one span less a token", **base, "tokens": words[:63]},
        {"name": "one span", **base, "tokens": words[:64]},
        {"name": "spans and a tail", **base, "tokens": words[:183]},
        {"name": "small spans", **base, "span": 32, "sub": 8, "tokens": words[:101]},
        {
            "name": "salt and adapter",
            **base,
            "namespace": {**NAMESPACE, "salt": "0f" * 32, "adapter": "cd" * 32},
            "tokens": words[:128],
        },
        {
            "name": "not ASCII",
            **base,
            "namespace": {**NAMESPACE, "model": "modèle-é"},
            "tokens": words[:64],
        },
        {
            "name": "extras",
            **base,
            "extras": [[70, 80, "beef"], [0, 4, "01"], [150, 1, ""]],
            "tokens": words[:200],
        },
    ]


def reference(case: dict[str, Any]) -> dict[str, Any]:
    """The keys of a case, written down from docs, not from ``kmesh.keys``."""

    def u64(n: int) -> bytes:
        return n.to_bytes(8, "little")

    blob = b""
    for name in NAMESPACE:
        for text in (name, case["namespace"][name]):
            blob += u64(len(text.encode())) + text.encode()
    digest = blake3(blob, derive_key_context="kmesh 2026-11 namespace digest v1").digest()
    root = blake3(digest, derive_key_context="kmesh 2026-11 prefix chain root v1").digest()

    def key(parent: bytes, begin: int, end: int) -> bytes:
        data = parent
        for token in case["tokens"][begin:end]:
            data += token.to_bytes(4, "little")
        inside = sorted(e for e in case["extras"] if e[0] < end and e[0] + e[1] > begin)
        if inside:
            data += b"\xff\xff\xff\xff"
        for start, length, identity in inside:
            content = bytes.fromhex(identity)
            data += (start - begin).to_bytes(8, "little", signed=True) + u64(length)
            data += len(content).to_bytes(4, "little") + content
        return blake3(data).digest()

    def chain(root: bytes) -> tuple[list[str], list[str]]:
        """Of all tokens, and of what is left behind the last full span."""
        keys: list[bytes] = []
        span, sub, count = case["span"], case["sub"], len(case["tokens"])
        for begin in range(0, count - span + 1, span):
            keys.append(key(keys[-1] if keys else root, begin, begin + span))
        begin, parent = len(keys) * span, keys[-1] if keys else root
        tails = [key(parent, begin, end) for end in range(begin + sub, count + 1, sub)]
        return [k.hex() for k in keys], [k.hex() for k in tails]

    keys, tails = chain(root)
    # The same tokens as one segment, wherever it stands.
    own = blake3(digest, derive_key_context="kmesh 2026-11 segment chain root v1").digest()
    segment_keys, segment_tails = chain(own)
    return {
        "digest": digest.hex(),
        "root": root.hex(),
        "keys": keys,
        "tail_keys": tails,
        "segment_root": own.hex(),
        "segment_keys": segment_keys,
        "segment_tail_keys": segment_tails,
    }


def actual(case: dict[str, Any]) -> dict[str, Any]:
    digest = Namespace.from_fields(case["namespace"]).digest()
    roots = {"": chain_root(digest), "segment_": segment_root(digest)}
    found: dict[str, Any] = {"digest": digest.hex()}
    for prefix, root in roots.items():
        chain = KeyChain(
            digest,
            span_tokens=case["span"],
            sub_tokens=case["sub"],
            extras=[Extra(start, length, bytes.fromhex(i)) for start, length, i in case["extras"]],
            root=root if prefix else None,
        )
        chain.extend(case["tokens"])
        rest = len(case["tokens"]) - chain.spans * case["span"]
        found[f"{prefix}root"] = root.hex()
        found[f"{prefix}keys"] = [chain.key(i).hex() for i in range(chain.spans)]
        found[f"{prefix}tail_keys"] = [k.hex() for k in chain.sub_keys(chain.spans, rest)]
    return found


def golden() -> list[dict[str, Any]]:
    return [{**case, "expected": reference(case)} for case in inputs()]


def test_stored_vectors_are_those_of_the_reference() -> None:
    assert json.loads(VECTORS.read_text()) == golden()


@pytest.mark.parametrize("case", json.loads(VECTORS.read_text()), ids=lambda case: case["name"])
def test_keys_equal_the_stored_vectors(case: dict[str, Any]) -> None:
    assert actual(case) == case["expected"]


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with different seeds; each would fail if anything used ``hash``."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_keys as t;"
        "print(json.dumps([t.actual(case) for case in json.loads(t.VECTORS.read_text())]))"
    )
    outputs = []
    for seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", program, str(Path(__file__).parent)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(json.loads(run.stdout))
    expected = [case["expected"] for case in json.loads(VECTORS.read_text())]
    assert outputs == [expected, expected]


DIGEST = Namespace.from_fields(NAMESPACE).digest()
TOKENS = st.lists(st.integers(0, 0xFFFFFFFF), max_size=300)
EXTRAS = st.lists(
    st.builds(Extra, st.integers(0, 250), st.integers(1, 100), st.binary(max_size=8)), max_size=4
)


@given(tokens=TOKENS, extras=EXTRAS, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_extending_in_any_split_gives_the_same_keys(
    tokens: list[int], extras: list[Extra], cuts: list[int]
) -> None:
    whole = KeyChain(DIGEST, span_tokens=16, sub_tokens=4, extras=extras)
    whole.extend(tokens)
    parts = KeyChain(DIGEST, span_tokens=16, sub_tokens=4, extras=reversed(extras))
    at = 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        parts.extend(tokens[at:cut])
        at = cut
    assert parts.keys == whole.keys
    assert parts.tokens == len(tokens)
    assert len(whole.keys) == len(tokens) // 16 * KEY_BYTES
    assert parts.sub_keys(parts.spans, len(tokens) % 16) == whole.sub_keys(
        whole.spans, len(tokens) % 16
    )


@given(tokens=st.lists(st.integers(0, 100), min_size=64, max_size=64), at=st.integers(0, 63))
def test_a_token_changes_its_span_and_all_later_ones(tokens: list[int], at: int) -> None:
    def keys(ids: list[int]) -> list[bytes]:
        chain = KeyChain(DIGEST, span_tokens=16, sub_tokens=16)
        chain.extend(ids)
        return [chain.key(i) for i in range(4)]

    other = list(tokens)
    other[at] += 1
    same = [a == b for a, b in zip(keys(tokens), keys(other), strict=True)]
    assert same == [i < at // 16 for i in range(4)]


def test_a_tail_key_is_not_that_of_a_full_span_in_another_chain_position() -> None:
    chain = KeyChain(DIGEST)
    chain.extend([7] * 192)
    assert len({chain.key(0), chain.key(1), chain.key(2), *chain.sub_keys(0, 48)}) == 6


@given(tokens=st.lists(st.integers(0, 3), min_size=4, max_size=200))
def test_no_key_of_a_segment_is_a_prefixs(tokens: list[int]) -> None:
    """Not even where a segment has a prefix's tokens, or a prefix begins with a segment's."""
    found: list[set[bytes]] = []
    for root in (None, segment_root(DIGEST)):
        chain = KeyChain(DIGEST, span_tokens=4, sub_tokens=2, root=root)
        chain.extend(tokens)
        rest = len(tokens) % 4
        keys = {chain.key(i) for i in range(chain.spans)} | set(chain.sub_keys(chain.spans, rest))
        found.append(keys | {chain.parent(0)})
    assert not found[0] & found[1]


def test_extras_are_bound_by_place_length_and_content() -> None:
    def key(*extras: Extra) -> bytes:
        chain = KeyChain(DIGEST, extras=extras)
        chain.extend(range(64))
        return chain.key(0)

    picture = Extra(3, 10, b"picture")
    variants = [
        key(),
        key(picture),
        key(Extra(4, 10, b"picture")),
        key(Extra(3, 11, b"picture")),
        key(Extra(3, 10, b"picturf")),
        key(picture, picture),
        key(Extra(3, 10, b"pict"), Extra(3, 10, b"ure")),
    ]
    assert len(set(variants)) == len(variants)
    # Content that lies elsewhere, or that ends where the span begins, says nothing about it.
    assert key(Extra(64, 5, b"later")) == key()


def test_content_that_began_before_a_span_is_in_its_key() -> None:
    def second(extra: Extra) -> bytes:
        chain = KeyChain(DIGEST, extras=[extra])
        chain.extend(range(128))
        return chain.key(1)

    assert second(Extra(60, 10, b"a")) != second(Extra(60, 10, b"b"))


@pytest.mark.parametrize("name", list(NAMESPACE))
def test_every_namespace_field_changes_the_digest(name: str) -> None:
    changed = {**NAMESPACE, name: NAMESPACE[name] + "1"}
    one, two = Namespace.from_fields(NAMESPACE), Namespace.from_fields(changed)
    assert one.digest() != two.digest()
    assert one.differing(two) == [name]
    assert two.fields() == changed


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.data())
def test_moving_text_between_fields_changes_the_digest(texts: list[str], data: Any) -> None:
    """rope ‖ adapter ‖ salt ‖ reset stays the same text; where it is cut does not."""
    names = ("rope", "adapter", "salt", "reset")
    joined = "".join(texts)
    cuts = sorted(data.draw(st.integers(0, len(joined))) for _ in range(3))
    bounds = [0, *cuts, len(joined)]
    again = [joined[a:b] for a, b in itertools.pairwise(bounds)]
    base = Namespace.from_fields(NAMESPACE)
    one = dataclasses.replace(base, **dict(zip(names, texts, strict=True)))
    two = dataclasses.replace(base, **dict(zip(names, again, strict=True)))
    assert (one.digest() == two.digest()) == (texts == again)


def test_pages_are_a_field_only_where_they_say_something() -> None:
    plain = Namespace.from_fields(NAMESPACE)
    assert Namespace.from_fields({**NAMESPACE, "pages": ""}).digest() == plain.digest()
    other = Namespace.from_fields({**NAMESPACE, "pages": "blocks of 32"})
    assert other.fields() == {**NAMESPACE, "pages": "blocks of 32"}
    assert other.digest() != plain.digest()
    assert plain.differing(other) == other.differing(plain) == ["pages"]


def test_namespace_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"^colour: unknown"):
        Namespace.from_fields({**NAMESPACE, "colour": "red"})
    with pytest.raises(ValueError, match=r"^rope: missing"):
        Namespace.from_fields({k: v for k, v in NAMESPACE.items() if k != "rope"})
    for text in ("", "-1", "1.0", "²", " 4"):
        with pytest.raises(ValueError, match=r"^layers: not a whole number"):
            Namespace.from_fields({**NAMESPACE, "layers": text})


def test_salts_are_digests() -> None:
    assert salt_digest("") == ""
    assert len(salt_digest("tenant")) == 64
    assert salt_digest("tenant") != salt_digest("tenant2")
    assert "tenant" not in salt_digest("tenant")


def test_keys_that_are_not_known_are_refused() -> None:
    chain = KeyChain(DIGEST)
    chain.extend(range(100))
    assert chain.spans == 1
    for span, tokens in ((1, None), (-1, None), (1, 64), (1, 48), (1, 17), (1, 0), (2, 16)):
        with pytest.raises(ValueError, match=r"token|span"):
            chain.key(span, tokens)
    assert chain.key(1, 32) == chain.sub_keys(1, 36)[-1]
    with pytest.raises(ValueError, match="multiple"):
        KeyChain(DIGEST, span_tokens=64, sub_tokens=24)
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            chain.extend([token])
    assert chain.tokens == 100


def test_token_ids_are_little_endian_words() -> None:
    chain = KeyChain(DIGEST, span_tokens=2, sub_tokens=1)
    chain.extend([1, 0x01020304])
    expected = blake3(chain_root(DIGEST) + struct.pack("<II", 1, 0x01020304)).digest()
    assert chain.keys == expected


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(golden(), indent=1, ensure_ascii=False) + "\n")
