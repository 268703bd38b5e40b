"""Every error evenstep raises on purpose.

A message says what was promised, what was found (numbers and ids) and how to fix it. Errors caused by input are also
``ValueError``; each error is built from one message string, so it survives pickling between processes.
"""

__all__ = [
    "CollectionError",
    "ConfigError",
    "CreditError",
    "DistributedError",
    "EngineError",
    "EvenstepError",
    "FileFormatError",
    "NumericsError",
    "PlanError",
    "RowError",
    "SegmentationError",
    "StateError",
]


class EvenstepError(Exception):
    """Base of all errors raised by evenstep."""


class ConfigError(EvenstepError, ValueError):
    """A configuration key is unknown, has a wrong value, or contradicts another key."""


class FileFormatError(EvenstepError, ValueError):
    """A data file does not hold what its format promises; names the file, the line and the field."""


class SegmentationError(EvenstepError, ValueError):
    """A rollout's calls break the prefix rule without declaring a reason."""


class CollectionError(EvenstepError, ValueError):
    """A collection cannot close with exactly ``num_prompts * num_generations`` rollouts."""


class CreditError(EvenstepError, ValueError):
    """Advantages or token weights cannot be computed from the given rollouts."""


class PlanError(EvenstepError, ValueError):
    """A step plan cannot be made from these arguments, or a plan breaks one of its promises."""


class RowError(EvenstepError, ValueError):
    """A row is malformed: unequal lengths, a trained first token, a non-finite value at a trained token."""


class EngineError(EvenstepError, ValueError):
    """A generation request cannot be served as asked."""


class StateError(EvenstepError, RuntimeError):
    """Calls were made in an order that would corrupt the step."""


class DistributedError(EvenstepError, RuntimeError):
    """Ranks disagree about what to do next; raised on every rank, before a collective could hang."""


class NumericsError(EvenstepError, ArithmeticError):
    """A loss, log-probability or gradient is not finite where it must be."""
