"""The environment variables of a task: a fixed selection, the same on every run."""

import os
from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.bundle.machine import usable_threads
from perilune.bundle.secret_sources import require_secret

KEPT_VARIABLES = {
    *("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SSL_CERT_DIR", "SSL_CERT_FILE"),
    *("SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
}
KEPT_PREFIXES = ("COVERAGE_", "CUDA_", "HF_", "LC_", "NCCL_", "NVIDIA_", "PYTORCH_", "TORCH_", "XPU_")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# A variable that looks like a credential is passed only if the job names it as a secret.
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
# Training allocates and frees large tensors in every step. Clearing pages of new tensors took a quarter of a
# step, so the process keeps up to 64 GiB of freed memory, and uses pages of 2 MiB.
MALLOC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"


def make_task_environment(job: Job, mark: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the task process of `job`.

    Args:
        mark: further variables, by which the processes of the attempt are found.

    Raises:
        RequestError: a secret of the job is not set on this machine.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES
        or (name.startswith(KEPT_PREFIXES) and not any(word in name.upper() for word in SECRET_WORDS))
    }
    secrets = {name: require_secret(name, f"stage {job.stage}") for name in job.secrets}
    resources = job.resources
    threads = str(resources.threads or max(1, usable_threads() // resources.processes))
    return {
        **kept,
        **dict.fromkeys(THREAD_VARIABLES, threads),
        # Waiting threads sleep instead of spinning: on shared cores, spinning is ten times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLIBC_TUNABLES": MALLOC_TUNABLES,
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        **secrets,
        **mark,
    }
