//! The stores that the tests of this crate run on.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::PathBuf;
use std::sync::Arc;

use steadfast_core::command::{Command, Moment, decide};
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::snapshot::{Snapshot, Wants};
use steadfast_pgtest::Shared;
use steadfast_store::clock::Clock;
use steadfast_store::conformance::Harness;
use steadfast_store::memory::MemoryStore;
use steadfast_store::postgres::{self, PostgresStore};
use steadfast_store::sqlite::{self, SqliteStore};
use steadfast_store::{Store, Writer};
use tempfile::TempDir;

/// The secret of every store made here, equal to that of a store in memory: receipts then compare.
pub const SECRET: FingerprintKey = FingerprintKey([0x5f; 32]);

/// Loads and decides, as the first half of a batch; nothing is written.
pub fn decided(writer: &mut dyn Writer, moment: &Moment, commands: &[Command]) -> Snapshot {
    let (mut wants, mut snapshot) = (Wants::default(), Snapshot::new());
    commands.iter().for_each(|command| command.wants(moment, &mut wants));
    writer.load(&wants, &mut snapshot).expect("it loads");
    commands.iter().for_each(|command| drop(decide(&mut snapshot, command, moment).expect("it decides")));
    snapshot
}

/// Stores in memory.
#[derive(Default)]
pub struct Memory(Option<MemoryStore>);

impl Harness for Memory {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        let store = match self.0.take() {
            None => MemoryStore::new(clock),
            Some(last) => last.reopened(restored),
        };
        self.0 = Some(store.clone());
        Box::new(store)
    }
}

/// Stores in a file; restored ones in a backup of the last file.
pub struct Sqlite {
    folder: TempDir,
    restores: usize,
}

impl Default for Sqlite {
    fn default() -> Self {
        Self { folder: TempDir::new().expect("a folder for tests"), restores: 0 }
    }
}

impl Sqlite {
    pub fn path(&self) -> PathBuf {
        self.folder.path().join(format!("{}.db", self.restores))
    }
}

impl Harness for Sqlite {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        if restored {
            let from = self.path();
            self.restores += 1;
            sqlite::backup(&from, &self.path()).expect("a backup is made");
        }
        Box::new(SqliteStore::open_with(self.path(), clock, || Ok(SECRET)).expect("the store opens"))
    }
}

/// Stores in a PostgreSQL database, each in a schema of its own.
pub struct Postgres {
    _shared: Shared,
    pub url: String,
}

impl Default for Postgres {
    fn default() -> Self {
        let shared = steadfast_pgtest::shared();
        Self { url: shared.fresh_url(), _shared: shared }
    }
}

impl Harness for Postgres {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        if restored {
            postgres::mark_restored(&self.url).expect("the store is marked");
        }
        Box::new(PostgresStore::open_with(&self.url, clock, || Ok(SECRET)).expect("the store opens"))
    }
}

/// Stores in a PostgreSQL database whose logs and receipts are hashed into partitions.
pub struct Partitioned(pub Postgres);

impl Default for Partitioned {
    fn default() -> Self {
        let mut whole = Postgres::default();
        whole.url += "&partitions=3";
        Self(whole)
    }
}

impl Harness for Partitioned {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        self.0.open(clock, restored)
    }
}

/// Stores in a file until they are restored, and from then on in a PostgreSQL database that the file was copied to.
#[derive(Default)]
pub struct Grown {
    file: Sqlite,
    grown: Option<Postgres>,
}

impl Harness for Grown {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        match (&mut self.grown, restored) {
            (None, false) => self.file.open(clock, false),
            (Some(grown), restored) => grown.open(clock, restored),
            (None, true) => {
                let mut grown = Postgres::default();
                postgres::copy(&self.file.path(), &grown.url, &mut |_| {}).expect("the store is copied");
                let store = grown.open(clock, false);
                self.grown = Some(grown);
                store
            }
        }
    }
}

/// Stores in the file at a given path, for tests that look at the file.
pub struct At(pub PathBuf);

impl Harness for At {
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store> {
        assert!(!restored, "a file at a path is not restored");
        Box::new(SqliteStore::open_with(&self.0, clock, || Ok(SECRET)).expect("the store opens"))
    }
}
