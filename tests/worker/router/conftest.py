"""Shares the replayed pods of tests/contract, the ports of tests/multiproc, and this folder's stubs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "multiproc"))

from replay_fixtures import checkpoint, front, pod, start_pod, tokenizer

__all__ = ["checkpoint", "front", "pod", "start_pod", "tokenizer"]
