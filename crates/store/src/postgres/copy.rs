//! Copy: a whole SQLite store into an empty PostgreSQL schema, for whoever has grown out of one file.
//!
//! # What comes along
//! Everything that a caller was told of: receipts with the secret that their fingerprints are keyed with, so that a
//! start sent again is still a replay; logs, heads, variables, claim calls; namespaces and workflows under the numbers
//! they had. The copy is one epoch later than both: claims of steps that ran are void in it and are given back by the
//! first node that opens it. Boots are counted on from the higher of the two counts.
//!
//! # One moment, one transaction
//! The owner's lock of the file is held, so nothing is written to it meanwhile. Everything goes into one transaction,
//! the making of the schema included, and the transaction ends only after the copy was re-derived from its logs and
//! counted: what fails leaves nothing. Rows stream from the file's cursor to `copy .. from stdin`, a few pieces ahead.
//!
//! # Races
//! A process that opens the target meanwhile meets its locks: it waits, or gives up and may try again, and then reads the
//! secret and the boot that were copied. One that has it open already would go on with another secret: a target with a
//! living node is refused.

use std::path::Path;
use std::sync::mpsc;

use steadfast_core::fingerprint::FingerprintKey;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{ToSql, Type};

use super::place::Place;
use super::reader::{AT_LENGTH, Background, examine};
use super::session::{Purpose, Session, postgres};
use super::{board, migrate, server_time};
use crate::contract::{StoreError, Verified};
use crate::sqlite::Held;

/// A piece of a table on its way: so many rows, or so many bytes, whichever comes first.
const PIECE_ROWS: usize = 512;
const PIECE_BYTES: usize = 1 << 20;
/// How many pieces the file may be ahead of the database.
const AHEAD: usize = 4;

/// A table that both have, with the columns that are copied.
struct Table {
    name: &'static str,
    columns: &'static [(&'static str, Type)],
}

/// Every table that is copied, in the order in which it is. What is not here belongs to one database: the row of the
/// store, which is carried over by hand, and the nodes.
static TABLES: [Table; 7] = [
    Table { name: "namespaces", columns: &[("namespace", Type::INT4), ("name", Type::TEXT)] },
    Table {
        name: "admissions",
        columns: &[
            ("namespace", Type::INT4),
            ("id", Type::TEXT),
            ("workflow", Type::INT8),
            ("fingerprint", Type::BYTEA),
            ("admitted_at", Type::INT8),
        ],
    },
    Table {
        name: "events",
        columns: &[
            ("namespace", Type::INT4),
            ("workflow", Type::INT8),
            ("seq", Type::INT8),
            ("type", Type::TEXT),
            ("version", Type::INT4),
            ("at", Type::INT8),
            ("payload", Type::TEXT),
        ],
    },
    Table {
        name: "heads",
        columns: &[
            ("namespace", Type::INT4),
            ("workflow", Type::INT8),
            ("id", Type::TEXT),
            ("name", Type::TEXT),
            ("options", Type::TEXT),
            ("priority", Type::INT4),
            ("created_at", Type::INT8),
            ("updated_at", Type::INT8),
            ("seq", Type::INT8),
            ("status", Type::TEXT),
            ("code", Type::TEXT),
            ("step", Type::TEXT),
            ("visit", Type::INT8),
            ("attempt", Type::INT4),
            ("delivery", Type::INT4),
            ("rank", Type::INT8),
            ("wake", Type::INT2),
            ("due", Type::INT8),
            ("token", Type::BYTEA),
            ("epoch", Type::INT8),
            ("worker", Type::TEXT),
            ("boot", Type::INT8),
            ("remote", Type::BOOL),
            ("started_at", Type::INT8),
            ("lease_ms", Type::INT8),
            ("lease_until", Type::INT8),
            ("step_deadline", Type::INT8),
            ("progress", Type::TEXT),
            ("wait", Type::TEXT),
        ],
    },
    Table {
        name: "scratchpad",
        columns: &[
            ("namespace", Type::INT4),
            ("workflow", Type::INT8),
            ("key", Type::TEXT),
            ("value", Type::TEXT),
            ("seq", Type::INT8),
        ],
    },
    Table {
        name: "signals",
        columns: &[
            ("namespace", Type::INT4),
            ("workflow", Type::INT8),
            ("number", Type::INT8),
            ("id", Type::TEXT),
            ("name", Type::TEXT),
            ("accepted_at", Type::INT8),
            ("fingerprint", Type::BYTEA),
            ("seq", Type::INT8),
            ("payload", Type::TEXT),
        ],
    },
    Table {
        name: "claim_calls",
        columns: &[("namespace", Type::INT4), ("request", Type::TEXT), ("at", Type::INT8), ("granted", Type::TEXT)],
    },
];

