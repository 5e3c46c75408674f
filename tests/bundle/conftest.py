"""Fixtures: a job, its inputs and its frozen bundle."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_cases import make_inputs, make_job

from perilune.bundle.freeze import copy_for_attempt, freeze
from perilune.bundle.job import Job


@pytest.fixture
def job() -> Job:
    return make_job()


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    return make_inputs(tmp_path / "sources")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen bundle that no test changes."""
    folder = tmp_path_factory.mktemp("pristine")
    freeze(make_job(), make_inputs(folder), folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    """A frozen bundle of the test's own."""
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))


@pytest.fixture
def make_attempt(pristine: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes an attempt's copy of the bundle, by name."""

    def make(name: str) -> Path:
        copy_for_attempt(pristine, tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def in_child() -> Iterator[Callable[..., str]]:
    """Runs `prepare` and then `function` in a forked process; returns the result, or the error, as text.

    An error reads "Type: message". The text is empty if a signal killed the process.
    """

    def run(prepare: Callable[[], None], function: Callable[[], object]) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                prepare()
                text = str(function())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode()[:4000])
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(child, 0)
        return text

    yield run
