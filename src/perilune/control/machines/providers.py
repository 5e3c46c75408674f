"""The providers that rent machines to this home, and the name under which the home rents.

Both are files beside the database, so rented machines can be found and terminated if the database is lost.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from perilune.control.record.home import Home
from perilune.control.record.ids import new_ulid
from perilune.errors import RequestError
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.protocol import Provider
from perilune.execution.providers.ray.client import RayCluster
from perilune.execution.providers.ray.ray_settings import RaySettings
from perilune.execution.providers.skypilot.client import SkyPilot
from perilune.execution.providers.skypilot.skypilot_settings import SkyPilotSettings
from perilune.files import write_atomic
from perilune.frozen import Frozen
from perilune.recipe.problems import ProblemsError, raise_problems, validate
from perilune.recipe.source import Document, parse_yaml

PROVIDERS_FILE, CLUSTER_FILE = "providers.yaml", "cluster"


class FakeSettings(Frozen):
    """The fake cloud, whose machines are folders and processes of this machine."""

    type: Literal["fake"]
    folder: Annotated[Path, Field(description="folder of the cloud's server, with its address")]
    visibility_seconds: Annotated[
        float, Field(ge=0, description="seconds after which operations are visible in its answers")
    ] = 0.0


Settings = FakeSettings | RaySettings | SkyPilotSettings


class ProvidersFile(Frozen):
    """The content of providers.yaml."""

    daily_cap: Annotated[
        float, Field(gt=0, description="currency units that may be spent or committed in any 24 hours")
    ]
    providers: Mapping[str, Annotated[Settings, Field(discriminator="type")]]


class Providers:
    """The providers of one home, opened when they are first used."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._open: dict[str, Provider] = {}

    def settings(self) -> ProvidersFile | None:
        """Return the configuration; None without a file, when no machine can be rented.

        Raises:
            RequestError: the file is invalid.
        """
        document = self._document()
        if document is None:
            return None
        try:
            return validate(ProvidersFile, document.value, (), "")
        except ProblemsError as error:
            raise_problems(error.problems, document.locate)

    def problems(self, name: str, kinds: Sequence[str]) -> list[RequestError]:
        """Return the problems of kinds of machines, as far as they can be checked without renting.

        Raises:
            RequestError: there is no provider of that name.
        """
        settings = self._settings_of(name)
        if isinstance(settings, RaySettings):
            known, where = ", ".join(settings.kinds), str(self.home.root / PROVIDERS_FILE)
            unknown = [kind for kind in kinds if kind not in settings.kinds]
            return [RequestError(f"no kind '{kind}'; there is {known}", where=where) for kind in unknown]
        if not isinstance(settings, SkyPilotSettings):  # only its server knows the kinds
            return []
        document = self._document() or Document(None)
        with SkyPilot(settings, Path()) as provider:
            problems = {kind: provider.problem(kind) for kind in kinds}
        return [
            RequestError(what, where=document.locate(("providers", name, "kinds", kind, "resources")))
            for kind, what in problems.items()
            if what
        ]

    def names(self) -> list[str]:
        settings = self.settings()
        return sorted(settings.providers) if settings else []

    def get(self, name: str) -> Provider:
        """Return the provider of that name.

        Raises:
            RequestError: there is none.
        """
        if name not in self._open:
            self._open[name] = open_provider(self._settings_of(name), self.home.root / "ssh")
        return self._open[name]

    def daily_cap(self) -> float:
        """Currency units that may be spent or committed in any 24 hours."""
        settings = self.settings()
        return settings.daily_cap if settings else 0.0

    def _settings_of(self, name: str) -> Settings:
        settings = self.settings()
        if settings is None or name not in settings.providers:
            known = ", ".join(settings.providers) if settings else "none"
            raise RequestError(
                f"no provider is called '{name}'",
                where=str(self.home.root / PROVIDERS_FILE),
                remedy=f"configure it there; configured: {known}",
            )
        return settings.providers[name]

    def _document(self) -> Document | None:
        path = self.home.root / PROVIDERS_FILE
        try:
            return parse_yaml(path.read_text(), str(path))
        except FileNotFoundError:
            return None


def open_provider(settings: Settings, folder: Path) -> Provider:
    """Return the provider with these settings; it may keep host keys of machines in `folder`."""
    match settings:
        case FakeSettings():
            return FakeCloud(settings.folder, settings.visibility_seconds)
        case RaySettings():
            return RayCluster(settings)
        case SkyPilotSettings():
            return SkyPilot(settings, folder)


def cluster_id(home: Home) -> str:
    """Return the random name under which this home rents. It is part of every machine's key and tag."""
    path = home.root / CLUSTER_FILE
    if not path.exists():
        draft = path.with_name(f".{CLUSTER_FILE}.{new_ulid()}.tmp")
        write_atomic(draft, new_ulid()[-10:].lower())
        with suppress(FileExistsError):
            os.link(draft, path)  # never replaces: of two commands, both get the name of the first
        draft.unlink()
    return path.read_text()
