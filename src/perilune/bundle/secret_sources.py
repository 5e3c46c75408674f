"""Reads the values of secrets: from the environment, or from the source in $PERILUNE_HOME/secrets.yaml.

Recipes and bundles contain names of secrets only. The user's secrets.yaml has the source of each value:

    JUDGE_KEY: {keyring: perilune}
    HF_TOKEN: {file: ~/.cache/huggingface/token}
    WANDB_API_KEY: {environment: MY_WANDB_KEY}

An environment variable with the name of the secret takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from perilune.errors import RequestError, requires_extra
from perilune.files import home_directory, write_atomic
from perilune.frozen import Frozen
from perilune.redaction import MIN_SECRET_LENGTH, register_secret

SECRETS_FILE = "secrets.yaml"
MAX_BYTES = 1 << 16  # of a file with the value of a secret
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SecretSource(Frozen):
    """The source of one value: exactly one of the fields."""

    keyring: str | None = Field(None, description="service in the keyring of the operating system")
    file: str | None = Field(None, description="file with only the value; surrounding white space is removed")
    environment: str | None = Field(None, description="another environment variable")

    @model_validator(mode="after")
    def _one(self) -> SecretSource:
        if sum(value is not None for value in (self.keyring, self.file, self.environment)) != 1:
            raise ValueError("needs exactly one of keyring, file and environment")
        return self

    def value(self, name: str) -> str | None:
        """Return the value of the secret `name`, or None.

        Raises:
            RequestError: when its file or the keyring cannot be read.
        """
        if self.environment is not None:
            return os.environ.get(self.environment) or None
        if self.file is not None:
            return _from_file(Path(self.file).expanduser())
        assert self.keyring is not None
        return _from_keyring(self.keyring, name)

    def __str__(self) -> str:
        kind = next(kind for kind in ("keyring", "file", "environment") if getattr(self, kind) is not None)
        return f"{kind} {getattr(self, kind)}"


_SOURCES = TypeAdapter(dict[Name, SecretSource])


def secret_value(name: str) -> str | None:
    """Return the value of a secret, or None. This process then redacts it in everything that it writes.

    Raises:
        RequestError: when secrets.yaml is wrong, or a source cannot be read.
    """
    value = os.environ.get(name)
    if not value and (source := read_sources().get(name)) is not None:
        value = source.value(name)
    if value:
        register_secret(name, value)
    return value or None


def register_secrets(names: Iterable[str]) -> None:
    """Redact the values of these secrets in everything that this process writes.

    Raises:
        RequestError: when a value is too short to redact, or cannot be read.
    """
    for name in names:
        value = secret_value(name)
        if value is not None and len(value) < MIN_SECRET_LENGTH:
            raise RequestError(
                f"the secret {name} has only {len(value)} characters, which is too short to redact",
                remedy=f"use a value of at least {MIN_SECRET_LENGTH} characters",
            )


def require_secret(name: str, where: str) -> str:
    """Return the value of a secret that the stage `where` needs.

    Raises:
        RequestError: when it has no value here.
    """
    value = secret_value(name)
    if value is None:
        raise RequestError(
            f"the secret {name}, which the run needs, is not set here",
            where=where,
            remedy=f"export {name}, or configure its source: perilune secrets set {name}",
        )
    return value


def sources_file() -> Path:
    return home_directory() / SECRETS_FILE


def read_sources() -> dict[str, SecretSource]:
    """Return the sources in secrets.yaml by secret; empty without that file.

    Raises:
        RequestError: when the file is wrong. The message shows no value, because it may be a secret.
    """
    path = sources_file()
    if not path.exists():
        return {}
    import yaml

    try:
        return _SOURCES.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        keys = (
            [".".join(map(str, detail["loc"])) for detail in error.errors()]
            if isinstance(error, ValidationError)
            else []
        )
        raise RequestError(
            f"is not a valid list of secret sources{': ' + ', '.join(keys) if keys else ''}",
            where=str(path),
            remedy="NAME: {keyring: SERVICE}, {file: PATH} or {environment: VARIABLE}; never a value",
        ) from None


def write_sources(sources: dict[str, SecretSource]) -> None:
    import yaml

    document = {name: source.model_dump(exclude_none=True) for name, source in sorted(sources.items())}
    write_atomic(sources_file(), yaml.safe_dump(document, sort_keys=True))


def store_in_keyring(service: str, name: str, value: str) -> None:
    """Store a value in the keyring of the operating system.

    Raises:
        RequestError: when there is no keyring, or it refuses.
    """
    register_secret(name, value)
    keyring = _keyring()
    try:
        keyring.set_password(service, name, value)
    except keyring.errors.KeyringError as error:
        raise RequestError(
            f"the keyring did not store the value: {error}", remedy="use --file or --environment"
        ) from None


def _from_keyring(service: str, name: str) -> str | None:
    keyring = _keyring()
    try:
        value = keyring.get_password(service, name)
    except keyring.errors.KeyringError as error:
        remedy = "unlock it, or use --file or --environment"
        raise RequestError(f"the keyring cannot be read: {error}", remedy=remedy) from None
    return value or None


def _from_file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the file of a secret cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}",
            where=str(path),
            remedy=f"check the path in {SECRETS_FILE}",
        ) from None
    if len(data) > MAX_BYTES:
        what = f"the file of a secret has more than {MAX_BYTES:,} bytes"
        raise RequestError(what, where=str(path), remedy="store only the value in the file")
    return text or None


def _keyring() -> ModuleType:
    with requires_extra("keyring", "the package keyring is not installed"):
        import keyring
    return keyring
