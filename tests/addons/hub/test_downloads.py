"""`hf://` addresses, from a server on this machine with the interface of Hugging Face's."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from tests.addons.hub.exports import golden, write_checkpoint

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")
pytest.importorskip("huggingface_hub")

REPOSITORY = "organization/tiny"
COMMIT = hashlib.sha1(b"tiny").hexdigest()
#: Not of the model, and not downloaded.
OTHERS = ["pytorch_model.bin", "original/consolidated.safetensors"]

_LOAD = """
import sys
import numpy as np
import tfdist
try:
    task = tfdist.load_preset("hf://" + sys.argv[1], preprocessor=None, dtype="float32")
except ValueError as error:
    sys.exit(f"ValueError: {error}")
ids = np.load(sys.argv[2])
mask = np.ones_like(ids)
np.save(sys.argv[3], task.predict({"token_ids": ids, "padding_mask": mask}, verbose=0))
"""


@contextlib.contextmanager
def hugging_face(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves one repository.

    Yields:
        The address of the server, and the files that were read.
    """
    read: list[str] = []
    files = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]

    class Handler(http.server.BaseHTTPRequestHandler):
        def _send(self, status: int, body: bytes, kind: str, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            info, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/{COMMIT}/"
            if path.startswith(f"{info}/tree/"):
                listed = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size}
                    | {"oid": hashlib.sha1((folder / name).read_bytes()).hexdigest()}
                    for name in files
                ]
                self._send(200, json.dumps(listed).encode(), "application/json")
            elif path in (info, f"{info}/revision/main"):
                siblings = [{"rfilename": name} for name in files]
                body = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(body).encode(), "application/json")
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                name = path.removeprefix(resolve)
                body = (folder / name).read_bytes()
                if self.command == "GET":
                    read.append(name)
                etag = hashlib.sha1(body).hexdigest()
                kind = "application/octet-stream"
                self._send(200, body, kind, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
            else:
                code = "RepoNotFound" if REPOSITORY not in path else "EntryNotFound"
                self._send(404, b"{}", "application/json", X_Error_Code=code)

        do_HEAD = do_GET

        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", read
        finally:
            server.shutdown()


def load(endpoint: str, home: Path, repository: str, *files: Path) -> subprocess.CompletedProcess:
    """What a new process says that loads a model, with a cache of its own."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }
    return subprocess.run(
        [sys.executable, "-c", _LOAD, repository, *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_model_is_downloaded_once(tmp_path):
    folder = tmp_path / "repository"
    write_checkpoint("Llama3", folder)
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"other")
    expected = golden("Llama3")
    ids, logits = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(ids, expected["tokens"])
    home = tmp_path / "home"
    with hugging_face(folder) as (endpoint, read):
        for _ in range(2):
            done = load(endpoint, home, REPOSITORY, ids, logits)
            assert done.returncode == 0, done.stderr[-2000:]
            np.testing.assert_allclose(np.load(logits), expected["logits/plain"], atol=1e-5)
    assert sorted(read) == ["config.json", "model.safetensors"]


def test_what_cannot_be_downloaded_is_named(tmp_path):
    folder = tmp_path / "repository"
    write_checkpoint("Llama3", folder)
    with hugging_face(folder) as (endpoint, _):
        missing = load(endpoint, tmp_path / "home", "organization/none")
    unreachable = load(endpoint, tmp_path / "home", REPOSITORY)
    for done in (missing, unreachable):
        (line,) = done.stderr.strip().splitlines()[-1:]
        assert line.startswith("ValueError: 'hf://organization/"), done.stderr[-2000:]
        assert "must be a model of Hugging Face that can be downloaded" in line
