"""Every bound on what may arrive, in one table.  Read by the parsers and by the sockets' shells."""

from __future__ import annotations

PROTOCOL_VERSION = 11

CONTROL_FRAME_BYTES = 320 * 1024  # one control message, before it is parsed
CONTROL_BIN_BYTES = 192 * 1024  # one bytes field in it (a run's hash list, a status)
CONTROL_STR_BYTES = 8 * 1024
PART_BYTES = 128 * 1024  # of what a member shows the coordinator, in one message
PARTS_AT_ONCE = 8  # so many messages answer one question; the coordinator asks for the rest
CONTROL_ARRAY_LEN = 8256  # the products of 128 members with each other
CONTROL_MAP_LEN = 1024

HANDSHAKE_S = 5.0  # for a connection to show its key

# Of one member to the coordinator, in a second: for each fragment, and for each beat that is due.
MESSAGES_LEAST_PER_S = 50
MESSAGES_PER_BEAT = 5
MESSAGES_BURST_S = 10.0  # so many seconds' messages may come at once

# 4096 hashes of 32 bytes fit in one control message; also the most of a whole model.
CHUNKS_PER_FRAGMENT = 4096
FRAGMENTS_MAX = 64  # beats and ticks have an entry for each
MEMBERS_PER_ROUND = 128  # direct exchange of all with all
MEMBERS_PER_MESH = 1024  # of a round in groups
GROUPS_MOST = 32  # of such a round
SEATS_TOLD = 1024  # of a stage and those beside it: the living ones, and as many that went during a batch
SHELVED_TOLD = 32  # versions in one beat that a peer can bring from its disk
SHELVED_TAG_BYTES = 4  # of each fragment's digest in such a word
MAX_PEERS = 16384
ROSTER_GONE_MOST = 256  # peers that one list of contacts says to be gone since another one
ROSTER_MOST = 1024  # contacts that one member is told: all fit into one control message
BEAT_LONGEST_S = 20.0  # between two beats of a member of a large run
ADDRESSES_MOST = 4  # of one coordinator, in a join URL and in what it signs
WHEREABOUTS_BYTES = 960  # of such a signed list
WAYS_MOST = 128  # of one member over relays
MEETS_AT_ONCE = 16  # pairs of one member that connect to each other at agreed instants
TICKET_CHARS = 160
HOST_CHARS = 64  # of a relay, in numbers
ADDRESS_CHARS = 128  # with ROSTER_MOST: a whole roster fits into one control message

AMENDMENTS_MOST = 64  # of one run
AMENDMENT_BYTES = 1024  # of what one changes
AMENDMENTS_TOLD = 8  # in one tick

KEPT_COMMITS = 64  # the newest ones that each peer keeps, signed, for a coordinator that loses its disk
KEPT_BOOKS_BYTES = 96 * 1024  # of what such a one says of the books

BULK_HEADER_BYTES = 96
BULK_SLACK_BYTES = 4 * 1024  # encoding headers and CURVE on top of a chunk

MICROS_PER_BATCH = 4096  # microbatches in one synchronous batch: a mask of them has 512 bytes

TOKENS_MAX = 1 << 50  # more than any run will see; keeps sums far from 2**63
AMOUNT_MAX = 1 << 48  # of the steps or bytes that a member tells: more counts as this, for the sake of sums

EVIDENCE_COMMITS_KEPT = 64  # whose signed hash lists the coordinator keeps
EVIDENCE_BYTES_MOST = 256 << 20  # of all of these; the newest one is always kept

WINDOWS_MOST = 1024  # of text that is held out: what one peer says of all of them has 4 KB
NATS_MOST = 1e4  # of one token
TEXT_GIVEN, TEXT_MADE = 48, 96  # ids of a held-out window, and that a model goes on with
FIGURES_MOST = 8  # of a script's own, with names of so many characters
FIGURE_CHARS = 32

AUDITED_AT_ONCE = 32  # chunks in one message: their contributions' hashes fit in well
ROUNDS_KEPT = 2  # committed ones, whose contributions their authors keep for audits
PROOFS_KEPT = 64  # files that show who cheated
PROOF_BYTES_MOST = 256 << 20  # of all contributions to one chunk: more are not gathered to judge it

METRICS_CONNECTIONS = 16  # at once, to /metrics
METRICS_REQUEST_BYTES = 4096
METRICS_REQUEST_S = 5.0  # for a whole request and its answer

# At the port of `farflung coordinate --web`.
WEB_CONNECTIONS = 512  # at once
WEB_CONNECTIONS_OF_NETWORK = 64
WEB_REQUEST_BYTES = 8192
WEB_REQUEST_S = 5.0  # for a whole request
WEB_ANSWER_S = 30.0  # for its whole answer
WEB_SLOW_S = 20.0  # for a viewer to take an update
WEB_REQUESTS_PER_S = 10.0  # of one network
WEB_REQUESTS_BURST = 100.0
WEB_MEMORY_BYTES = 512 << 20  # address space of the process
