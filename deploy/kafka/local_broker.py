"""A real Kafka broker without Docker, for tests and trying out: one KRaft node on the loopback interface, in plain text
and open to all users of the machine.

`python deploy/kafka/local_broker.py --port 9092 --data DIR [--background]`, or `start(port, data)` from Python. Needs
Java 17 or later, and Maven the first time: it copies the jars that pom.xml names into the user's cache folder. Standard
library only.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
READY_TIMEOUT_S = 60.0
POM = Path(__file__).with_name("pom.xml")
JVM_FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners={protocol}://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners={protocol}://{host}:{port}
inter.broker.listener.name={protocol}
controller.quorum.voters=1@{host}:{controller_port}
controller.listener.names=CONTROLLER
listener.security.protocol.map={protocol}:{protocol},CONTROLLER:PLAINTEXT
log.dirs={logs}
auto.create.topics.enable=false
num.partitions=1
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


class BrokerError(Exception):
    """No broker could be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker, owned by its starter."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def stop(self) -> None:
        """Send SIGTERM and wait until it has ended."""
        self.process.terminate()
        self.process.wait(READY_TIMEOUT_S)

    def kill(self) -> None:
        """Send SIGKILL, like a power cut, and wait until it has ended."""
        self.process.kill()
        self.process.wait(READY_TIMEOUT_S)


def start(port: int, data: Path, *, protocol: str = "PLAINTEXT", more: str = "") -> Broker:
    """Start a broker and return it when it answers; port 0 picks a free one.

    Args:
        data: folder of its log, which may be that of an earlier broker.
        protocol: protocol of its listener: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        more: additional lines of its properties, such as keys and users.

    Raises:
        BrokerError: no Java or jars, the port is taken, or the broker ended; see `data`/broker.log.
    """
    jars = fetch_jars()
    port = port or _free_port()
    _refuse_taken(port)
    data = data.resolve()  # the broker runs in it
    data.mkdir(parents=True, exist_ok=True)
    data.chmod(0o700)  # users' words are in it
    properties = _write_properties(port, data, protocol, more)
    _format(jars, properties, data)
    with (data / "broker.log").open("ab") as log:
        command = [*_java(jars), "kafka.Kafka", str(properties)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=data, start_new_session=True, umask=0o077)
    broker = Broker(process, port)
    with _killed_on_error(broker):
        _wait_until_ready(broker, data)
        (data / "broker.pid").write_text(str(process.pid))
    return broker


@contextmanager
def _killed_on_error(broker: Broker) -> Iterator[None]:
    """Kill the broker when its start fails or is interrupted: it is in a session of its own and would stay."""
    try:
        yield
    except BaseException:
        broker.kill()
        raise


def fetch_jars() -> Path:
    """Return the folder of Kafka's jars; Maven fills it the first time.

    Raises:
        BrokerError: Java or Maven is missing, or Maven could not get them.
    """
    if shutil.which("java") is None:
        raise BrokerError("no `java` on the path; install Java 17 or later")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnidraft" / "kafka"
    jars = cache / f"jars-{_jar_set()}"
    if jars.is_dir():
        return jars
    if shutil.which("mvn") is None:
        raise BrokerError(f"no Kafka in {jars} and no `mvn` on the path to fetch it with; install Maven")
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        _copy_jars(partial)
        partial.rename(jars)
    except OSError as exc:
        if not jars.is_dir():  # otherwise another process was faster, and its jars serve as well
            raise BrokerError(f"cannot put Kafka's jars into {jars}: {exc}") from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return jars


def _jar_set() -> str:
    """Return a name for the content of pom.xml, so that another pom.xml gets a folder of its own."""
    return uuid.uuid5(uuid.NAMESPACE_OID, POM.read_text()).hex[:12]


def _copy_jars(into: Path) -> None:
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={into}"]
    done = subprocess.run(["mvn", "-B", "-q", "-f", str(POM), *goal], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokerError(f"Maven could not fetch Kafka:\n{(done.stdout + done.stderr)[-2000:]}")


def _java(jars: Path) -> list[str]:
    return ["java", *JVM_FLAGS, "-cp", f"{jars}/*"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0


def _refuse_taken(port: int) -> None:
    if _answers(port):
        raise BrokerError(f"port {port} is taken; name another with --port, or stop what listens there")


def _write_properties(port: int, data: Path, protocol: str, more: str) -> Path:
    properties = data / "server.properties"
    values = {"host": HOST, "port": port, "controller_port": _free_port(), "logs": data / "logs"}
    properties.touch(mode=0o600)  # passwords may be in it
    properties.write_text(PROPERTIES.format(**values, protocol=protocol) + more)
    return properties


def _format(jars: Path, properties: Path, data: Path) -> None:
    """Give an empty data folder its cluster id."""
    if (data / "logs" / "meta.properties").exists():
        return
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    command = [*_java(jars), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=data, check=False, umask=0o077)
    if done.returncode:
        raise BrokerError(f"Kafka could not format {data}:\n{(done.stdout + done.stderr)[-2000:]}")


def _wait_until_ready(broker: Broker, data: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _answers(broker.port):
        if broker.process.poll() is not None:
            last = (data / "broker.log").read_text(errors="replace")[-2000:]
            raise BrokerError(f"Kafka ended with {broker.process.returncode}:\n{last}")
        if time.monotonic() > deadline:
            raise BrokerError(f"nothing on {broker.bootstrap} after {READY_TIMEOUT_S} s; see {data}/broker.log")
        time.sleep(0.05)


def main() -> int:
    """Start a broker; in the foreground until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9092, help="0 picks a free one")
    parser.add_argument("--data", type=Path, required=True, help="where the log lives; kept between runs")
    parser.add_argument("--background", action="store_true", help="leave it running; DATA/broker.pid names it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the broker first
    try:
        broker = start(options.port, options.data)
    except (BrokerError, OSError) as exc:
        print(f"no broker: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(broker.bootstrap, flush=True)
    if options.background:
        return 0
    try:
        return broker.process.wait()
    except KeyboardInterrupt:
        broker.stop()
        return 0


if __name__ == "__main__":
    sys.exit(main())
