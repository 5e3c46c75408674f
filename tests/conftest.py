"""Shared fixtures and hooks.

In continuous integration everything is installed, so a skipped test counts as failed unless marked `gpu`.
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

# A shell makes its background jobs ignore SIGINT, and their children inherit that. Tests interrupt commands,
# so restore the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

IN_CI = os.environ.get("CI", "").lower() not in {"", "0", "false"}


@pytest.fixture(scope="module", params=["native", "torch"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both CPU backends: the C kernels and plain torch."""
    from perilune.models.native import ops

    if request.param == "native" and not ops.is_available():
        pytest.skip("needs a C compiler: install gcc or clang")
    with mock.patch.object(ops, "is_available", lambda: request.param == "native"):
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
    """Reset the secrets that redaction has collected in this process."""
    redaction.KNOWN_SECRETS.__dict__.update(redaction.Redactor().__dict__)


@pytest.fixture(autouse=True)
def orphans_go_to_init() -> Iterator[None]:
    """Stop adopting orphans: a worker in this process enables it, and later tests would see zombies."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="session")
def walls() -> None:
    """Require all walls of the sandbox; xfail with the missing ones, because a container may forbid them."""
    from perilune.sandbox import WALLS, Sandbox

    with Sandbox(allow_missing=tuple(WALLS)) as sandbox:
        found = sandbox.capabilities()
    if found.missing:
        pytest.xfail(f"this machine cannot build {', '.join(found.missing)}: {found.reasons}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection: objects created by collection live until the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that none of them is the last to finish."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Report a skipped test as failed in CI."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and "gpu" not in item.keywords:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Report a skipped module as failed in CI."""
    report = yield
    if IN_CI and report.skipped:
        _fail(report)
    return report


def _fail(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"only GPU tests may skip where CI is set; this one did: {reason}"
