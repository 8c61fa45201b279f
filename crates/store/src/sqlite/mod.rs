//! A store in one SQLite file.
//!
//! One process owns the file (a lock that the system releases when the process ends, however it ends). One
//! connection writes, in WAL mode, and nobody hears of a commit before its log is synced (see `durable`). Readers
//! have connections of their own and see the last commit.
//!
//! # After a commit that failed
//! A failed commit may have succeeded: the frames can be in the log though the sync failed. The writer then closes
//! every connection, opens the file anew and serves only after a full checkpoint has succeeded, so that what anyone
//! reads from then on is durable ([`Writer::recover`]).

mod backup;
mod durable;
mod held;
pub mod limit;
mod migrate;
mod reader;
mod rows;
mod writer;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::UNIX_EPOCH;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};
use steadfast_core::fingerprint::FingerprintKey;

pub use backup::backup;
pub(crate) use held::Held;
pub use reader::{SqliteReader, look_statements};
#[doc(hidden)]
pub use writer::hot_statements;

use self::durable::Durable;
use crate::clock::{Clock, SystemClock};
use crate::contract::{Identity, Reader, Store, StoreError, Writer};

/// The oldest SQLite without the WAL-reset fault, which could corrupt a file in every release from 3.7.0 on.
const SQLITE_VERSION_MIN: i32 = 3_051_003;

/// The version of the linked SQLite.
pub fn version() -> &'static str {
    rusqlite::version()
}

/// A store in one SQLite file, owned by this process.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    clock: Arc<dyn Clock>,
    identity: Identity,
    reader: Arc<SqliteReader>,
    durable: Arc<Durable>,
    /// The connection that `open` used; the writer takes it over.
    first: Mutex<Option<Connection>>,
    writer_taken: AtomicBool,
    /// Counts what the owner's connections do, where a test wants to know.
    work: Option<Arc<AtomicU64>>,
    /// Held for the life of the store; the system lets go of it when the process ends.
    _lock: File,
}

