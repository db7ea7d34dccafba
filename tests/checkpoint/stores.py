"""Object stores: servers of S3's and Google's interfaces, and a proxy that counts, delays and refuses requests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3

from tfdist.runtime.rendezvous import free_ports

__all__ = ["BUCKET", "Proxy", "S3", "google", "s3"]

BUCKET = "runs"
_START_SECONDS = 60.0
_MOST_BYTES = 64 << 20
_REGION = "eu-central-1"
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": _REGION,
    # Not those of this machine.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class Proxy:
    """Passes requests on to a server on this machine.

    Attributes:
        port: Its port.
        requests: The method and path of each request so far.
        before: Called with the method and path of each; returns the status to answer with, or None to pass it on.
        after: The same, once the server has answered.
    """

    def __init__(self, port: int):
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], int | None] = lambda method, path: None
        self.after: Callable[[str, str], int | None] = lambda method, path: None
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.requests.append((self.command, self.path))
                status = proxy.before(self.command, self.path)
                if status is not None:
                    self._refuse(status)
                    return
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                with contextlib.closing(connection):
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    content = answer.read()
                    status = proxy.after(self.command, self.path)
                    if status is not None:
                        self._refuse(status)
                        return
                    self.send_response(answer.status)
                    length = answer.headers.get("Content-Length", "0")
                    for name, value in answer.headers.items():
                        if name.lower() not in (
                            "transfer-encoding",
                            "connection",
                            "content-length",
                        ):
                            self.send_header(name, value)
                    size = length if self.command == "HEAD" else str(len(content))
                    self.send_header("Content-Length", size)
                    self.end_headers()
                    self.wfile.write(content)

            def _refuse(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops."""
        self._server.shutdown()
        self._server.server_close()


class S3:
    """A server of S3's interface with an empty bucket, behind a proxy.

    Attributes:
        proxy: The proxy.
        variables: What a process needs to reach it through the proxy.
        direct: The same without the proxy.
    """

    def __init__(self, port: int):
        self.proxy = Proxy(port)
        endpoint = f"http://127.0.0.1:{self.proxy.port}"
        self.variables = {**_CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
        self.direct = {**_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        self._uploaded: dict[str, bytes] = {}
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name=_REGION,
        )
        place = {"LocationConstraint": _REGION}
        self._client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def read(self, name: str) -> bytes:
        """The content of an object."""
        return self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def delete(self, name: str) -> None:
        """Deletes an object."""
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def put(self, name: str, content: bytes) -> None:
        """Writes an object."""
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def upload(self, folder: Path, prefix: str) -> None:
        """Makes the objects below a prefix the regular files of a folder.

        Only those that differ from what was uploaded before are written; of a large file its beginning, since
        a damage makes sparse files of terabytes.
        """
        wanted = {
            f"{prefix}/{path.relative_to(folder)}": _beginning(path)
            for path in sorted(folder.rglob("*"))
            # The server does not find the bucket of names with line feeds.
            if path.is_file() and not path.is_symlink() and "\n" not in path.name
        }
        for name in set(self._uploaded) - set(wanted):
            self.delete(name)
        for name, content in wanted.items():
            if self._uploaded.get(name) != content:
                self.put(name, content)
        self._uploaded = wanted

    def download(self, prefix: str, folder: Path) -> None:
        """Writes the objects below a prefix to a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        for name in self.names(f"{prefix}/"):
            path = folder / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(name))


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


@contextlib.contextmanager
def s3() -> Iterator[S3]:
    """A server of S3's interface."""
    port = free_ports(1)[0]
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        server = S3(port)
        try:
            yield server
        finally:
            server.proxy.close()


@contextlib.contextmanager
def google(folder: Path) -> Iterator[dict[str, str]]:
    """A server of Google's interface that ignores conditions; yields what a process needs to reach it."""
    port = free_ports(1)[0]
    program = "from gcp_storage_emulator.__main__ import main; main()"
    flags = [
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--default-bucket={BUCKET}",
        "--in-memory",
    ]
    with _process([sys.executable, "-c", program, *flags], port):
        yield {
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }


@contextlib.contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[2]} did not start.")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()
