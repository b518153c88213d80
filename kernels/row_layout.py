"""Where the fields of a packed row lie: derived by the owner of a wire schema, obeyed by the kernels."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """One field: `width` elements of `dtype` at byte `offset`, counted in entries of `entry_width`."""

    name: str
    offset: int
    width: int
    dtype: torch.dtype
    entry_width: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes at full capacity."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """A row of `row_bytes` bytes. The first `reserved_bytes` (a header) belong to the caller and are never
    written.

    Raises ValueError where a field is misaligned, overlaps another or the reserved bytes, or leaves the row.
    """

    row_bytes: int
    fields: tuple[FieldLayout, ...]
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        end, previous = self.reserved_bytes, "the reserved bytes"
        for field in self.fields:
            name, at, itemsize = f"field {field.name}", field.offset, field.dtype.itemsize
            if at % itemsize:
                raise ValueError(f"{name} must lie on a multiple of {itemsize} bytes, got offset {at}")
            if at < end:
                raise ValueError(f"{name} must begin at byte {end} or later, behind {previous}, got {at}")
            entry = field.entry_width
            if field.width < 0 or entry < 1 or field.width % entry:
                raise ValueError(f"{name} must hold whole entries of {entry} elements, got {field.width}")
            end, previous = field.offset + field.nbytes, f"field {field.name}"
        if end > self.row_bytes:
            raise ValueError(f"row_bytes must be at least {end}, the end of {previous}, got {self.row_bytes}")

    @cached_property
    def word_bytes(self) -> int:
        """Widest copy unit (1, 2, 4 or 8 bytes) that divides every offset and length."""
        sizes = [self.row_bytes, self.reserved_bytes, 8]
        for field in self.fields:
            sizes += [field.offset, field.nbytes, field.entry_width * field.dtype.itemsize]
        return math.gcd(*sizes)

    def field(self, name: str) -> FieldLayout:
        """Look a field up; ValueError lists the names there are."""
        for field in self.fields:
            if field.name == name:
                return field
        raise ValueError(f"field must be one of {', '.join(f.name for f in self.fields)}, got {name!r}")
