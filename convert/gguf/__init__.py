"""GGUF files: the container, blocks as codes, and what llama.cpp's converter makes of an architecture."""

from turbomill.convert.gguf.checkpoint import DequantizedGguf, GgufCheckpoint

__all__ = ["DequantizedGguf", "GgufCheckpoint"]
