//! Migrations: numbered, each in one transaction, run twice without harm.

use std::path::Path;

use rusqlite::{Connection, ErrorCode, OpenFlags};
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
    let has = stand(connection, path)?;
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

/// Refuses the file of another program, or of a newer release, before anything is written to it or beside it.
pub(super) fn refuse_foreign(path: &Path) -> Result<(), StoreError> {
    if std::fs::metadata(path).map_or(0, |metadata| metadata.len()) == 0 {
        return Ok(());
    }
    let sqlite = |source| StoreError::Sqlite { doing: "look at the file", source };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(sqlite)?;
    connection.execute_batch("pragma busy_timeout = 5000").map_err(sqlite)?;
    match stand(&connection, path) {
        Err(StoreError::Sqlite { source, .. }) if source.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
            let problem = "it is not an SQLite file; give another path".to_owned();
            Err(StoreError::Foreign { path: path.to_path_buf(), problem })
        }
        other => other.map(drop),
    }
}

/// How many migrations the connected file has.
pub(super) fn stand(connection: &Connection, path: &Path) -> Result<usize, StoreError> {
    let number = |text: &str| {
        connection
            .query_row(text, [], |row| row.get::<_, i64>(0))
            .map_err(|source| StoreError::Sqlite { doing: "read the header of the store", source })
    };
    check(path, number("pragma application_id")?, number("pragma user_version")?, || {
        number("select count(*) from sqlite_schema")
    })
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
