"""A real broker that wants passwords over TLS: who has them is served, who has not is told why, no secret is shown."""

import datetime
import ipaddress
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from omnidraft import assembly, config
from omnidraft.errors import BusError
from omnidraft.ports import Outgoing
from tests.kafka_fixture import load_local_broker, skip_without_kafka

pytestmark = [pytest.mark.kafka, pytest.mark.long]

PASSWORD = "correct-horse"
PROPERTIES = """
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
  username="alice" password="{password}" user_alice="{password}";
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={certificate}
"""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """host:port, and the certificate that the broker shows."""
    folder = tmp_path_factory.mktemp("secured")
    keystore, certificate = write_certificate(folder)
    local_broker = load_local_broker()
    more = PROPERTIES.format(password=PASSWORD, keystore=keystore, certificate=certificate)
    try:
        broker = local_broker.start(0, folder / "kafka", protocol="SASL_SSL", more=more)
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    yield broker.bootstrap, certificate
    broker.kill()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A key with its own signature for 127.0.0.1, and the certificate alone, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    keystore, certificate = folder / "keystore.pem", folder / "ca.pem"
    keystore.write_bytes(secret + pem)
    certificate.write_bytes(pem)
    return keystore, certificate


def settings_for(secured: tuple[str, Path], *, password: str = PASSWORD, knows_broker: bool = True) -> config.Settings:
    servers, certificate = secured
    environ = {
        "OMNIDRAFT_LOG__URL": f"kafka://{servers}",
        "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "5",
        "OMNIDRAFT_LOG__KAFKA__SECURITY": "sasl_ssl",
        "OMNIDRAFT_LOG__KAFKA__MECHANISM": "PLAIN",
        "OMNIDRAFT_LOG__KAFKA__USERNAME": "alice",
        "OMNIDRAFT_LOG__KAFKA__PASSWORD": password,
    }
    if knows_broker:
        environ["OMNIDRAFT_LOG__KAFKA__CA_FILE"] = str(certificate)
    return config.load(None, environ)


def test_with_the_password_both_ends_work_and_no_log_line_shows_it(
    secured: tuple[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(secured)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("kafka").setLevel(logging.NOTSET)
        assert logging.getLogger("kafka").isEnabledFor(logging.DEBUG)
        writer = assembly.log_writer(settings, "topic")
        writer.append([Outgoing(b"key", b"value", {})])
        reader = assembly.log_reader(settings, "topic")
        reader.seek({})
        found, until = [], time.monotonic() + 20
        while not found and time.monotonic() < until:
            found += reader.poll(10, 1.0).messages
        reader.close()
        writer.close()
    assert [message.value for message in found] == [b"value"]
    assert PASSWORD not in caplog.text + repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize(("password", "knows_broker"), [("wrong-horse", True), (PASSWORD, False)])
def test_a_wrong_password_or_an_unknown_broker_is_an_error_that_shows_no_secret(
    secured: tuple[str, Path], password: str, knows_broker: bool
) -> None:
    with pytest.raises(BusError) as refused:
        assembly.log_writer(settings_for(secured, password=password, knows_broker=knows_broker), "topic")
    assert password not in str(refused.value)
