"""What the worker's tests share."""

import sys
from pathlib import Path

# The simulated fabric, network and lanes
sys.path.insert(0, str(Path(__file__).parent / "handoff"))
