"""Makes the small API server importable next to the tests, and wires the real operator to it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from api_server import ApiServer
from stage import Stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A KimiDeployment on four nodes that no operator has looked at yet."""
    async with ApiServer() as server, Stage.of(server) as made:
        yield made
