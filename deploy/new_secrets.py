"""Write passwords and keys for a deployment: `python deploy/new_secrets.py [FILE]`, by default `.env` beside
docker-compose.yml. `--kubernetes` writes a manifest of Secrets instead, for `kubectl apply -f`, and beside it
FILE.operator-key: the private key of whoever commands the fleet, which no Secret has.

The files are their owner's alone (0600) and are never overwritten: running services know the values in them.
"""

import argparse
import json
import secrets
import sys
from pathlib import Path

from omnidraft.private_files import private_opener
from omnidraft.snapshots.keys import PrivateKey, new_private_key

ENV_FILE = Path(__file__).parents[1] / ".env"
NAMESPACE = "omnidraft"
KAFKA_USERS = ("ADMIN", "WORKER", "DISTILLER", "CONTROLLER", "OPERATOR")
COMPOSE = (
    "OMNIDRAFT_POSTGRES_PASSWORD",
    "OMNIDRAFT_GRAFANA_PASSWORD",
    "OMNIDRAFT_RAY_TOKEN",
    "OMNIDRAFT_MLFLOW_PASSWORD",
    "OMNIDRAFT_MLFLOW_SECRET_KEY",
    *(f"OMNIDRAFT_KAFKA_{user}_PASSWORD" for user in KAFKA_USERS),
)
"""The variables of docker-compose.yml, beside those of the key pairs."""
ROLES = ("distiller", "controller", "operator")
"""Those who sign snapshots and values of the control log."""


def new_secret() -> str:
    """Return 256 random bits as hexadecimal digits, which need quotes nowhere."""
    return secrets.token_hex(32)


def signing_keys() -> dict[str, str]:
    """Return a private key for each role, and under `trusted` the public ones as registry.trusted_keys takes them."""
    private = {role: new_private_key() for role in ROLES}
    trusted = [PrivateKey(key).public_text(role) for role, key in private.items()]
    return {**private, "trusted": json.dumps(trusted)}


def env_file() -> str:
    """Return the lines of an environment file for Docker Compose."""
    keys = signing_keys()
    values = {name: new_secret() for name in COMPOSE}
    values |= {f"OMNIDRAFT_{role.upper()}_PRIVATE_KEY": keys[role] for role in ROLES}
    values["OMNIDRAFT_TRUSTED_KEYS"] = f"'{keys['trusted']}'"
    return "".join(f"{name}={value}\n" for name, value in values.items())


def kubernetes_secrets() -> tuple[str, str]:
    """Return a list of Secrets as JSON, and the operator's key. Kafka's passwords are not among them: Strimzi makes
    those."""
    keys = signing_keys()
    operator_key = keys.pop("operator")
    wanted = {
        "mlflow-postgres": {"host": "postgres", "database": "mlflow", "username": "mlflow", "password": new_secret()},
        "mlflow-login": {"username": "omnidraft", "password": new_secret(), "secret-key": new_secret()},
        "signing-keys": keys,
    }
    items = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "type": "Opaque",
            "stringData": values,
        }
        for name, values in wanted.items()
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n", operator_key + "\n"


def main() -> int:
    """Write the files, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="default: .env, or secrets.json with --kubernetes")
    parser.add_argument("--kubernetes", action="store_true")
    options = parser.parse_args()
    file = options.file or (ENV_FILE.with_name("secrets.json") if options.kubernetes else ENV_FILE)
    if not options.kubernetes:
        return write(file, env_file())
    manifest, operator_key = kubernetes_secrets()
    key_file = file.with_name(f"{file.name}.operator-key")
    if file.exists():  # the key of an operator is of no use without the manifest that trusts it
        return write(file, manifest)
    return write(key_file, operator_key) or write(file, manifest)


def write(file: Path, text: str) -> int:
    """Write a file that is not there yet, or say why not; return the exit code."""
    try:
        with open(file, "x", encoding="utf-8", opener=private_opener) as stream:
            stream.write(text)
    except FileExistsError:
        print(f"{file} exists and stays: services know its values. Move it away to make new ones.", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"{file} cannot be written: {exc}", file=sys.stderr)
        return 1
    print(f"wrote {file}; keep it out of version control")
    return 0


if __name__ == "__main__":
    sys.exit(main())
