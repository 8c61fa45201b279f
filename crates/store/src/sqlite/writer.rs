//! The writing connection.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rusqlite::types::Value;
use rusqlite::{CachedStatement, Connection, params};
use steadfast_core::claim::{Announced, Call, CallId, Steps};
use steadfast_core::event::Event;
use steadfast_core::fingerprint::Fingerprint;
use steadfast_core::head::{Head, Wake};
use steadfast_core::signal::{Pending, Receipt};
use steadfast_core::snapshot::{
    Admission, ChangedHead, ClaimCursor, Handle, HeadChange, PENDING_PAGE, Snapshot, Wants,
};
use steadfast_core::text::{Namespace, SignalId, SignalName, WorkflowId, WorkflowKey};

use super::rows::{self, HEAD_COLUMNS};
use super::{Shared, connect_whole};
use crate::contract::{Disk, Fate, Saved, StoreError, Writer};
use crate::stored::{Stored, signed, stored_options, wake_number};

/// Pages in the write-ahead log from which a quiet moment is used for a checkpoint: 4 MiB.
const CHECKPOINT_QUIET_PAGES: u32 = 1_000;
/// Pages from which a checkpoint is made even under load, so that the log stays bounded: 32 MiB.
const CHECKPOINT_LOADED_PAGES: u32 = 8_000;
/// How many workflows are remembered, so that a step neither looks its workflow up by id nor loads its head.
const KNOWN_MAX: usize = 32_768;
/// Claim calls are remembered for a day.
const CALL_AGE_MS: i64 = 86_400_000;

/// How a head is found by its number: the primary key.
pub(super) const HEAD_BY_NUMBER: &str = "select {head} from heads where namespace = ?1 and workflow = ?2";
/// How a receipt is found: the primary key.
pub(super) const ADMISSION: &str =
    "select workflow, fingerprint, admitted_at from admissions where namespace = ?1 and id = ?2";
/// How one event is found: the primary key.
pub(super) const EVENT: &str =
    "select type, version, payload from events where namespace = ?1 and workflow = ?2 and seq = ?3";
/// The next ready workflows at one step, in claim order: `heads_ready`, covered.
pub(super) const READY: &str = "select rank, workflow from heads
     where namespace = ?1 and name = ?2 and step = ?3 and rank is not null order by rank, workflow limit ?4";
/// The first step after another at which workflows of a definition are ready: `heads_ready`, one entry.
pub(super) const READY_STEP: &str = "select step from heads
     where namespace = ?1 and name = ?2 and step > ?3 and rank is not null order by step limit 1";
/// Whose time has come, of one kind: `heads_timed`.
pub(super) const DUE: &str =
    "select {head} from heads where wake = ?1 and due <= ?2 order by due, namespace, workflow limit ?3";
/// The next open claims in order of their sweep time: `heads_timed`, which is found only with `due is not null`.
pub(super) const OPEN: &str = "select {head} from heads where wake = 0 and due is not null
     and (due, namespace, workflow) > (?1, ?2, ?3) order by due, namespace, workflow limit ?4";
/// What an earlier claim call was given: the primary key.
pub(super) const CALL: &str = "select at, granted from claim_calls where namespace = ?1 and request = ?2";

/// The receipt of a signal: `signals_by_id`.
pub(super) const SIGNAL: &str =
    "select fingerprint, accepted_at from signals where namespace = ?1 and workflow = ?2 and id = ?3";
/// The number of the last signal of an inbox: the last entry of the primary key.
pub(super) const LAST_SIGNAL: &str =
    "select number from signals where namespace = ?1 and workflow = ?2 order by number desc limit 1";
/// The next signals of a name that no wait has taken: `signals_pending`.
pub(super) const PENDING: &str = "select number, name, id, payload, accepted_at from signals indexed by signals_pending
     where namespace = ?1 and workflow = ?2 and name = ?3 and number > ?4 and seq is null order by number limit ?5";

pub(super) const INSERT_SIGNAL: &str = "insert into signals (namespace, workflow, number, id, name, accepted_at,
     fingerprint, seq, payload) values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
pub(super) const TAKE_SIGNAL: &str = "update signals set seq = ?4, payload = null
     where namespace = ?1 and workflow = ?2 and number = ?3 and seq is null";
pub(super) const INSERT_ADMISSION: &str =
    "insert into admissions (namespace, id, workflow, fingerprint, admitted_at) values (?1, ?2, ?3, ?4, ?5)";
pub(super) const INSERT_EVENT: &str =
    "insert into events (namespace, workflow, seq, type, version, at, payload) values (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
