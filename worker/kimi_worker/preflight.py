"""Checks before a pod starts what takes minutes: do checkpoint, settings and group fit together? No torch."""

from dataclasses import dataclass

from kimi_worker.model.checkpoint import Checkpoint, CheckpointError, check_checkpoint
from kimi_worker.model.config import ConfigError
from kimi_worker.parallel.ranks import ParallelError, place
from kimi_worker.server.text import Tokenizer, TokenizerError
from kimi_worker.settings import PodIdentity, SettingsError, WorkerSettings

MAX_RUN_DIR_CHARS = 80
"""A Unix socket's path has at most 107 characters."""
PREFLIGHT_ERRORS = (CheckpointError, ConfigError, ParallelError, SettingsError, TokenizerError)
"""What `check_pod` raises; each message says what to do."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was checked, for people."""

    tensors: int
    checkpoint_bytes: int
    layers: int
    experts_per_rank: int
    ranks: int


def check_pod(settings: WorkerSettings, identity: PodIdentity) -> Findings:
    """Check everything that can be known without reading a weight. Raises one of PREFLIGHT_ERRORS."""
    if len(str(identity.run_dir)) > MAX_RUN_DIR_CHARS:
        raise SettingsError(
            f"environment KIMI_RUN_DIR: {identity.run_dir} has {len(str(identity.run_dir))} characters; at most "
            f"{MAX_RUN_DIR_CHARS} leave room for the names of sockets"
        )
    checkpoint = check_checkpoint(settings.model.checkpoint)
    Tokenizer.load(settings.model.checkpoint)
    _check_sizes(settings, checkpoint)
    where = place(settings.parallel, identity.ordinal, 0)
    where.share(checkpoint.config.num_heads, "num_attention_heads")
    where.share(checkpoint.config.kda_num_heads, "linear_attn_config.num_heads")
    return Findings(
        tensors=len(checkpoint.tensors),
        checkpoint_bytes=checkpoint.num_bytes,
        layers=checkpoint.config.num_layers,
        experts_per_rank=len(where.experts(checkpoint.config.num_experts)),
        ranks=settings.parallel.world_size,
    )


def _check_sizes(settings: WorkerSettings, checkpoint: Checkpoint) -> None:
    longest = checkpoint.config.max_position_embeddings
    if settings.model.max_model_len > longest:
        raise SettingsError(
            f"model.max_model_len: {settings.model.max_model_len} exceeds the checkpoint's max_position_embeddings "
            f"{longest}; lower it"
        )
