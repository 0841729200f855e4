"""Give a Kafka cluster our topics, users and rights: `python deploy/kafka/grant.py [--config settings.toml]`.

The settings name broker and topics, as everywhere; log.kafka's user has to be one of the broker's super users. What
each user may do is in rights.toml, his password in a variable like OMNIDRAFT_KAFKA_WORKER_PASSWORD; where tokens or
certificates name users, there are no passwords. Passwords are replaced, rights of these users that the table names for
no log.topic_prefix are taken away, and everything may be repeated, also with another prefix.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError, NoError

from omnidraft import assembly, config
from omnidraft.bus.kafka_client import connection
from omnidraft.errors import OmnidraftError

RIGHTS = Path(__file__).with_name("rights.toml")
TABLE_PREFIX = "omnidraft."
OPERATIONS = {
    "Read": ACLOperation.READ,
    "Write": ACLOperation.WRITE,
    "DescribeConfigs": ACLOperation.DESCRIBE_CONFIGS,
}
Rights = Mapping[str, Mapping[str, tuple[str, ...]]]


class GrantError(Exception):
    """The broker refused, or a password is missing; the message says which."""


def rights() -> Rights:
    """Return user -> topic -> operations, with topics of TABLE_PREFIX."""
    return tomllib.loads(RIGHTS.read_text(encoding="utf-8"))


def password_variable(user: str) -> str:
    """Return the variable with this user's password."""
    return f"OMNIDRAFT_KAFKA_{user.removeprefix('omnidraft-').upper()}_PASSWORD"


def grant(settings: config.Settings, passwords: Mapping[str, str]) -> None:
    """Make the topics, then all users with exactly the rights of the table.

    Args:
        passwords: of each user; empty: they have none.

    Raises:
        GrantError: the broker refuses users or rights.
        OmnidraftError: no broker answers, or it does not take these credentials.
    """
    log = settings.log
    for topic in (log.traces_topic, log.dead_letters_topic, log.control_topic):
        assembly.log_writer(settings, topic).close()
    servers = log.url.removeprefix("kafka://")
    with connection(servers, log.request_timeout_s, log.kafka) as shared:
        admin = KafkaAdminClient(**shared, request_timeout_ms=int(log.request_timeout_s * 1000))
    with closing(admin):
        if passwords:
            _set_passwords(admin, passwords)
        _set_rights(admin, log.topic_prefix)


def _set_passwords(admin: KafkaAdminClient, passwords: Mapping[str, str]) -> None:
    answers = admin.alter_user_scram_credentials(
        [UserScramCredentialUpsertion(user, ScramMechanism.SCRAM_SHA_512, passwords[user]) for user in rights()]
    )
    if refused := {user: error for user, error in answers.items() if error is not None}:
        raise GrantError(f"the broker refused users: {refused}")


def _set_rights(admin: KafkaAdminClient, prefix: str) -> None:
    """Give what is missing first, so that a running service never lacks a right that it keeps."""
    wanted = [rule for user in rights() for rule in _rules(user, prefix)]
    if failed := admin.create_acls(wanted)["failed"]:
        raise GrantError(f"the broker refused rights: {failed}")
    for user in rights():
        everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
        found, error = admin.describe_acls(
            ACLFilter(f"User:{user}", None, ACLOperation.ANY, ACLPermissionType.ANY, everything)
        )
        if error is not NoError:
            raise GrantError(f"the broker does not tell the rights of {user}: {error}")
        if surplus := [rule for rule in found if rule not in _rules(user, _prefix(rule))]:
            admin.delete_acls(surplus)


def _rules(user: str, prefix: str) -> list[ACL]:
    """Return what the table names, for topics of this prefix."""
    topics = {f"{prefix}.{topic.removeprefix(TABLE_PREFIX)}": may for topic, may in rights()[user].items()}
    return [_rule(user, topic, operation) for topic, may in topics.items() for operation in may]


def _prefix(rule: ACL) -> str:
    """Return the prefix of its topic's name, as in PREFIX.traces.v1."""
    return str(rule.resource_pattern.resource_name).rsplit(".", 2)[0]


def _rule(user: str, topic: str, operation: str) -> ACL:
    resource = ResourcePattern(ResourceType.TOPIC, topic, ACLResourcePatternType.LITERAL)
    return ACL(f"User:{user}", "*", OPERATIONS[operation], ACLPermissionType.ALLOW, resource)


def _has_passwords(access: config.KafkaSettings) -> bool:
    """Return whether users log in by passwords, and not by tokens or certificates, where this login is of that kind."""
    return access.mechanism != "OAUTHBEARER" and access.security != "ssl"


def main() -> int:
    """Grant what the table says; passwords come from the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a settings file, as the services have it")
    options = parser.parse_args()
    try:
        settings = config.load(options.config)
        variables = {user: password_variable(user) for user in rights()} if _has_passwords(settings.log.kafka) else {}
        if missing := [name for name in variables.values() if not os.environ.get(name)]:
            need = f"these variables need a password each: {', '.join(missing)}; see deploy/new_secrets.py"
            print(need, file=sys.stderr)
            return 2
        grant(settings, {user: os.environ[name] for user, name in variables.items()})
    except (GrantError, OmnidraftError, KafkaError) as exc:
        print(f"Kafka's users and rights: {exc}", file=sys.stderr)
        return 1
    print(f"{len(rights())} users have the rights of {RIGHTS.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
