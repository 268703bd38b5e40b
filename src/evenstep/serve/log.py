"""Structured logs: one JSON object a line, without a word of any prompt or answer unless asked."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

__all__ = ["LOGGER", "log_event"]

LOGGER = logging.getLogger("evenstep.serve")


def log_event(event: str, **fields: Any) -> None:
    """Log what happened, with plain values beside it."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info(json.dumps({"time": round(time.time(), 3), "event": event, **fields}, default=str))
