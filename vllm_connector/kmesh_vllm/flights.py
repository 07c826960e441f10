"""Which request brings which span into the engine now; the others wait for it and share it."""

from __future__ import annotations

from kmesh_vllm.requests import Phase, RequestState


class Flights:
    """At most one request for each key: the first that came."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, RequestState] = {}
        #: The one that brings all of it, where it is known to be one.
        self._alone: RequestState | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Nobody brings anything any more."""
        self._by_key, self._alone = {}, None

    def take_off(self, state: RequestState, keys: tuple[bytes, ...]) -> None:
        """A request begins to bring the spans of these keys, in place of earlier ones."""
        self.land(state)
        state.flight_keys = keys
        if self._by_key:
            self._alone = None
            for key in keys:
                self._by_key.setdefault(key, state)
        else:
            self._by_key, self._alone = dict.fromkeys(keys, state), state

    def land(self, state: RequestState) -> None:
        """A request brings nothing any more."""
        if self._alone is state:
            self._by_key, self._alone = {}, None
        else:
            by_key = self._by_key
            for key in state.flight_keys:
                if by_key.get(key) is state:
                    del by_key[key]
        state.flight_keys = ()

    def other(self, state: RequestState, key: bytes) -> bool:
        """Whether another request is bringing this key's span.

        One whose lease has come but that was not given blocks yet brings nothing: it may have to
        wait for memory that the asking request holds.
        """
        found = self._by_key.get(key)
        if found is None or found is state:
            return False
        if found.phase is Phase.ACQUIRING:
            return found.restore is not None and not found.restore.future.done()
        return found.phase is Phase.LOADING
