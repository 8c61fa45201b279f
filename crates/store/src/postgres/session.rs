//! Session: one connection to the server that writes, with the statements it knows.
//!
//! # Poolers
//! Behind a pooler that hands a server's connection out by the transaction nothing may be left on that connection: no
//! setting, no prepared statement. Such a pooler shows by the port that the server sees, which is not ours. Settings
//! then go with every transaction, and statements with their text. Where ports cannot be compared, as over a socket in
//! the file system, there may be one: settings go with every transaction, for they would stay behind unnoticed, while a
//! prepared statement that is missing is noticed.
//!
//! # Plans
//! A statement is planned once a connection, for any arrays: by index, whatever the statistics say of tables that were
//! empty when it was planned. With sequential scans priced out a plan looks dear enough to be compiled, which takes
//! longer than any of our statements: the compiler is off.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Error, Row, Statement};

use super::learned::Learned;
use super::place::{Place, Prepared};
use super::reach::{self, Path, Problem, Reached};
use crate::contract::StoreError;

/// What a connection is set to; where there is a pooler or may be one, each transaction.
const SETTINGS: [(&str, &str); 11] = [
    ("jit", "off"),
    ("enable_memoize", "off"),
    ("enable_sort", "off"),
    ("enable_incremental_sort", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    // Nobody waits longer for a row than this.
    ("lock_timeout", "5s"),
    // A transaction whose process is gone, or stands still, lets go of its rows.
    ("idle_in_transaction_session_timeout", "60s"),
    ("client_connection_check_interval", "5s"),
];
/// The same for batches: others wait behind one that waits for a row, and one that is begun is decided in memory, so that
/// a machine that vanished meanwhile need not keep its rows for long.
const BATCH_TIMEOUTS: [(&str, &str); 2] = [("lock_timeout", "1s"), ("idle_in_transaction_session_timeout", "15s")];
/// The same for looks, none of which may take long.
const LOOK_TIMEOUT: (&str, &str) = ("statement_timeout", "30s");

/// A statement with the types of its arguments.
#[derive(Debug)]
pub(super) struct Text {
    pub text: &'static str,
    pub types: &'static [Type],
}

/// What the server says of itself when a connection is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    /// The cluster, by the number it got when it was made.
    pub system: String,
    /// Its timeline, which a promotion raises; 0 where that is not told.
    pub timeline: i64,
}

impl Server {
    /// Whether it says enough of itself to be compared with others by their timelines.
    pub(super) fn is_comparable(&self) -> bool {
        !self.system.is_empty() && self.timeline != 0
    }
}

/// The server's process behind a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Backend {
    pub pid: i32,
    /// When it began, in the server's words: numbers are given again.
    pub since: String,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Write,
    Look,
    /// What others notify comes in at [`Session::told`].
    Listen,
}

/// One connection.
pub(super) struct Session {
    pub client: Client,
    pub server: Server,
    /// `None` behind a pooler, which has several.
    pub backend: Option<Backend>,
    /// True behind a pooler.
    pub is_pooled: bool,
    /// What comes without being asked for, where the connection is made for that.
    pub told: Option<UnboundedReceiver<AsyncMessage>>,
    learned: Arc<Learned>,
    schema: String,
    texts: &'static [Text],
    /// Empty behind a pooler.
    prepared: Vec<Statement>,
    /// What opens a transaction.
    begin: String,
}

/// What an error means for whoever met it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The connection or the server's leave to write is gone.
    Gone,
    /// Another node came first; the same may work when it is done again.
    Raced,
    /// The statement itself was refused.
    Refused,
}

