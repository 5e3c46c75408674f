"""Ray's HTTP API for jobs.

Redirects are not followed, because the cluster's token is only for the cluster.
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
MAX_ANSWER_BYTES = 64 << 20
CLUSTER = "perilune.execution.providers.ray.cluster"  # the package that is sent to the cluster
PACKAGE = "perilune_ray"  # its name on the cluster


@dataclass(frozen=True, slots=True)
class Job:
    """A job as described by Ray.

    Attributes:
        name: its submission id.
        status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        message: reason of the status.
        exit_code: of its entrypoint; None if it has none.
        started, ended: seconds by the cluster's clock, or None.
        metadata: of its submission.
    """

    name: str
    status: str
    message: str
    exit_code: int | None
    started: float | None
    ended: float | None
    metadata: Mapping[str, str]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Job:
        times = (fields.get("start_time"), fields.get("end_time"))
        started, ended = (None if not time else float(time) / 1000.0 for time in times)
        return cls(
            str(fields["submission_id"]),
            str(fields["status"]),
            str(fields.get("message") or ""),
            fields.get("driver_exit_code"),
            started,
            ended,
            {str(name): str(value) for name, value in (fields.get("metadata") or {}).items()},
        )


class Jobs:
    """The jobs of one cluster. Every method may raise ProviderUnreachableError.

    Args:
        token: name of the secret with the cluster's token; None if it needs none.
    """

    def __init__(self, dashboard: str, token: str | None = None) -> None:
        self.dashboard, self.token = dashboard.rstrip("/"), token

    def list_jobs(self) -> Sequence[Job]:
        """Return the submitted jobs, without other drivers."""
        return [Job.parse(job) for job in self._json("GET") if job.get("submission_id")]

    def find(self, name: str) -> Job | None:
        status, answer = self._call("GET", f"/api/jobs/{quote(name)}")
        if status == 404:
            return None
        return Job.parse(self._parsed(status, answer, "GET"))

    def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Submit a job that can import the package `PACKAGE`.

        Raises:
            ProviderRefusedError: Ray rejects it.
        """
        archive = build_package()
        uri = f"_ray_pkg_{hashlib.sha256(archive).hexdigest()[:32]}.zip"
        status, answer = self._call("PUT", f"/api/packages/gcs/{uri}", archive)
        if status != 200:
            self._parsed(status, answer, "PUT")
        request = {
            "submission_id": name,
            "entrypoint": entrypoint,
            "metadata": metadata,
            "runtime_env": {"working_dir": f"gcs://{uri}"},
        }
        self._json("POST", request)

    def log(self, name: str) -> str:
        """Return the output of a job; "" if it is gone or has not started."""
        status, answer = self._call("GET", f"/api/jobs/{quote(name)}/logs")
        return "" if status in {400, 404} else str(self._parsed(status, answer, "GET").get("logs") or "")

    def stop(self, name: str) -> None:
        """Ask a job to end, if it exists."""
        status, answer = self._call("POST", f"/api/jobs/{quote(name)}/stop")
        if status != 404:
            self._parsed(status, answer, "POST")

    def forget(self, name: str) -> None:
        """Delete a job that has ended from Ray's list."""
        self._call("DELETE", f"/api/jobs/{quote(name)}")

    def _json(self, method: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return self._parsed(*self._call(method, "/api/jobs/", data), method)

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Make one HTTP call; returns status and body."""
        headers = {"Content-Type": "application/json", "User-Agent": "perilune"}  # Ray checks both
        if self.token is not None:
            headers["Authorization"] = f"Bearer {require_secret(self.token, self.dashboard)}"
        url = urlsplit(self.dashboard)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=CALL_SECONDS)
        try:
            connection.request(method, url.path + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ProviderUnreachableError(
                f"Ray's dashboard does not answer ({error or type(error).__name__})", where=self.dashboard
            ) from None
        finally:
            connection.close()

    def _parsed(self, status: int, answer: bytes, method: str) -> Any:
        if status in {401, 403}:
            remedy = "set `token` in providers.yaml to the name of the secret with the cluster's token"
            raise ProviderRefusedError("the Ray cluster refuses access", where=self.dashboard, remedy=remedy)
        if status != 200:
            message = (answer.decode(errors="replace").strip().splitlines() or [""])[-1][:300]
            kind = ProviderRefusedError if 400 <= status < 500 else ProviderUnreachableError
            raise kind(f"Ray answered {method} with {status}: {message}", where=self.dashboard)
        try:
            return json.loads(answer)
        except ValueError:
            raise ProviderUnreachableError("this is not a Ray dashboard", where=self.dashboard) from None


@cache
def build_package() -> bytes:
    """Return the package for the cluster as a zip archive, identical every time."""
    sources = [*files(CLUSTER).iterdir(), files("perilune.execution.providers") / "frames.py"]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        for file in sorted(sources, key=lambda path: path.name):
            if file.name.endswith(".py"):
                out.writestr(zipfile.ZipInfo(f"{PACKAGE}/{file.name}"), file.read_bytes())
    return archive.getvalue()