impl Table {
    fn names(&self) -> String {
        self.columns.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// So many rows of so many are written.
    Rows(u64, u64),
    /// So many workflows of so many are verified.
    Verified(u64, u64),
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Workflows, each with its state.
    pub workflows: u64,
    /// Receipts of starts.
    pub receipts: u64,
    /// Events of their logs.
    pub events: u64,
    /// Variables of their scratchpads.
    pub variables: u64,
    /// Signals that were accepted.
    pub signals: u64,
    /// Namespaces.
    pub namespaces: u64,
    /// Remembered claim calls.
    pub claim_calls: u64,
    /// The epoch of the copy.
    pub epoch: u64,
}

/// Why there is no copy. Unless it says so, nothing was left in the target.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// One of the two stores could not be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The target holds work of its own.
    #[error("the store {place} has workflows of its own; copy into a schema that is new or empty")]
    NotEmpty {
        /// Where.
        place: String,
    },
    /// The target is open.
    #[error("the store {place} is in use by {nodes} nodes; stop them first, a copy brings another secret and epoch")]
    InUse {
        /// Where.
        place: String,
        /// How many live.
        nodes: usize,
    },
    /// What was copied contradicts itself: the file was damaged.
    #[error("{} faults were found in what was copied, nothing was kept; verify the source, and restore a backup of it", .0.fault_count)]
    Faults(Verified),
    /// Not everything has arrived.
    #[error("{found} rows of {table} arrived where {expected} were sent; nothing was kept")]
    Differs {
        /// In which table.
        table: &'static str,
        /// How many the source has.
        expected: u64,
        /// How many the target has.
        found: u64,
    },
    /// The answer to the commit was lost.
    #[error("whether the copy was committed is not known: verify the target; if it has no workflows, copy again")]
    Unknown {
        /// How it was lost.
        #[source]
        source: StoreError,
    },
}

impl CopyError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::NotEmpty { .. } => "target_not_empty",
            Self::InUse { .. } => "target_in_use",
            Self::Faults(_) => "faults_found",
            Self::Differs { .. } => "copy_differs",
            Self::Unknown { .. } => "outcome_unknown",
        }
    }
}

/// Copies the SQLite store at `from` into the schema of the URL `to`, which may not be there yet. Blocks, for as long as
/// it takes; `progress` is told how far it is.
///
/// # Errors
/// [`CopyError`].
pub fn copy(from: &Path, to: &str, progress: &mut dyn FnMut(Progress)) -> Result<Copied, CopyError> {
    let place = Place::parse(to)?;
    let held = Held::take(from)?;
    let source = Source::of(&held)?;
    let background = Background::start(&place)?;
    let session = background.wait({
        let place = place.clone();
        async move { Session::connect(&place, &std::sync::Arc::default(), &[], Purpose::Write).await }
    })?;

    let (tell, told) = mpsc::channel();
    let (send, receive) = tokio::sync::mpsc::channel(AHEAD);
    let (answer, answered) = mpsc::sync_channel(1);
    let (begin, may_begin) = mpsc::channel();
    background.handle().spawn(async move {
        let mut copy = Copy { session, place, source, tell };
        let copied = copy.run(begin, receive).await;
        if !matches!(copied, Ok(Ok(_)) | Err(CopyError::Unknown { .. })) {
            // Best effort, so that the next try meets no lock; the end of the connection does the same.
            let _ = copy.session.client.batch_execute("rollback").await;
        }
        // Ends the progress too.
        drop(copy);
        let _ = answer.send(copied);
    });
    // A thread of its own, which may wait for the database wherever the caller stands.
    let reading = std::thread::spawn(move || {
        // Not before the target has agreed to be one: counting takes its time.
        if may_begin.recv().is_ok() { read(&held, &send) } else { Ok(()) }
    });
    told.iter().for_each(progress);
    let read = reading.join().unwrap_or(Err(StoreError::Recovering));
    match answered.recv() {
        Ok(Ok(Ok(copied))) => Ok(copied),
        Ok(Err(error)) => Err(error),
        // The source came to no end, and says why.
        Ok(Ok(Err(CutShort))) => Err(read.err().unwrap_or(StoreError::Recovering).into()),
        Err(_) => Err(StoreError::Recovering.into()),
    }
}

