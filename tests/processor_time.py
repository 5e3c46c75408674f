"""Processor time of each test file, including the processes that its tests started and waited for.

The whole suite has a budget of twenty minutes on two cores. Wall time is misleading for tests that run in
parallel, so the summary lists the files with the most processor time.
"""

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SHOWN = 25
BEGAN = pytest.StashKey[float]()
SPENT = "processor seconds"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[BEGAN] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        item.user_properties.append((SPENT, sum(os.times()[:4]) - item.stash[BEGAN]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the files with the most processor time, if more than SHOWN files ran."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                seconds[report.nodeid.split("::")[0]] += dict(report.user_properties).get(SPENT, 0.0)
    if len(seconds) <= SHOWN:
        return
    terminalreporter.section(f"processor time: {sum(seconds.values()):.0f} s; the most by file")
    for path, spent in seconds.most_common(SHOWN):
        terminalreporter.line(f"{spent:7.1f} s  {path}")
