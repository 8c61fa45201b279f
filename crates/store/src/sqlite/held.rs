//! Held: a store without an owner, held still to be read whole.

use std::fs::File;
use std::path::Path;

use rusqlite::{Connection, Row};

use super::reader::{self, SqliteReader};
use super::{own, resolved};
use crate::contract::StoreError;

/// A store that nobody can open meanwhile. Nothing is written to it.
#[derive(Debug)]
pub(crate) struct Held {
    connection: Connection,
    /// The owner's, taken without a boot being begun.
    _lock: File,
}

impl Held {
    /// Takes the lock that an owner takes.
    ///
    /// # Errors
    /// [`StoreError`] when there is no store of this release's schema, or when a process owns it.
    pub(crate) fn take(path: &Path) -> Result<Self, StoreError> {
        // First, so that nothing is made beside what is no store.
        SqliteReader::open(path)?;
        let path = resolved(path)?;
        let lock = own(&path)?;
        let connection = reader::open_for_reading(&path)?;
        connection.execute_batch("begin").map_err(sqlite)?;
        Ok(Self { connection, _lock: lock })
    }

    /// Reads the only row of a query.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be read.
    pub(crate) fn one<T>(
        &self,
        text: &str,
        read: impl FnOnce(&Row<'_>) -> Result<T, rusqlite::Error>,
    ) -> Result<T, StoreError> {
        self.connection.query_row(text, [], read).map_err(sqlite)
    }

    /// Reads every row of a query, one after the other, as long as `read` says so.
    ///
    /// # Errors
    /// [`StoreError`] when one cannot be read.
    pub(crate) fn each(
        &self,
        text: &str,
        mut read: impl FnMut(&Row<'_>) -> Result<bool, rusqlite::Error>,
    ) -> Result<(), StoreError> {
        let mut statement = self.connection.prepare(text).map_err(sqlite)?;
        let mut rows = statement.query([]).map_err(sqlite)?;
        while let Some(row) = rows.next().map_err(sqlite)? {
            if !read(row).map_err(sqlite)? {
                break;
            }
        }
        Ok(())
    }
}

fn sqlite(source: rusqlite::Error) -> StoreError {
    StoreError::Sqlite { doing: "read the store", source }
}
