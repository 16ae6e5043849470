"""The order in which people count devices: mlx5_2 before mlx5_10. Pure."""

from __future__ import annotations

import re

_PARTS = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key for sorting: digits compare as numbers."""
    # The text itself last, so that names which differ in leading zeros alone keep one order.
    parts = tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _PARTS.split(name[:256]))
    return (*parts, (-1, name))
