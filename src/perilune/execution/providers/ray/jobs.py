"""Ray's HTTP interface, as far as jobs go.

Redirects are not followed: the cluster's token is for the cluster alone.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlsplit

from perilune.bundle.secret_sources import require_secret
from perilune.execution.providers.protocol import ProviderRefusedError, ProviderUnreachableError

CALL_SECONDS = 20.0
LARGEST = 64 << 20  # bytes of an answer
CLUSTER = "perilune.execution.providers.ray.cluster"  # what travels there,
PACKAGE = "perilune_ray"  # and what it is called there


@dataclass(frozen=True, slots=True)
class Job:
    """A job as Ray tells of it.

    Attributes:
        name: its submission id.
        status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        message: why.
        exit_code: of its entrypoint; None when it has none.
        started, ended: seconds, by the cluster's clock; None when it has not.
        metadata: as it was submitted with.
    """

    name: str
    status: str
    message: str
    exit_code: int | None
    started: float | None
    ended: float | None
    metadata: Mapping[str, str]

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Job:
        """Read what Ray said."""
        times = {field: told.get(field) for field in ("start_time", "end_time")}
        started, ended = (None if not time else float(time) / 1000.0 for time in times.values())
        return cls(
            str(told["submission_id"]),
            str(told["status"]),
            str(told.get("message") or ""),
            told.get("driver_exit_code"),
            started,
            ended,
            {str(name): str(value) for name, value in (told.get("metadata") or {}).items()},
        )


class Jobs:
    """The jobs of one cluster. Every method may raise ProviderUnreachableError, and nothing is known then.

    Args:
        dashboard: address of Ray's dashboard.
        token: secret that holds the cluster's own token; None where it wants none.
    """

    def __init__(self, dashboard: str, token: str | None = None) -> None:
        self.dashboard, self.token = dashboard.rstrip("/"), token

    def all(self) -> Sequence[Job]:
        """Jobs that were submitted as jobs; there are other drivers too."""
        return [Job.parse(one) for one in self._json("GET", "/api/jobs/") if one.get("submission_id")]

    def find(self, name: str) -> Job | None:
        """The job called so."""
        status, answer = self._call("GET", f"/api/jobs/{quote(name)}")
        if status == 404:
            return None
        return Job.parse(self._parsed(status, answer, "GET"))

    def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Submit a job that finds the package `PACKAGE`.

        Raises:
            ProviderRefusedError: it is not accepted.
        """
        archive = package()
        uri = f"_ray_pkg_{hashlib.sha256(archive).hexdigest()[:32]}.zip"
        self._done("PUT", f"/api/packages/gcs/{uri}", archive)
        request = {
            "submission_id": name,
            "entrypoint": entrypoint,
            "metadata": metadata,
            "runtime_env": {"working_dir": f"gcs://{uri}"},
        }
        self._json("POST", "/api/jobs/", request)

    def log(self, name: str) -> str:
        """What a job has printed; "" when it is gone, or has not begun."""
        status, answer = self._call("GET", f"/api/jobs/{quote(name)}/logs")
        return "" if status in {400, 404} else str(self._parsed(status, answer, "GET").get("logs") or "")

    def stop(self, name: str) -> None:
        """Ask a job to end; that there is none is fine."""
        status, answer = self._call("POST", f"/api/jobs/{quote(name)}/stop")
        if status != 404:
            self._parsed(status, answer, "POST")

    def forget(self, name: str) -> None:
        """Let Ray forget a job that has ended."""
        self._call("DELETE", f"/api/jobs/{quote(name)}")

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return self._parsed(*self._call(method, path, data), method)

    def _done(self, method: str, path: str, body: bytes) -> None:
        status, answer = self._call(method, path, body)
        if status != 200:
            self._parsed(status, answer, method)

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """One HTTP call; its status and what it answered."""
        headers = {"Content-Type": "application/json", "User-Agent": "perilune"}  # Ray looks at both
        if self.token is not None:
            headers["Authorization"] = f"Bearer {require_secret(self.token, self.dashboard)}"
        url = urlsplit(self.dashboard)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=CALL_SECONDS)
        try:
            connection.request(method, url.path + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as error:
            raise ProviderUnreachableError(
                f"Ray's dashboard does not answer ({error or type(error).__name__})", where=self.dashboard
            ) from None
        finally:
            connection.close()

    def _parsed(self, status: int, answer: bytes, method: str) -> Any:
        if status in {401, 403}:
            remedy = "name the secret with its token in providers.yaml, as token"
            raise ProviderRefusedError("the Ray cluster lets nobody in", where=self.dashboard, remedy=remedy)
        if status != 200:
            said = (answer.decode(errors="replace").strip().splitlines() or [""])[-1][:300]
            kind = ProviderRefusedError if 400 <= status < 500 else ProviderUnreachableError
            raise kind(f"Ray answered {method} with {status}: {said}", where=self.dashboard)
        try:
            return json.loads(answer)
        except ValueError:
            raise ProviderUnreachableError("what answers is no Ray dashboard", where=self.dashboard) from None


@cache
def package() -> bytes:
    """What travels to the cluster, as a zip archive that is the same every time."""
    found = [*files(CLUSTER).iterdir(), files("perilune.execution.providers") / "frames.py"]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        for file in sorted(found, key=lambda one: one.name):
            if file.name.endswith(".py"):
                out.writestr(zipfile.ZipInfo(f"{PACKAGE}/{file.name}"), file.read_bytes())
    return archive.getvalue()
