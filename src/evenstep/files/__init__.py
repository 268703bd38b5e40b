"""Versioned JSONL: rollouts, rows, and lengths alone; ``.gz`` by suffix; one self-contained object a line.

Every line carries ``format_version`` and ``kind``. Reading is strict and streams: the first wrong line raises, naming
file, line, field, what was found and the fix. Fields this version does not know are kept in ``extra`` and written
back. NaN, infinities and halves of surrogate pairs are neither read nor written. What a reader accepts a writer writes,
and the other way round.

>>> import tempfile, pathlib
>>> from evenstep.types import Call, Rollout
>>> call = Call(order=0, prompt_ids=(5, 6), output_ids=(7, 2), logprobs=(-0.5, -0.1))
>>> rollout = Rollout(rollout_id="p0/0", group_id="p0", prompt_id="p0", reward=1.0, calls=(call,))
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder) / "rollouts.jsonl.gz"
...     write_rollouts(path, [rollout])
...     list(read_rollouts(path)) == [rollout]
True
"""

from evenstep.files.lines import FORMAT_VERSION
from evenstep.files.reading import read_lengths, read_rollouts, read_rows
from evenstep.files.records import RowLengths, RowRecord
from evenstep.files.writing import RolloutWriter, write_lengths, write_rollouts, write_rows

__all__ = [
    "FORMAT_VERSION",
    "RolloutWriter",
    "RowLengths",
    "RowRecord",
    "read_lengths",
    "read_rollouts",
    "read_rows",
    "write_lengths",
    "write_rollouts",
    "write_rows",
]
