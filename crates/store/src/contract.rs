//! The contract of a store: load, save, look.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use steadfast_core::event::{DecodeError, Event};
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::head::Head;
use steadfast_core::json::Json;
use steadfast_core::signal::Pending;
use steadfast_core::snapshot::{Admission, Handle, Snapshot, Wants};
use steadfast_core::state::Status;
use steadfast_core::sweep::Boots;
use steadfast_core::text::{Key, Name, Namespace, WorkflowKey};
use steadfast_core::verify::Fault;

use crate::clock::Clock;

/// A database that commands are saved in.
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// Which life of which store this is.
    fn identity(&self) -> Identity;

    /// The number of this process among those that have the store open.
    fn node(&self) -> u32 {
        1
    }

    /// The time this store judges by.
    fn clock(&self) -> Arc<dyn Clock>;

    /// A connection that writes.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be opened, or when there are as many as there may be.
    fn writer(&self) -> Result<Box<dyn Writer>, StoreError>;

    /// How many connections of this process may write at the same time.
    fn writers(&self) -> usize {
        1
    }

    /// How many of them are worth using now. Where other processes write to the same database too, another connection
    /// takes from theirs.
    fn writers_worth(&self) -> usize {
        self.writers()
    }

    /// Short looks from any thread, beside the writer.
    fn reader(&self) -> Arc<dyn Reader>;

    /// How many looks its reader serves at the same time.
    fn looks(&self) -> usize {
        8
    }

    /// Which owners of the store live. Unless told otherwise a store has one at a time.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be looked up.
    fn boots(&self) -> Result<Boots, StoreError> {
        Ok(Boots::only(self.identity().boot))
    }

    /// True when other processes may have the store open too.
    fn is_shared(&self) -> bool {
        false
    }

    /// True when no other process has the store open, as far as was seen in the last few seconds.
    fn is_alone(&self) -> bool {
        true
    }

    /// True when no process that has the store open began earlier, as far as was seen in the last few seconds: what any
    /// of them could do, and one must, is left to the first for a moment. At times several are the first, or none.
    fn is_first(&self) -> bool {
        true
    }

    /// False when what this process writes by itself, without a command, has failed for several seconds.
    fn is_writable(&self) -> bool {
        true
    }

    /// Another owner that is gone, once: whoever is answered its boot gives back what it held, and then buries it.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be looked up.
    fn next_gone(&self) -> Result<Option<u64>, StoreError> {
        Ok(None)
    }

    /// Lets the other owners know that there is work which this one has not taken. A hint: it may be late, lost, or one
    /// for many.
    fn hint(&self) {}

    /// Calls `hear` when another owner has left a hint; until the store is dropped.
    fn on_hint(&self, hear: Box<dyn Fn() + Send + Sync>) {
        drop(hear);
    }

    /// Forgets an owner that is gone, after what it held was given back. One that still holds something is kept, and
    /// answered again later.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be done; the owner is then answered again later.
    fn bury(&self, boot: u64) -> Result<(), StoreError> {
        let _ = boot;
        Ok(())
    }
}

/// For whoever does not know which store there will be.
impl Store for Box<dyn Store> {
    fn identity(&self) -> Identity {
        (**self).identity()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        (**self).clock()
    }

    fn writer(&self) -> Result<Box<dyn Writer>, StoreError> {
        (**self).writer()
    }

    fn reader(&self) -> Arc<dyn Reader> {
        (**self).reader()
    }

    fn boots(&self) -> Result<Boots, StoreError> {
        (**self).boots()
    }

    fn node(&self) -> u32 {
        (**self).node()
    }

    fn writers(&self) -> usize {
        (**self).writers()
    }

    fn writers_worth(&self) -> usize {
        (**self).writers_worth()
    }

    fn looks(&self) -> usize {
        (**self).looks()
    }

    fn is_shared(&self) -> bool {
        (**self).is_shared()
    }

    fn is_alone(&self) -> bool {
        (**self).is_alone()
    }

    fn is_first(&self) -> bool {
        (**self).is_first()
    }

    fn is_writable(&self) -> bool {
        (**self).is_writable()
    }

    fn next_gone(&self) -> Result<Option<u64>, StoreError> {
        (**self).next_gone()
    }

