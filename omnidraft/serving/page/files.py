"""The files of the page, and the headers under which a browser runs them and nothing else.

No file is generated and none comes from another host. uPlot (MIT, its licence is served beside it) draws the charts.
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

PAGE_PATH = "/"
FILES_PATH = "/page/files/"
"""The prefix of the paths of all other files."""
FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only files of this page run; a text that got into its markup could not."""
HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_files(app: FastAPI) -> None:
    """Serve the page on `/` and each of its files under FILES_PATH."""
    for path in sorted(FOLDER.iterdir()):
        _add_file(app, PAGE_PATH if path.name == INDEX else FILES_PATH + path.name, path)


def _add_file(app: FastAPI, url_path: str, path: Path) -> None:
    content, content_type = path.read_bytes(), CONTENT_TYPES[path.suffix]

    @app.get(url_path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=content_type, headers=HEADERS)
