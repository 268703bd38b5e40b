"""A run's configuration: TOML files merged left to right, ``--set`` on top, checked as a whole before anything starts.

Values are never rewritten: what a file says is what runs, or it is refused with the key, the value and the fix.
``Config.resolved()`` is TOML text with every key, and loads to the same configuration.

>>> from evenstep.config import parse_override
>>> parse_override("train.lr=1e-5"), parse_override("plan.layout=packed")
((('train', 'lr'), 1e-05), (('plan', 'layout'), 'packed'))
"""

from evenstep.config.loading import load_config, parse_override, read_toml
from evenstep.config.schema import Config

__all__ = ["Config", "load_config", "parse_override", "read_toml"]
