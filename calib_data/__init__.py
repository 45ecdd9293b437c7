"""Texts for calibration and evaluation: built-in, local files, hub datasets, and the model's own samples."""
