//! Session: one connection to the server that writes, with the statements it knows.
//!
//! # Which server
//! The hosts of the URL are tried in order until one answers that takes writes. A standby, a server that is starting
//! up or one that was set read-only is passed over, so that a failover needs no word from anybody.
//!
//! # Poolers
//! Behind a pooler that hands a server's connection out by the transaction nothing may be left on that connection: no
//! setting, no prepared statement. Such a pooler shows by the port that the server sees, which is not ours. Settings
//! then go with every transaction, and statements with their text.
//!
//! # Plans
//! A statement is planned once a connection, for any arrays: by index, whatever the statistics say of tables that were
//! empty when it was planned. With sequential scans priced out a plan looks dear enough to be compiled, which takes
//! longer than any of our statements: the compiler is off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Error, NoTls, Row, Statement};

use super::place::{Host, Keepalive, Place, Prepared};
use crate::contract::StoreError;

/// What a connection is set to; behind a pooler, each transaction.
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
    /// True behind a pooler.
    pub is_pooled: bool,
    /// What comes without being asked for, where the connection is made for that.
    pub told: Option<UnboundedReceiver<AsyncMessage>>,
    schema: String,
    texts: &'static [Text],
    /// Empty behind a pooler.
    prepared: Vec<Statement>,
    /// What opens a transaction.
    begin: String,
}

/// Remembers that this place is behind a pooler after all.
#[derive(Debug, Default)]
pub(super) struct Pooled(AtomicBool);

