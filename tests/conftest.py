"""In continuous integration everything is installed, so a skipped test there is a failed one.

A test marked `gpu` may skip anywhere; no other may where CI is set.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any
from unittest import mock

import pytest

from perilune import redaction
from perilune.execution.processes import PR_SET_CHILD_SUBREAPER
from processor_time import pytest_runtest_setup, pytest_runtest_teardown, pytest_terminal_summary

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown", "pytest_terminal_summary"]

# A shell has the jobs that it starts in the background ignore Ctrl-C, and their children inherit that; the
# commands that tests interrupt must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

IN_CI = os.environ.get("CI", "").lower() not in {"", "0", "false"}


@pytest.fixture(scope="module", params=["native", "torch"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to compute on a CPU: the C kernels, and torch alone."""
    from perilune.models.native import ops

    if request.param == "native" and not ops.available():
        pytest.skip("needs a C compiler: install gcc or clang")
    with mock.patch.object(ops, "available", lambda: request.param == "native"):
        yield request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads of torch and of the kernels."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests() -> None:
    """A process keeps the secrets that it has read out of all it writes; each test begins without any."""
    redaction.KNOWN.__dict__.update(redaction.Redactor().__dict__)


@pytest.fixture(autouse=True)
def orphans_go_to_init() -> Iterator[None]:
    """A worker that ran in this process made it adopt orphans, which would stay zombies in later tests."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="session")
def walls() -> None:
    """All walls of the sandbox, which a container may forbid; what is missing is named."""
    from perilune.sandbox import WALLS, Sandbox

    with Sandbox(allow_missing=tuple(WALLS)) as one:
        found = one.capabilities()
    if found.missing:
        pytest.xfail(f"this machine cannot build {', '.join(found.missing)}: {found.reasons}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What collecting makes lives to the end: the garbage collector would look through it in vain."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Turn the skip of a test into its failure."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and "gpu" not in item.keywords:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Turn the skip of a whole module into its failure."""
    report = yield
    if IN_CI and report.skipped:
        _fail(report)
    return report


def _fail(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"only GPU tests may skip where CI is set; this one did: {reason}"
