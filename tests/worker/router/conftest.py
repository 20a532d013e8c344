"""Shares the replayed pods of tests/contract, and this folder's stubs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))

from replay_fixtures import checkpoint, front, pod, start_pod, tokenizer

__all__ = ["checkpoint", "front", "pod", "start_pod", "tokenizer"]
