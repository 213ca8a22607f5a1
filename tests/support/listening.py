"""An HTTP server of a test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of a server that ends with the block; `handler` answers its requests. 0: a free port."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})  # nobody reads a line for each request
    server = ThreadingHTTPServer(("127.0.0.1", port), quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