    fn hint(&self) {
        (**self).hint();
    }

    fn on_hint(&self, hear: Box<dyn Fn() + Send + Sync>) {
        (**self).on_hint(hear);
    }

    fn bury(&self, boot: u64) -> Result<(), StoreError> {
        (**self).bury(boot)
    }
}

/// Which life of which store this is. Boot and secret are fixed while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Raised on restore and on failover; claims of earlier epochs are void. A writer tells the present one.
    pub epoch: u64,
    /// Counts the owners of the store.
    pub boot: u64,
    /// The secret that fingerprints are keyed with.
    pub fingerprint_key: FingerprintKey,
}

/// The connection of the committer: it loads what a batch wants and saves what the batch decided.
///
/// `load` begins a batch when there is none, and with it a transaction unless it has all it needs at hand; `save`, `confirm`
/// and `abandon` end it. All calls block.
pub trait Writer: Send {
    /// Loads the wanted rows into the snapshot. May be called again within the transaction for more.
    ///
    /// # Errors
    /// [`StoreError`]; the transaction is then still to be abandoned.
    fn load(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError>;

    /// The next batch is decided on rows that were loaded, and on nothing that this writer remembers or takes for granted.
    /// After [`StoreError::Raced`] it is so by itself.
    fn careful(&mut self) {}

    /// Leaves these workflows, which could not be saved, out of every page from now on, and no others.
    fn leave_out(&mut self, handles: BTreeSet<Handle>) {
        drop(handles);
    }

    /// The store's epoch as of the last load or recovery: that of every claim which is granted now.
    fn epoch(&self) -> u64;

    /// Writes the snapshot's difference and commits. It is durable once [`Disk::sync`] has returned after it, and no
    /// reader of the store shows it before.
    fn save(&mut self, snapshot: &Snapshot) -> Saved;

    /// What makes saves durable. Apart from the writer, so that one batch can be written while the one before it is
    /// on its way to the disk.
    fn disk(&self) -> Arc<dyn Disk>;

    /// How long a batch may wait for the commands that the one before it leads to: about what a small batch costs more
    /// than a large one. None where batches cost by their rows.
    fn gathers(&self) -> Duration {
        Duration::ZERO
    }

    /// Ends the transaction of a batch that changed nothing, once it is sure that what was loaded was true.
    ///
    /// # Errors
    /// [`StoreError::Raced`] when it was not, any other when that cannot be told; the commands are then decided anew.
    fn confirm(&mut self) -> Result<(), StoreError> {
        self.abandon();
        Ok(())
    }

    /// Ends the transaction without a trace.
    fn abandon(&mut self);

    /// Called when nothing waits: housekeeping such as checkpoints, in short pieces.
    fn rest(&mut self) {}

    /// Called after [`Saved::Unknown`] or a failed [`Disk::sync`] until it succeeds: makes sure that what the store
    /// shows from now on is durable, and tells what became of the last save. Nothing is loaded or saved before.
    ///
    /// # Errors
    /// [`StoreError`] when the database is still not well; it is tried again.
    fn recover(&mut self) -> Result<Fate, StoreError>;
}

/// What became of a save of unknown outcome, as far as a recovery can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is there, and durable.
    Committed,
    /// Certainly without a trace; it may be done again.
    NotCommitted,
    /// Only a look at its content tells.
    Unknown,
}

/// The way to the disk.
pub trait Disk: Send + Sync {
    /// Makes everything durable that was saved before the call. Blocks.
    ///
    /// # Errors
    /// [`StoreError`]; what was saved since the last success may be durable or not, and only a look after
    /// [`Writer::recover`] tells.
    fn sync(&self) -> Result<(), StoreError>;
}

/// What became of a save. A failed commit is not a failure: it may have succeeded.
#[derive(Debug)]
pub enum Saved {
    /// Whole and in its place. Nobody may hear of it before [`Disk::sync`] has returned.
    Written,
    /// Certainly without a trace.
    NotCommitted(StoreError),
    /// It may be there or not; only a look after [`Writer::recover`] tells.
    Unknown(StoreError),
}

/// An event as a log shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// Its position.
    pub seq: u64,
    /// When, in milliseconds since the epoch.
    pub at: i64,
    /// What happened.
    pub event: Event,
}

