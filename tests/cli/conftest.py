"""Makes the scripted control server importable under one name for the tests here."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for state directories: engines put sockets below them, so llmgw wants them short."""
    folder = Path(tempfile.mkdtemp(prefix="lg-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