pub(super) const INSERT_HEAD: &str = "insert into heads (namespace, workflow, seq, updated_at, status, code, step, visit, \
     attempt, delivery, token, epoch, worker, boot, remote, started_at, lease_ms, lease_until, step_deadline, progress, \
     wait, rank, wake, due, id, name, options, priority, created_at) values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, \
     ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?28, ?29)";
/// A head that keeps its place in both scheduling indexes: no index is touched.
pub(super) const UPDATE_HEAD_IN_PLACE: &str = "update heads set seq = ?3, updated_at = ?4, code = ?6, step = ?7, \
     visit = ?8, attempt = ?9, delivery = ?10, token = ?11, epoch = ?12, worker = ?13, boot = ?14, remote = ?15, \
     started_at = ?16, lease_ms = ?17, lease_until = ?18, step_deadline = ?19, progress = ?20, \
     wait = ?21 where namespace = ?1 and workflow = ?2 and status = ?5";
/// A head whose place changes.
pub(super) const UPDATE_HEAD: &str = "update heads set seq = ?3, updated_at = ?4, status = ?5, code = ?6, step = ?7, \
     visit = ?8, attempt = ?9, delivery = ?10, token = ?11, epoch = ?12, worker = ?13, boot = ?14, remote = ?15, \
     started_at = ?16, lease_ms = ?17, lease_until = ?18, step_deadline = ?19, progress = ?20, wait = ?21, \
     rank = ?22, wake = ?23, due = ?24 where namespace = ?1 and workflow = ?2";
pub(super) const UPSERT_VARIABLE: &str = "insert into scratchpad (namespace, workflow, key, value, seq)
     values (?1, ?2, ?3, ?4, ?5) on conflict (namespace, workflow, key) do update set value = ?4, seq = ?5";
pub(super) const DELETE_VARIABLE: &str = "delete from scratchpad where namespace = ?1 and workflow = ?2 and key = ?3";
pub(super) const INSERT_CALL: &str =
    "insert into claim_calls (namespace, request, at, granted) values (?1, ?2, ?3, ?4)";
pub(super) const FORGET_CALLS: &str = "delete from claim_calls where at < ?1";

/// Every statement that commands are loaded and saved by, with its name: for tests of how they are carried out.
pub fn hot_statements() -> Vec<(&'static str, String)> {
    [
        ("HEAD_BY_NUMBER", HEAD_BY_NUMBER),
        ("ADMISSION", ADMISSION),
        ("EVENT", EVENT),
        ("READY", READY),
        ("READY_STEP", READY_STEP),
        ("DUE", DUE),
        ("OPEN", OPEN),
        ("CALL", CALL),
        ("SIGNAL", SIGNAL),
        ("LAST_SIGNAL", LAST_SIGNAL),
        ("PENDING", PENDING),
        ("INSERT_SIGNAL", INSERT_SIGNAL),
        ("TAKE_SIGNAL", TAKE_SIGNAL),
        ("INSERT_ADMISSION", INSERT_ADMISSION),
        ("INSERT_EVENT", INSERT_EVENT),
        ("INSERT_HEAD", INSERT_HEAD),
        ("UPDATE_HEAD_IN_PLACE", UPDATE_HEAD_IN_PLACE),
        ("UPDATE_HEAD", UPDATE_HEAD),
        ("UPSERT_VARIABLE", UPSERT_VARIABLE),
        ("DELETE_VARIABLE", DELETE_VARIABLE),
        ("INSERT_CALL", INSERT_CALL),
        ("FORGET_CALLS", FORGET_CALLS),
    ]
    .map(|(name, text)| (name, with_head(text)))
    .into()
}

/// A statement with its head columns filled in.
pub(super) fn with_head(statement: &str) -> String {
    statement.replace("{head}", HEAD_COLUMNS)
}

pub(super) struct SqliteWriter {
    shared: Arc<Shared>,
    /// `None` between a commit of unknown outcome and the recovery from it.
    connection: Option<Connection>,
    texts: Texts,
    namespaces: Namespaces,
    /// What is certain because this connection alone writes: each entry is as the last commit left it.
    known: HashMap<WorkflowKey, Known>,
    next_number: i64,
    wal_pages: Arc<AtomicU32>,
    in_transaction: bool,
    /// Numbers of heads that cannot be read: reported once, then left out of every page.
    corrupt: BTreeSet<i64>,
    /// Numbers of heads that could not be saved: left out of every page for now.
    left_out: BTreeSet<i64>,
}

/// A workflow as the last commit left it.
struct Known {
    number: i64,
    /// Kept for running workflows: theirs is what the next commands name.
    head: Option<Head>,
}

/// The statements that name the head's columns, put together once.
struct Texts {
    head_by_number: String,
    due: String,
    open: String,
}

