"""Brokers of our own that want a login, by passwords, tokens or certificates, and settings that log in."""

import base64
import datetime
import ipaddress
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from omnidraft import config
from tests.kafka_fixture import load_local_broker, skip_without_kafka

ROOT = Path(__file__).parents[1]
KINDS = ("passwords", "tokens", "certificates")
REAUTH_MS = 3_000
RIGHTS = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin;User:ANONYMOUS
"""
"""The broker reaches its own controller as nobody; its clients cannot be nobody."""
TLS = """
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
"""
CERTIFICATES = """
ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=(.*)$/$1/
"""
ALLOWED_URLS = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
_SECURITY = "org.apache.kafka.common.security."
_OAUTH = f"{_SECURITY}oauthbearer."
PASSWORDS = f"""
sasl.enabled.mechanisms={{mechanism}},PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.{{listener}}.plain.sasl.jaas.config={_SECURITY}plain.PlainLoginModule required \\
  username="admin" password="{{password}}" user_admin="{{password}}";
listener.name.{{listener}}.scram-sha-512.sasl.jaas.config={_SECURITY}scram.ScramLoginModule required;
"""
"""The broker itself logs in by PLAIN: the users of SCRAM are in the log that it would have to read."""
TOKENS = f"""
listener.name.sasl_ssl.oauthbearer.connections.max.reauth.ms={REAUTH_MS}
listener.name.sasl_ssl.oauthbearer.sasl.jaas.config={_OAUTH}OAuthBearerLoginModule required;
listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class={_OAUTH}OAuthBearerValidatorCallbackHandler
listener.name.sasl_ssl.oauthbearer.sasl.oauthbearer.jwks.endpoint.url={{keys_url}}
listener.name.sasl_ssl.oauthbearer.sasl.oauthbearer.expected.audience=kafka
"""


@dataclass(frozen=True)
class Cluster:
    """A running broker with the users and rights of deploy/kafka/rights.toml, and what its users log in with."""

    kind: str
    servers: str
    folder: Path
    secrets: Mapping[str, str]
    endpoint: "TokenEndpoint | None"

    def environ(self, user: str, **changed: str) -> dict[str, str]:
        """The settings with which this user logs in, as environment variables, some of which may be changed."""
        secret = self.secret_of(user)
        named = {"USERNAME": user, "PASSWORD": secret}
        match self.kind:
            case "passwords":
                account = {**named, "SECURITY": "sasl_plaintext"} | ({"MECHANISM": "PLAIN"} if user == "admin" else {})
            case "tokens":
                assert self.endpoint is not None
                urls = {"TOKEN_URL": self.endpoint.url, "CA_FILE": f"{self.folder}/ca.pem"}
                account = {**named, **urls, "SECURITY": "sasl_ssl", "MECHANISM": "OAUTHBEARER", "TOKEN_SCOPE": "kafka"}
            case _:
                files = {"CERT_FILE": f"{self.folder}/{user}.pem", "KEY_FILE": f"{self.folder}/{user}.pem"}
                account = {**files, "SECURITY": "ssl", "CA_FILE": f"{self.folder}/ca.pem", "KEY_PASSWORD": secret}
        environ = {f"OMNIDRAFT_LOG__KAFKA__{name}": value for name, value in (account | changed).items() if value}
        return {**environ, "OMNIDRAFT_LOG__URL": f"kafka://{self.servers}", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "5"}

    def settings(self, user: str, **changed: str) -> config.Settings:
        return config.load(None, self.environ(user, **changed))

    def secret_of(self, user: str) -> str:
        return self.secrets[f"OMNIDRAFT_KAFKA_{user.removeprefix('omnidraft-').upper()}_PASSWORD"]

    def grant(self, prefix: str = "omnidraft") -> None:
        """Give all users exactly their rights for topics of this prefix."""
        environ = {**os.environ, **self.environ("admin"), "OMNIDRAFT_LOG__TOPIC_PREFIX": prefix}
        environ |= self.secrets if self.kind == "passwords" else {}
        subprocess.run([sys.executable, ROOT / "deploy/kafka/grant.py"], env=environ, check=True, timeout=60)


@contextmanager
def cluster(kind: str, folder: Path) -> Iterator[Cluster]:
    """A cluster of this kind. Skips, or fails, where there can be none."""
    local_broker, data = load_local_broker(), folder / "kafka"
    subprocess.run([sys.executable, ROOT / "deploy/new_secrets.py", folder / "env"], check=True, timeout=60)
    secrets = dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines())
    endpoint, broker = None, None
    try:
        protocol, more = {"passwords": "SASL_PLAINTEXT", "tokens": "SASL_SSL"}.get(kind, "SSL"), RIGHTS
        write_certificates(folder, secrets)
        if kind != "certificates":
            mechanism = "OAUTHBEARER" if kind == "tokens" else "SCRAM-SHA-512"
            password = secrets["OMNIDRAFT_KAFKA_ADMIN_PASSWORD"]
            more += PASSWORDS.format(mechanism=mechanism, listener=protocol.lower(), password=password)
        if kind != "passwords":
            more += TLS.format(folder=folder)
        if kind == "certificates":
            more += CERTIFICATES
        with pytest.MonkeyPatch.context() as patch:
            if kind == "tokens":
                endpoint = TokenEndpoint(secrets)
                patch.setenv("JAVA_TOOL_OPTIONS", f"-D{ALLOWED_URLS}={endpoint.keys_url}")
                more += TOKENS.format(keys_url=endpoint.keys_url)
            broker = local_broker.start(0, data, protocol=protocol, more=more)
        made = Cluster(kind, broker.bootstrap, folder, secrets, endpoint)
        made.grant()
        yield made
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    finally:
        if broker is not None:
            broker.kill()
        if endpoint is not None:
            endpoint.close()


def write_certificates(folder: Path, secrets: Mapping[str, str]) -> None:
    """An authority's certificate, and key and certificate of the broker and of every user with a password, by which his
    key is encrypted."""
    authority = _new_key()
    root = _certificate("authority", authority, "authority", authority)
    (folder / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    for variable in (name for name in secrets if name.startswith("OMNIDRAFT_KAFKA_")):
        user = variable.split("_")[2].lower()
        name = user if user == "admin" else f"omnidraft-{user}"
        encryption = serialization.BestAvailableEncryption(secrets[variable].encode())
        _write_pair(folder / f"{name}.pem", name, authority, encryption)
    _write_pair(folder / "broker.pem", "admin", authority, serialization.NoEncryption())


def _new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65_537, key_size=2048)


def _write_pair(
    path: Path, name: str, authority: rsa.RSAPrivateKey, encryption: serialization.KeySerializationEncryption
) -> None:
    key = _new_key()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    signed = _certificate(name, key, "authority", authority)
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))


def _certificate(name: str, key: rsa.RSAPrivateKey, issuer: str, issuer_key: rsa.RSAPrivateKey) -> x509.Certificate:
    named, issued = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(issued)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


class TokenEndpoint(ThreadingHTTPServer):
    """An OAuth 2.0 server: tokens for client ids with their secrets, and the key by which brokers check them."""

    daemon_threads = True

    def __init__(self, secrets: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secrets, self.key = secrets, _new_key()
        self.life_s, self.is_down, self.issued, self.last_token = 60.0, Event(), Counter[str](), ""
        self._thread = Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/token"

    @property
    def keys_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def keys(self) -> dict[str, Any]:
        numbers = self.key.public_key().public_numbers()
        exponent, modulus = (_text(each.to_bytes(256).lstrip(b"\0")) for each in (numbers.e, numbers.n))
        return {"keys": [{"kty": "RSA", "kid": "1", "alg": "RS256", "use": "sig", "n": modulus, "e": exponent}]}

    def token(self, user: str) -> dict[str, Any]:
        self.issued[user] += 1
        now_s = time.time()
        times = {"iat": int(now_s), "exp": now_s + self.life_s, "jti": str(self.issued.total())}
        claims = {"sub": user, "aud": "kafka", "scope": "kafka", **times}
        parts = ({"alg": "RS256", "kid": "1"}, claims)
        signed = ".".join(_text(json.dumps(part).encode()) for part in parts)
        signature = self.key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        self.last_token = f"{signed}.{_text(signature)}"
        return {"access_token": self.last_token, "token_type": "Bearer", "expires_in": self.life_s}

    def is_known(self, user: str, secret: str) -> bool:
        return self.secrets.get(f"OMNIDRAFT_KAFKA_{user.removeprefix('omnidraft-').upper()}_PASSWORD") == secret


class _Handler(BaseHTTPRequestHandler):
    server: TokenEndpoint

    def do_GET(self) -> None:
        self._answer(200, self.server.keys())

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        user, _, secret = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode().partition(":")
        if self.server.is_down.is_set():
            self._answer(503, {})
        elif form != {"grant_type": ["client_credentials"], "scope": ["kafka"]}:
            self._answer(400, {"error": "invalid_request"})
        elif not self.server.is_known(user, secret):
            self._answer(401, {"error": "invalid_client"})
        else:
            self._answer(200, self.server.token(user))

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
