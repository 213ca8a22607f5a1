"""`glm5-ascend ui`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.errors import ConfigError
from glm5_ascend.options import Option


@dataclass(frozen=True)
class UiOptions:
    """Options of `ui`."""

    _: KW_ONLY
    url: Annotated[str, Option("The server, http://HOST:PORT.", "URL")] = "http://127.0.0.1:8000"
    port: Annotated[int, Option("Port of the page on 127.0.0.1; 0: any free port.", min=0, max=65535)] = 8080


def register(app: typer.Typer) -> None:
    add_command(app, "ui", run, "ui --url http://atlas:8000")


def run(options: UiOptions, output: Output) -> int:
    """Show the chat page for a remote server, such as an Atlas. The browser talks to that server directly."""
    url, port = options.url, options.port
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url}: not a URL", "give it as http://HOST:PORT")
    server_url = f"{parts.scheme}://{parts.netloc}"
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(server_url))
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror or error}", "select another one with --port") from None
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
