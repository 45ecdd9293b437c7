"""Scores and benchmarks of what was quantized, and the report that shows them."""
