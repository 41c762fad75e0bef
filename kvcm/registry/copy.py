"""Moving a registry to another database, as it is: cluster uid, secret, epochs and all."""

from __future__ import annotations

from sqlalchemy import Connection, Table, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from kvcm.core.errors import ConfigError
from kvcm.registry import migrate
from kvcm.registry.database import lock_schema, open_engine, reason, shown, transaction
from kvcm.registry.migrate import SchemaState
from kvcm.registry.tables import METADATA, STATE


def copy_registry(source_url: str, target_url: str) -> dict[str, int]:
    """Copy a registry whose managers are stopped into an empty database, in one transaction.

    Unlike a snapshot it keeps what blocks depend on, so an index goes on under the copy.

    Returns:
        Rows by table.

    Raises:
        ConfigError: the source's schema is not ours, the target has a registry or tables of
            unknown origin, or a database fails. The target is as before then.
    """
    if migrate.schema_status(source_url).state is not SchemaState.CURRENT:
        raise ConfigError(
            f"the registry at {shown(source_url)} is empty or not at revision "
            f"{migrate.head_revision()}; see `kvcm registry status`"
        )
    source, target = open_engine(source_url), open_engine(target_url)
    try:
        with (
            transaction(source, write=False) as old,
            transaction(target, write=True) as new,
        ):
            lock_schema(new)
            migrate.ensure_schema(new, auto_migrate=True)
            if new.execute(select(STATE.c.id)).first() is not None:
                raise ConfigError(f"{shown(target_url)} has a registry already")
            counts = {table.name: _copy(old, new, table) for table in METADATA.sorted_tables}
            new.commit()
            return counts
    except SQLAlchemyError as error:
        raise ConfigError(f"copying the registry: {reason(error)}") from None
    finally:
        source.dispose()
        target.dispose()


def _copy(old: Connection, new: Connection, table: Table) -> int:
    rows = [dict(row) for row in old.execute(select(table)).mappings()]
    if rows:
        new.execute(insert(table), rows)
    found = new.execute(select(func.count()).select_from(table)).scalar_one()
    if found != len(rows):
        raise ConfigError(f"{found} of {len(rows)} rows of {table.name} arrived")
    return len(rows)
