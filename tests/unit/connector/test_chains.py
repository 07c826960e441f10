"""Chains of prompts that begin alike."""

from __future__ import annotations

import gc

from kmesh.keys import KeyChain
from kmesh_vllm.chains import Chains

ONE, TWO = bytes(32), bytes(range(32))


def chain(chains: Chains, namespace: bytes, tokens: list[int]) -> KeyChain:
    made, alone = KeyChain(namespace), KeyChain(namespace)
    chains.extend(made, namespace, tokens)
    alone.extend(tokens)
    assert made.keys == alone.keys
    return made


def test_siblings_have_their_own_keys_and_nothing_is_kept() -> None:
    chains = Chains()
    shared = list(range(200))
    first = chain(chains, ONE, shared)
    sibling = chain(chains, ONE, [*shared[:130], *range(1000, 1070)])
    assert sibling.keys[:64] == first.keys[:64]
    assert sibling.keys[64:] != first.keys[64:]
    other = chain(chains, TWO, shared)
    assert other.keys[:32] != first.keys[:32]
    chain(chains, ONE, shared[:20])
    assert len(chains) == 2
    del sibling, other
    gc.collect()
    assert len(chains) == 1
    longer = chain(chains, ONE, [*shared, *range(300)])
    del first
    gc.collect()
    assert len(chains) == 1
    del longer
    gc.collect()
    assert len(chains) == 0