/// Namespaces by number and back; few, and never deleted.
#[derive(Default)]
struct Namespaces {
    by_name: BTreeMap<Namespace, i64>,
    by_number: BTreeMap<i64, Namespace>,
}

fn sqlite(doing: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |source| StoreError::Sqlite { doing, source }
}

impl SqliteWriter {
    pub(super) fn new(shared: Arc<Shared>, connection: Connection) -> Result<Self, StoreError> {
        let mut writer = Self {
            shared,
            connection: None,
            texts: Texts { head_by_number: with_head(HEAD_BY_NUMBER), due: with_head(DUE), open: with_head(OPEN) },
            namespaces: Namespaces::default(),
            known: HashMap::new(),
            next_number: 1,
            wal_pages: Arc::new(AtomicU32::new(0)),
            in_transaction: false,
            corrupt: BTreeSet::new(),
            left_out: BTreeSet::new(),
        };
        writer.adopt(connection)?;
        Ok(writer)
    }

    /// Takes a fresh connection and reads what is kept in memory beside it.
    fn adopt(&mut self, mut connection: Connection) -> Result<(), StoreError> {
        let pages = self.wal_pages.clone();
        connection
            .wal_hook(Some(move |_: &mut _, count: std::ffi::c_int| {
                pages.store(count.unsigned_abs(), Ordering::Relaxed);
                Ok(())
            }))
            .map_err(sqlite("watch the write-ahead log"))?;
        self.namespaces = Namespaces::default();
        let mut statement =
            connection.prepare("select namespace, name from namespaces").map_err(sqlite("read the namespaces"))?;
        let mut rows = statement.query([]).map_err(sqlite("read the namespaces"))?;
        while let Some(row) = rows.next().map_err(sqlite("read the namespaces"))? {
            let number: i64 = row.get(0).map_err(sqlite("read a namespace"))?;
            let name = Namespace::trusted(row.get::<_, String>(1).map_err(sqlite("read a namespace"))?);
            self.namespaces.by_name.insert(name.clone(), number);
            self.namespaces.by_number.insert(number, name);
        }
        drop(rows);
        drop(statement);
        // The last number of each namespace, by the primary key; and the floor, for numbers whose heads are gone.
        self.next_number = connection
            .query_row(
                "select 1 + max((select number_floor from store), coalesce(
                     (select max((select max(workflow) from heads h where h.namespace = n.namespace))
                      from namespaces n), 0))",
                [],
                |row| row.get(0),
            )
            .map_err(sqlite("read the last workflow number"))?;
        connection
            .execute_batch("pragma synchronous = normal")
            .map_err(sqlite("leave the sync of the log to its own thread"))?;
        self.shared.durable.begin()?;
        self.known.clear();
        self.in_transaction = false;
        self.connection = Some(connection);
        Ok(())
    }

    fn connection(&self) -> Result<&Connection, StoreError> {
        self.connection.as_ref().ok_or(StoreError::Recovering)
    }

    fn statement(&self, text: &str) -> Result<CachedStatement<'_>, StoreError> {
        self.connection()?.prepare_cached(text).map_err(sqlite("prepare a statement"))
    }

    fn begin(&mut self) -> Result<(), StoreError> {
        if !self.in_transaction {
            // Immediate: a deferred transaction that turns into a writing one fails at once when somebody else
            // writes, whatever the busy timeout says.
            self.statement("begin immediate")?.execute([]).map_err(sqlite("begin a transaction"))?;
            self.in_transaction = true;
        }
        Ok(())
    }

    fn namespace(&self, namespace: &Namespace) -> Option<i64> {
        self.namespaces.by_name.get(namespace).copied()
    }

    fn remember(&mut self, key: &WorkflowKey, number: i64, head: Option<Head>) {
        if let Some(known) = self.known.get_mut(key) {
            known.head = head;
            return;
        }
        if self.known.len() >= KNOWN_MAX {
            // Cheaper than an order of use, and as good: live workflows come back with their next load.
            self.known.clear();
        }
        self.known.insert(key.clone(), Known { number, head });
    }

    fn admission(&mut self, key: &WorkflowKey) -> Result<Option<(i64, Admission)>, StoreError> {
        let Some(namespace) = self.namespace(&key.namespace) else { return Ok(None) };
        let found = self
            .statement(ADMISSION)?
            .query_row(params![namespace, key.id.as_str()], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, [u8; 33]>(1)?, row.get::<_, i64>(2)?))
            })
            .map(Some)
            .or_else(super::none_if_empty)
            .map_err(sqlite("look up a receipt"))?;
        Ok(found.map(|(number, fingerprint, admitted_at)| {
            if !self.known.contains_key(key) {
                self.remember(key, number, None);
            }
            (number, Admission { key: key.clone(), fingerprint: Fingerprint(fingerprint), admitted_at })
        }))
    }

    /// Namespace and number of a workflow, if it was ever admitted.
    fn number(&mut self, key: &WorkflowKey) -> Result<Option<(i64, i64)>, StoreError> {
        let Some(namespace) = self.namespace(&key.namespace) else { return Ok(None) };
        if let Some(known) = self.known.get(key) {
            return Ok(Some((namespace, known.number)));
        }
        Ok(self.admission(key)?.map(|(number, _)| (namespace, number)))
    }

    fn head_by_number(&self, namespace: (i64, &Namespace), number: i64) -> Result<Option<Head>, StoreError> {
        let mut statement = self.statement(&self.texts.head_by_number)?;
        let mut rows = statement.query(params![namespace.0, number]).map_err(sqlite("load a head"))?;
        match rows.next().map_err(sqlite("load a head"))? {
            Some(row) => Ok(Some(rows::head(row, namespace.1)?.1)),
            None => Ok(None),
        }
    }

    /// The heads of a statement that yields head columns. Rows that cannot be read are left out: one bad row must
    /// not stop a sweep or a claim.
    fn heads(
        &mut self,
        text: fn(&Texts) -> &str,
        args: &[Value],
        limit: usize,
    ) -> Result<Vec<(i64, i64, Head)>, StoreError> {
        let mut heads = Vec::new();
        let mut corrupt = Vec::new();
        {
            let mut statement = self.statement(text(&self.texts))?;
            let mut rows = statement.query(rusqlite::params_from_iter(args)).map_err(sqlite("load a page of heads"))?;
            while let Some(row) = rows.next().map_err(sqlite("load a page of heads"))? {
                let namespace: i64 = row.get(0).map_err(sqlite("load a head"))?;
                let number: i64 = row.get(1).map_err(sqlite("load a head"))?;
                if self.left_out.contains(&number) {
                    continue;
                }
                let Some(name) = self.namespaces.by_number.get(&namespace) else { continue };
                match rows::head(row, name) {
                    Ok((_, head)) if heads.len() < limit => heads.push((namespace, number, head)),
                    Ok(_) => break,
                    Err(error) => corrupt.push((number, error)),
                }
            }
        }
        for (number, error) in corrupt {
            self.report(number, &error);
        }
        Ok(heads)
    }

    fn report(&mut self, number: i64, error: &StoreError) {
        if self.corrupt.insert(number) {
            tracing::error!(workflow = number, %error, "a stored head cannot be read; run verify");
        }
    }

    /// A page size that leaves room for the rows that are known to be unreadable, or left out.
    fn page(&self, limit: usize) -> Value {
        Value::Integer(i64::try_from(limit + self.corrupt.len() + self.left_out.len()).unwrap_or(i64::MAX))
    }

    fn ready(&mut self, announced: &Announced, limit: usize) -> Result<Vec<(i64, Head)>, StoreError> {
        let Some(namespace) = self.namespace(&announced.namespace) else { return Ok(Vec::new()) };
        // Rank and number first, from the index alone; whole rows only for those that are chosen.
        let mut found: Vec<(i64, i64)> = Vec::new();
        for (name, steps) in &announced.definitions {
            let mut at_step = |step: &str| -> Result<(), StoreError> {
                let mut statement = self.statement(READY)?;
                let mut rows = statement
                    .query(params![namespace, name.as_str(), step, self.page(limit)])
                    .map_err(sqlite("look for ready steps"))?;
                while let Some(row) = rows.next().map_err(sqlite("look for ready steps"))? {
                    let rank = row.get(0).map_err(sqlite("read a rank"))?;
                    let number = row.get(1).map_err(sqlite("read a number"))?;
                    if !self.corrupt.contains(&number) && !self.left_out.contains(&number) {
                        found.push((rank, number));
                    }
                }
                Ok(())
            };
            match steps {
                Steps::Listed(steps) => steps.iter().try_for_each(|step| at_step(step.as_str()))?,
                Steps::AllBut(unknown) => {
                    let mut after = String::new();
                    loop {
                        let next: Option<String> = self
                            .statement(READY_STEP)?
                            .query_row(params![namespace, name.as_str(), after], |row| row.get(0))
                            .map(Some)
                            .or_else(super::none_if_empty)
                            .map_err(sqlite("look for ready steps"))?;
                        let Some(step) = next else { break };
                        if !unknown.contains(step.as_str()) {
                            at_step(&step)?;
                        }
                        after = step;
                    }
                }
            }
        }
        found.sort_unstable();
        found.truncate(limit);
        let mut heads = Vec::with_capacity(found.len());
        for (_, number) in found {
            match self.head_by_number((namespace, &announced.namespace), number) {
                Ok(Some(head)) => heads.push((number, head)),
                Ok(None) => {}
                Err(error @ StoreError::Corrupt { .. }) => self.report(number, &error),
                Err(error) => return Err(error),
            }
        }
        Ok(heads)
    }

    fn due(&mut self, now: i64, limit: usize) -> Result<Vec<(i64, Head)>, StoreError> {
        let mut due = Vec::new();
        for wake in [Wake::Lease, Wake::Timer] {
            let args = [Value::Integer(wake_number(wake)), Value::Integer(now), self.page(limit)];
            due.extend(self.heads(|texts| &texts.due, &args, limit)?);
        }
        due.sort_by_key(|(namespace, number, head)| {
            (head.placed().due.map(|(wake, due)| (due, wake)), *namespace, *number)
        });
        due.truncate(limit);
        Ok(due.into_iter().map(|(_, number, head)| (number, head)).collect())
    }

    fn open(&mut self, after: Option<&ClaimCursor>, limit: usize) -> Result<Vec<(i64, Head)>, StoreError> {
        let (look_at, namespace, number) = match after {
            None => (i64::MIN, 0, 0),
            Some(after) => match self.number(&after.key)? {
                Some((namespace, number)) => (after.look_at, namespace, number),
                None => (after.look_at, i64::MAX, i64::MAX),
            },
        };
        let args = [Value::Integer(look_at), Value::Integer(namespace), Value::Integer(number), self.page(limit)];
        Ok(self.heads(|texts| &texts.open, &args, limit)?.into_iter().map(|(_, number, head)| (number, head)).collect())
    }

    fn call(&self, namespace: &Namespace, id: &CallId) -> Result<Option<Call>, StoreError> {
        let Some(number) = self.namespace(namespace) else { return Ok(None) };
        let found: Option<(i64, String)> = self
            .statement(CALL)?
            .query_row(params![number, &*id.0], |row| Ok((row.get(0)?, row.get(1)?)))
            .map(Some)
            .or_else(super::none_if_empty)
            .map_err(sqlite("look up a claim call"))?;
        let Some((at, granted)) = found else { return Ok(None) };
        let granted: Vec<(String, u64)> = serde_json::from_str(&granted).map_err(|error| StoreError::Corrupt {
            what: "claim call",
            key: id.0.to_string(),
            problem: format!("column {}", error.column()),
        })?;
        let key = |id: String| WorkflowKey { namespace: namespace.clone(), id: WorkflowId::trusted(id) };
        Ok(Some(Call {
            namespace: namespace.clone(),
            id: id.clone(),
            at,
            granted: granted.into_iter().map(|(id, seq)| (key(id), seq)).collect(),
        }))
    }

    /// The receipt of a signal, and the number of the last one of its inbox.
    fn signal(&mut self, key: &WorkflowKey, id: &SignalId) -> Result<(Option<Receipt>, u64), StoreError> {
        let Some((namespace, number)) = self.number(key)? else { return Ok((None, 0)) };
        let receipt = self
            .statement(SIGNAL)?
            .query_row(params![namespace, number, id.as_str()], |row| {
                Ok(Receipt { fingerprint: Fingerprint(row.get::<_, [u8; 33]>(0)?), accepted_at: row.get(1)? })
            })
            .map(Some)
            .or_else(super::none_if_empty)
            .map_err(sqlite("look up a signal"))?;
        let last: Option<i64> = self
            .statement(LAST_SIGNAL)?
            .query_row(params![namespace, number], |row| row.get(0))
            .map(Some)
            .or_else(super::none_if_empty)
            .map_err(sqlite("look up the last signal"))?;
        Ok((receipt, last.unwrap_or(0).unsigned_abs()))
    }

    fn pending(&mut self, key: &WorkflowKey, name: &SignalName, after: u64) -> Result<Vec<Pending>, StoreError> {
        let doing = "look for signals";
        let Some((namespace, number)) = self.number(key)? else { return Ok(Vec::new()) };
        let limit = i64::try_from(PENDING_PAGE).expect("a page is small");
        let mut statement = self.statement(PENDING)?;
        let rows = statement
            .query_map(params![namespace, number, name.as_str(), signed(after), limit], rows::pending)
            .map_err(sqlite(doing))?;
        rows.collect::<Result<_, _>>().map_err(sqlite(doing))
    }

    fn event(&self, (namespace, number): (i64, i64), key: &WorkflowKey, seq: u64) -> Result<Option<Event>, StoreError> {
        let mut statement = self.statement(EVENT)?;
        let mut rows = statement.query(params![namespace, number, signed(seq)]).map_err(sqlite("look up an event"))?;
        let Some(row) = rows.next().map_err(sqlite("look up an event"))? else { return Ok(None) };
        rows::event(row, 0, key, seq).map(Some)
    }

    /// Writes everything but the commit.
    fn write(&mut self, snapshot: &Snapshot) -> Result<Written, StoreError> {
        self.begin()?;
        let mut written = Written::default();
        for admission in snapshot.new_admissions() {
            let added = written.namespaces.get(&admission.key.namespace).copied();
            let namespace = match self.namespace(&admission.key.namespace).or(added) {
                Some(number) => number,
                None => {
                    let number = self.add_namespace(&admission.key.namespace)?;
                    written.namespaces.insert(admission.key.namespace.clone(), number);
                    number
                }
            };
            let number = self.next_number;
            self.next_number += 1;
            self.statement(INSERT_ADMISSION)?
                .execute(params![
                    namespace,
                    admission.key.id.as_str(),
                    number,
                    admission.fingerprint.0,
                    admission.admitted_at
                ])
                .map_err(sqlite("write a receipt"))?;
            written.admitted.insert(admission.key.clone(), number);
        }
        let numbered = |key: &WorkflowKey, handle: Option<Handle>| -> Result<(i64, i64), StoreError> {
            let namespace = self.namespace(&key.namespace).or_else(|| written.namespaces.get(&key.namespace).copied());
            let number = handle.or_else(|| written.admitted.get(key).copied());
            namespace.zip(number).ok_or_else(|| StoreError::Corrupt {
                what: "number",
                key: key.to_string(),
                problem: "it was decided without being loaded".to_owned(),
            })
        };
        let mut insert = self.statement(INSERT_EVENT)?;
        for new in snapshot.appended() {
            let (namespace, number) = numbered(&new.key, new.handle)?;
            insert
                .execute(params![
                    namespace,
                    number,
                    signed(new.seq),
                    new.event.kind(),
                    steadfast_core::event::VERSION,
                    new.at,
                    new.event.payload()
                ])
                .map_err(sqlite("append an event"))?;
        }
        drop(insert);
        let mut heads = HeadStatements {
            insert: self.statement(INSERT_HEAD)?,
            in_place: self.statement(UPDATE_HEAD_IN_PLACE)?,
            whole: self.statement(UPDATE_HEAD)?,
        };
        for changed in snapshot.changed_heads() {
            heads.write(&changed, numbered(&changed.head.key, changed.handle)?)?;
        }
        drop(heads);
        let mut upsert = self.statement(UPSERT_VARIABLE)?;
        for changed in snapshot.changed_variables() {
            let (namespace, number) = numbered(changed.workflow, changed.handle)?;
            let key = changed.key.as_str();
            match changed.value {
                Some(value) => upsert
                    .execute(params![namespace, number, key, value.as_str(), signed(changed.seq)])
                    .map_err(sqlite("write a variable"))?,
                None => self
                    .statement(DELETE_VARIABLE)?
                    .execute(params![namespace, number, key])
                    .map_err(sqlite("unset a variable"))?,
            };
        }
        drop(upsert);
        for new in snapshot.new_signals() {
            let (namespace, number) = numbered(&new.workflow, new.handle)?;
            let Pending { number: place, name, id, payload, accepted_at } = &new.signal;
            let payload = new.taken.is_none().then_some(payload.as_str());
            let taken = new.taken.map(signed);
            self.statement(INSERT_SIGNAL)?
                .execute(params![
                    namespace,
                    number,
                    signed(*place),
                    id.as_str(),
                    name.as_str(),
                    accepted_at,
                    new.fingerprint.0,
                    taken,
                    payload
                ])
                .map_err(sqlite("write a signal"))?;
        }
        for taken in snapshot.taken_signals() {
            let (namespace, number) = numbered(&taken.workflow, taken.handle)?;
            let updated = self
                .statement(TAKE_SIGNAL)?
                .execute(params![namespace, number, signed(taken.number), signed(taken.seq)])
                .map_err(sqlite("take a signal"))?;
            if updated != 1 {
                let problem = format!("number {} was taken {updated} times", taken.number);
                return Err(StoreError::Corrupt { what: "signal", key: taken.workflow.to_string(), problem });
            }
        }
        for call in snapshot.new_calls() {
            let granted: Vec<(&str, u64)> = call.granted.iter().map(|(key, seq)| (key.id.as_str(), *seq)).collect();
            let granted = serde_json::to_string(&granted).expect("strings and integers serialize");
            self.statement(FORGET_CALLS)?.execute([call.at - CALL_AGE_MS]).map_err(sqlite("forget old claim calls"))?;
            let namespace =
                self.namespace(&call.namespace).or_else(|| written.namespaces.get(&call.namespace).copied());
            self.statement(INSERT_CALL)?
                .execute(params![namespace, &*call.id.0, call.at, granted])
                .map_err(sqlite("remember a claim call"))?;
        }
        Ok(written)
    }

    fn add_namespace(&self, namespace: &Namespace) -> Result<i64, StoreError> {
        self.statement("insert into namespaces (name) values (?1) returning namespace")?
            .query_row([namespace.as_str()], |row| row.get(0))
            .map_err(sqlite("add a namespace"))
    }

    /// Moves the log into the file. When that fails nobody knows what the file has, so the store is to be recovered
    /// before anything else is done.
    fn checkpoint(&self) {
        let Some(connection) = self.connection.as_ref().filter(|_| !self.shared.durable.has_failed()) else { return };
        match connection.query_row("pragma wal_checkpoint(passive)", [], |_| Ok(())) {
            Ok(()) => self.wal_pages.store(0, Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, "a checkpoint failed; the store recovers");
                self.shared.durable.fail();
            }
        }
    }
}

