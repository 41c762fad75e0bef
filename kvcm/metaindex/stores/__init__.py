"""Implementations of the KVStore contract."""