/// A variable of a scratchpad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub key: Key,
    /// Its current value.
    pub value: Json,
    /// The event that wrote it.
    pub seq: u64,
}

/// Which workflows to list. Absent fields match everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Whose.
    pub namespace: Namespace,
    /// Of this definition.
    pub name: Option<Name>,
    /// In this status.
    pub status: Option<Status>,
}

impl Filter {
    /// Everything of a namespace.
    pub fn all(namespace: Namespace) -> Self {
        Self { namespace, name: None, status: None }
    }
}

/// A position in a list, newest first: the number of the last workflow seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor(pub i64);

/// A workflow in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its position.
    pub cursor: Cursor,
    /// Its current state.
    pub head: Head,
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The workflows, newest first.
    pub items: Vec<Listed>,
    /// Where the next page begins; `None` at the end. A page may hold fewer items than asked for, even none, and
    /// still have a next: a look stays short however rare the match.
    pub next: Option<Cursor>,
}

/// What a verification looked at and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// Workflows re-derived.
    pub workflows: u64,
    /// Events read.
    pub events: u64,
    /// What is not as it should be; at most a thousand are kept.
    pub faults: Vec<Fault>,
    /// How many there are in all.
    pub fault_count: u64,
}

impl Verified {
    /// Records a fault.
    pub fn fault(&mut self, fault: Fault) {
        self.fault_count += 1;
        if self.faults.len() < 1_000 {
            self.faults.push(fault);
        }
    }
}

/// The oldest snapshot that keeps dead rows in the database: none that has died since can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OldestSnapshot {
    /// How many transactions have begun since.
    pub transactions: u64,
    /// How long ago the transaction of the one with most of them began, where that may be seen.
    pub age: Option<Duration>,
}

/// Short looks beside the writer. All calls block; none holds a read transaction longer than it answers, and none
/// answers what is not durable.
pub trait Reader: Send + Sync {
    /// The current state of a workflow.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn head(&self, key: &WorkflowKey) -> Result<Option<Head>, StoreError>;

    /// Those of these workflows that have ended, with the event that ended them.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn ended(&self, keys: &[WorkflowKey]) -> Result<Vec<(WorkflowKey, Event)>, StoreError> {
        let mut ended = Vec::new();
        for key in keys {
            if let Some(head) = self.head(key)?.filter(|head| head.status().is_terminal())
                && let Some(last) = self.events(key, head.seq, 1)?.pop()
            {
                ended.push((key.clone(), last.event));
            }
        }
        Ok(ended)
    }

    /// The receipt of a start.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn admission(&self, key: &WorkflowKey) -> Result<Option<Admission>, StoreError>;

    /// Up to `limit` events from `from` on.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn events(&self, key: &WorkflowKey, from: u64, limit: usize) -> Result<Vec<Logged>, StoreError>;

    /// One variable.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn variable(&self, key: &WorkflowKey, name: &Key) -> Result<Option<Variable>, StoreError>;

    /// Up to `limit` variables in key order, after `after`.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn variables(&self, key: &WorkflowKey, after: Option<&Key>, limit: usize) -> Result<Vec<Variable>, StoreError>;

    /// Up to `limit` signals that no wait has taken yet, in the order of acceptance, from behind number `after` on.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn signals(&self, key: &WorkflowKey, after: u64, limit: usize) -> Result<Vec<Pending>, StoreError>;

    /// A page of workflows, newest first, before `before`.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn list(&self, filter: &Filter, before: Option<Cursor>, limit: usize) -> Result<Page, StoreError>;

    /// The earliest instant that a sweep waits for.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn next_due(&self) -> Result<Option<i64>, StoreError>;

    /// Re-derives every head and scratchpad from its log and compares; `progress` hears how many workflows are done.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails; what is wrong with the content is in the answer.
    fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Verified, StoreError>;

    /// Bytes the store takes, where that can be told.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn bytes(&self) -> Result<u64, StoreError>;

    /// The oldest snapshot of the database, whoever holds it, where others can hold one.
    ///
    /// # Errors
    /// [`StoreError`] when the look fails.
    fn oldest_snapshot(&self) -> Result<Option<OldestSnapshot>, StoreError> {
        Ok(None)
    }
}

