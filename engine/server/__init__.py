"""The OpenAI-compatible HTTP server over an engine."""

from __future__ import annotations

from turbomill.engine.server.app import create_app

__all__ = ["create_app"]
