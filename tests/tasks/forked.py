"""A fork server that has loaded torch, the tasks and the test cases, so that processes start quickly.

The first test that needs it starts the server. Modules that are not found are skipped.
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
