"""Extras install no GPL packages, unless the name of the extra ends with -gpl."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
COPYLEFT = re.compile(r"(?<!L)A?GPL|(?<!Lesser )General Public License")


def licenses(requirements):
    """Names and licenses of the installed packages among `requirements` and their dependencies."""
    installed, waiting = {}, [Requirement(text) for text in requirements]
    while waiting:
        need = waiting.pop()
        if need.name.lower() in installed or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            package = distribution(need.name)
        except PackageNotFoundError:
            continue
        about = package.metadata
        parts = [about.get("License-Expression"), (about.get("License") or "")[:200]]
        parts += [line for line in about.get_all("Classifier") or () if line.startswith("License ::")]
        installed[need.name.lower()] = " ".join(filter(None, parts))
        waiting += map(Requirement, package.requires or ())
    return installed


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev", "docs"}))
def test_only_gpl_extras_install_gpl_packages(extra):
    installed = licenses(EXTRAS[extra])
    copyleft = {name: text for name, text in installed.items() if COPYLEFT.search(text)}
    if extra.endswith("-gpl"):
        assert copyleft or not installed, "no GPL package is left: drop the -gpl suffix"
    else:
        assert not copyleft
