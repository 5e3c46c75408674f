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
    found, waiting = {}, [Requirement(one) for one in requirements]
    while waiting:
        need = waiting.pop()
        if need.name.lower() in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            held = distribution(need.name)
        except PackageNotFoundError:
            continue
        about = held.metadata
        said = [about.get("License-Expression"), (about.get("License") or "")[:200]]
        said += [line for line in about.get_all("Classifier") or () if line.startswith("License ::")]
        found[need.name.lower()] = " ".join(filter(None, said))
        waiting += map(Requirement, held.requires or ())
    return found


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev", "docs"}))
def test_only_gpl_extras_install_gpl_packages(extra):
    found = licenses(EXTRAS[extra])
    copyleft = {name: said for name, said in found.items() if COPYLEFT.search(said)}
    if extra.endswith("-gpl"):
        assert copyleft or not found, "no GPL package is left: drop the -gpl suffix"
    else:
        assert not copyleft
