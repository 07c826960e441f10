"""Why a prompt misses: where its stored prefix ends, what became of the key there, and which
other namespace has more of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kmesh import errors
from kmesh.keys import KEY_BYTES, KeyChain, Namespace
from kmesh.layout import SUB_TOKENS
from kmesh.v1 import admin_pb2
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.journal import shard_message
from kmesh_spand.control.translate import shard_code
from kmesh_spand.core.codes import Verdict
from kmesh_spand.core.fates import Fates

MAX_TOKENS = 262_144
MAX_KEYS = 8192
MAX_SHARDS = 16
_MAX_NEAREST = 8
#: Namespaces, and spans of one, that are tried before others are served.
_TURN = 64


@dataclass(frozen=True, slots=True)
class Names:
    """Keys of a prompt under one namespace.

    Attributes:
        full: of its full spans, 32 bytes each.
        chain: that made them; None when only keys are known.
    """

    full: bytes
    chain: KeyChain | None
    span_tokens: int

    def tail(self, span: int) -> list[bytes]:
        """Keys of the first 16, 32, ... tokens of a span, shorter than a full one."""
        if self.chain is None:
            return []
        known = min(self.chain.tokens - span * self.span_tokens, self.span_tokens - 1)
        return self.chain.sub_keys(span, known // SUB_TOKENS * SUB_TOKENS)


class Explainer:
    """Answers Admin.Explain.

    Args:
        restarts: how often control was started again: endings before that are not known.
    """

    def __init__(self, handler: Handler, restarts: int) -> None:
        self._handler = handler
        self._restarts = restarts
        self._span = handler.settings.span_tokens
        self._started_ms = handler.now_ms()

    @property
    def _fates(self) -> Fates:
        return self._handler.core.fates

    async def explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        """Gives way to other work now and then.

        Raises:
            RequestError: of which field.
        """
        digest, fields = self._namespace(request)
        shards = self._shards(request)
        answer = admin_pb2.ExplainResponse(namespace=digest, fields=fields)
        if request.keys:
            names = Names(request.keys, None, self._span)
            answer.tokens = len(request.keys) // KEY_BYTES * self._span
        else:
            names = await self._names(digest, request.tokens)
            answer.tokens = len(request.tokens)
        answer.spans = len(names.full) // KEY_BYTES
        now = self._handler.now_ms()
        found = shards or self._found(names)
        parts = [self._shard(names, shard, now) for shard in found]
        if not parts:
            parts = [self._unknown(names)]
        answer.shards.extend(sorted(parts, key=lambda part: part.tokens))
        if request.tokens:
            reached = max(part.tokens for part in parts)
            answer.nearest.extend(
                await self._nearest(digest, fields, request.tokens, shards, reached)
            )
        forgotten = self._fates.remembered_ms(self._handler.now_ms())
        uptime = self._handler.now_ms() - self._started_ms
        answer.remembered_ms = uptime if forgotten is None else min(forgotten, uptime)
        return answer

    # The request.

    def _namespace(self, request: admin_pb2.ExplainRequest) -> tuple[bytes, dict[str, str]]:
        if bool(request.tokens) == bool(request.keys):
            raise errors.InvalidArgument("either tokens or keys are needed", field="tokens")
        if len(request.tokens) > MAX_TOKENS:
            raise errors.TooLarge(f"at most {MAX_TOKENS}", field="tokens")
        if len(request.keys) % KEY_BYTES:
            raise errors.InvalidArgument(f"no multiple of {KEY_BYTES} bytes", field="keys")
        if len(request.keys) > MAX_KEYS * KEY_BYTES:
            raise errors.TooLarge(f"at most {MAX_KEYS} keys", field="keys")
        digest = request.namespace
        if request.fields:
            try:
                space = Namespace.from_fields(request.fields)
            except ValueError as wrong:
                name, _, text = str(wrong).partition(": ")
                raise errors.InvalidArgument(text, field=f"fields.{name[:256]}") from None
            if digest and digest != space.digest():
                raise errors.InvalidArgument("not the digest of fields", field="namespace")
            return space.digest(), space.fields()
        if len(digest) != KEY_BYTES and (digest or request.tokens):
            raise errors.InvalidArgument(f"not {KEY_BYTES} bytes", field="namespace")
        return digest, self._handler.registry.namespace_fields(digest)

    def _shards(self, request: admin_pb2.ExplainRequest) -> list[int]:
        if len(request.shards) > MAX_SHARDS:
            raise errors.TooLarge(f"at most {MAX_SHARDS}", field="shards")
        return [shard_code(s, f"shards[{i}]") for i, s in enumerate(request.shards)]

    # One namespace.

    async def _names(self, digest: bytes, ids: Sequence[int]) -> Names:
        chain = KeyChain(digest, span_tokens=self._span, sub_tokens=SUB_TOKENS)
        for at in range(0, len(ids), step := _TURN * self._span):
            chain.extend(ids[at : at + step])
            await asyncio.sleep(0)
        return Names(chain.keys, chain, self._span)

    def _shard(self, names: Names, shard: int, now: int) -> admin_pb2.ShardExplanation:
        fates = self._fates
        spans = fates.served(names.full, shard)
        tail = names.tail(spans)
        known = [fates.of(key, shard, now).verdict is Verdict.SERVED for key in tail]
        steps = max((step for step, yes in enumerate(known, 1) if yes), default=0)
        made = admin_pb2.ShardExplanation(
            shard=shard_message(shard), spans=spans, tokens=spans * self._span + steps * SUB_TOKENS
        )
        made.mirrors = fates.mirrors(names.full[: spans * KEY_BYTES], shard)
        if spans:
            last = names.full[(spans - 1) * KEY_BYTES : spans * KEY_BYTES]
            made.leases = fates.of(last, shard, now).leases
        key = names.full[spans * KEY_BYTES : (spans + 1) * KEY_BYTES]
        if not key and tail and steps < len(tail):
            key = tail[-1]
        if not key:
            made.verdict = admin_pb2.VERDICT_SERVED
            return made
        fate = fates.of(key, shard, now)
        made.key = key
        made.verdict = admin_pb2.Verdict.ValueType(self._sure(fate.verdict))
        if fate.cause is not None:
            made.cause = admin_pb2.Cause.ValueType(fate.cause)
            made.ended_ms = fate.ago_ms
        return made

    def _unknown(self, names: Names) -> admin_pb2.ShardExplanation:
        key = names.full[:KEY_BYTES] or b"".join(names.tail(0)[-1:])
        if not key:
            # Fewer tokens than any key has: nothing is missing.
            return admin_pb2.ShardExplanation(verdict=admin_pb2.VERDICT_SERVED)
        forgotten = self._fates.remembered_ms(0) is not None
        verdict = self._sure(Verdict.UNKNOWN if forgotten else Verdict.NEVER)
        return admin_pb2.ShardExplanation(verdict=admin_pb2.Verdict.ValueType(verdict), key=key)

    def _sure(self, verdict: Verdict) -> Verdict:
        """What was stored before control was started again may have ended unseen."""
        return Verdict.UNKNOWN if verdict is Verdict.NEVER and self._restarts else verdict

    def _found(self, names: Names) -> list[int]:
        """Shards in which there was ever anything of a prompt."""
        tails = dict.fromkeys([*names.tail(0), *names.tail(len(names.full) // KEY_BYTES)])
        return self._fates.shards(names.full + b"".join(tails), MAX_SHARDS)

    # Other namespaces.

    async def _nearest(
        self,
        digest: bytes,
        fields: dict[str, str],
        ids: Sequence[int],
        shards: list[int],
        reached: int,
    ) -> list[admin_pb2.NamespaceMatch]:
        known = self._handler.registry.namespaces()
        stored = (row.namespace for row in self._handler.core.views.namespaces())
        others = dict.fromkeys([*known, *stored])
        others.pop(digest, None)
        matches = []
        for tried, other in enumerate(others, 1):
            if tried % _TURN == 0:
                await asyncio.sleep(0)
            # Most share not even the first span: that is found out without hashing the rest.
            first = KeyChain(other, span_tokens=self._span, sub_tokens=SUB_TOKENS)
            first.extend(ids[: self._span])
            if not self._reach(Names(first.keys, first, self._span), shards):
                continue
            count = self._reach(await self._names(other, ids), shards)
            if count > reached:
                theirs = known.get(other, {})
                match = admin_pb2.NamespaceMatch(digest=other, fields=theirs, tokens=count)
                if fields and theirs:
                    match.differing.extend(
                        name for name in fields if fields[name] != theirs.get(name)
                    )
                matches.append(match)
        matches.sort(key=lambda match: (-match.tokens, not match.fields, len(match.differing)))
        return matches[:_MAX_NEAREST]

    def _reach(self, names: Names, shards: list[int]) -> int:
        """Most tokens that are served in one shard."""
        now = self._handler.now_ms()
        found = shards or self._found(names)
        return max((self._shard(names, shard, now).tokens for shard in found), default=0)
