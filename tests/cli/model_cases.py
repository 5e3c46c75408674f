"""A package with a small model for a package index, and a small Hugging Face hub."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from perilune.files import sha256_file
from perilune.models.fetch import PACKAGED, PackagedModel

LICENSE_TEXT = "Apache License, for a test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_package(folder: Path, gguf: Path) -> PackagedModel:
    """Write a wheel with the file `gguf` to `folder`, and describe it."""
    name, metadata = "llm_small-0.1-py3-none-any.whl", "llm_small-0.1.dist-info"
    files = {
        "llm_small/model.gguf": gguf.read_bytes(),
        f"{metadata}/LICENSE": LICENSE_TEXT.encode(),
        # The dependency doesn't exist, so a download with dependencies would fail.
        f"{metadata}/METADATA": (
            b"Metadata-Version: 2.1\nName: llm-small\nVersion: 0.1\nRequires-Dist: no-such-thing-9\n"
        ),
        f"{metadata}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{metadata}/RECORD": b"",
    }
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return replace(
        PACKAGED["smollm2-135m"],
        requirement="llm-small==0.1",
        wheel=name,
        wheel_sha256=sha256_file(folder / name),
        gguf="llm_small/model.gguf",
        gguf_sha256=sha256_file(gguf),
        license_file=f"{metadata}/LICENSE",
    )


@contextmanager
def hub(repository: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve a repository like the Hugging Face hub; yields the address and the requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{repository}/revision/"):
                siblings = [{"rfilename": name} for name in files]
                return self.answer(
                    json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
                )
            if path.startswith(f"/api/models/{repository}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self.answer(json.dumps(tree).encode())
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            return self.answer(files[name]) if name in files else self.answer(b"{}", 404)

        def answer(self, data: bytes, code: int = 200) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
