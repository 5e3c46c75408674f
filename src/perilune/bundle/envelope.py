"""Signed statements: an in-toto Statement in a DSSE envelope, signed with Ed25519.

DSSE signs the payload together with its type, so signed bytes cannot be presented as another type
(https://github.com/secure-systems-lab/dsse). Each home has one key, and its owner can sign anything. A
signature therefore proves which home handled the evidence, not that the machine computed it honestly.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError
from perilune.files import canonical_json, fsync_directory, read_regular, write_atomic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from securesystemslib.signer import SSlibKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PRIVATE, PUBLIC = "controller.key", "controller.pub"


class SignatureError(RequestError):
    """An envelope is damaged, or not signed with the expected key."""


class SigningKey:
    """The key pair in a folder: `controller.key` (0600) and `controller.pub`, both PEM.

    Args:
        folder: where the pair is; created with a new pair if there is none.

    Raises:
        RequestError: when the folder cannot be written, or its key is invalid.
    """

    def __init__(self, folder: Path) -> None:
        private = folder / PRIVATE
        with storage_errors("store a signing key", folder):
            if not private.exists():
                _make(private)
            self._key = _load(private)
            if not (folder / PUBLIC).exists():
                write_atomic(folder / PUBLIC, _pem(self._key.public_key()))
        self.public = folder / PUBLIC

    def sign(self, statement: Mapping[str, Any]) -> bytes:
        """Return the DSSE envelope of a statement, as JSON."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import CryptoSigner

        envelope = Envelope(canonical_json(statement), PAYLOAD_TYPE, {})
        envelope.sign(CryptoSigner(self._key))
        return canonical_json(envelope.to_dict()) + b"\n"


def verify_statement(envelope: Path, key: Path) -> dict[str, Any]:
    """Check the signature of an envelope and return its statement.

    Args:
        envelope: the file with the envelope.
        key: the PEM file with the public key of the signature.

    Raises:
        SignatureError: when the envelope is damaged, or not signed with the key.
        RequestError: when `key` is not an Ed25519 public key.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error

    expected = read_public_key(key)
    try:
        signed = Envelope.from_dict(json.loads(read_regular(envelope)))
        signed.verify([expected], 1)
        statement = json.loads(signed.payload)
    except OSError as error:
        raise SignatureError(f"cannot be read: {error.strerror}", where=str(envelope)) from None
    except RequestError as error:
        raise SignatureError(error.what, where=str(envelope)) from None
    except Error:
        raise SignatureError(
            "is not signed with this key, or was changed",
            where=str(envelope),
            remedy=f"check that {key} is the right key",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SignatureError("is not an envelope", where=str(envelope)) from None
    stated = isinstance(statement, dict) and statement.get("_type") == STATEMENT_TYPE
    if not stated or signed.payload_type != PAYLOAD_TYPE:
        raise SignatureError("holds no in-toto statement", where=str(envelope))
    return dict(statement)


def read_public_key(path: Path) -> SSlibKey:
    """Return the public key in a PEM file.

    Raises:
        RequestError: when the file is not an Ed25519 public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        key = load_pem_public_key(read_regular(path))
    except (OSError, RequestError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise RequestError(
            "is not an Ed25519 public key", where=str(path), remedy=f"give the path of a {PUBLIC}"
        )
    return SSlibKey.from_crypto(key)


def _make(private: Path) -> None:
    """Create a key pair, unless another process creates it first."""
    from securesystemslib.signer import CryptoSigner

    private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = private.with_name(f".{private.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(CryptoSigner.generate_ed25519().private_bytes)
            file.flush()
            os.fsync(file.fileno())
        try:
            private.hardlink_to(temporary)
        except FileExistsError:
            return
    finally:
        temporary.unlink()
    fsync_directory(private.parent)


def _load(private: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise RequestError(
            "holds no Ed25519 key",
            where=str(private),
            remedy="restore the file from a backup of this home",
        )
    return key


def _pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
