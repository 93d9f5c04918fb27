"""Read Parquet files row group by row group, with errors that name the file, the row and the column."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import fs, parquet

from marl_ray.errors import MarlRayError, one_line_without


def read_tables(path: str, columns: Mapping[str, pa.DataType]) -> Iterator[tuple[str, int, pa.Table]]:
    """Yield the row groups of Parquet files.

    Each comes as the file, the number of the group's first row in it, and these columns in these types. `path` is a
    file, a folder of `*.parquet` files and folders, or a URI of either. Groups are read one by one, because numbers
    take eight times as much space in a file's types as in a policy's. Raises MarlRayError naming the file and the
    column.
    """
    try:
        filesystem, root = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
        info = filesystem.get_file_info(root)
        names = [root]
        if info.type == fs.FileType.Directory:
            infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
            names = sorted(f.path for f in infos if f.extension == "parquet" and f.base_name[0] not in "._")
        if info.type == fs.FileType.NotFound or not names:
            raise MarlRayError(f"{path}: expected a Parquet file or a folder of *.parquet files")
        for name in names:
            with filesystem.open_input_file(name) as source:
                file, begin = parquet.ParquetFile(source), 0
                for group in range(file.num_row_groups):
                    table = _read_columns(name, file, group, columns)
                    yield name, begin, table
                    begin += len(table)
    except (OSError, pa.ArrowException, ValueError) as error:  # no such file, not a Parquet file, or not a URI
        raise MarlRayError(f"{path}: cannot be read: {one_line_without(error, path)}") from error


def _read_columns(name: str, file: parquet.ParquetFile, group: int, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Return a row group's columns in these `types`; `name` is the file's, for errors."""
    missing = [column for column in types if column not in file.schema_arrow.names]
    if missing:
        raise MarlRayError(f"{name}: expected a column {missing[0]!r}")
    table, columns = file.read_row_group(group, list(types)), {}
    for column, expected in types.items():
        try:
            columns[column] = table.column(column).cast(expected).combine_chunks()
        except pa.ArrowException as error:
            actual = table.column(column).type
            raise MarlRayError(f"{name}: column {column}: expected {expected}, got {actual}") from error
    return pa.table(columns)


@dataclass(frozen=True)
class ParquetRows:
    """Rows of one file. The methods raise MarlRayError naming the file, the row and the column."""

    file: str
    table: pa.Table
    numbers: np.ndarray
    """(rows,) number of each row in the file."""

    def refuse(self, column: str, row: int, expected: str) -> NoReturn:
        """Raise MarlRayError about a value; `row` counts these rows."""
        raise MarlRayError(f"{self.file}: row {self.numbers[row]}, column {column}: expected {expected}")

    def check(self, column: str, good: Any, expected: str, lengths: np.ndarray | None = None) -> None:
        """Refuse the first row whose flag in `good` is False; with `lengths` there is one flag per step."""
        if good.all():
            return
        position = int(np.argmin(good))
        row = position if lengths is None else int(np.searchsorted(lengths.cumsum(), position, side="right"))
        self.refuse(column, row, expected)

    def column(self, column: str) -> np.ndarray:
        """Return a column with one value per row, (rows,)."""
        array = self._without_nulls(column)
        return np.array(array.to_pylist(), object) if array.type == pa.string() else _to_numpy(array)

    def lengths(self, column: str) -> np.ndarray:
        """Return the length of each row's list in a list column, (rows,)."""
        return _to_numpy(self._without_nulls(column).value_lengths())

    def steps(self, column: str, lengths: np.ndarray, width: int | None = None) -> np.ndarray:
        """Return all steps of a list column one after another, (sum of lengths,).

        With `width` they are (sum of lengths, width).
        """
        if width is None:
            return _to_numpy(self._steps(column, lengths))
        widths, values = self.ragged_rows(column, lengths)
        self.check(column, widths == width, f"{width} numbers per step", lengths)
        return values.reshape(len(widths), width)

    def ragged_rows(self, column: str, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the count of numbers at each step of a list column of lists, and all the numbers one after another."""
        steps = self._steps(column, lengths)
        widths, values = _to_numpy(steps.value_lengths()), steps.flatten()
        if values.null_count:
            step = int(np.searchsorted(widths.cumsum(), np.argmin(_to_numpy(values.is_valid())), side="right"))
            self.check(column, np.arange(len(widths)) != step, "no nulls", lengths)
        return widths, _to_numpy(values)

    def _steps(self, column: str, lengths: np.ndarray) -> pa.Array:
        """Return the entries of a list column, whose rows have these lengths, one after another."""
        array = self._without_nulls(column)
        self.check(column, _to_numpy(array.value_lengths()) == lengths, "as many entries as observations")
        values = array.flatten()
        self.check(column, _to_numpy(values.is_valid()), "no nulls", lengths)
        return values

    def is_null(self, column: str) -> np.ndarray:
        """Return (rows,) bool: True where the value is null."""
        return ~_to_numpy(self.table.column(column).combine_chunks().is_valid())

    def select(self, numbers: np.ndarray) -> "ParquetRows":
        """Return the rows of these numbers among these rows."""
        return ParquetRows(self.file, self.table.take(numbers), self.numbers[numbers])

    def _without_nulls(self, column: str) -> pa.Array:
        self.check(column, ~self.is_null(column), "a value, not null")
        return self.table.column(column).combine_chunks()


def _to_numpy(array: pa.Array) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
