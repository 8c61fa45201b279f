//! Durable: how far the write-ahead log has reached the disk.
//!
//! The writer commits without a sync (`synchronous = normal`: SQLite then syncs its log before each checkpoint and
//! when the log begins anew) and the log is synced here, after one commit or after several. Commits stand in the log
//! in order and are chained by checksums, so what a sync has reached is whole, and of what came later nothing or a
//! whole number of commits survives a power cut: the same as with `synchronous = full`, as long as nobody hears of a
//! commit before its sync. That holds for answers, which the committer sends after it, and for looks, which wait here.
//!
//! # Three counts
//! A commit is counted as begun before it is made and as written after it was. A look may have seen whatever had begun
//! when it ended; a sync covers what was written when it began. So a look waits until all that had begun is synced.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::contract::{Disk, StoreError};

/// How long a look waits for what it saw to become durable.
const WAIT: Duration = Duration::from_secs(5);
/// Bytes of the log that are written anew at a time.
const PIECE: usize = 1 << 20;

/// How far the log of one store has reached the disk.
#[derive(Debug)]
pub(super) struct Durable {
    log: PathBuf,
    begun: AtomicU64,
    written: AtomicU64,
    synced: AtomicU64,
    /// Raised whenever the log may have lost what a look has seen.
    generation: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The log, opened anew with every connection that writes: SQLite deletes it with the last one. Closing it is
    /// harmless, because SQLite's locks are on other files.
    file: Option<Arc<File>>,
    /// What the log holds is not known: a sync or a checkpoint has failed.
    failed: bool,
}

