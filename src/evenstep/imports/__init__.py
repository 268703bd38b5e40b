"""Row lengths out of many kinds of files: plain numbers, tables, evenstep's own, and dumps of other trainers.

Everything here reads and nothing writes; no pickle is ever loaded.

>>> import tempfile, pathlib
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder) / "lengths.txt"
...     _ = path.write_text("812\\n96\\n2048\\n")
...     rows = import_rows(path)
>>> rows.format, rows.lengths_R.tolist()
('numbers', [812, 96, 2048])
"""

from evenstep.imports.reading import FORMATS, import_rows
from evenstep.imports.rows import FoundRow, ImportedRows, SkippedLine

__all__ = ["FORMATS", "FoundRow", "ImportedRows", "SkippedLine", "import_rows"]