impl Pooled {
    fn is_found(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
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
    if *code == SqlState::UNIQUE_VIOLATION {
        // The keys that two nodes can reach for at the same time. Partitions name theirs after the table.
        let races = ["admissions", "events", "claim_calls", "namespaces"];
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

/// Makes a [`StoreError`] of what happened while `doing`.
pub(super) fn postgres(doing: &'static str) -> impl Fn(Error) -> StoreError {
    move |error| StoreError::Postgres { doing, error }
}

impl Session {
    /// Connects to the first host that takes writes.
    ///
    /// # Errors
    /// [`StoreError::NoServer`] with what each host said.
    pub(super) async fn connect(
        place: &Place,
        pooled: &Arc<Pooled>,
        texts: &'static [Text],
        purpose: Purpose,
    ) -> Result<Self, StoreError> {
        let mut tried = Vec::new();
        for host in place.hosts() {
            let patience = place.connect_timeout();
            match timeout(patience, Self::connect_to(place, &host, pooled, texts, purpose)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(problem)) => tried.push(format!("{host}: {problem}")),
                Err(_) => tried.push(format!("{host}: no answer within {} s", patience.as_secs_f64())),
            }
        }
        Err(StoreError::NoServer { tried: tried.join("; ") })
    }

    async fn connect_to(
        place: &Place,
        host: &Host,
        pooled: &Arc<Pooled>,
        texts: &'static [Text],
        purpose: Purpose,
    ) -> Result<Self, String> {
        let (tell, told_of) = tokio::sync::mpsc::unbounded_channel();
        let tell = (purpose == Purpose::Listen).then_some(tell);
        let (client, own_port) = if host.name.starts_with('/') && host.address.is_none() {
            let path = format!("{}/.s.PGSQL.{}", host.name, host.port);
            let stream = UnixStream::connect(path).await.map_err(|error| error.to_string())?;
            let (client, connection) = place.config.connect_raw(stream, NoTls).await.map_err(|error| told(&error))?;
            tokio::spawn(drive(connection, tell));
            (client, None)
        } else {
            let stream = match host.address {
                Some(address) => TcpStream::connect((address, host.port)).await,
                None => TcpStream::connect((host.name.as_str(), host.port)).await,
            };
            let stream = stream.map_err(|error| error.to_string())?;
            let own_port = stream.local_addr().map_err(|error| error.to_string())?.port();
            tend(&stream, &place.keepalive).map_err(|error| error.to_string())?;
            let (client, connection) = place.config.connect_raw(stream, NoTls).await.map_err(|error| told(&error))?;
            tokio::spawn(drive(connection, tell));
            (client, Some(i32::from(own_port)))
        };
        let answer = client
            .query_typed(
                "select pg_is_in_recovery() or current_setting('transaction_read_only')::boolean,
                        current_setting('server_version_num')::int, inet_client_port(),
                        current_setting('synchronous_commit') = 'off'",
                &[],
            )
            .await
            .map_err(|error| told(&error))?;
        let first = answer.first().ok_or("it says nothing of itself")?;
        if first.get::<_, bool>(0) {
            return Err("it takes no writes now (a standby, or set read-only)".to_owned());
        }
        let version: i32 = first.get(1);
        if version < 130_000 {
            return Err(format!("its version is {}; 13 or later is needed", version / 10_000));
        }
        let server = server(&client).await.map_err(|error| told(&error))?;
        // The server sees the pooler's port. A network that changes ports on the way costs a little speed.
        let through = match place.prepared {
            Prepared::On => false,
            Prepared::Off => true,
            Prepared::Auto => {
                pooled.is_found() || own_port.is_some_and(|own| first.get::<_, Option<i32>>(2) != Some(own))
            }
        };
        let mut settings: Vec<(&str, &str)> = SETTINGS.to_vec();
        if purpose != Purpose::Write {
            settings.push(LOOK_TIMEOUT);
        } else if !texts.is_empty() {
            settings.extend(BATCH_TIMEOUTS);
        }
        if first.get::<_, bool>(3) {
            // An answer means that it is on the disk, whatever the database is set to.
            settings.push(("synchronous_commit", "on"));
        }
        if version < 140_000 {
            settings.retain(|(name, _)| *name != "client_connection_check_interval");
        }
        let set =
            |word: &str| settings.iter().map(|(name, value)| format!("{word} {name} = '{value}';")).collect::<String>();
        let (begin, prepared) = if through {
            (format!("begin; {}", set("set local")), Vec::new())
        } else {
            client.batch_execute(&set("set")).await.map_err(|error| told(&error))?;
            let prepare = texts.iter().map(|text| {
                let (client, sql) = (&client, place.text(text.text));
                async move { client.prepare_typed(&sql, text.types).await }
            });
            let prepared = futures_util::future::try_join_all(prepare).await.map_err(|error| {
                note(pooled, &error);
                told(&error)
            })?;
            ("begin".to_owned(), prepared)
        };
        let told = (purpose == Purpose::Listen).then_some(told_of);
        Ok(Self { client, server, is_pooled: through, told, schema: place.schema.clone(), texts, prepared, begin })
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

/// Remembers an error that shows a pooler where none was thought to be.
pub(super) fn note(pooled: &Pooled, error: &Error) {
    if error
        .code()
        .is_some_and(|code| [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT].contains(code))
    {
        tracing::warn!(
            "the database is behind a pooler that lends connections by the transaction; statements are not prepared any more"
        );
        pooled.0.store(true, Ordering::Relaxed);
    }
}

/// An error with what the server said.
pub(crate) fn told(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Carries a connection until it ends.
async fn drive<S>(
    mut connection: tokio_postgres::Connection<S, tokio_postgres::tls::NoTlsStream>,
    tell: Option<UnboundedSender<AsyncMessage>>,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    loop {
        match std::future::poll_fn(|context| connection.poll_message(context)).await {
            Some(Ok(AsyncMessage::Notice(notice))) => {
                tracing::debug!(notice = notice.message(), "the server says");
            }
            Some(Ok(message)) => {
                if let Some(tell) = &tell {
                    // Whoever listened may be gone.
                    let _ = tell.send(message);
                }
            }
            // Whoever waits for an answer hears of it there.
            Some(Err(_)) | None => return,
        }
    }
}

/// A peer that is silently gone is noticed.
fn tend(stream: &TcpStream, keepalive: &Keepalive) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if keepalive.asks {
        let mut asks = TcpKeepalive::new();
        asks = keepalive.idle.map_or(asks.clone(), |idle| asks.with_time(idle));
        asks = keepalive.interval.map_or(asks.clone(), |interval| asks.with_interval(interval));
        asks = keepalive.count.map_or(asks.clone(), |count| asks.with_retries(count));
        socket.set_tcp_keepalive(&asks)?;
    }
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(keepalive.unanswered)?;
    Ok(())
}

async fn server(client: &Client) -> Result<Server, Error> {
    let system = match client.query_typed("select system_identifier::text from pg_control_system()", &[]).await {
        Ok(rows) => rows.first().map(|row| row.get::<_, String>(0)).unwrap_or_default(),
        Err(error) if error.as_db_error().is_some() => String::new(),
        Err(error) => return Err(error),
    };
    let walk = "select ('x' || lpad(substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), 16, '0'))::bit(64)::bigint";
    let timeline = match client.query_typed(walk, &[]).await {
        Ok(rows) => rows.first().map(|row| row.get::<_, i64>(0)).unwrap_or_default(),
        // Databases that only speak PostgreSQL's language may have no log of its kind.
        Err(error) if error.as_db_error().is_some() => 0,
        Err(error) => return Err(error),
    };
    Ok(Server { system, timeline })
}