impl Durable {
    /// Of the store at `path`, which has no symbolic link in it: SQLite puts the log beside the file itself.
    pub(super) fn of(path: &Path) -> Self {
        let mut log = path.as_os_str().to_owned();
        log.push("-wal");
        Self {
            log: log.into(),
            begun: AtomicU64::new(0),
            written: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the lock is held for one look or change")
    }

    fn file(&self, doing: &'static str) -> impl Fn(std::io::Error) -> StoreError {
        move |source| StoreError::File { doing, path: self.log.clone(), source }
    }

    /// A connection begins to write, after a full checkpoint: everything there is is durable.
    pub(super) fn begin(&self) -> Result<(), StoreError> {
        let file =
            File::options().read(true).write(true).open(&self.log).map_err(self.file("open the write-ahead log"))?;
        let mut state = self.state();
        *state = State { file: Some(Arc::new(file)), failed: false };
        self.all_durable();
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    fn all_durable(&self) {
        let begun = self.begun.load(Ordering::SeqCst);
        self.written.store(begun, Ordering::SeqCst);
        self.synced.store(begun, Ordering::SeqCst);
    }

    /// The writer goes; `checkpointed` when the file has everything.
    pub(super) fn end(&self, checkpointed: bool) {
        let mut state = self.state();
        state.file = None;
        if checkpointed {
            self.all_durable();
            drop(state);
            self.changed.notify_all();
        } else {
            drop(state);
            self.fail();
        }
    }

    /// What the log holds is not known from now on, until the next [`Durable::begin`].
    pub(super) fn fail(&self) {
        // Under the lock, so that no look misses it between its last glance and its wait.
        let mut state = self.state();
        state.failed = true;
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
    }

    /// A commit is about to be made.
    pub(super) fn commit_begins(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// It was made.
    pub(super) fn commit_written(&self) {
        self.written.store(self.begun.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// True after a failure, until the next [`Durable::begin`].
    pub(super) fn has_failed(&self) -> bool {
        self.state().failed
    }

    /// Called before a look: what [`Durable::wait`] is to be told after it.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Waits until everything is durable that a look which ended just now can have seen.
    pub(super) fn wait(&self, generation: u64) -> Result<(), StoreError> {
        let seen = self.begun.load(Ordering::SeqCst);
        let is_durable = || self.synced.load(Ordering::SeqCst) >= seen;
        let is_lost = || self.generation.load(Ordering::SeqCst) != generation;
        let begin = Instant::now();
        if !is_durable() {
            let mut state = self.state();
            while !is_durable() && !is_lost() {
                let Some(left) = WAIT.checked_sub(begin.elapsed()) else { return Err(StoreError::Recovering) };
                state = self.changed.wait_timeout(state, left).expect("the lock is held for one look or change").0;
            }
        }
        if is_lost() { Err(StoreError::Recovering) } else { Ok(()) }
    }

    /// Writes the log anew, byte by byte in its place, and syncs it. After a failed sync the kernel may have given up
    /// pages that it still shows: a later sync would find nothing to do and succeed. Nobody has the file open.
    pub(super) fn rewrite_log(&self) -> Result<(), StoreError> {
        let file = match File::options().read(true).write(true).open(&self.log) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.file("open the write-ahead log")(error)),
        };
        let failed = self.file("write the write-ahead log anew");
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        loop {
            let length = file.read_at(&mut piece, at).map_err(&failed)?;
            if length == 0 {
                break;
            }
            file.write_all_at(&piece[..length], at).map_err(&failed)?;
            at += length as u64;
        }
        file.sync_data().map_err(&failed)
    }
}

impl Disk for Durable {
    fn sync(&self) -> Result<(), StoreError> {
        let reached = self.written.load(Ordering::SeqCst);
        let file = {
            let state = self.state();
            match &state.file {
                Some(file) if !state.failed => file.clone(),
                _ => return Err(StoreError::Recovering),
            }
        };
        // Not while the lock is held: looks need it.
        if let Err(source) = file.sync_data() {
            self.fail();
            return Err(self.file("sync the write-ahead log")(source));
        }
        // Under the lock, as in `fail`.
        let state = self.state();
        self.synced.fetch_max(reached, Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_a_log() -> (tempfile::TempDir, Arc<Durable>) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.db-wal"), vec![7; (PIECE * 2) + 5]).unwrap();
        let durable = Arc::new(Durable::of(&folder.path().join("a.db")));
        durable.begin().unwrap();
        (folder, durable)
    }

    fn looks(durable: &Arc<Durable>) -> std::sync::mpsc::Receiver<bool> {
        let (tell, told) = std::sync::mpsc::channel();
        let (durable, generation) = (durable.clone(), durable.generation());
        std::thread::spawn(move || tell.send(durable.wait(generation).is_ok()));
        told
    }

    #[test]
    fn a_sync_that_began_before_a_commit_was_written_does_not_cover_it() {
        let (_folder, durable) = of_a_log();
        durable.commit_begins();
        // The sync for the commit before runs while this one is being made.
        durable.sync().unwrap();
        durable.commit_written();
        let look = looks(&durable);
        assert!(look.recv_timeout(Duration::from_millis(100)).is_err(), "it has seen what is not on the disk");
        durable.sync().unwrap();
        assert!(look.recv_timeout(WAIT).unwrap());
    }

    #[test]
    fn a_look_does_not_outlive_a_failure() {
        let (_folder, durable) = of_a_log();
        let early = durable.generation();
        durable.commit_begins();
        durable.commit_written();
        let waiting = looks(&durable);
        durable.fail();
        assert!(!waiting.recv_timeout(WAIT).unwrap());
        assert!(durable.has_failed() && durable.sync().is_err());
        durable.begin().unwrap();
        assert!(durable.wait(early).is_err(), "what it saw may be gone");
        assert!(durable.wait(durable.generation()).is_ok());
    }

    #[test]
    fn a_log_is_written_anew_as_it_was() {
        let (folder, durable) = of_a_log();
        durable.rewrite_log().unwrap();
        assert_eq!(std::fs::read(folder.path().join("a.db-wal")).unwrap(), vec![7; (PIECE * 2) + 5]);
        std::fs::remove_file(folder.path().join("a.db-wal")).unwrap();
        durable.rewrite_log().unwrap();
    }
}
