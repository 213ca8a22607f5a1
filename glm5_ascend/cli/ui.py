"""`glm5-ascend ui`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated
from urllib.parse import quote

from glm5_ascend.cli.command import Output, command
from glm5_ascend.options import Option

#: Port of the page; another one if it is taken.
PORT = 8080


@dataclass(frozen=True)
class UiOptions:
    """Options of `ui`."""

    _: KW_ONLY
    url: Annotated[str, Option("The server, http://HOST:PORT.", "URL")] = "http://127.0.0.1:8000"


@command("ui", "ui --url http://atlas:8000")
def run(options: UiOptions, output: Output) -> int:
    """Show the chat page for a remote server, such as an Atlas. The browser talks to that server directly."""
    from glm5_ascend.serve.connection import server_address

    server_url = server_address(options.url)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", PORT), _handler(server_url))
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server_url))
    with server:
        print(
            f"open http://127.0.0.1:{server.server_port}/#{quote(server_url, safe=':/')}   (Ctrl-C to stop)", flush=True
        )
        server.serve_forever()
    return 0


def _handler(server_url: str) -> type[BaseHTTPRequestHandler]:
    from glm5_ascend.serve.middleware import headers, page

    class LocalPage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page() if self.path == "/" else b""
            self.send_response(200 if body else 404)
            for name, value in headers(f"'self' {server_url}") if body else []:
                self.send_header(name.decode(), value.decode())
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print no line per request."""

    return LocalPage
