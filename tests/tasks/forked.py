"""Processes forked from one that has loaded torch, the tasks and the cases, so that each starts in a moment.

Whichever test comes first starts the server. Its modules are the same for all; those not found are left out.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pandas",
        "torch.distributed.fsdp",
        "torch.utils.checkpoint",
        "perilune.execution.task_process",
        "perilune.tasks.distill.loop",
        "perilune.tasks.rl.loop",
        "perilune.tasks.supervised.preference",
        "perilune.tasks.supervised.reward_model",
        "perilune.tasks.supervised.sft",
        "task_cases",
        "test_learning_together",
        "test_stages_together",
    ]
)
