//! Migrations: numbered, each in one transaction, run twice without harm.

use std::path::Path;

use rusqlite::Connection;
use steadfast_core::fingerprint::FingerprintKey;

use crate::contract::StoreError;

/// "Stdf" in the header of the file: whose it is.
pub(super) const APPLICATION_ID: i32 = 0x5374_6466;

/// Every migration, in order; the file's `user_version` counts those it has.
pub(super) const MIGRATIONS: [&str; 1] = [include_str!("../../migrations/sqlite/0001_spine.sql")];

/// Brings the file to this release's schema.
pub(super) fn migrate(
    connection: &mut Connection,
    path: &Path,
    secret: FingerprintKey,
    now: i64,
) -> Result<(), StoreError> {
    let sqlite = |source| StoreError::Sqlite { doing: "migrate the store", source };
    let pragma = |connection: &Connection, name: &str| {
        connection.query_row(&format!("pragma {name}"), [], |row| row.get::<_, i64>(0)).map_err(sqlite)
    };
    let has = check(path, pragma(connection, "application_id")?, pragma(connection, "user_version")?, || {
        connection.query_row("select count(*) from sqlite_schema", [], |row| row.get(0)).map_err(sqlite)
    })?;
    for (number, migration) in (1..).zip(MIGRATIONS).skip(has) {
        let transaction =
            connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(sqlite)?;
        transaction.execute_batch(migration).map_err(sqlite)?;
        if number == 1 {
            transaction
                .execute(
                    "insert into store (one, epoch, boot, file_id, copy, fingerprint_key, created_at)
                     values (1, 1, 0, '', 0, ?1, ?2)",
                    rusqlite::params![secret.0, now],
                )
                .map_err(sqlite)?;
            transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(sqlite)?;
        }
        transaction.pragma_update(None, "user_version", number).map_err(sqlite)?;
        transaction.commit().map_err(sqlite)?;
    }
    Ok(())
}

/// How many migrations the file has, if it is ours and not from the future.
pub(super) fn check(
    path: &Path,
    application_id: i64,
    version: i64,
    tables: impl FnOnce() -> Result<i64, StoreError>,
) -> Result<usize, StoreError> {
    let foreign = |problem: String| StoreError::Foreign { path: path.to_path_buf(), problem };
    if application_id != i64::from(APPLICATION_ID) {
        if application_id == 0 && version == 0 && tables()? == 0 {
            return Ok(0);
        }
        return Err(foreign("it is an SQLite file of another program; give another path".to_owned()));
    }
    let has = usize::try_from(version).unwrap_or(usize::MAX);
    if has > MIGRATIONS.len() {
        let known = MIGRATIONS.len();
        return Err(foreign(format!("its schema is version {has}, this release knows {known}; use a newer release")));
    }
    Ok(has)
}