/// Judges an error.
pub(super) fn kind(error: &Error) -> Kind {
    let Some(db) = error.as_db_error() else { return Kind::Gone };
    let code = db.code();
    let raced = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE];
    if raced.contains(code) {
        return Kind::Raced;
    }
    if *code == SqlState::INVALID_TEXT_REPRESENTATION && db.message().contains("steadfast: ") {
        // A statement of ours that found something else than was decided on.
        return Kind::Raced;
    }
    if *code == SqlState::UNIQUE_VIOLATION {
        // The keys that two nodes can reach for at the same time, and that of a batch which its writer has given up.
        // Partitions name theirs after the table.
        let races = ["admissions", "events", "claim_calls", "namespaces", "batches", "signals"];
        let key = db.constraint().unwrap_or_default();
        return if races.iter().any(|table| key.starts_with(table)) { Kind::Raced } else { Kind::Refused };
    }
    let gone = [
        // The server goes, comes, or takes no writes.
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::READ_ONLY_SQL_TRANSACTION,
        SqlState::TOO_MANY_CONNECTIONS,
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
        SqlState::IDLE_SESSION_TIMEOUT,
        // What was prepared is not what it was: a new connection prepares it anew.
        SqlState::INVALID_SQL_STATEMENT_NAME,
        SqlState::DUPLICATE_PSTATEMENT,
        SqlState::FEATURE_NOT_SUPPORTED,
        // A transaction that the server has ended without telling.
        SqlState::NO_ACTIVE_SQL_TRANSACTION,
    ];
    if gone.contains(code) || code.code().starts_with("08") { Kind::Gone } else { Kind::Refused }
}

/// Why a batch is decided anew, in a word for a metric.
pub(super) fn cause(error: &Error) -> &'static str {
    match error.code() {
        Some(&SqlState::T_R_DEADLOCK_DETECTED) => "deadlock",
        Some(&SqlState::T_R_SERIALIZATION_FAILURE) => "serialization",
        Some(&SqlState::LOCK_NOT_AVAILABLE) => "held",
        Some(&SqlState::UNIQUE_VIOLATION) => "key",
        _ => "changed",
    }
}

/// True when the same may work later without anybody's doing: the server is away or busy, and has not said no.
pub(crate) fn may_pass(error: &Error) -> bool {
    if error.as_db_error().is_some() {
        return kind(error) != Kind::Refused;
    }
    // Everything else that is no answer is of our own making, such as a password that is missing.
    let ours = |error: &std::io::Error| {
        use std::io::ErrorKind::{InvalidData, InvalidInput, Other, Unsupported};
        matches!(error.kind(), InvalidData | InvalidInput | Other | Unsupported)
    };
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    error.is_closed() || source.is_some_and(|error| !ours(error))
}

/// Makes a [`StoreError`] of what happened while `doing`.
pub(super) fn postgres(doing: &'static str) -> impl Fn(Error) -> StoreError {
    move |error| StoreError::Postgres { doing, error }
}

impl Session {
    /// Connects to the first host that takes writes and was not overtaken by another.
    ///
    /// # Errors
    /// [`StoreError::NoServer`] with what each host said, [`StoreError::Denied`] when all of them will say the same again.
    pub(super) async fn connect(
        place: &Place,
        learned: &Arc<Learned>,
        texts: &'static [Text],
        purpose: Purpose,
    ) -> Result<Self, StoreError> {
        let was_pooled = learned.is_pooled();
        match Self::try_connect(place, learned, texts, purpose).await {
            // This very try has met a pooler: the next goes without what it stumbled over.
            Err(_) if !was_pooled && learned.is_pooled() => Self::try_connect(place, learned, texts, purpose).await,
            connected => connected,
        }
    }

