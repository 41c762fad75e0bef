"""Space: time-outs, watermarks, eviction, deleting bytes (design.md §5)."""
