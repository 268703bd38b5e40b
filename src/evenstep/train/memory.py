"""Peak memory of this process, from a moment on: the allocator's on a GPU, resident pages otherwise."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_memory_bytes", "reset_peak_memory"]

CLEAR = Path("/proc/self/clear_refs")  # Linux; there the peak of resident pages can be set back
PEAK_RESIDENT = "5"


def peak_memory_bytes() -> int:
    """Most memory this process held since the last reset, or since its start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> bool:
    """Count from the present memory on; False where the system cannot, and the peak is that of the whole process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        CLEAR.write_text(PEAK_RESIDENT)
    except OSError:
        return False
    return True