/// What the source says of itself.
#[derive(Debug, Clone, Copy)]
struct Source {
    epoch: i64,
    boot: i64,
    created_at: i64,
    /// The last number that a workflow was given.
    last_number: i64,
    secret: FingerprintKey,
}

impl Source {
    fn of(held: &Held) -> Result<Self, StoreError> {
        let secret: Vec<u8> = held.one("select fingerprint_key from store", |row| row.get(0))?;
        let secret = secret.try_into().map_err(|_| StoreError::Corrupt {
            what: "store row",
            key: "-".to_owned(),
            problem: "its secret is not 32 bytes long".to_owned(),
        })?;
        let text = "select epoch, boot, created_at, max(number_floor,
                        coalesce((select max(workflow) from admissions), 0), coalesce((select max(workflow) from heads), 0))
                    from store";
        held.one(text, |row| {
            Ok(Self {
                epoch: row.get(0)?,
                boot: row.get(1)?,
                created_at: row.get(2)?,
                last_number: row.get(3)?,
                secret: FingerprintKey(secret),
            })
        })
    }
}

/// A value on its way.
#[derive(Debug)]
enum Cell {
    Null,
    Long(i64),
    Int(i32),
    Small(i16),
    Truth(bool),
    Text(String),
    Bytes(Vec<u8>),
}

impl Cell {
    /// Reads a column as the target wants it.
    fn read(row: &rusqlite::Row<'_>, column: usize, of: &Type) -> Result<Self, rusqlite::Error> {
        if row.get_ref(column)? == rusqlite::types::ValueRef::Null {
            return Ok(Self::Null);
        }
        Ok(match *of {
            Type::INT8 => Self::Long(row.get(column)?),
            Type::INT4 => Self::Int(row.get(column)?),
            Type::INT2 => Self::Small(row.get(column)?),
            Type::BOOL => Self::Truth(row.get(column)?),
            Type::BYTEA => Self::Bytes(row.get(column)?),
            _ => Self::Text(row.get(column)?),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            _ => 8,
        }
    }

    fn argument(&self, of: &Type) -> &(dyn ToSql + Sync) {
        match self {
            Self::Null => match *of {
                Type::INT8 => &None::<i64>,
                Type::INT4 => &None::<i32>,
                Type::INT2 => &None::<i16>,
                Type::BOOL => &None::<bool>,
                Type::BYTEA => &None::<&[u8]>,
                _ => &None::<&str>,
            },
            Self::Long(value) => value,
            Self::Int(value) => value,
            Self::Small(value) => value,
            Self::Truth(value) => value,
            Self::Text(value) => value,
            Self::Bytes(value) => value,
        }
    }
}

/// What comes from the file, in this order.
enum Piece {
    /// How many rows each table has.
    Counts([u64; TABLES.len()]),
    /// Rows of the table that is under way.
    Rows(Vec<Vec<Cell>>),
    /// The table has no more.
    End,
}

/// Nothing more comes from the file, and not because it was read to its end.
struct CutShort;

/// Reads the file to its end, or until nobody listens any more.
fn read(held: &Held, send: &tokio::sync::mpsc::Sender<Piece>) -> Result<(), StoreError> {
    let mut counts = [0; TABLES.len()];
    for (count, table) in counts.iter_mut().zip(&TABLES) {
        *count = held.one(&format!("select count(*) from {}", table.name), |row| row.get::<_, i64>(0))?.unsigned_abs();
    }
    let mut heard = send.blocking_send(Piece::Counts(counts)).is_ok();
    for table in &TABLES {
        let (mut piece, mut bytes) = (Vec::new(), 0);
        // In the order in which they lie: that of commits for events, that of keys for the others.
        held.each(&format!("select {} from {}", table.names(), table.name), |row| {
            let cells = table.columns.iter().enumerate().map(|(column, (_, of))| Cell::read(row, column, of));
            let cells = cells.collect::<Result<Vec<_>, _>>()?;
            bytes += cells.iter().map(Cell::bytes).sum::<usize>();
            piece.push(cells);
            if piece.len() >= PIECE_ROWS || bytes >= PIECE_BYTES {
                bytes = 0;
                heard = heard && send.blocking_send(Piece::Rows(std::mem::take(&mut piece))).is_ok();
            }
            Ok(heard)
        })?;
        heard = heard && send.blocking_send(Piece::Rows(piece)).is_ok() && send.blocking_send(Piece::End).is_ok();
        if !heard {
            break;
        }
    }
    Ok(())
}

/// The writing end.
struct Copy {
    session: Session,
    place: Place,
    source: Source,
    tell: mpsc::Sender<Progress>,
}

impl Copy {
    async fn run(
        &mut self,
        begin: mpsc::Sender<()>,
        mut pieces: tokio::sync::mpsc::Receiver<Piece>,
    ) -> Result<Result<Copied, CutShort>, CopyError> {
        let epoch = self.take_target().await?;
        // It waits for this alone.
        let _ = begin.send(());
        let Some(Piece::Counts(counts)) = pieces.recv().await else { return Ok(Err(CutShort)) };
        let (mut done, all) = (0, counts.iter().sum());
        for table in &TABLES {
            if self.fill(table, &mut pieces, &mut done, all).await?.is_err() {
                return Ok(Err(CutShort));
            }
        }
        self.finish().await?;
        self.check(&counts).await?;
        self.session.client.batch_execute("commit").await.map_err(|error| {
            let source = postgres("commit the copy")(error);
            let refused = matches!(&source, StoreError::Postgres { error, .. } if error.as_db_error().is_some());
            if refused { CopyError::Store(source) } else { CopyError::Unknown { source } }
        })?;
        let [namespaces, receipts, events, workflows, variables, signals, claim_calls] = counts;
        let epoch = epoch.unsigned_abs();
        Ok(Ok(Copied { workflows, receipts, events, variables, signals, namespaces, claim_calls, epoch }))
    }

