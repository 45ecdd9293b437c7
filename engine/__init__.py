"""The Python side of the inference engine: configuration, requests, pipeline and server."""
