"""Resolve image tags to digests: `python deploy/pin_images.py [--check] [FILE ...]`.

By default in docker-compose.yml and deploy/kubernetes: `postgres:17` becomes `postgres:17@sha256:...`, what a registry
says now; a digest that is there is asked for again. Images that we build ourselves, and names with variables, stay.
`--check` writes nothing and fails if anything would change. Digests come from the registries' HTTP API (OCI
distribution), of the index of all platforms where there is one.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx

ROOT = Path(__file__).parents[1]
ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.v2",
    )
)
TIMEOUT = httpx.Timeout(15.0)
MAX_MANIFEST_BYTES = 4 << 20
DOCKER_HUB = "registry-1.docker.io"
OURS = ("omnidraft", "registry.example.com/omnidraft")
_IMAGE = re.compile(r"^(\s*(?:- )?image:[ \t]*)([\w./:-]+?)(@sha256:[0-9a-f]{64})?(?=[ \t]*(?:#|$))", re.M)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_KEPT_HEADERS = ("www-authenticate", "docker-content-digest")


class PinError(Exception):
    """A registry did not answer, or not with a digest; the message names the image."""


@dataclass(frozen=True, slots=True)
class Image:
    """A tag in a repository of a registry."""

    registry: str
    repository: str
    tag: str

    @property
    def url(self) -> str:
        scheme = "http" if self.registry.partition(":")[0] in ("127.0.0.1", "localhost") else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}/manifests/{self.tag}"


def parse(name: str) -> Image:
    """Return the parts of an image's name as Docker reads them. Raises PinError without a tag."""
    first, slash, rest = name.partition("/")
    has_registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    registry, path = (first, rest) if has_registry else (DOCKER_HUB, name)
    repository, colon, tag = path.partition(":")
    if not colon:
        raise PinError(f"{name} has no tag")
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return Image(registry, repository, tag)


def digest(name: str, client: httpx.Client) -> str:
    """Return the digest that this image's tag has now. Raises PinError."""
    image = parse(name)
    try:
        response = _get(client, image.url, {})
        if response.status_code == 401:
            token = _token(client, response.headers.get("www-authenticate", ""))
            response = _get(client, image.url, {"Authorization": f"Bearer {token}"})
        response.raise_for_status()
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        raise PinError(f"{name}: {image.registry} does not tell its digest: {type(exc).__name__}: {exc}") from exc
    found = f"sha256:{hashlib.sha256(response.content).hexdigest()}"
    told = response.headers.get("docker-content-digest", found)
    if told != found:
        raise PinError(f"{name}: {image.registry} says {told}, and what it sends has {found}")
    return found


def _get(client: httpx.Client, url: str, headers: dict[str, str]) -> httpx.Response:
    """Return a response of bounded size. Raises httpx.HTTPError, ValueError."""
    with client.stream("GET", url, headers={"Accept": ACCEPT, **headers}) as response:
        content = b""
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > MAX_MANIFEST_BYTES:
                raise ValueError(f"more than {MAX_MANIFEST_BYTES} bytes")
        return httpx.Response(
            response.status_code,
            headers={key: response.headers[key] for key in _KEPT_HEADERS if key in response.headers},
            content=content,
            request=response.request,
        )


def _token(client: httpx.Client, challenge: str) -> str:
    """Return the token of a registry that gives one to anybody. Raises httpx.HTTPError, ValueError, KeyError."""
    scheme, _, rest = challenge.partition(" ")
    wanted = dict(_CHALLENGE.findall(rest))
    if scheme.lower() != "bearer" or "realm" not in wanted:
        raise ValueError(f"it wants a login: {challenge!r}")
    query = urlencode({name: value for name, value in wanted.items() if name in ("service", "scope")})
    response = client.get(f"{wanted['realm']}?{query}").raise_for_status()
    answer = response.json()
    return str(answer.get("token") or answer["access_token"])


def pin(text: str, client: httpx.Client) -> str:
    """Return a YAML file's text with the digests of its images. Raises PinError."""

    def pinned(match: re.Match[str]) -> str:
        before, name, _ = match.groups()
        if name.partition(":")[0] in OURS or ":" not in name.rpartition("/")[2]:
            return match.group()
        return f"{before}{name}@{digest(name, client)}"

    return _IMAGE.sub(pinned, text)


def _files() -> Iterator[Path]:
    yield ROOT / "docker-compose.yml"
    yield from sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml"))


def main() -> int:
    """Pin all files, or none where a registry does not answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = {path: path.read_text(encoding="utf-8") for path in options.files or _files()}
    try:
        with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
            after = {path: pin(text, client) for path, text in before.items()}
    except PinError as exc:
        print(f"nothing was written: {exc}", file=sys.stderr)
        return 2
    changed = [path for path in before if after[path] != before[path]]
    for path in changed:
        print(f"{'to be pinned' if options.check else 'pinned'}: {path}")
        if not options.check:
            path.write_text(after[path], encoding="utf-8")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
