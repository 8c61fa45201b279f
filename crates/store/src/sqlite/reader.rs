//! Reading connections: short looks beside the writer.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use steadfast_core::fingerprint::Fingerprint;
use steadfast_core::head::Head;
use steadfast_core::json::Json;
use steadfast_core::signal::Pending;
use steadfast_core::snapshot::Admission;
use steadfast_core::state::Status;
use steadfast_core::text::{Key, Namespace, SignalId, SignalName, WorkflowId, WorkflowKey};
use steadfast_core::verify::{Fault, Rebuilt};

use super::durable::Durable;
use super::rows::{self, HEAD_COLUMNS};
use super::{migrate, none_if_empty};
use crate::contract::{Cursor, Filter, Listed, Logged, Page, Reader, StoreError, Variable, Verified};

/// How many reading connections are open at most.
const CONNECTIONS_MAX: usize = 8;
/// How long a look waits for a connection while the store recovers or all are busy.
const WAIT: Duration = Duration::from_secs(5);
/// How many rows a page of a list looks at before it gives a cursor instead of going on.
const LOOK_MAX: usize = 10_000;

/// A workflow's number by its id: two primary keys.
const NUMBER: &str = "select a.namespace, a.workflow from admissions a
     where a.namespace = (select namespace from namespaces where name = ?1) and a.id = ?2";
/// A receipt: the primary key.
const ADMISSION: &str = "select fingerprint, admitted_at from admissions where namespace = ?1 and id = ?2";
/// A page of a log: the primary key.
const LOG: &str = "select seq, at, type, version, payload from events
     where namespace = ?1 and workflow = ?2 and seq >= ?3 order by seq limit ?4";
/// One variable: the primary key.
const VARIABLE: &str = "select value, seq from scratchpad where namespace = ?1 and workflow = ?2 and key = ?3";
/// A page of a scratchpad: the primary key.
const PAD: &str = "select key, value, seq from scratchpad
     where namespace = ?1 and workflow = ?2 and key > ?3 order by key limit ?4";
/// A page of what lies in an inbox: `signals_inbox`.
const INBOX: &str = "select number, name, id, payload, accepted_at from signals indexed by signals_inbox
     where namespace = ?1 and workflow = ?2 and number > ?3 and seq is null order by number limit ?4";
/// The first time of one kind: the first entry of `heads_timed`.
const NEXT_DUE: &str = "select min(due) from heads where wake = ?1 and due is not null";

/// What a list walks, from the newest on. The status is compared row by row, but for those few that ended badly.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listing {
    /// The primary key.
    All,
    /// `heads_by_name`.
    OfName,
    /// `heads_ended_badly`.
    EndedBadly,
}

impl Listing {
    fn statement(self) -> String {
        // Without the hint SQLite takes the primary key for all three, and walks over every other workflow.
        let (index, condition) = match self {
            Self::All => ("", "?3 is null"),
            Self::OfName => ("indexed by heads_by_name", "name = ?3"),
            Self::EndedBadly => ("indexed by heads_ended_badly", "status = ?3 and status in ('failed', 'cancelled')"),
        };
        format!(
            "select {HEAD_COLUMNS} from heads {index} where namespace = ?1 and {condition} and workflow < ?2
             order by workflow desc limit ?4"
        )
    }
}

/// Every statement of short looks, with its name: for tests of how they are carried out.
pub fn look_statements() -> Vec<(&'static str, String)> {
    let fixed = [
        ("NUMBER", NUMBER),
        ("ADMISSION", ADMISSION),
        ("LOG", LOG),
        ("VARIABLE", VARIABLE),
        ("PAD", PAD),
        ("INBOX", INBOX),
        ("NEXT_DUE", NEXT_DUE),
    ];
    let listings = [
        ("LIST", Listing::All),
        ("LIST of a name", Listing::OfName),
        ("LIST of what ended badly", Listing::EndedBadly),
    ];
    let fixed = fixed.into_iter().map(|(name, text)| (name, text.to_owned()));
    fixed.chain(listings.into_iter().map(|(name, listing)| (name, listing.statement()))).collect()
}