    async fn try_connect(
        place: &Place,
        learned: &Arc<Learned>,
        texts: &'static [Text],
        purpose: Purpose,
    ) -> Result<Self, StoreError> {
        let (servers, mut tried) = reach::servers(place, learned, purpose).await;
        for reached in servers {
            let name = reached.name.clone();
            if let Some(timeline) = learned.overtaken_by(&reached.server) {
                tried.push(Problem::passing(format!(
                    "{name}: it takes writes on timeline {}, and its cluster has gone on to {timeline} elsewhere: \
                     stop it, or restart this process if it is the one to go on with",
                    reached.server.timeline
                )));
                continue;
            }
            let patience = place.connect_timeout();
            match timeout(patience, Self::settle(place, reached, learned, texts, purpose)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(problem)) => tried.push(problem.at(&name)),
                Err(_) => {
                    let said = format!("{name}: no answer within {} s", patience.as_secs_f64());
                    tried.push(Problem::passing(said));
                }
            }
        }
        let may_pass = tried.iter().any(|problem| problem.may_pass);
        let tried = tried.into_iter().map(|problem| problem.said).collect::<Vec<_>>().join("; ");
        Err(if may_pass { StoreError::NoServer { tried } } else { StoreError::Denied { tried } })
    }

    /// Sets and prepares what can be.
    async fn settle(
        place: &Place,
        reached: Reached,
        learned: &Arc<Learned>,
        texts: &'static [Text],
        purpose: Purpose,
    ) -> Result<Self, Problem> {
        let path = match place.prepared {
            Prepared::On => Path::Direct,
            Prepared::Off => Path::Pooler,
            Prepared::Auto if learned.is_pooled() => Path::Pooler,
            Prepared::Auto => reached.path,
        };
        let settings = settings(&reached, texts, purpose);
        let set =
            |word: &str| settings.iter().map(|(name, value)| format!("{word} {name} = '{value}';")).collect::<String>();
        let Reached { client, server, backend, told: told_of, .. } = reached;
        let begin = if path == Path::Direct {
            client.batch_execute(&set("set")).await?;
            "begin".to_owned()
        } else {
            format!("begin; {}", set("set local"))
        };
        let texts_to_prepare = if path == Path::Pooler { &[] } else { texts };
        let prepare = texts_to_prepare.iter().map(|text| {
            let (client, sql) = (&client, place.text(text.text));
            async move { client.prepare_typed(&sql, text.types).await }
        });
        let prepared = futures_util::future::try_join_all(prepare).await.inspect_err(|error| note(learned, error))?;
        Ok(Self {
            client,
            server,
            backend: backend.filter(|_| path != Path::Pooler),
            is_pooled: path == Path::Pooler,
            told: told_of,
            learned: learned.clone(),
            schema: place.schema.clone(),
            texts,
            prepared,
            begin,
        })
    }

    /// True when it has ended, or should: another server has taken the place of this one's.
    pub(super) fn is_over(&self) -> bool {
        self.client.is_closed() || self.is_overtaken()
    }

    pub(super) fn is_overtaken(&self) -> bool {
        self.learned.overtaken_by(&self.server).is_some()
    }

    /// Opens a transaction.
    pub(super) async fn begin(&self) -> Result<(), Error> {
        self.client.batch_execute(&self.begin).await
    }

    /// Runs the statement at `which` of this connection's texts. It is sent when this is first polled, so statements
    /// that are polled together go in that order and in one piece.
    pub(super) async fn run(&self, which: usize, args: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        if let Some(statement) = self.prepared.get(which) {
            return self.client.query(statement, args).await;
        }
        let Text { text, types } = &self.texts[which];
        let typed: Vec<(&(dyn ToSql + Sync), Type)> = args.iter().copied().zip(types.iter().cloned()).collect();
        self.client.query_typed(&text.replace("{schema}", &self.schema), &typed).await
    }
}

/// What a connection, or each of its transactions, is set to.
fn settings(reached: &Reached, texts: &[Text], purpose: Purpose) -> Vec<(&'static str, &'static str)> {
    let mut settings = SETTINGS.to_vec();
    if purpose != Purpose::Write {
        settings.push(LOOK_TIMEOUT);
    } else if !texts.is_empty() {
        settings.extend(BATCH_TIMEOUTS);
    }
    if reached.is_hasty {
        // An answer means that it is on the disk, whatever the database is set to.
        settings.push(("synchronous_commit", "on"));
    }
    if reached.version < 140_000 {
        settings.retain(|(name, _)| *name != "client_connection_check_interval");
    }
    settings
}

/// Remembers an error that shows a pooler where none was thought to be.
pub(super) fn note(learned: &Learned, error: &Error) {
    if error
        .code()
        .is_some_and(|code| [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT].contains(code))
    {
        tracing::warn!(
            "the database is behind a pooler that lends connections by the transaction; statements are not prepared any more"
        );
        learned.met_pooler();
    }
}

/// An error with what the server said.
pub(crate) fn told(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