/// The numbers that a batch gave out; they count once it is committed.
#[derive(Default)]
struct Written {
    admitted: BTreeMap<WorkflowKey, i64>,
    namespaces: BTreeMap<Namespace, i64>,
}

/// The three ways a head is written, prepared once a batch.
struct HeadStatements<'a> {
    insert: CachedStatement<'a>,
    in_place: CachedStatement<'a>,
    whole: CachedStatement<'a>,
}

impl HeadStatements<'_> {
    fn write(&mut self, changed: &ChangedHead<'_>, (namespace, number): (i64, i64)) -> Result<(), StoreError> {
        let ChangedHead { head, change, .. } = changed;
        let columns = Stored::of(head);
        let doing = sqlite("write a head");
        let statement = match change {
            HeadChange::Insert => &mut self.insert,
            HeadChange::InPlace => &mut self.in_place,
            HeadChange::Move => &mut self.whole,
        };
        let common = params![
            namespace,
            number,
            columns.seq,
            columns.updated_at,
            columns.status,
            columns.code,
            columns.step,
            columns.visit,
            columns.attempt,
            columns.delivery,
            columns.token,
            columns.epoch,
            columns.worker,
            columns.boot,
            columns.remote,
            columns.started_at,
            columns.lease_ms,
            columns.lease_until,
            columns.step_deadline,
            columns.progress,
            columns.wait.as_deref(),
        ];
        let place = params![columns.rank, columns.wake, columns.due];
        let options = if *change == HeadChange::Insert { stored_options(&head.options) } else { None };
        let fixed = params![columns.id, columns.name, options, columns.priority, columns.created_at];
        let all = common.iter().chain(match change {
            HeadChange::InPlace => &[][..],
            _ => place,
        });
        let written = match change {
            HeadChange::Insert => statement.execute(rusqlite::params_from_iter(all.chain(fixed.iter()))),
            _ => statement.execute(rusqlite::params_from_iter(all)),
        }
        .map_err(doing)?;
        if written != 1 {
            let problem = format!("its row was written {written} times");
            return Err(StoreError::Corrupt { what: "head", key: head.key.to_string(), problem });
        }
        Ok(())
    }
}

