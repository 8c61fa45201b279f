//! Backup: a copy of a live store, whole and of one moment.

use std::path::Path;

use rusqlite::Connection;
use rusqlite::backup::{Backup, StepResult};

use super::reader::SqliteReader;
use crate::contract::StoreError;

/// Copies the store at `from` to the new file `to`, beside a running owner or without one.
///
/// The copy is marked: whoever opens it raises its epoch, which voids every claim in it. Workers of the original
/// then lose quietly, and a copy that is put in place of the original cannot be committed to by them.
///
/// # Errors
/// [`StoreError`] when there is no store at `from`, or something at `to` already.
pub fn backup(from: &Path, to: &Path) -> Result<(), StoreError> {
    let sqlite = |source| StoreError::Sqlite { doing: "back the store up", source };
    let file = |doing| move |source| StoreError::File { doing, path: to.to_path_buf(), source };
    let reader = SqliteReader::open(from)?;
    // Created here, so that nothing is ever overwritten.
    std::fs::OpenOptions::new().write(true).create_new(true).open(to).map_err(|error| {
        let doing = match error.kind() {
            std::io::ErrorKind::AlreadyExists => "nothing is overwritten, give a path that does not exist instead of",
            _ => "create the backup",
        };
        file(doing)(error)
    })?;
    let copied = reader.with(|connection| {
        let mut target = Connection::open(to).map_err(sqlite)?;
        {
            let backup = Backup::new(connection, &mut target).map_err(sqlite)?;
            // All pages in one step: a step sees one moment, and a copy in steps would begin anew at every commit.
            match backup.step(-1).map_err(sqlite)? {
                StepResult::Done => {}
                _ => return Err(StoreError::Recovering),
            }
        }
        target.execute_batch("pragma journal_mode = delete; update store set copy = 1;").map_err(sqlite)
    });
    if let Err(error) = copied {
        // Half a backup is none. The first error is the one to tell.
        let _ = std::fs::remove_file(to);
        return Err(error);
    }
    let target = std::fs::File::open(to).map_err(file("open the backup"))?;
    target.sync_all().map_err(file("sync the backup"))?;
    if let Some(folder) = to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(file("sync the folder of"))?;
    }
    Ok(())
}
