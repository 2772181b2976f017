"""A v2 server that dies as a killed one does: with its 30th request while it has four connections. Prints its port."""

from __future__ import annotations

import itertools
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONNECTIONS, LAST = 4, 30
NUMBERS = itertools.count(1)
OPEN: set[object] = set()
METADATA = {
    "name": "m",
    "platform": "none",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}],
}


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        OPEN.add(self)

    def finish(self) -> None:
        OPEN.discard(self)
        super().finish()

    def do_GET(self) -> None:
        if self.path == "/v2/models/m":
            self._answer(200, METADATA)
        else:
            self._answer(404, {"error": "no such page"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if len(OPEN) >= CONNECTIONS and next(NUMBERS) == LAST:
            os._exit(9)
        self._answer(200, {"outputs": []})

    def _answer(self, status: int, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()
