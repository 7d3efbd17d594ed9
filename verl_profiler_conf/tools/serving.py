"""Serves a trace file to Perfetto, which reads it through a local server: that file only, once, on loopback."""

from __future__ import annotations

import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import quote

PERFETTO = "https://ui.perfetto.dev"

PORT = 9001
"""The only local port that Perfetto's page may read from (its content security policy)."""


class FileServer(HTTPServer):
    """Serves one file, then has nothing left to do.

    Args:
        path: the file.
        port: of 127.0.0.1; 0: any that is free.

    Raises:
        OSError: the file cannot be read, or the port is taken.
    """

    def __init__(self, path: Path, port: int = PORT) -> None:
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb"):
            pass
        self.is_served = False
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def place(self) -> str:
        """Path of the file on this server."""
        return "/" + quote(self.path.name)

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"http://127.0.0.1:{self.server_port}{self.place}"

    @property
    def viewer(self) -> str:
        """The address to open in a browser on this machine."""
        return f"{PERFETTO}/#!/?url={self.url}"

    def serve_once(self) -> None:
        """Wait until the file has been read to its end; requests for anything else are refused."""
        while not self.is_served:
            self.handle_request()


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        """Send the file."""
        if self._begin():
            with self.server.path.open("rb") as file:
                shutil.copyfileobj(file, self.wfile, 1 << 20)
            self.server.is_served = True

    def do_HEAD(self) -> None:
        """Tell the size of the file."""
        self._begin()

    def _begin(self) -> bool:
        if self.path.partition("?")[0] != self.server.place:
            self.send_error(404)
            return False
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", PERFETTO)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(self.server.size))
        self.end_headers()
        return True

    def log_message(self, *_: object) -> None:
        """Log nothing: the command line prints what a user should know."""
