"""Keeping the values of secrets out of files. A job names them; `secret_sources` knows where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.job import Job
from perilune.bundle.secret_sources import secret_value
from perilune.errors import RequestError
from perilune.files import canonical_json

SHORTEST_SECRET = 4  # characters; anything shorter occurs in every file
_BLOCK = 1 << 20  # bytes read at once


def secret_values(job: Job) -> dict[bytes, str]:
    """Each form in which a secret's value could stand in a file (plain, as in JSON), to the secret's name.

    Secrets that are not set here are left out: their values cannot have come from here.

    Raises:
        RequestError: when a value is too short to be told from ordinary text.
    """
    forms: dict[bytes, str] = {}
    for name in job.secrets:
        value = secret_value(name)
        if not value:
            continue
        if len(value) < SHORTEST_SECRET:
            raise RequestError(
                f"the secret {name} has {len(value)} characters: too short to be kept out of files",
                remedy=f"use a value of at least {SHORTEST_SECRET} characters",
            )
        plain = os.fsencode(value)
        forms[plain] = name
        forms[canonical_json(plain.decode(errors="replace"))[1:-1]] = name
    return forms


def find_secret(path: Path, forms: Mapping[bytes, str]) -> str | None:
    """Name of the first secret whose value stands in the file at `path`, read in bounded memory."""
    if not forms:
        return None
    overlap = max(map(len, forms)) - 1
    tail = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            window = tail + block
            for form, name in forms.items():
                if form in window:
                    return name
            tail = window[-overlap:]
    return None


def redact(data: bytes, forms: Mapping[bytes, str]) -> bytes:
    """`data` with every secret's value replaced by "[NAME]"; longer values first, as one may hold another."""
    for form in sorted(forms, key=len, reverse=True):
        data = data.replace(form, f"[{forms[form]}]".encode())
    return data
