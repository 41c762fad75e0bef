"""Every limit of the manager, with its unit in the name. Each has a test at N and N+1."""

KEYS_PER_REQUEST_MAX = 262_144
"""Block keys in one call."""
TOKENS_PER_REQUEST_MAX = 4_194_304
"""Token ids in one call."""
BLOCKS_PER_EXTENT_MAX = 65_535
"""Blocks that one StartWrite may grant: a position is stored in 16 bits."""
BLOCKS_PER_CHUNK_MAX = 512
"""Blocks in one stored chunk of an extent's immutable part."""
INSTANCE_ID_BYTES_MAX = 1_024
ENTITY_NAME_BYTES_MAX = 256
"""Names of groups, storages, accounts, specs and spec groups, in UTF-8 bytes."""
TRACE_ID_BYTES_MAX = 1_024
STATUS_MESSAGE_CHARS_MAX = 2_048
"""Of an answer's ``header.status.message``; longer ones are cut."""
SPECS_PER_INSTANCE_MAX = 64
"""A block's specs are one bit each in a 64-bit set."""
SPEC_GROUPS_PER_INSTANCE_MAX = 256
SPEC_SIZE_BYTES_MAX = 1 << 40
USER_DATA_BYTES_MAX = 1 << 20
TEXT_FIELD_BYTES_MAX = 4_096
"""Other texts of an entity (a model's name, a path of a storage), in UTF-8 bytes."""
STORAGE_CANDIDATES_PER_GROUP_MAX = 256
PASSWORD_BYTES_MAX = 1_024
REGISTRY_QUEUE_S_MAX = 10.0
"""A registry change that waited longer for those before it is refused, not begun."""
REPLY_BYTES_DEFAULT = 4 * 1024 * 1024
"""What a default gRPC client accepts."""
RECEIVE_BYTES_DEFAULT = 64 * 1024 * 1024
WRITE_TIMEOUT_S_DEFAULT = 30
WRITE_TIMEOUT_S_MAX = 3_600
EMPTY_SESSION_TIMEOUT_S = 60
GRACE_S_MIN = 10.0
"""Floor of the time between retiring a block and deleting its bytes."""
ROOM_WAIT_S_DEFAULT = 0.05
"""A StartWrite that a limit cut waits so long for eviction, if eviction can help."""
ROOM_WAIT_S_MAX = 5.0
RAMP_S = 60.0
"""A storage that has just come back counts as no freer than the mean of the others, and as one more
mean each time that so long has passed."""
PROBE_TIMEOUT_S_DEFAULT = 5.0
"""A probe of a storage that takes longer counts as hung."""
PROBE_AGAIN_S = 1.0
"""Complaints of readers have a storage probed at once, but not more often than this."""
PROBE_FAILURES_MAX = 2
"""So many failed probes in a row make a storage unavailable; fewer make it suspect."""
PROBE_SUCCESSES_MIN = 2
"""So many good probes in a row bring an unavailable storage back."""
READER_BYTES_MAX = 256
"""Of a reader's name in a report."""
BREAKER_READERS = 3
"""So many readers that cannot read a storage within the window take it out of use."""
BREAKER_WINDOW_S = 60.0
BREAKER_OPEN_S = 30.0
"""For so long, the first time."""
BREAKER_OPEN_S_MAX = 480.0
SHARDS_MIN = 16
SHARDS_MAX_DEFAULT = 64
"""Unless the server's settings allow more."""
SHARDS_MAX = 1_024
SPACE_BYTES_MAX = 32
"""The uid of an instance as the index stores know it."""
HOME_SHARDS = 16
KEYS_PER_SHARD = 262_144
ROW_REFS_MAX = 16
"""Locations one row can name."""
STEP_S_MAX = 0.002
"""No step holds the event loop longer."""
ORDER_STEPS_MAX = 500
"""Heap operations of one question to an eviction order: below 2 ms."""
EVICTION_UNIT_EXTENTS_MAX = 64
"""Extents in a circle of refilled gaps that are evicted together; a link that would make a larger
one is not kept."""
SKETCH_CELLS_MIN = 4_096
SKETCH_CELLS_MAX = 1 << 24
"""Counters in a row of a group's frequency sketch (TinyLFU admission); five bytes each."""
ADMISSION_QUEUE_BYTES_MAX = 8 << 20
"""Keys of a group's requests that wait to be counted, as they came; the rest is not counted."""
CEILING_INSTANCES_MAX = 64
"""Instances with hit-rate windows of their own; the others count in their group only. One takes
below 2 MiB."""
CEILING_GROUPS_MAX = 64
"""Groups with hit-rate windows."""
METRICS_INSTANCES_MAX = 1_000
"""Instances with series of their own in the metrics, about 40 series each."""
METRICS_GROUPS_MAX = 1_000
"""Groups with series of their own, about 120 each."""
CEILING_QUEUE_BYTES_MAX = 8 << 20
"""Keys of requests that wait to be counted for the ceiling, as they came; others are not."""
CEILING_SAMPLED_KEYS_MAX = 32_768
"""Keys whose fate is followed, to tell why blocks are missed."""
CEILING_SAMPLED_KEYS_PER_S = 8_192
"""Looks at one of them; the sample is halved when there are more."""
STORAGE_ROOT_BYTES_MAX = 512
"""Root folder of a file storage; it is part of every allocation's descriptor."""
KEYS_PER_FILE_MAX = 4_096
"""Blocks of one spec in one file (``key_count_per_file``)."""
FILE_NAME_BYTES_MAX = 120
"""Last component of a block file's path."""
STORAGE_THREADS_MAX = 4
"""Threads in which one storage blocks."""
STORAGE_JOBS_MAX = 1_024
"""Blocking jobs that wait for those threads; a hung mount refuses the next ones."""
NAMES_PER_JOB_MAX = 256
"""Names that one such job deletes, checks or creates."""
PLUGIN_NAME_CHARACTERS_MAX = 32
"""Name of a storage plug-in; it is the scheme of location URIs."""
OPTIONS_PER_PLUGIN_MAX = 64
"""Options of one storage that a plug-in serves."""
MOONCAKE_CALL_S_MAX = 30.0
"""A call of Mooncake's SDK that takes longer ends its process."""
MOONCAKE_BATCH_KEYS_MAX = 512
MOONCAKE_BATCH_BYTES_MAX = 64 << 20
"""What one call of its SDK moves: its queue to a peer refuses more than some thousand transfers."""
COPY_COMMIT_BYTES_MAX = 1 << 20
"""Keys and values in one commit of `kvcm index copy`."""
COPY_COMMIT_RECORDS_MAX = 256
"""Records in one such commit."""
COPY_SHARDS_AT_ONCE = 8
"""Shards that are copied at the same time."""
TRACE_LINE_BYTES_MAX = 16 * 1024 * 1024
"""One row of a request trace, decompressed."""
SCRUB_PER_SECOND_MAX = 100_000
"""Records and files that the background repair looks at."""
REPORTED_BLOCKS_PER_REQUEST_MAX = 16_384
"""Keys in one ReportCacheError."""
REPORTED_CORRUPT_BLOCKS_PER_MINUTE_MAX = 8_192
"""Blocks of an instance that readers' word alone may take out of the cache."""
REPORTED_UNCONFIRMED_BLOCKS_PER_MINUTE_MAX = 16_384
"""Blocks of an instance that are reported missing without being so; each costs a look."""
REPORT_CHECK_S_MAX = 1.0
"""A storage that does not tell by then whether reported blocks are missing keeps them. Below the
client's time-out for a call."""
TRACE_EVENT_QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""What waits to be recorded and streamed, as it is in memory; what comes on top is dropped."""
ACCESS_LOG_QUEUE_LINES_MAX = 16_384
"""Lines of the access log that wait to be written; what comes on top is dropped."""
EVENT_FILTER_VALUES_MAX = 256
"""Instances, or types, that one subscriber names."""
EVENT_SUBSCRIBERS_MAX = 64
"""Open streams of events."""
SUBSCRIBER_QUEUE_BYTES_MAX = 8 * 1024 * 1024
"""Events that wait for one subscriber; what comes on top is dropped, and it is told."""
