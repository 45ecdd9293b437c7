"""The model store: what the engine maps. FORMAT.md beside this package specifies it to the byte."""

from turbomill.convert.store.convert import convert_checkpoint
from turbomill.convert.store.reader import Store, StoreTensor, open_store

__all__ = ["Store", "StoreTensor", "convert_checkpoint", "open_store"]
