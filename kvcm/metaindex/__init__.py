"""The block index: extents and rows over a KVStore (design.md §3)."""
