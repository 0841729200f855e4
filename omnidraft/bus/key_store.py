"""The key store: each tenant's data keys, wrapped by a master key, in an SQL database.

A key is destroyed by overwriting it. Its row stays as a tombstone, so that a destroyed key is told from an unknown one.
A tenant may have several keys at once: of writers that began together, or that have other master keys.
Reading creates nothing: a database or table that is missing is a store that does not answer.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from omnidraft.errors import KeyStoreError
from omnidraft.private_files import PRIVATE, create

CONNECT_TIMEOUT_S = 3
"""How long a server has to take a connection, of which every call makes one: whoever calls may have orders waiting."""

_TABLE = sa.Table(
    "omnidraft_tenant_keys",
    sa.MetaData(),
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False, index=True),
    sa.Column("wrapped", sa.LargeBinary, nullable=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("destroyed_ms", sa.BigInteger, nullable=True),
)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A row of the store."""

    key_id: str
    tenant: str
    wrapped: bytes | None
    """None: the key was destroyed."""


class KeyStore:
    """The keys in one database. Any thread may use it. Every method raises KeyStoreError when the store does not
    answer."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        """`url` is sqlite:///path or postgresql://user@host/database. Nothing is opened before the first call."""
        self._url = sa.make_url(url)
        self._path = Path(self._url.database or "") if self._url.get_backend_name() == "sqlite" else None
        timeout = {"timeout": timeout_s} if self._path else {"connect_timeout": CONNECT_TIMEOUT_S}
        self._engine = sa.create_engine(self._url, poolclass=sa.NullPool, connect_args=timeout)
        if self._path:
            sa.event.listen(self._engine, "connect", _overwrite_deleted)

    def get(self, key_ids: Collection[str]) -> dict[str, StoredKey]:
        """Return those of these keys that the store knows, by id."""
        return {key.key_id: key for key in self._select(_TABLE.c.key_id.in_(key_ids))}

    def of_tenant(self, tenant: str) -> list[StoredKey]:
        """Return a tenant's keys, oldest first, destroyed ones too; none before the first key is stored."""
        return [] if self._is_missing() else self._select(_TABLE.c.tenant == tenant)

    def destroyed_ms(self, tenants: Collection[str]) -> dict[str, int]:
        """Return when the last destroyed key of each of these tenants was destroyed; those without one are missing."""
        if not tenants or self._is_missing():
            return {}
        last = sa.func.max(_TABLE.c.destroyed_ms)
        query = sa.select(_TABLE.c.tenant, last).where(_TABLE.c.tenant.in_(tenants), _TABLE.c.wrapped.is_(None))
        with self._translated("reading"), self._engine.connect() as connection:
            return {tenant: ms for tenant, ms in connection.execute(query.group_by(_TABLE.c.tenant)) if ms is not None}

    def all_keys(self) -> list[StoredKey]:
        """Return every key, oldest first."""
        return [] if self._is_missing() else self._select(sa.true())

    def add(self, key: StoredKey) -> None:
        """Store a new key, durably when this returns. The first one creates the database's table."""
        if self._path:
            with self._translated("creating"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                create(self._path, PRIVATE)
        with self._translated("writing"), self._engine.begin() as connection:
            _TABLE.create(connection, checkfirst=True)
            row = {"key_id": key.key_id, "tenant": key.tenant, "wrapped": key.wrapped, "created_ms": _now_ms()}
            connection.execute(sa.insert(_TABLE).values(row))

    def replace(self, key: StoredKey, wrapped: bytes) -> None:
        """Store the same key wrapped anew, unless it was destroyed or wrapped by another process meanwhile."""
        is_same = (_TABLE.c.key_id == key.key_id) & (_TABLE.c.wrapped == key.wrapped)
        with self._translated("writing"), self._engine.begin() as connection:
            connection.execute(sa.update(_TABLE).where(is_same).values(wrapped=wrapped))
        self._overwrite_old_rows()

    def destroy(self, tenant: str) -> int:
        """Destroy all keys of a tenant, durably when this returns; return the number of keys that existed."""
        if self._is_missing():
            return 0
        exists = (_TABLE.c.tenant == tenant) & (_TABLE.c.wrapped.is_not(None))
        with self._translated("writing"), self._engine.begin() as connection:
            update = sa.update(_TABLE).where(exists).values(wrapped=None, destroyed_ms=_now_ms())
            num_destroyed: int = connection.execute(update).rowcount
        self._overwrite_old_rows()
        return num_destroyed

    def _select(self, condition: sa.ColumnElement[bool]) -> list[StoredKey]:
        query = sa.select(_TABLE.c.key_id, _TABLE.c.tenant, _TABLE.c.wrapped).where(condition)
        with self._translated("reading"):
            if self._path and not self._path.exists():
                raise FileNotFoundError(f"no file {self._path}")
            with self._engine.connect() as connection:
                rows = connection.execute(query.order_by(_TABLE.c.created_ms, _TABLE.c.key_id)).all()
        return [StoredKey(*row) for row in rows]

    def _is_missing(self) -> bool:
        """Return whether the store answers and no key was ever stored."""
        if self._path:
            return not self._path.exists()
        with self._translated("reading"):
            return not sa.inspect(self._engine).has_table(_TABLE.name)

    def _overwrite_old_rows(self) -> None:
        """Have PostgreSQL write the table anew without dead rows; SQLite overwrites them in place (`secure_delete`)."""
        if self._path:
            return
        with self._translated("vacuuming"), self._engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text(f"VACUUM (FULL) {_TABLE.name}"))

    @contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError) as exc:
            address = self._url.render_as_string(hide_password=True)
            reason = getattr(exc, "orig", None) or exc
            raise KeyStoreError(f"{action} the key store {address}: {str(reason).strip()}") from exc


def _overwrite_deleted(connection: object, record: object) -> None:
    """Set up an SQLite connection. The rollback journal, unlike a WAL, ends with its transaction."""
    for statement in ("PRAGMA secure_delete=ON", "PRAGMA synchronous=FULL"):
        connection.execute(statement)  # type: ignore[attr-defined]  # the listener's type is any driver's connection


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