    async fn execute(&self, doing: &'static str, text: &str) -> Result<(), CopyError> {
        self.session.client.batch_execute(&self.place.text(text)).await.map_err(|error| postgres(doing)(error).into())
    }

    /// Opens the transaction and takes the target, making it where there is none. Answers its epoch.
    async fn take_target(&self) -> Result<i64, CopyError> {
        let (doing, place) = ("take the target of the copy", self.place.to_string());
        self.session.begin().await.map_err(postgres(doing))?;
        // Nothing is at work here but this transaction, for as long as it takes.
        self.execute(doing, &format!("{AT_LENGTH}; set local idle_in_transaction_session_timeout = 0")).await?;
        let has = migrate::version(&self.session, &self.place).await?;
        if has == 0 {
            let now = server_time(&self.session).await?;
            migrate::make(&self.session, &self.place, self.source.secret, now).await.map_err(postgres(doing))?;
        } else if has != migrate::known() {
            let known = migrate::known();
            let problem = format!("its schema is version {has} and this release's is {known}; migrate first");
            return Err(StoreError::Foreign { path: place.into(), problem }.into());
        } else {
            // Before the tables are waited for: who has them open would be waited for in vain.
            self.refuse_nodes().await?;
            self.execute(
                doing,
                "lock table {schema}.store, {schema}.nodes, {schema}.namespaces, {schema}.admissions, {schema}.events,
                     {schema}.heads, {schema}.ready, {schema}.timed, {schema}.ended_badly, {schema}.scratchpad,
                     {schema}.signals, {schema}.claim_calls in access exclusive mode",
            )
            .await?;
            self.refuse_nodes().await?;
            let text = "select exists (select from {schema}.admissions) or exists (select from {schema}.events)
                or exists (select from {schema}.heads) or exists (select from {schema}.scratchpad)
                or exists (select from {schema}.signals)";
            let rows = self.session.client.query_typed(&self.place.text(text), &[]).await.map_err(postgres(doing))?;
            if rows.first().is_none_or(|row| row.get(0)) {
                return Err(CopyError::NotEmpty { place });
            }
        }
        self.execute(
            doing,
            "delete from {schema}.nodes; delete from {schema}.namespaces; delete from {schema}.ready;
             delete from {schema}.timed; delete from {schema}.ended_badly; delete from {schema}.claim_calls",
        )
        .await?;
        // Where it is, as of this connection: the first node shall not find itself elsewhere.
        let Source { epoch, boot, created_at, secret, .. } = &self.source;
        let args: [(&(dyn ToSql + Sync), Type); 6] = [
            (epoch, Type::INT8),
            (boot, Type::INT8),
            (created_at, Type::INT8),
            (&&secret.0[..], Type::BYTEA),
            (&self.session.server.system, Type::TEXT),
            (&self.session.server.timeline, Type::INT8),
        ];
        let text =
            "update {schema}.store set epoch = greatest(epoch, $1) + 1, boot = greatest(boot, $2), created_at = $3,
                        fingerprint_key = $4, system = $5, timeline = $6, copied = false returning epoch";
        let rows = self.session.client.query_typed(&self.place.text(text), &args).await.map_err(postgres(doing))?;
        Ok(rows.first().map_or(0, |row| row.get(0)))
    }

