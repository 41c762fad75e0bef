"""The use cases: lookup, write sessions, remove, trim (design.md §4, §6)."""