impl Writer for SqliteWriter {
    fn load(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        if self.shared.durable.has_failed() {
            return Err(StoreError::Recovering);
        }
        self.begin()?;
        for key in &wants.admissions {
            if !snapshot.has_admission(key) {
                let admission = self.admission(key)?.map(|(_, admission)| admission);
                snapshot.load_admission(key.clone(), admission);
            }
        }
        for key in &wants.heads {
            if snapshot.has_head(key) {
                continue;
            }
            if let Some(Known { number, head: Some(head) }) = self.known.get(key) {
                snapshot.load_head(key.clone(), Some((*number, head.clone())));
                continue;
            }
            let found = match self.number(key)? {
                Some((namespace, number)) => match self.head_by_number((namespace, &key.namespace), number) {
                    Err(error @ StoreError::Corrupt { .. }) => {
                        self.report(number, &error);
                        None
                    }
                    other => other?.map(|head| (number, head)),
                },
                None => None,
            };
            snapshot.load_head(key.clone(), found);
        }
        for (key, seq) in &wants.events {
            let event = match self.number(key)? {
                Some((namespace, number)) => self.event((namespace, number), key, *seq)?,
                None => None,
            };
            snapshot.load_event(key.clone(), *seq, event);
        }
        for (key, id) in &wants.signals {
            let (receipt, last) = self.signal(key, id)?;
            snapshot.load_signal(key.clone(), id.clone(), receipt, last);
        }
        for ((key, name), after) in &wants.pending {
            let pending = self.pending(key, name, *after)?;
            snapshot.load_pending(key.clone(), name.clone(), pending);
        }
        for (namespace, id) in &wants.calls {
            snapshot.load_call(namespace.clone(), id.clone(), self.call(namespace, id)?);
        }
        for (announced, limit) in &wants.ready {
            let heads = self.ready(announced, *limit)?;
            snapshot.load_ready(announced.clone(), *limit, heads);
        }
        if let Some((now, limit)) = wants.due {
            snapshot.load_due(self.due(now, limit)?);
        }
        if let Some((after, limit)) = &wants.open {
            snapshot.load_open(after.clone(), *limit, self.open(after.as_ref(), *limit)?);
        }
        Ok(())
    }