    async fn refuse_nodes(&self) -> Result<(), CopyError> {
        let nodes = board::boots(&self.session, &self.place).await?.alive.len();
        if nodes == 0 { Ok(()) } else { Err(CopyError::InUse { place: self.place.to_string(), nodes }) }
    }

    /// Writes one table, from the pieces that come in until its end.
    async fn fill(
        &self,
        table: &'static Table,
        pieces: &mut tokio::sync::mpsc::Receiver<Piece>,
        done: &mut u64,
        all: u64,
    ) -> Result<Result<(), CutShort>, CopyError> {
        let failed = |error| CopyError::from(postgres("write the copy")(error));
        let types: Vec<Type> = table.columns.iter().map(|(_, of)| of.clone()).collect();
        let text = format!("copy {{schema}}.{} ({}) from stdin (format binary)", table.name, table.names());
        let sink = self.session.client.copy_in(&self.place.text(&text)).await.map_err(failed)?;
        let mut writer = std::pin::pin!(BinaryCopyInWriter::new(sink, &types));
        loop {
            match pieces.recv().await {
                Some(Piece::Rows(rows)) => {
                    for row in &rows {
                        let arguments = row.iter().zip(&types).map(|(cell, of)| cell.argument(of));
                        writer.as_mut().write_raw(arguments.collect::<Vec<_>>()).await.map_err(failed)?;
                    }
                    *done += rows.len() as u64;
                    // Nobody may listen.
                    let _ = self.tell.send(Progress::Rows(*done, all));
                }
                Some(Piece::End) => break,
                Some(Piece::Counts(_)) | None => return Ok(Err(CutShort)),
            }
        }
        writer.as_mut().finish().await.map_err(failed)?;
        Ok(Ok(()))
    }

    /// What follows from the rows: the place of the ready ones, where numbers go on, what planners know.
    async fn finish(&self) -> Result<(), CopyError> {
        let last = self.source.last_number;
        let past =
            if last > 0 { format!("select setval('{{schema}}.workflow_numbers', {last});") } else { String::new() };
        self.execute(
            "finish the copy",
            &format!(
                "insert into {{schema}}.ready (namespace, workflow, name, step, rank)
                     select namespace, workflow, name, step, rank from {{schema}}.heads where rank is not null;
                 insert into {{schema}}.timed (namespace, workflow, wake, due)
                     select namespace, workflow, wake, due from {{schema}}.heads where due is not null;
                 insert into {{schema}}.ended_badly (namespace, workflow, status)
                     select namespace, workflow, status from {{schema}}.heads where status in ('failed', 'cancelled');
                 select setval('{{schema}}.namespace_numbers', (select max(namespace) from {{schema}}.namespaces));
                 {past}
                 analyze {{schema}}.namespaces, {{schema}}.admissions, {{schema}}.events, {{schema}}.heads,
                     {{schema}}.ready, {{schema}}.timed, {{schema}}.ended_badly, {{schema}}.scratchpad,
                     {{schema}}.signals, {{schema}}.claim_calls"
            ),
        )
        .await
    }

    /// Re-derives what has arrived and counts it.
    async fn check(&self, counts: &[u64; TABLES.len()]) -> Result<(), CopyError> {
        for (table, expected) in TABLES.iter().zip(counts) {
            let text = self.place.text(&format!("select count(*) from {{schema}}.{}", table.name));
            let rows = self.session.client.query_typed(&text, &[]).await.map_err(postgres("count the copy"))?;
            let found = rows.first().map_or(0, |row| row.get::<_, i64>(0)).unsigned_abs();
            if found != *expected {
                return Err(CopyError::Differs { table: table.name, expected: *expected, found });
            }
        }
        let workflows = counts[3];
        let (tell, told) = mpsc::channel();
        let onwards = self.tell.clone();
        std::thread::spawn(move || {
            for done in told {
                // Nobody may listen.
                let _ = onwards.send(Progress::Verified(done, workflows));
            }
        });
        let verified = examine(&self.session, &self.place, &tell).await?;
        if verified.fault_count == 0 { Ok(()) } else { Err(CopyError::Faults(verified)) }
    }
}
