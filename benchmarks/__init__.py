"""Measurements of the hot path; ``python -m benchmarks --help``."""
