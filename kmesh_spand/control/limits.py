"""Limits of one connection. What an operator may change is in ``Settings``."""

MAX_MESSAGE_BYTES = 128 * 1024
#: Of a gRPC message: a prompt's token ids, to be explained.
MAX_RPC_BYTES = 1024 * 1024
MAX_BATCH = 1024
#: Requests of one session that wait for something (a copy, memory).
MAX_PENDING = 256
HELLO_SECONDS = 5.0
#: Packets that wait for a slow reader before its own requests are no longer read.
PAUSE_PACKETS = 64
#: Packets that wait for a reader before its connection ends.
MAX_PACKETS = PAUSE_PACKETS + 2 * MAX_PENDING
#: Fds that are kept free for gRPC, staging and the refusal of connections.
FD_MARGIN = 12
MAX_TEXT = 256
#: At a time, where there are files enough for it.
MAX_RPC_CONNECTIONS = 256
#: After which a gRPC connection without a call is ended, and one that never said anything.
RPC_IDLE_SECONDS = 60
RPC_HELLO_SECONDS = 5
#: Tiers, and kinds of one tier, that a Hello may name.
MAX_HANDLES = 16
#: Spans that one session is given as a file descriptor of their own.
MAX_EXPORTS = 1024