impl SqliteStore {
    /// Opens the file, creating it if it is not there, and takes ownership of it.
    ///
    /// # Errors
    /// [`StoreError`] when another process owns it, when it is not a store, or when the system refuses.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(path, Arc::new(SystemClock::new()), random_key)
    }

    /// Opens the file with a given clock and source of the fingerprint secret of a new store.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        clock: Arc<dyn Clock>,
        secret: impl FnOnce() -> Result<FingerprintKey, std::io::Error>,
    ) -> Result<Self, StoreError> {
        Self::open_as(path.as_ref(), clock, secret, None)
    }

    /// Like [`SqliteStore::open_with`]; `work` counts the operations of SQLite's virtual machine that opening,
    /// loading and saving take, which tells what they cost on any machine.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    #[doc(hidden)]
    pub fn open_counted(
        path: impl AsRef<Path>,
        clock: Arc<dyn Clock>,
        secret: impl FnOnce() -> Result<FingerprintKey, std::io::Error>,
        work: Arc<AtomicU64>,
    ) -> Result<Self, StoreError> {
        Self::open_as(path.as_ref(), clock, secret, Some(work))
    }

    fn open_as(
        path: &Path,
        clock: Arc<dyn Clock>,
        secret: impl FnOnce() -> Result<FingerprintKey, std::io::Error>,
        work: Option<Arc<AtomicU64>>,
    ) -> Result<Self, StoreError> {
        let path = resolved(path)?;
        if rusqlite::version_number() < SQLITE_VERSION_MIN {
            return Err(StoreError::Version { found: rusqlite::version() });
        }
        migrate::refuse_foreign(&path)?;
        let lock = own(&path)?;
        let mut connection = connect_counted(&path, work.as_ref())?;
        let secret =
            secret().map_err(|source| StoreError::File { doing: "draw a secret for", path: path.clone(), source })?;
        migrate::migrate(&mut connection, &path, secret, clock.now())?;
        let identity = board(&mut connection, &path)?;
        // The clock goes on from the last commit, even if the machine's clock was set back meanwhile.
        let last: Option<i64> = connection
            .query_row("select at from events order by rowid desc limit 1", [], |row| row.get(0))
            .map(Some)
            .or_else(none_if_empty)
            .map_err(|source| StoreError::Sqlite { doing: "read the time of the last event", source })?;
        if let Some(last) = last {
            clock.at_least(last);
        }
        let durable = Arc::new(Durable::of(&path));
        let reader = Arc::new(SqliteReader::beside(path.clone(), Some(durable.clone())));
        Ok(Self {
            shared: Arc::new(Shared {
                path,
                clock,
                identity,
                reader,
                durable,
                first: Mutex::new(Some(connection)),
                writer_taken: AtomicBool::new(false),
                work,
                _lock: lock,
            }),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }
}

impl Store for SqliteStore {
    fn identity(&self) -> Identity {
        self.shared.identity
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.shared.clock.clone()
    }

    fn writer(&self) -> Result<Box<dyn Writer>, StoreError> {
        if self.shared.writer_taken.swap(true, Ordering::SeqCst) {
            return Err(StoreError::WriterTaken);
        }
        let first = self.shared.first.lock().expect("held for one take").take();
        let connection = match first {
            Some(connection) => connection,
            None => {
                connect_whole(&self.shared).inspect_err(|_| self.shared.writer_taken.store(false, Ordering::SeqCst))?
            }
        };
        Ok(Box::new(writer::SqliteWriter::new(self.shared.clone(), connection)?))
    }

    fn reader(&self) -> Arc<dyn Reader> {
        self.shared.reader.clone()
    }
}

/// The path of the file itself, for SQLite puts its log beside that: a store that is opened through a link has one log
/// and one owner lock, whatever it is called, and a change of the working folder moves neither.
fn resolved(path: &Path) -> Result<PathBuf, StoreError> {
    let failed = |source| StoreError::File { doing: "find the folder of", path: path.to_path_buf(), source };
    if path.exists() {
        return path.canonicalize().map_err(failed);
    }
    if path.is_symlink() {
        let problem = "it is a link to a file that is not there; give the path of the file itself".to_owned();
        return Err(StoreError::Foreign { path: path.to_path_buf(), problem });
    }
    let Some(name) = path.file_name() else {
        let problem = "it names no file; give the path of one".to_owned();
        return Err(StoreError::Foreign { path: path.to_path_buf(), problem });
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(failed)?;
    Ok(folder.canonicalize().map_err(failed)?.join(name))
}

/// Brings the store at `path` to this release's schema, as opening it does. Answers the version it had and the one it
/// has.
///
/// # Errors
/// [`StoreError`] when there is none, when another process owns it, or as for opening it.
pub fn migrate(path: &Path) -> Result<(usize, usize), StoreError> {
    let (path, _lock, mut connection) = own_existing(path)?;
    let had = migrate::stand(&connection, &path)?;
    // Of a file that has a version this secret is not used.
    let secret =
        random_key().map_err(|source| StoreError::File { doing: "draw a secret for", path: path.clone(), source })?;
    migrate::migrate(&mut connection, &path, secret, SystemClock::new().now())?;
    Ok((had, migrate::MIGRATIONS.len()))
}

/// Says that the store at `path` is a restored copy: whoever opens it next raises its epoch. What [`backup`] has made
/// says so by itself, and a file in another place shows; one that was written over the original does not.
///
/// # Errors
/// As [`migrate`].
pub fn mark_restored(path: &Path) -> Result<(), StoreError> {
    let (_, _lock, connection) = own_existing(path)?;
    connection
        .execute("update store set copy = 1", [])
        .map(drop)
        .map_err(|source| StoreError::Sqlite { doing: "mark the store as restored", source })
}

/// Takes ownership of a store that is there, without beginning a boot.
fn own_existing(path: &Path) -> Result<(PathBuf, File, Connection), StoreError> {
    if !path.is_file() {
        let problem = "there is no such file; give the path of a store, serve makes one".to_owned();
        return Err(StoreError::Foreign { path: path.to_path_buf(), problem });
    }
    let path = resolved(path)?;
    migrate::refuse_foreign(&path)?;
    let lock = own(&path)?;
    let connection = connect(&path)?;
    Ok((path, lock, connection))
}

fn random_key() -> Result<FingerprintKey, std::io::Error> {
    let mut key = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    Ok(FingerprintKey(key))
}

fn none_if_empty<T>(error: rusqlite::Error) -> Result<Option<T>, rusqlite::Error> {
    match error {
        rusqlite::Error::QueryReturnedNoRows => Ok(None),
        other => Err(other),
    }
}

/// Takes the owner lock beside the file.
///
/// A lock file of its own, because SQLite's locks on the database come and go with its transactions.
fn own(path: &Path) -> Result<File, StoreError> {
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock_path = PathBuf::from(lock_path);
    let file = |doing, source| StoreError::File { doing, path: lock_path.clone(), source };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(|source| file("create the folder of", source))?;
    }
    let mut lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&lock_path)
        .map_err(|source| file("open the owner lock", source))?;
    match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut owner = String::new();
            // Only for the message: the lock itself is what counts.
            let named = lock.take(64).read_to_string(&mut owner).is_ok() && !owner.trim().is_empty();
            let owner = if named { format!("process {}", owner.trim()) } else { "another process".to_owned() };
            return Err(StoreError::Owned { path: path.to_path_buf(), owner });
        }
        Err(source) => return Err(file("take the owner lock", source.into())),
    }
    let write_pid = |lock: &mut File| {
        lock.set_len(0)?;
        lock.rewind()?;
        writeln!(lock, "{}", std::process::id())
    };
    write_pid(&mut lock).map_err(|source| file("write the owner lock", source))?;
    Ok(lock)
}

