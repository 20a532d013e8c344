"""What the worker's tests share."""

import sys
from pathlib import Path

# The simulated fabric, network and lanes; ports for processes
sys.path.insert(0, str(Path(__file__).parent / "handoff"))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
