"""Opening the RocksDB of a RocksStore: options, lock, format marker."""

from __future__ import annotations

import os
from pathlib import Path

import rocksdict

from kvcm.core.errors import ConfigError
from kvcm.metaindex.stores.rocksdb_layout import FORMAT, FORMAT_KEY

MIB = 1 << 20


def open_rocksdb(path: Path, *, cache_bytes: int, write_buffer_bytes: int) -> rocksdict.Rdict:
    """Lock, recover and check a store's directory; blocks while the log is replayed.

    Raises:
        ConfigError: the path cannot be used; names it and why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"index store path {path}: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"index store path {path}: no permission to write")
    try:
        db = rocksdict.Rdict(str(path), _options(cache_bytes, write_buffer_bytes))
    except Exception as error:
        # "lock file" from another process, "lock hold" within this one.
        if "lock file" in str(error) or "lock hold" in str(error):
            raise ConfigError(
                f"index store path {path}: another process (or store) holds it"
            ) from error
        raise ConfigError(f"index store path {path}: {error}") from error
    try:
        _check_format(path, db)
    except ConfigError:
        db.close()
        raise
    return db


def _check_format(path: Path, db: rocksdict.Rdict) -> None:
    marker = db.get(FORMAT_KEY)
    if marker is None:
        if next(db.keys(), None) is not None:
            raise ConfigError(f"index store path {path}: holds another program's data")
        db.put(FORMAT_KEY, b"%d" % FORMAT)
    elif not marker.isdigit() or int(marker) > FORMAT:
        raise ConfigError(
            f"index store path {path}: has format {marker!r}, this version reads {FORMAT}"
        )


def _options(cache_bytes: int, write_buffer_bytes: int) -> rocksdict.Options:
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_cache(rocksdict.Cache(cache_bytes))
    tables.set_bloom_filter(10, False)
    # Filters and indexes in the cache too, or memory would grow with the data.
    tables.set_cache_index_and_filter_blocks(True)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    tables.set_block_size(4 * 1024)
    tables.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    tables.set_data_block_hash_ratio(0.75)
    tables.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(tables)
    options.set_db_write_buffer_size(write_buffer_bytes)
    options.set_write_buffer_size(max(write_buffer_bytes // 2, MIB))
    options.set_max_write_buffer_number(4)
    # A StartWrite asks for thousands of keys that are not there: without this each of them is
    # searched in every memtable, which took four times as long.
    options.set_memtable_prefix_bloom_ratio(0.02)
    options.set_memtable_whole_key_filtering(True)
    options.set_max_total_wal_size(4 * write_buffer_bytes)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(2)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_bytes_per_sync(MIB)
    # A stalled write would stop the event loop: let level 0 grow before RocksDB brakes.
    options.set_level_zero_slowdown_writes_trigger(40)
    options.set_level_zero_stop_writes_trigger(80)
    options.set_max_open_files(512)
    options.set_max_log_file_size(8 * MIB)
    options.set_keep_log_file_num(4)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    return options
