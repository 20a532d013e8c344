"""One rank's part of a step: from a plan to logits."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_worker.engine.caches import Caches, layout_hash
from kimi_worker.model.batch import build_batch
from kimi_worker.model.checkpoint import check_checkpoint
from kimi_worker.model.config import KimiConfig
from kimi_worker.model.forms import Forms
from kimi_worker.model.kimi import Kimi
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.groups import Groups
from kimi_worker.protocol.step import StepPlan
from kimi_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this rank's device. `free_bytes` is what is left now; 0 where the device cannot tell."""

    weights_bytes: int
    pages_bytes: int
    slots_bytes: int
    free_bytes: int


class Runner:
    """Owns the model and the caches of one rank. Make it, `load()` it once, then `execute()` every step of the group.

    Not thread-safe: one thread runs the steps. Loading sets torch's threads for the whole process.
    """

    def __init__(self, settings: WorkerSettings, groups: Groups, forms: Forms | None = None) -> None:
        """`forms`: by default those that suit the group's device."""
        self._settings = settings
        self._groups = groups
        self._forms = forms or Forms.suited_to(groups.device)
        self._model: Kimi | None = None
        self._caches: Caches | None = None
        self._config: KimiConfig | None = None
        self._weights_bytes = 0
        self._layout_hash = ""

    @property
    def config(self) -> KimiConfig:
        assert self._config is not None, "load() first"
        return self._config

    @property
    def caches(self) -> Caches:
        """Pages and slots; `caches.regions` is what a handoff registers. They keep their addresses."""
        assert self._caches is not None, "load() first"
        return self._caches

    @property
    def layout_hash(self) -> str:
        """Ranks with different hashes must not exchange pages or slots."""
        assert self._layout_hash, "load() first"
        return self._layout_hash

    @property
    def memory(self) -> Memory:
        """Ask after the first steps: what they allocate stays allocated."""
        device = self._groups.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        return Memory(self._weights_bytes, self.caches.pages_bytes, self.caches.slots_bytes, free)

    def load(self) -> None:
        """Check the checkpoint, read this rank's weights, allocate the caches, wait until every rank has done so.

        Raises ConfigError, CheckpointError or ParallelError when checkpoint, settings and group do not fit together,
        CollectiveError when another rank is not there in time.
        """
        settings, groups = self._settings, self._groups
        torch.set_num_threads(settings.runtime.threads_per_rank)
        if groups.device.type == "cuda":
            torch.cuda.set_device(groups.device)
        else:
            _keep_freed_memory()
        checkpoint = check_checkpoint(settings.model.checkpoint)
        dtype = getattr(torch, settings.runtime.dtype)
        source = WeightSource(checkpoint, dtype, groups.device, self._forms)
        with torch.inference_mode():
            self._model = Kimi(source, groups)
        # Outside inference mode: the handoff and tests may write to the caches from anywhere.
        self._caches = Caches(checkpoint.config, groups.place, settings.limits, settings.runtime, groups.device)
        self._config = checkpoint.config
        self._layout_hash = layout_hash(
            checkpoint.config, groups.place.tp_size, settings.limits, settings.runtime, source.fingerprint()
        )
        self._weights_bytes = source.loaded_bytes
        # Loading times differ by more than a collective may take.
        groups.wait_for_all("loaded")

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Run one step: every rank of the group calls this with its lane's plan, an empty one too.

        returns  [n, vocab] fp32 logits on the lane's leader, one row for each sequence with `sample` in the plan's
                 order (n may be 0); None on its followers

        Zeroes the slot of every sequence that starts, advances states and pages in place. Raises CollectiveError.
        """
        assert self._model is not None, "load() first"
        if not self._settings.faults.keep_recycled_state:
            self.caches.zero_slots([sequence.slot for sequence in plan.sequences if sequence.num_cached == 0])
        return self._model.forward(build_batch(plan, self.caches.page_size, self._groups.device), self.caches)


def _keep_freed_memory() -> None:
    """Have glibc reuse the large blocks that a step frees instead of returning them to the system.

    Otherwise every temporary above 128 KiB is mapped and faulted in anew, thousands of page faults a step: a decode
    step of 32 requests with 2,000 tokens each took 36 ms instead of 22.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have no such setting and need none
        trim_threshold, mmap_threshold, largest = -1, -3, 1 << 30
        mallopt(mmap_threshold, largest)
        mallopt(trim_threshold, largest)
