"""The settings of a Ray cluster in providers.yaml."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from perilune.frozen import Frozen

PLACE = r"^[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}$"  # HOST:PORT


class RayKind(Frozen):
    """The resources that Ray reserves for one machine of a kind."""

    cpus: Annotated[float, Field(ge=0, description="CPUs")] = 0.0
    gpus: Annotated[float, Field(ge=0, description="GPUs; 0.5 is half of one")] = 0.0
    memory_gib: Annotated[float, Field(ge=0, description="memory, in GiB")] = 0.0
    custom: Annotated[Mapping[str, float], Field(description="custom resources of the cluster")] = {}
    price: Annotated[float, Field(ge=0, description="currency units per hour for budgets")] = 0.0

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.resources():
            raise ValueError("a kind needs some of cpus, gpus, memory_gib or custom")
        return self

    def resources(self) -> dict[str, float]:
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(int(self.memory_gib * 2**30))}
        return {name: amount for name, amount in {**named, **self.custom}.items() if amount > 0}


class RaySettings(Frozen):
    """A Ray cluster: its addresses and its kinds of machines."""

    type: Literal["ray"]
    dashboard: Annotated[
        str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$", description="address of Ray's dashboard")
    ] = "http://127.0.0.1:8265"
    gateway: Annotated[
        str,
        Field(pattern=PLACE, description="HOST:PORT of the gateway to machines, seen from here"),
    ] = "127.0.0.1:8275"
    listen: Annotated[
        str,
        Field(pattern=PLACE, description="HOST:PORT of the gateway on the head node; shared by all homes"),
    ] = "127.0.0.1:8275"
    token: Annotated[str | None, Field(description="name of the secret with the cluster's token")] = None
    python: Annotated[str, Field(min_length=1, description="Python on the head node that has Ray")] = "python"
    workspace: Annotated[
        str, Field(min_length=1, description="folder on every node for the folders of machines")
    ] = "~/.perilune/ray"
    namespace: Annotated[str, Field(min_length=1, description="Ray namespace of the machines")] = "perilune"
    strategy: Annotated[
        Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"],
        Field(description="Ray's placement strategy for the machines of one attempt"),
    ] = "SPREAD"
    kinds: Annotated[Mapping[str, RayKind], Field(min_length=1, description="kinds of machines, by name")]
