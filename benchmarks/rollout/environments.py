"""Virtual environments of the engines, created once in a cache folder."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perilune-benchmarks"
CACHE = Path(os.environ.get("PERILUNE_BENCHMARKS", _HOME)) / "rollout"


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one peer.

    Attributes:
        requirements: installed with their dependencies.
        alone: installed without dependencies. Those of optimum-intel include a second torch, with CUDA.
    """

    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()

    def python(self, name: str) -> Path:
        """The interpreter of the environment `name`, which is installed if missing or outdated."""
        folder = CACHE / name
        python, mark = folder / "venv" / "bin" / "python", folder / "installed.json"
        wanted = [*self.requirements, *self.alone]
        if mark.exists() and json.loads(mark.read_text()) == wanted:
            return python
        print(f"installing {', '.join(wanted)} into {folder}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        with (folder / "install.log").open("w") as log:
            for packages in (self.requirements, self.alone and ("--no-deps", *self.alone)):
                if packages:
                    install = [python, "-m", "pip", "install", "--no-input", *packages]
                    subprocess.run(install, check=True, stdout=log, stderr=log)
        mark.write_text(json.dumps(wanted))
        return python


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings to run an engine of the comparison.

    Attributes:
        module: module in `engines/`.
        environment: name of its virtual environment, or None for the running interpreter.
        options: further arguments of its adapter.
        prepares: True if it needs the checkpoint in its own format.
    """

    module: str
    environment: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prepares: bool = False

    def python(self, *, here: bool = False) -> Path:
        """The interpreter of the engine, or with `here` always the running one."""
        if self.environment is None or here:
            return Path(sys.executable)
        return ENVIRONMENTS[self.environment].python(self.environment)


ENVIRONMENTS = MappingProxyType(
    {
        "transformers": Environment(("torch==2.13.0", "transformers==5.23.0")),
        # All but the last two only export the checkpoint; optimum-intel knows no newer transformers.
        "openvino": Environment(
            (
                "torch==2.13.0",
                "transformers==5.5.4",
                "nncf==3.4.0",
                "requests",
                "openvino-tokenizers==2026.4.1.0",
                "openvino==2026.4.1",
                "openvino-genai==2026.4.1",
            ),
            alone=("optimum==2.3.0", "optimum-intel==2.2.0"),
        ),
        "llama-cpp": Environment(("llama-cpp-python==0.3.36", "gguf==0.19.0")),
    }
)

ENGINES = MappingProxyType(
    {
        "perilune": Engine("ours"),
        "perilune-int8": Engine("ours", options={"cache": "int8"}),
        "transformers": Engine("generate", "transformers", {"cache": None}),
        "transformers-static": Engine("generate", "transformers", {"cache": "static"}),
        "openvino": Engine("openvino", "openvino", {"kv_cache": "u8"}, prepares=True),
        "llama.cpp": Engine("llama", "llama-cpp", prepares=True),
    }
)
LIMITS = Engine("limits")