/// Reads a store, beside its owner or alone.
pub struct SqliteReader {
    path: PathBuf,
    pool: Mutex<Pool>,
    changed: Condvar,
    /// Of the owner in this process, if it is here.
    durable: Option<Arc<Durable>>,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Connection>,
    out: usize,
    closed: bool,
}

impl fmt::Debug for SqliteReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteReader").field("path", &self.path).finish_non_exhaustive()
    }
}

fn sqlite(doing: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |source| StoreError::Sqlite { doing, source }
}

impl SqliteReader {
    /// Opens an existing store for reading only, beside a running owner or without one.
    ///
    /// # Errors
    /// [`StoreError`] when there is no store at `path`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_path_buf();
        if !path.is_file() {
            let problem = "there is no such file; give the path of a store".to_owned();
            return Err(StoreError::Foreign { path, problem });
        }
        let reader = Self::beside(path.clone(), None);
        let checked = reader.with(|connection| {
            let pragma = |name: &str| {
                connection
                    .query_row(&format!("pragma {name}"), [], |row| row.get::<_, i64>(0))
                    .map_err(sqlite("read the header of the store"))
            };
            let has = migrate::check(&path, pragma("application_id")?, pragma("user_version")?, || Ok(1))?;
            if has < migrate::MIGRATIONS.len() {
                let problem = format!("its schema is version {has}; open it once with this release to migrate it");
                return Err(StoreError::Foreign { path: path.clone(), problem });
            }
            Ok(())
        });
        match checked {
            Err(StoreError::Sqlite { source, .. }) if source.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
                let problem = "it is not an SQLite file; give another path".to_owned();
                Err(StoreError::Foreign { path: reader.path, problem })
            }
            Err(error) => Err(error),
            Ok(()) => Ok(reader),
        }
    }

    pub(super) fn beside(path: PathBuf, durable: Option<Arc<Durable>>) -> Self {
        Self { path, pool: Mutex::default(), changed: Condvar::new(), durable }
    }

    /// Closes every connection and lets nobody read until [`Self::reopen`].
    pub(super) fn close(&self) {
        let mut pool = self.pool.lock().expect("the pool's lock is held for one change");
        pool.closed = true;
        pool.idle.clear();
        while pool.out > 0 {
            let (next, timeout) =
                self.changed.wait_timeout(pool, WAIT).expect("the pool's lock is held for one change");
            pool = next;
            if timeout.timed_out() {
                tracing::warn!(
                    readers = pool.out,
                    "a reader holds its connection for long; recovery goes on without it"
                );
                break;
            }
        }
    }

    pub(super) fn reopen(&self) {
        self.pool.lock().expect("the pool's lock is held for one change").closed = false;
        self.changed.notify_all();
    }

    /// Runs one look with a connection of the pool. What it saw is durable when it is answered; a look that has seen
    /// what was lost in a failure is made again.
    pub(super) fn with<T>(&self, mut look: impl FnMut(&Connection) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let begin = Instant::now();
        loop {
            let generation = self.durable.as_ref().map(|durable| durable.generation());
            let answer = self.look_once(&mut look);
            let seen = match (&self.durable, generation) {
                (Some(durable), Some(generation)) => durable.wait(generation),
                _ => Ok(()),
            };
            match seen {
                Ok(()) => return answer,
                Err(_) if begin.elapsed() < WAIT => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn look_once<T>(&self, look: impl FnOnce(&Connection) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut pool = self.pool.lock().expect("the pool's lock is held for one change");
        while pool.closed || (pool.idle.is_empty() && pool.out >= CONNECTIONS_MAX) {
            let (next, timeout) =
                self.changed.wait_timeout(pool, WAIT).expect("the pool's lock is held for one change");
            pool = next;
            if timeout.timed_out() {
                return Err(StoreError::Recovering);
            }
        }
        pool.out += 1;
        let idle = pool.idle.pop();
        drop(pool);
        let mut returned = Returned { reader: self, connection: None };
        let connection = match idle {
            Some(connection) => connection,
            None => open_for_reading(&self.path)?,
        };
        let answer = look(&connection);
        returned.connection = Some(connection);
        answer
    }

    fn number(connection: &Connection, key: &WorkflowKey) -> Result<Option<(i64, i64)>, StoreError> {
        connection
            .prepare_cached(NUMBER)
            .and_then(|mut statement| {
                statement
                    .query_row(params![key.namespace.as_str(), key.id.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
            })
            .map(Some)
            .or_else(none_if_empty)
            .map_err(sqlite("look up a workflow"))
    }

    fn namespace(connection: &Connection, namespace: &Namespace) -> Result<Option<i64>, StoreError> {
        connection
            .prepare_cached("select namespace from namespaces where name = ?1")
            .and_then(|mut statement| statement.query_row([namespace.as_str()], |row| row.get(0)))
            .map(Some)
            .or_else(none_if_empty)
            .map_err(sqlite("look up a namespace"))
    }
}

/// Gives a connection back to its pool, also when the look panics; without a connection, only its place.
struct Returned<'a> {
    reader: &'a SqliteReader,
    connection: Option<Connection>,
}

impl Drop for Returned<'_> {
    fn drop(&mut self) {
        if let Ok(mut pool) = self.reader.pool.lock() {
            pool.out -= 1;
            if let Some(connection) = self.connection.take()
                && !pool.closed
            {
                pool.idle.push(connection);
            }
        }
        self.reader.changed.notify_all();
    }
}

pub(super) fn open_for_reading(path: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(sqlite("open the store for reading"))?;
    super::configure(&connection)?;
    connection
        .execute_batch("pragma busy_timeout = 5000; pragma cache_size = -16384; pragma query_only = on;")
        .map_err(sqlite("set up a reading connection"))?;
    Ok(connection)
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Reader for SqliteReader {
    fn head(&self, key: &WorkflowKey) -> Result<Option<Head>, StoreError> {
        self.with(|connection| {
            let Some((namespace, number)) = Self::number(connection, key)? else { return Ok(None) };
            let mut statement = connection
                .prepare_cached(&format!("select {HEAD_COLUMNS} from heads where namespace = ?1 and workflow = ?2"))
                .map_err(sqlite("look at a head"))?;
            let mut rows = statement.query(params![namespace, number]).map_err(sqlite("look at a head"))?;
            match rows.next().map_err(sqlite("look at a head"))? {
                Some(row) => Ok(Some(rows::head(row, &key.namespace)?.1)),
                None => Ok(None),
            }
        })
    }

    fn admission(&self, key: &WorkflowKey) -> Result<Option<Admission>, StoreError> {
        self.with(|connection| {
            let Some(namespace) = Self::namespace(connection, &key.namespace)? else { return Ok(None) };
            let found: Option<([u8; 33], i64)> = connection
                .prepare_cached(ADMISSION)
                .and_then(|mut statement| {
                    statement.query_row(params![namespace, key.id.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
                })
                .map(Some)
                .or_else(none_if_empty)
                .map_err(sqlite("look at a receipt"))?;
            Ok(found.map(|(fingerprint, admitted_at)| Admission {
                key: key.clone(),
                fingerprint: Fingerprint(fingerprint),
                admitted_at,
            }))
        })
    }

    fn events(&self, key: &WorkflowKey, from: u64, limit: usize) -> Result<Vec<Logged>, StoreError> {
        self.with(|connection| {
            let Some((namespace, number)) = Self::number(connection, key)? else { return Ok(Vec::new()) };
            let mut events = Vec::new();
            log(connection, (namespace, number), key, from, limit, |event| events.push(event))?;
            Ok(events)
        })
    }

    fn variable(&self, key: &WorkflowKey, name: &Key) -> Result<Option<Variable>, StoreError> {
        self.with(|connection| {
            let Some((namespace, number)) = Self::number(connection, key)? else { return Ok(None) };
            let found: Option<(String, i64)> = connection
                .prepare_cached(VARIABLE)
                .and_then(|mut statement| {
                    statement.query_row(params![namespace, number, name.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
                })
                .map(Some)
                .or_else(none_if_empty)
                .map_err(sqlite("look at a variable"))?;
            Ok(found.map(|(value, seq)| Variable {
                key: name.clone(),
                value: Json::trusted(value),
                seq: seq.unsigned_abs(),
            }))
        })
    }

    fn variables(&self, key: &WorkflowKey, after: Option<&Key>, limit: usize) -> Result<Vec<Variable>, StoreError> {
        self.with(|connection| {
            let Some((namespace, number)) = Self::number(connection, key)? else { return Ok(Vec::new()) };
            let mut variables = Vec::new();
            pad(connection, (namespace, number), after, limit, |variable| variables.push(variable))?;
            Ok(variables)
        })
    }

    fn signals(&self, key: &WorkflowKey, after: u64, limit: usize) -> Result<Vec<Pending>, StoreError> {
        self.with(|connection| {
            let doing = sqlite("read an inbox");
            let Some((namespace, number)) = Self::number(connection, key)? else { return Ok(Vec::new()) };
            let mut statement = connection.prepare_cached(INBOX).map_err(&doing)?;
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let rows = statement.query_map(params![namespace, number, signed(after), limit], rows::pending);
            rows.and_then(Iterator::collect).map_err(&doing)
        })
    }

    fn list(&self, filter: &Filter, before: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        self.with(|connection| {
            let empty = Page { items: Vec::new(), next: None };
            let Some(namespace) = Self::namespace(connection, &filter.namespace)? else { return Ok(empty) };
            // The status is compared row by row, which is why a page ends after so many looks as well as after so
            // many matches.
            let (listing, third) = match (&filter.name, filter.status) {
                (Some(name), _) => (Listing::OfName, Some(name.as_str())),
                (None, Some(status @ (Status::Failed | Status::Cancelled))) => {
                    (Listing::EndedBadly, Some(status.label()))
                }
                _ => (Listing::All, None),
            };
            let before = before.map_or(i64::MAX, |cursor| cursor.0);
            let mut statement = connection.prepare_cached(&listing.statement()).map_err(sqlite("list workflows"))?;
            let mut rows = statement
                .query(params![namespace, before, third, i64::try_from(LOOK_MAX + 1).unwrap_or(i64::MAX)])
                .map_err(sqlite("list workflows"))?;
            let mut items: Vec<Listed> = Vec::new();
            let mut last = None;
            let mut looked = 0;
            while let Some(row) = rows.next().map_err(sqlite("list workflows"))? {
                if items.len() == limit || looked == LOOK_MAX {
                    return Ok(Page { items, next: last });
                }
                looked += 1;
                let number: i64 = row.get(1).map_err(sqlite("list workflows"))?;
                last = Some(Cursor(number));
                let status = row.get_ref(9).ok().and_then(|status| status.as_str().ok().and_then(Status::from_label));
                if filter.status.is_none_or(|wanted| status == Some(wanted)) {
                    let (_, head) = rows::head(row, &filter.namespace)?;
                    items.push(Listed { cursor: Cursor(number), head });
                }
            }
            Ok(Page { items, next: None })
        })
    }

    fn next_due(&self) -> Result<Option<i64>, StoreError> {
        self.with(|connection| {
            let mut first: Option<i64> = None;
            for wake in [0, 1] {
                let due: Option<i64> = connection
                    .prepare_cached(NEXT_DUE)
                    .and_then(|mut statement| statement.query_row([wake], |row| row.get(0)))
                    .map_err(sqlite("look for the next due time"))?;
                first = [first, due].into_iter().flatten().min();
            }
            Ok(first)
        })
    }

    fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Verified, StoreError> {
        self.with(|connection| verify(connection, progress))
    }

    fn bytes(&self) -> Result<u64, StoreError> {
        let size = |suffix: &str| {
            let mut path = self.path.as_os_str().to_owned();
            path.push(suffix);
            std::fs::metadata(PathBuf::from(path)).map_or(0, |metadata| metadata.len())
        };
        Ok(size("") + size("-wal"))
    }
}

/// Hands over up to `limit` events of one log from `from` on: the primary key.
fn log(
    connection: &Connection,
    (namespace, number): (i64, i64),
    key: &WorkflowKey,
    from: u64,
    limit: usize,
    mut each: impl FnMut(Logged),
) -> Result<(), StoreError> {
    let doing = sqlite("read a log");
    let mut statement = connection.prepare_cached(LOG).map_err(&doing)?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query(params![namespace, number, signed(from), limit]).map_err(&doing)?;
    while let Some(row) = rows.next().map_err(&doing)? {
        let seq = row.get::<_, i64>(0).map_err(&doing)?.unsigned_abs();
        let at = row.get(1).map_err(&doing)?;
        each(Logged { seq, at, event: rows::event(row, 2, key, seq)? });
    }
    Ok(())
}

/// Hands over up to `limit` variables in key order, after `after`: the primary key.
fn pad(
    connection: &Connection,
    (namespace, number): (i64, i64),
    after: Option<&Key>,
    limit: usize,
    mut each: impl FnMut(Variable),
) -> Result<(), StoreError> {
    let doing = sqlite("read a scratchpad");
    let mut statement = connection.prepare_cached(PAD).map_err(&doing)?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let after = after.map_or("", Key::as_str);
    let mut rows = statement.query(params![namespace, number, after, limit]).map_err(&doing)?;
    while let Some(row) = rows.next().map_err(&doing)? {
        each(Variable {
            key: Key::trusted(row.get::<_, String>(0).map_err(&doing)?),
            value: Json::trusted(row.get::<_, String>(1).map_err(&doing)?),
            seq: row.get::<_, i64>(2).map_err(&doing)?.unsigned_abs(),
        });
    }
    Ok(())
}

/// One read transaction over the whole store: a comparison needs one moment. It is the only long look there is.
fn verify(connection: &Connection, progress: &mut dyn FnMut(u64)) -> Result<Verified, StoreError> {
    let transaction = connection.unchecked_transaction().map_err(sqlite("verify the store"))?;
    let mut verified = Verified::default();
    for part in [check_pages, compare] {
        match part(&transaction, &mut verified, progress) {
            // Damage ends this part of the look, but not the report of what it has found.
            Err(StoreError::Sqlite { source, .. })
                if source.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) =>
            {
                verified.fault(of_the_whole("database_damaged", source.to_string()));
            }
            other => other?,
        }
    }
    Ok(verified)
}

/// Lets SQLite check its own pages and indexes.
fn check_pages(transaction: &Connection, verified: &mut Verified, _: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
    let doing = sqlite("check the pages of the store");
    let mut statement = transaction.prepare("pragma integrity_check").map_err(&doing)?;
    let mut rows = statement.query([]).map_err(&doing)?;
    while let Some(row) = rows.next().map_err(&doing)? {
        let line: String = row.get(0).map_err(&doing)?;
        if line != "ok" {
            verified.fault(of_the_whole("database_damaged", line));
        }
    }
    Ok(())
}

/// A fault of no workflow in particular.
fn of_the_whole(code: &'static str, detail: String) -> Fault {
    let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("-") };
    Fault { key, code, detail }
}

/// Compares every head and scratchpad with its log, and looks for rows that belong to nothing.
fn compare(transaction: &Connection, verified: &mut Verified, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
    let doing = sqlite("verify the store");
    let mut statement = transaction
        .prepare(&format!(
            "select {HEAD_COLUMNS}, (select name from namespaces n where n.namespace = heads.namespace) from heads
             order by namespace, workflow"
        ))
        .map_err(&doing)?;
    let mut rows = statement.query([]).map_err(&doing)?;
    while let Some(row) = rows.next().map_err(&doing)? {
        let at = (row.get(0).map_err(&doing)?, row.get(1).map_err(&doing)?);
        let key = WorkflowKey {
            namespace: Namespace::trusted(row.get::<_, Option<String>>(29).map_err(&doing)?.unwrap_or_default()),
            id: WorkflowId::trusted(row.get::<_, String>(2).map_err(&doing)?),
        };
        if key.namespace.as_str().is_empty() {
            let detail = format!("workflow number {}", at.1);
            verified.fault(Fault { key: key.clone(), code: "head_without_namespace", detail });
        }
        verify_one(transaction, at, key, row, verified)?;
        verified.workflows += 1;
        progress(verified.workflows);
    }
    drop(rows);
    drop(statement);
    // What has no head to be found by.
    for (code, text) in [
        (
            "log_without_head",
            "select e.workflow from events e where e.seq = 0 and not exists
                 (select 1 from heads h where h.namespace = e.namespace and h.workflow = e.workflow)",
        ),
        (
            "log_without_beginning",
            "select e.workflow from events e where not exists
                 (select 1 from heads h where h.namespace = e.namespace and h.workflow = e.workflow) group by 1",
        ),
        (
            "variable_without_head",
            "select s.workflow from scratchpad s where not exists
                 (select 1 from heads h where h.namespace = s.namespace and h.workflow = s.workflow) group by 1",
        ),
        (
            "signal_without_head",
            "select s.workflow from signals s where not exists
                 (select 1 from heads h where h.namespace = s.namespace and h.workflow = s.workflow) group by 1",
        ),
        (
            "head_without_receipt",
            "select h.workflow from heads h
                 left join admissions a on a.namespace = h.namespace and a.id = h.id
                 where a.workflow is not h.workflow",
        ),
    ] {
        let mut statement = transaction.prepare(text).map_err(&doing)?;
        let mut rows = statement.query([]).map_err(&doing)?;
        while let Some(row) = rows.next().map_err(&doing)? {
            let number: i64 = row.get(0).map_err(&doing)?;
            verified.fault(of_the_whole(code, format!("workflow number {number}")));
        }
    }
    Ok(())
}

fn verify_one(
    connection: &Connection,
    at: (i64, i64),
    key: WorkflowKey,
    row: &rusqlite::Row<'_>,
    verified: &mut Verified,
) -> Result<(), StoreError> {
    let mut rebuilt = Rebuilt::new(key.clone());
    let mut faults = Vec::new();
    let read = log(connection, at, &key, 0, usize::MAX, |logged| {
        verified.events += 1;
        rebuilt.event(logged.seq, logged.at, &logged.event);
    });
    match read {
        Err(error @ (StoreError::Event { .. } | StoreError::Corrupt { .. })) => {
            faults.push(Fault { key: key.clone(), code: "event_unreadable", detail: error.to_string() });
        }
        other => other?,
    }
    pad(connection, at, None, usize::MAX, |variable| rebuilt.variable(&variable.key, &variable.value, variable.seq))?;
    let doing = sqlite("read an inbox");
    let mut statement = connection
        .prepare_cached("select name, id, seq from signals where namespace = ?1 and workflow = ?2 order by number")
        .map_err(&doing)?;
    let mut signals = statement.query(params![at.0, at.1]).map_err(&doing)?;
    while let Some(signal) = signals.next().map_err(&doing)? {
        let name = SignalName::trusted(signal.get::<_, String>(0).map_err(&doing)?);
        let id = SignalId::trusted(signal.get::<_, String>(1).map_err(&doing)?);
        let taken: Option<i64> = signal.get(2).map_err(&doing)?;
        rebuilt.signal(&name, &id, taken.map(i64::unsigned_abs));
    }
    match rows::head(row, &key.namespace) {
        Ok((_, head)) => faults.extend(rebuilt.finish(Some(&head))),
        Err(error) => faults.push(Fault { key, code: "head_unreadable", detail: error.to_string() }),
    }
    faults.into_iter().for_each(|fault| verified.fault(fault));
    Ok(())
}
