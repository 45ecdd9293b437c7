"""Texts for calibration and evaluation: built-in, local files, hub datasets, and the model's own samples."""

from turbomill.calib_data.loader import OWN, check_name, known_names, load_texts, load_windows, token_ids
from turbomill.calib_data.windows import Windows, windows

__all__ = [
    "OWN",
    "Windows",
    "check_name",
    "known_names",
    "load_texts",
    "load_windows",
    "token_ids",
    "windows",
]
