"""Who rents machines to this home, and the name under which it rents: two files beside the database.

They are no part of it, so that what was rented is found, and ended, when the database is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.control.record.home import Home
from perilune.control.record.ids import new_ulid
from perilune.errors import RequestError
from perilune.execution.providers.protocol import Provider
from perilune.execution.providers.ray.ray_settings import RaySettings
from perilune.execution.providers.skypilot.skypilot_settings import SkyPilotSettings
from perilune.files import write_atomic
from perilune.recipe.problems import ProblemsError, raise_first, validate
from perilune.recipe.source import Document, parse_yaml

PROVIDERS, CLUSTER = "providers.yaml", "cluster"


class FakeSettings(BaseModel):
    """The fake cloud: machines that are folders and processes of this one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["fake"]
    folder: Annotated[Path, Field(description="of the cloud's server, which says where it listens")]
    visibility_seconds: Annotated[
        float, Field(ge=0, description="how long what it has done may stay out of sight")
    ] = 0.0

    def open(self, folder: Path) -> Provider:
        """The provider; it keeps nothing in `folder`."""
        from perilune.execution.providers.fake.client import FakeCloud

        return FakeCloud(self.folder, self.visibility_seconds)

    def problems(self, kinds: Sequence[str]) -> Mapping[str, str]:
        """None: which kinds there are only the cloud's server knows."""
        return {}


class ProvidersFile(BaseModel):
    """What providers.yaml holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    daily_cap: Annotated[
        float, Field(gt=0, description="currency units that may be spent or promised in any 24 hours")
    ]
    providers: Mapping[
        str, Annotated[FakeSettings | RaySettings | SkyPilotSettings, Field(discriminator="type")]
    ]


class Providers:
    """The providers of one home, opened when they are needed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._open: dict[str, Provider] = {}

    def settings(self) -> ProvidersFile | None:
        """What is configured; None when nothing is, and no machine can be rented.

        Raises:
            RequestError: when the file is not what it should be.
        """
        document = self._document()
        if document is None:
            return None
        try:
            return validate(ProvidersFile, document.value, (), "")
        except ProblemsError as found:
            raise_first(found.problems, document.place)

    def problems(self, name: str, kinds: Sequence[str]) -> list[RequestError]:
        """What is wrong with kinds of machines, as far as can be said without renting: where, and what.

        Raises:
            RequestError: no provider is called so.
        """
        settings = self._settings_of(name)
        document = self._document() or Document(None)
        return [
            RequestError(what, where=document.place(("providers", name, "kinds", kind, "resources")))
            for kind, what in settings.problems(kinds).items()
        ]

    def names(self) -> list[str]:
        """Names of the providers that are configured."""
        settings = self.settings()
        return sorted(settings.providers) if settings else []

    def get(self, name: str) -> Provider:
        """The provider called so.

        Raises:
            RequestError: when none is.
        """
        if name not in self._open:
            self._open[name] = self._settings_of(name).open(self.home.root / "ssh")
        return self._open[name]

    def daily_cap(self) -> float:
        """Currency units that may be spent or promised in any 24 hours."""
        settings = self.settings()
        return settings.daily_cap if settings else 0.0

    def _settings_of(self, name: str) -> FakeSettings | RaySettings | SkyPilotSettings:
        settings = self.settings()
        if settings is None or name not in settings.providers:
            known = ", ".join(settings.providers) if settings else "none"
            raise RequestError(
                f"no provider is called '{name}'",
                where=str(self.home.root / PROVIDERS),
                remedy=f"configure it there; there is {known}",
            )
        return settings.providers[name]

    def _document(self) -> Document | None:
        path = self.home.root / PROVIDERS
        try:
            return parse_yaml(path.read_text(), str(path))
        except FileNotFoundError:
            return None


def cluster_id(home: Home) -> str:
    """The name under which this home rents, made once: part of every machine's key, and of its tag."""
    path = home.root / CLUSTER
    if not path.exists():
        draft = path.with_name(f".{CLUSTER}.{new_ulid()}.tmp")
        write_atomic(draft, new_ulid()[-10:].lower())
        _link(draft, path)
    return path.read_text()


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)  # never replaces: of two commands, both get the first one's
    except FileExistsError:
        pass
    finally:
        draft.unlink()
