"""How tests/goldens/v3 was made: `python tests/goldens/make_v3.py DST`. It is never made anew.

Of a GGUF file of Q8_0, the embedding too: codes of 8 bits.
"""

import sys
import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType as Q
from make_v2 import gguf_file, neutral_store

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temp:
        gguf_file(Path(temp, "model.gguf"), Q.Q8_0, Q.Q8_0)
        neutral_store(Path(temp, "model.gguf"), Path(sys.argv[1]), "make_v3.py")
