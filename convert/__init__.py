"""Checkpoints, weight formats, architectures and the model store: the ground floor of the project."""
