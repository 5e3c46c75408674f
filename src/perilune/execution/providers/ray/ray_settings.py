"""A Ray cluster, as providers.yaml tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PLACE = r"^[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}$"  # HOST:PORT


class RayKind(BaseModel):
    """What Ray sets aside for one machine of a kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: Annotated[float, Field(ge=0, description="CPUs")] = 0.0
    gpus: Annotated[float, Field(ge=0, description="GPUs; 0.5 is half a one")] = 0.0
    memory_gib: Annotated[float, Field(ge=0, description="memory, in GiB")] = 0.0
    custom: Annotated[
        Mapping[str, float], Field(description="resources that the cluster has named itself")
    ] = {}
    price: Annotated[float, Field(ge=0, description="currency units an hour that it is counted at")] = 0.0

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.resources():
            raise ValueError("a kind needs some of cpus, gpus, memory_gib or custom")
        return self

    def resources(self) -> dict[str, float]:
        """By the names that Ray gives them."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(int(self.memory_gib * 2**30))}
        return {name: amount for name, amount in {**named, **self.custom}.items() if amount > 0}


class RaySettings(BaseModel):
    """A Ray cluster: how it is reached, and which machines can be had there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["ray"]
    dashboard: Annotated[
        str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$", description="where Ray's dashboard answers")
    ] = "http://127.0.0.1:8265"
    gateway: Annotated[
        str,
        Field(pattern=PLACE, description="HOST:PORT where commands to machines are taken, seen from here"),
    ] = "127.0.0.1:8275"
    listen: Annotated[
        str, Field(pattern=PLACE, description="HOST:PORT where they are, on the head node; one for all homes")
    ] = "127.0.0.1:8275"
    token: Annotated[str | None, Field(description="secret that holds the cluster's own token")] = None
    python: Annotated[str, Field(min_length=1, description="Python on the head node that has Ray")] = "python"
    workspace: Annotated[
        str, Field(min_length=1, description="folder on every node, below which machines have theirs")
    ] = "~/.perilune/ray"
    namespace: Annotated[str, Field(min_length=1, description="of the machines' names in Ray")] = "perilune"
    strategy: Annotated[
        Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"],
        Field(description="how the machines of one attempt lie on nodes, as Ray calls it"),
    ] = "SPREAD"
    kinds: Annotated[Mapping[str, RayKind], Field(min_length=1, description="kinds of machines, by name")]
