"""Write a model with an output head of its own, as vLLM on the CPU needs it.

python scripts/untie_model.py MODEL FOLDER

MODEL is named like ``model.path`` of a configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from evenstep.train.checkpoint import export
from evenstep.train.models import load_model

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    export(Path(sys.argv[2]), *load_model(sys.argv[1], dtype=torch.float32), untied=True)
