"""Launcher `docker`: the worker runs in a container of Docker, or of any program with Docker's command line.

This module decides what a container may do; the runner on its machine creates, watches and ends it. The image
is named by its digest, so that the name identifies its content.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, field_validator

from perilune.frozen import Frozen

RECORD_FILE = "container.json"  # in runtime/: program and image of the attempt's container
MAX_PROCESSES = 4096  # limit in a container, which stops fork bombs

Folder = Annotated[str, StringConstraints(pattern=r'^/[^,:"\n]+$')]
Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[bkmg]$")]


class Container(Frozen):
    """A container and what it may use of its machine."""

    name: Literal["docker"] = "docker"
    program: str = Field(
        "docker",
        pattern=r"^[A-Za-z0-9_./][A-Za-z0-9_./+-]*$",
        description="docker, podman, or the path of either on the machine",
    )
    image: str = Field(description="NAME@sha256:DIGEST, or the ID of a local image, sha256:ID")
    python: str = Field("python3", description="interpreter in the image, 3.11 or newer")
    gpus: Literal["all"] | tuple[int, ...] = Field(
        (), description='indices of the GPUs in the container, or "all"'
    )
    mounts: tuple[Folder, ...] = Field(
        (), description="folders of the machine, mounted read-only at the same path"
    )
    user: str | None = Field(
        None,
        pattern=r"^[0-9]+:[0-9]+$",
        description='"UID:GID" of the processes in the container; by default the user who starts them on the'
        " machine",
    )
    network: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="none, host, or the name of another network of docker or podman; by default their default"
        " network",
    )
    memory: Size | None = Field(
        None, description='memory limit, such as "16g"; exceeding it ends the container'
    )
    shared_memory: Size = Field("1g", description="size of /dev/shm in the container")

    @field_validator("image")
    @classmethod
    def _pinned(cls, image: str) -> str:
        if not re.fullmatch("([A-Za-z0-9./:_][A-Za-z0-9./:_-]*@)?sha256:[0-9a-f]{64}", image):
            raise ValueError(
                f"'{image}' does not identify the image: a tag can move. Use its digest, NAME@sha256:..., as"
                " printed by `docker pull NAME:TAG`, or its ID, sha256:..., as printed by"
                " `docker images --no-trunc` on the machine"
            )
        return image

    def runner_arguments(self) -> dict[str, Any]:
        """Return the arguments for the runner. They hold no secrets, because other users can read them."""
        return {
            "program": self.program,
            "image": self.image,
            "python": self.python,
            "user": self.user,
            "options": self._options(),
        }

    def _options(self) -> list[str]:
        """Return the options of `create` that do not depend on the machine."""
        options = [
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", str(MAX_PROCESSES)),
            *("--read-only", "--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777"),  # noqa: S108 - inside
            *("--shm-size", self.shared_memory),
            *("--log-driver", "none"),  # the worker's own log has its output
        ]
        options += ["--network", self.network] if self.network is not None else []
        options += ["--memory", self.memory] if self.memory is not None else []
        for folder in self.mounts:
            options += ["--mount", f"type=bind,source={folder},target={folder},readonly"]
        return options + self._devices()

    def _devices(self) -> list[str]:
        if not self.gpus:
            return []
        numbers = ["all"] if self.gpus == "all" else [str(number) for number in self.gpus]
        if Path(self.program).name.startswith("podman"):  # uses the Container Device Interface
            return [part for number in numbers for part in ("--device", f"nvidia.com/gpu={number}")]
        return ["--gpus", "all" if self.gpus == "all" else f'"device={",".join(numbers)}"']


class ContainerRecord(BaseModel):
    """The runner's record of an attempt's container; it comes from the machine, so it is validated."""

    program: str = Field(pattern=r"^[ -~]{1,200}$")
    image: str = Field(pattern=r"^[ -~]{1,500}$")
    image_id: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")


def read_container(attempt: Path) -> ContainerRecord | None:
    """Return the container of the attempt in this directory; None without one or if its record is invalid."""
    try:
        return ContainerRecord.model_validate_json((attempt / "runtime" / RECORD_FILE).read_bytes())
    except (OSError, ValueError):
        return None
