"""The only part of evenstep that computes with torch: one exact optimizer step from rows."""

from evenstep.train.distributed import shard
from evenstep.train.losses import LOSSES, TokenBatch
from evenstep.train.options import StepOptions
from evenstep.train.step import StepOutcome, StepResult, Trainer

__all__ = ["LOSSES", "StepOptions", "StepOutcome", "StepResult", "TokenBatch", "Trainer", "shard"]
