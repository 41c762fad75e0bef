"""kvcm: the central metadata manager of KV cache for large-model inference."""

__version__ = "0.1.0"
