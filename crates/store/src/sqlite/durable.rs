//! Durable: how far the write-ahead log has reached the disk.
//!
//! The writer commits without a sync (`synchronous = normal`: SQLite then syncs its log before each checkpoint and
//! when the log begins anew) and the log is synced here, after one commit or after several. Commits stand in the log
//! in order and are chained by checksums, so what a sync has reached is whole, and of what came later nothing or a
//! whole number of commits survives a power cut: the same as with `synchronous = full`, as long as nobody hears of a
//! commit before its sync. That holds for answers, which the committer sends after it, and for looks, which wait here.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::contract::{Disk, StoreError};

/// How long a look waits for what it saw to become durable.
const WAIT: Duration = Duration::from_secs(5);

/// How far the log of one store has reached the disk.
#[derive(Debug)]
pub(super) struct Durable {
    log: PathBuf,
    /// Counts commits; raised before each, so that nobody sees one that is not counted.
    written: AtomicU64,
    /// Those that are known to be on the disk.
    synced: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The log, opened anew with every connection that writes: SQLite deletes it with the last one. Closing it is
    /// harmless, because SQLite's locks are on other files.
    file: Option<Arc<File>>,
    /// A sync has failed, and what the log holds is not known.
    failed: bool,
}

impl Durable {
    /// Of the store at `path`.
    pub(super) fn of(path: &Path) -> Self {
        let mut log = path.as_os_str().to_owned();
        log.push("-wal");
        Self {
            log: log.into(),
            written: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the lock is held for one look or change")
    }

    /// A connection begins to write, after a checkpoint or a fresh start: everything before is durable.
    pub(super) fn begin(&self) -> Result<(), StoreError> {
        let open = |source| StoreError::File { doing: "open the write-ahead log", path: self.log.clone(), source };
        let file = File::options().read(true).write(true).open(&self.log).map_err(open)?;
        let mut state = self.state();
        *state = State { file: Some(Arc::new(file)), failed: false };
        self.synced.store(self.written.load(Ordering::SeqCst), Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The writer goes; `checkpointed` when the file has everything.
    pub(super) fn end(&self, checkpointed: bool) {
        let mut state = self.state();
        *state = State { file: None, failed: !checkpointed };
        self.synced.store(self.written.load(Ordering::SeqCst), Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
    }

    /// A commit is about to be made.
    pub(super) fn writes(&self) {
        self.written.fetch_add(1, Ordering::SeqCst);
    }

    /// True after a failed sync, until the next [`Durable::begin`].
    pub(super) fn has_failed(&self) -> bool {
        self.state().failed
    }

    /// Waits until everything is durable that a look which ended just now can have seen.
    pub(super) fn wait(&self) -> Result<(), StoreError> {
        let seen = self.written.load(Ordering::SeqCst);
        if self.synced.load(Ordering::SeqCst) >= seen {
            return Ok(());
        }
        let begin = Instant::now();
        let mut state = self.state();
        loop {
            if state.failed {
                return Err(StoreError::Recovering);
            }
            if self.synced.load(Ordering::SeqCst) >= seen {
                return Ok(());
            }
            let Some(left) = WAIT.checked_sub(begin.elapsed()) else { return Err(StoreError::Recovering) };
            state = self.changed.wait_timeout(state, left).expect("the lock is held for one look or change").0;
        }
    }
}

impl Disk for Durable {
    fn sync(&self) -> Result<(), StoreError> {
        let fail = |source| StoreError::File { doing: "sync the write-ahead log", path: self.log.clone(), source };
        let reached = self.written.load(Ordering::SeqCst);
        let file = {
            let state = self.state();
            match &state.file {
                Some(file) if !state.failed => file.clone(),
                _ => return Err(StoreError::Recovering),
            }
        };
        // Not while the lock is held: looks need it.
        let synced = file.sync_data().map_err(fail);
        let mut state = self.state();
        match &synced {
            Ok(()) => {
                self.synced.fetch_max(reached, Ordering::SeqCst);
            }
            Err(_) => state.failed = true,
        }
        drop(state);
        self.changed.notify_all();
        synced
    }
}
