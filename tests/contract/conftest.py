"""Shares the replayed pods of tests/contract, small checkpoints of the model's tests, ports of tests/multiproc."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worker/model"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiproc"))

from replay_fixtures import checkpoint, front, pod, start_pod, tokenizer

__all__ = ["checkpoint", "front", "pod", "start_pod", "tokenizer"]