/// What went wrong in a store, and while doing what. It names keys and never holds contents.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database said no.
    #[error("{doing}")]
    Sqlite {
        /// What we were doing.
        doing: &'static str,
        /// What it said.
        #[source]
        source: rusqlite::Error,
    },
    /// PostgreSQL said no, or said nothing.
    #[error("{doing}: {}", crate::postgres::told(error))]
    Postgres {
        /// What we were doing.
        doing: &'static str,
        /// What it said.
        error: tokio_postgres::Error,
    },
    /// No server of a PostgreSQL store can be used now.
    #[error("no server can be used: {tried}")]
    NoServer {
        /// Each with the reason.
        tried: String,
    },
    /// Every server of a PostgreSQL store says no, and will until somebody changes something: a wrong password, a
    /// database that is not there.
    #[error("no server can be used: {tried}")]
    Denied {
        /// Each with the reason.
        tried: String,
    },
    /// The URL of a store is not one.
    #[error("the store's URL cannot be used: {problem}")]
    Place {
        /// What is wrong, and what to give.
        problem: String,
    },
    /// A file could not be used.
    #[error("{doing} {path}")]
    File {
        /// What we were doing.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// Another process owns the store.
    #[error("the store {path} is in use by {owner}; one process owns a store: stop that one, or talk to it over HTTP")]
    Owned {
        /// Which.
        path: PathBuf,
        /// The owner as far as it can be told.
        owner: String,
    },
    /// Nodes have the store open that must not.
    #[error("the store {place} is in use by {nodes} nodes; stop them first, one that was killed counts for up to 15 s")]
    InUse {
        /// Which.
        place: String,
        /// How many live.
        nodes: usize,
    },
    /// The file or the schema is not a store of this release.
    #[error("{path} cannot be opened as a store: {problem}")]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Why, and what to do.
        problem: String,
    },
    /// The linked SQLite has a known fault.
    #[error("SQLite {found} is linked, which can corrupt a store; 3.51.3 or later is needed")]
    Version {
        /// The linked version.
        found: &'static str,
    },
    /// A stored row means nothing.
    #[error("{what} of workflow {key} is corrupt: {problem}")]
    Corrupt {
        /// Which row.
        what: &'static str,
        /// Of which workflow, where that can be told.
        key: String,
        /// Why.
        problem: String,
    },
    /// A stored event cannot be read.
    #[error("event {seq} of workflow {key}")]
    Event {
        /// Which workflow.
        key: WorkflowKey,
        /// Which event.
        seq: u64,
        /// Why.
        #[source]
        source: DecodeError,
    },
    /// The writer was already handed out.
    #[error("the store's writers are in use")]
    WriterTaken,
    /// The store is being recovered after a commit whose outcome was unknown, or after its database went away.
    #[error("the store is recovering; try again shortly")]
    Recovering,
    /// Somebody else came first: nothing was written, and the same commands decided anew see what he did.
    #[error("{doing} met another node; it is tried again")]
    Raced {
        /// What we were doing.
        doing: &'static str,
    },
    /// A fault that a test asked for.
    #[error("injected fault: {0}")]
    Injected(&'static str),
}

impl StoreError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Sqlite { .. }
            | Self::Postgres { .. }
            | Self::NoServer { .. }
            | Self::Denied { .. }
            | Self::File { .. }
            | Self::Injected(_) => "store_unavailable",
            Self::Place { .. } => "invalid_store",
            Self::Owned { .. } => "store_owned",
            Self::InUse { .. } => "store_in_use",
            Self::Foreign { .. } => "store_foreign",
            Self::Version { .. } => "sqlite_too_old",
            Self::Corrupt { .. } | Self::Event { .. } => "store_corrupt",
            Self::WriterTaken => "writer_taken",
            Self::Recovering => "store_recovering",
            Self::Raced { .. } => "store_busy",
        }
    }

    /// True when the same may work later without anybody's doing: the database is away, starting, or busy.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::NoServer { .. } | Self::Recovering | Self::Raced { .. } => true,
            Self::Postgres { error, .. } => crate::postgres::may_pass(error),
            _ => false,
        }
    }
}