/// A connection that writes, each commit durable by itself: migrations and the change of owner go through it. The
/// writer leaves the sync to [`durable`].
fn connect(path: &Path) -> Result<Connection, StoreError> {
    let sqlite = |doing| move |source| StoreError::Sqlite { doing, source };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(sqlite("open the store"))?;
    connection.set_prepared_statement_cache_capacity(64);
    configure(&connection)?;
    connection
        .execute_batch(
            "pragma busy_timeout = 5000;
             pragma journal_mode = wal;
             pragma synchronous = full;
             pragma cache_size = -65536;
             pragma temp_store = memory;
             pragma trusted_schema = off;",
        )
        .map_err(sqlite("set up the store's connection"))?;
    let mode: String =
        connection.query_row("pragma journal_mode", [], |row| row.get(0)).map_err(sqlite("read the journal mode"))?;
    if mode != "wal" {
        let problem = format!("its journal mode is {mode} and cannot be WAL here; put it on a local disk");
        return Err(StoreError::Foreign { path: path.to_path_buf(), problem });
    }
    Ok(connection)
}

/// What is the same for connections that write and that read.
fn configure(connection: &Connection) -> Result<(), StoreError> {
    for (setting, on) in [
        // A statement keeps the plan it was prepared with. Otherwise SQLite looks at the values bound to a range or a
        // limit, and plans such a statement anew for each.
        (DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true),
        // No statement can damage the file's own tables, and a misspelt name is an error and not a text.
        (DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true),
        (DbConfig::SQLITE_DBCONFIG_DQS_DML, false),
        (DbConfig::SQLITE_DBCONFIG_DQS_DDL, false),
    ] {
        connection
            .set_db_config(setting, on)
            .map_err(|source| StoreError::Sqlite { doing: "set up the store's connection", source })?;
    }
    Ok(())
}

/// A connection that writes to a store whose file has everything: the log, whatever was left in it, is moved there.
fn connect_whole(shared: &Shared) -> Result<Connection, StoreError> {
    let connection = connect_counted(&shared.path, shared.work.as_ref())?;
    let busy: i64 = connection
        .query_row("pragma wal_checkpoint(truncate)", [], |row| row.get(0))
        .map_err(|source| StoreError::Sqlite { doing: "checkpoint the whole log", source })?;
    if busy == 0 { Ok(connection) } else { Err(StoreError::Recovering) }
}

/// A connection that writes and counts what it does, where somebody wants to know.
fn connect_counted(path: &Path, work: Option<&Arc<AtomicU64>>) -> Result<Connection, StoreError> {
    let mut connection = connect(path)?;
    if let Some(work) = work.cloned() {
        let count = move || {
            work.fetch_add(1, Ordering::Relaxed);
            false
        };
        let doing = "count the work of a connection";
        connection.progress_handler(1, Some(count)).map_err(|source| StoreError::Sqlite { doing, source })?;
    }
    Ok(connection)
}

/// Begins this process's boot: counts it, and raises the epoch when the file is a restored or copied one.
fn board(connection: &mut Connection, path: &Path) -> Result<Identity, StoreError> {
    let sqlite = |source| StoreError::Sqlite { doing: "begin a boot", source };
    let file_id = file_id(path)?;
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(sqlite)?;
    // A file under another identity than at its last opening is a copy that may be behind its original.
    let identity = transaction
        .query_row(
            "update store set boot = boot + 1,
                 epoch = epoch + (copy = 1 or (file_id <> '' and file_id <> ?1)),
                 copy = 0, file_id = ?1
             where one = 1 returning epoch, boot, fingerprint_key",
            [&file_id],
            |row| {
                let key: Vec<u8> = row.get(2)?;
                let mut secret = [0; 32];
                secret.copy_from_slice(&key);
                Ok(Identity {
                    epoch: row.get::<_, i64>(0)?.unsigned_abs(),
                    boot: row.get::<_, i64>(1)?.unsigned_abs(),
                    fingerprint_key: FingerprintKey(secret),
                })
            },
        )
        .map_err(sqlite)?;
    transaction.commit().map_err(sqlite)?;
    Ok(identity)
}

/// What tells this file from a copy of it. The time of its birth too, where the system tells: file systems give the
/// number of a deleted file to the next one.
fn file_id(path: &Path) -> Result<String, StoreError> {
    let metadata = std::fs::metadata(path).map_err(|source| StoreError::File {
        doing: "look at",
        path: path.to_path_buf(),
        source,
    })?;
    let born = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    Ok(format!("{:x}:{:x}:{:x}", metadata.dev(), metadata.ino(), born.map_or(0, |born| born.as_nanos())))
}
