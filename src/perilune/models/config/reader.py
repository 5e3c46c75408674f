"""Typed lookups in an untrusted config.json. Every error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.errors import RequestError
from perilune.files import finite_number
from perilune.models.config.families import DECODER_FAMILIES, SAME_FAMILY

_LARGEST = 2**31


class UnsupportedModelError(RequestError):
    """The model looks well-formed, but Perilune's decoder does not compute it. Transformers may."""


class Reader:
    """One JSON object.

    Raises:
        RequestError: when `raw` is not an object, and from every method when a value is invalid.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        if not isinstance(raw, Mapping):
            raise RequestError(f"holds a {type(raw).__name__}, not an object", where=where)
        self.raw, self.where = raw, where

    def wrong(self, key: str, remedy: str = "") -> RequestError:
        return RequestError(f"{key} is {self.raw.get(key)!r}", where=f"{self.where}:{key}", remedy=remedy)

    def unsupported(self, key: str, remedy: str) -> UnsupportedModelError:
        """Return the error for a valid value of `key` that the decoder does not implement."""
        message = f"{key} is {self.raw.get(key)!r}, which Perilune's decoder does not compute"
        return UnsupportedModelError(message, where=f"{self.where}:{key}", remedy=remedy)

    def architecture(self) -> str:
        """Return the family that `model_type` names."""
        kind = self.raw.get("model_type")
        if not isinstance(kind, str):
            raise self.wrong("model_type", "give the name of an architecture")
        architecture = SAME_FAMILY.get(kind, kind)
        if architecture in DECODER_FAMILIES:
            return architecture
        text = self.raw.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        remedy = f"train a checkpoint of one of: {', '.join(DECODER_FAMILIES)}; others can only be sampled"
        if isinstance(inner, str) and inner in DECODER_FAMILIES:
            remedy = f"use a checkpoint of its text model alone, with model_type {inner}"
        raise self.unsupported("model_type", remedy)

    def reject(self, key: str, allowed: Any, remedy: str) -> None:
        """Refuse a value other than `allowed` (or null) because it would change the computation."""
        if self.raw.get(key) not in (None, allowed):
            raise self.unsupported(key, remedy)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the default where the key is missing or null."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise RequestError(f"{key} is missing", where=f"{self.where}:{key}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "give an integer")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer from `least` to 2^31, or the default."""
        value = self.integer(key, default)
        if value != default and not least <= value <= _LARGEST:
            raise self.wrong(key, f"give an integer from {least} to {_LARGEST}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = finite_number(self.raw.get(key, default))
        if value is None or value <= 0:
            raise self.wrong(key, "give a positive number")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None where the key is missing or null."""
        return None if self.raw.get(key) is None else self.number(key, 0.0)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "give true or false")
        return value

    def inner(self, key: str, **defaults: Any) -> Reader:
        """Return the object under `key`, with `defaults` for missing keys."""
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "give an object")
        return Reader({**defaults, **value}, f"{self.where}:{key}")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return non-negative integers: a list or a single one; empty where the key is missing or null."""
        value = self.raw.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in values):
            raise self.wrong(key, "give an integer of at least 0, or a list of such integers")
        return tuple(values)