    fn save(&mut self, snapshot: &Snapshot) -> Saved {
        let written = match self.write(snapshot) {
            Ok(written) => written,
            Err(error) => {
                self.abandon();
                return Saved::NotCommitted(error);
            }
        };
        self.shared.durable.commit_begins();
        let committed = self.statement("commit").and_then(|mut commit| commit.execute([]).map_err(sqlite("commit")));
        match committed {
            Ok(_) => {
                self.shared.durable.commit_written();
                self.in_transaction = false;
                for (namespace, number) in written.namespaces {
                    self.namespaces.by_number.insert(number, namespace.clone());
                    self.namespaces.by_name.insert(namespace, number);
                }
                for ChangedHead { head, handle, .. } in snapshot.changed_heads() {
                    if let Some(number) = handle.or_else(|| written.admitted.get(&head.key).copied()) {
                        self.remember(&head.key, number, head.claim.is_some().then(|| head.clone()));
                    }
                }
                if self.wal_pages.load(Ordering::Relaxed) >= CHECKPOINT_LOADED_PAGES {
                    self.checkpoint();
                }
                Saved::Written
            }
            Err(error) => {
                // Whether the frames are in the log is not known here, and the pages this connection holds may not
                // be those of the disk: it is closed, and nobody reads before `recover`.
                self.connection = None;
                self.known.clear();
                self.in_transaction = false;
                self.shared.reader.close();
                Saved::Unknown(error)
            }
        }
    }

