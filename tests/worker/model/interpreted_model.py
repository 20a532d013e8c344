"""Run by test_model.py under TRITON_INTERPRET=1: the model in the forms of a GPU, on a CPU, in given pieces.

One argument, JSON: `checkpoint`, `ids`, `sizes` of the pieces, `logits` the file to write {tokens seen: logits} to.
"""

import json
import sys
from pathlib import Path

import torch
from kimi_kernels.backend import Backend
from kimi_worker.engine.runner import Runner
from kimi_worker.model import moe
from kimi_worker.model.forms import AttentionForm, ExpertStorage, Forms
from kimi_worker.parallel.groups import Groups
from kimi_worker.parallel.ranks import RankPlace
from kimi_worker.protocol.step import SequenceStep, StepPlan
from kimi_worker.settings import WorkerSettings

PAGE_SIZE, SLOT = 16, 3
job = json.loads(sys.argv[1])
settings = WorkerSettings.model_validate(
    {
        "deployment": "test",
        "role": "both",
        "model": {"checkpoint": Path(job["checkpoint"]), "served_name": "tiny", "max_model_len": 64},
        "limits": {"max_num_seqs": 4, "num_pages": 8, "page_size_tokens": PAGE_SIZE, "num_state_slots": 5},
    }
)
forms = Forms(AttentionForm.BLOCKED, ExpertStorage.PACKED, Backend.TRITON)
runner = Runner(settings, Groups(RankPlace(0, 1, 1, 1), torch.device("cpu")), forms)
runner.load()
pages, ids, seen, found = [5, 2, 7, 0], job["ids"], 0, {}
for step, size in enumerate(job["sizes"]):
    # As in the release, experts of chunks run one by one; those of decodes are gathered.
    moe._GATHER_BYTES = 0 if size > 1 else 4 << 20
    need = -(-(seen + size) // PAGE_SIZE)
    plan = StepPlan(step, [SequenceStep(ids[seen : seen + size], seen, pages[:need], SLOT, sample=True)])
    logits = runner.execute(plan)
    assert logits is not None
    seen += size
    found[seen] = logits[0]
assert {f"kimi_kernels.{operator}.kernel" for operator in ("mla", "kda", "mxfp4")} <= sys.modules.keys()
torch.save(found, job["logits"])