    fn disk(&self) -> Arc<dyn Disk> {
        self.shared.durable.clone()
    }

    fn abandon(&mut self) {
        if std::mem::take(&mut self.in_transaction)
            && let Some(connection) = &self.connection
            && !connection.is_autocommit()
            && let Err(error) = connection.execute_batch("rollback")
        {
            tracing::warn!(%error, "a rollback failed; the store recovers");
            self.connection = None;
        }
    }

    fn rest(&mut self) {
        if self.wal_pages.load(Ordering::Relaxed) >= CHECKPOINT_QUIET_PAGES {
            self.checkpoint();
        }
    }

    fn leave_out(&mut self, handles: BTreeSet<Handle>) {
        self.left_out = handles;
    }

    fn epoch(&self) -> u64 {
        self.shared.identity.epoch
    }

    fn recover(&mut self) -> Result<Fate, StoreError> {
        self.connection = None;
        self.known.clear();
        self.in_transaction = false;
        self.shared.durable.fail();
        self.shared.reader.close();
        self.shared.durable.rewrite_log()?;
        let connection = connect_whole(&self.shared)?;
        self.adopt(connection)?;
        self.wal_pages.store(0, Ordering::Relaxed);
        self.shared.reader.reopen();
        Ok(Fate::Unknown)
    }
}

impl Drop for SqliteWriter {
    fn drop(&mut self) {
        self.abandon();
        // What was committed moves from the log into the file, so that the file alone is the whole store while nobody
        // owns it. SQLite does so when its last connection closes, but that may be a reader's, which may not write.
        let checkpointed = self.connection.as_ref().is_some_and(|connection| {
            let checkpoint = connection.query_row("pragma wal_checkpoint(truncate)", [], |row| row.get::<_, i64>(0));
            checkpoint
                .inspect_err(|error| tracing::warn!(%error, "the last checkpoint failed"))
                .is_ok_and(|busy| busy == 0)
        });
        let synced = checkpointed || self.shared.durable.sync().is_ok();
        self.shared.durable.end(synced);
        self.shared.writer_taken.store(false, std::sync::atomic::Ordering::SeqCst);
    }
}
