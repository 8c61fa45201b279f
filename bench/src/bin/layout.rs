//! Layout: which keys the hot tables should have on SQLite.
//!
//! Every candidate writes the same rows as the engine does for sequential workflows of ten steps: admission, head,
//! events and scratchpad, in transactions of 1, 64 or 256 commands, with full durability. The candidates differ only in
//! the type of the keys and in where a row lands: at its key (`without rowid`) or at the end of the table.
//!
//! `cargo run --release -p steadfast-bench --bin layout -- [--rounds 3] [--workflows 20000] [--only A,C] [--scenario 0,1]`
//!
//! Candidates are interleaved within a round so that a slow minute of the machine hits all of them. Each run prints a
//! JSON line; the table of medians follows at the end. Files live beside the executable, so that they are on a real disk.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rusqlite::types::{ToSql, ToSqlOutput};
use rusqlite::{Connection, OptionalExtension, Statement, params};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Steps of every workflow.
const STEPS: i64 = 10;
/// Commands of a workflow: start and first claim are one, then one for each step.
const COMMANDS: u64 = 11;
/// Workflows in flight, unless a batch is larger.
const IN_FLIGHT: usize = 64;
/// A checkpoint begins when the write-ahead log holds this many bytes (4,000 pages of 4 KiB).
const CHECKPOINT_BYTES: u64 = 4_000 * 4_096;
/// Logs that are read back at the end, taken evenly from all.
const LOGS_READ: usize = 2_000;
/// The bits of a packed event key that hold the seq; the workflow has the 39 above them.
const SEQ_BITS: u32 = 24;

/// What stands in `workflow`, the column by which every table names one.
#[derive(Clone, Copy, PartialEq)]
enum Ids {
    /// The id as the caller gave it: 36 random characters.
    Text,
    /// The same length, but growing with time, as a v7 UUID does.
    TextOrdered,
    /// 16 random bytes.
    Blob,
    /// A number given at admission, behind the namespace.
    Integer,
    /// A number given at admission that is unique over all namespaces, so that it is the whole key.
    Surrogate,
}

/// Where a new row of a table lands.
#[derive(Clone, Copy, PartialEq)]
enum Placement {
    /// At its key: the table is the index.
    Clustered,
    /// At the end of the table; a unique index finds it.
    Appended,
    /// At its key, which is one integer made of workflow and seq and therefore the rowid.
    Packed,
}

/// How the type of an event is stored.
#[derive(Clone, Copy, PartialEq)]
enum Types {
    Label,
    Number,
}

/// One layout to measure.
#[derive(Clone, Copy)]
struct Candidate {
    name: &'static str,
    about: &'static str,
    ids: Ids,
    events: Placement,
    scratchpad: Placement,
    types: Types,
    /// Commands name the text id, so that each step first finds the number at the admission.
    by_id: bool,
    /// One event a step in place of two: a lower bound, not a layout we could have.
    merged: bool,
}

/// What the other candidates vary: caller's ids, every table clustered.
const BASE: Candidate = Candidate {
    name: "A",
    about: "text, clustered",
    ids: Ids::Text,
    events: Placement::Clustered,
    scratchpad: Placement::Clustered,
    types: Types::Label,
    by_id: false,
    merged: false,
};

/// What the finer questions vary: numbers behind the namespace, events appended.
const APPENDED: Candidate =
    Candidate { name: "C", about: "int, events appended", ids: Ids::Integer, events: Placement::Appended, ..BASE };

/// What the last questions vary: the number alone, which is the rowid of its head.
const SURROGATE: Candidate =
    Candidate { name: "G", about: "int alone, events appended", ids: Ids::Surrogate, ..APPENDED };

const CANDIDATES: [Candidate; 13] = [
    BASE,
    Candidate { name: "A7", about: "text growing with time, clustered", ids: Ids::TextOrdered, ..BASE },
    Candidate { name: "E", about: "text, events appended", events: Placement::Appended, ..BASE },
    Candidate { name: "D", about: "16-byte blob, clustered", ids: Ids::Blob, ..BASE },
    Candidate { name: "B", about: "int, clustered", ids: Ids::Integer, ..BASE },
    APPENDED,
    Candidate { name: "C2", about: "int, events and scratchpad appended", scratchpad: Placement::Appended, ..APPENDED },
    Candidate { name: "CI", about: "C, every step names the text id", by_id: true, ..APPENDED },
    SURROGATE,
    Candidate { name: "GI", about: "G, every step names the text id", by_id: true, ..SURROGATE },
    Candidate { name: "GT", about: "G, event type as a number", types: Types::Number, ..SURROGATE },
    Candidate {
        name: "P",
        about: "int alone, event key packed into the rowid",
        events: Placement::Packed,
        ..SURROGATE
    },
    Candidate { name: "F", about: "C with one event a step (bound)", merged: true, ..APPENDED },
];

impl Candidate {
    fn text_namespace(&self) -> bool {
        matches!(self.ids, Ids::Text | Ids::TextOrdered)
    }

    fn numbered(&self) -> bool {
        matches!(self.ids, Ids::Integer | Ids::Surrogate)
    }

    /// The columns that name a workflow in heads, events and scratchpad.
    fn key(&self) -> &'static str {
        if self.ids == Ids::Surrogate { "workflow" } else { "namespace, workflow" }
    }

    /// The values of [`Candidate::key`] in an insert: `?1` is always the namespace and `?2` the workflow.
    fn key_values(&self) -> &'static str {
        if self.ids == Ids::Surrogate { "?2" } else { "?1, ?2" }
    }

    /// The condition that finds one workflow.
    fn key_is(&self) -> &'static str {
        if self.ids == Ids::Surrogate { "workflow = ?2" } else { "namespace = ?1 and workflow = ?2" }
    }

    fn schema(&self) -> String {
        let namespace = if self.text_namespace() { "text" } else { "integer" };
        let workflow = match self.ids {
            Ids::Text | Ids::TextOrdered => "text",
            Ids::Blob => "blob",
            Ids::Integer | Ids::Surrogate => "integer",
        };
        let key = self.key();
        let columns = if self.ids == Ids::Surrogate {
            format!("workflow {workflow} not null")
        } else {
            format!("namespace {namespace} not null, workflow {workflow} not null")
        };
        let receipt = "fingerprint blob not null, accepted_at integer not null";
        let admissions = if self.numbered() {
            format!(
                "workflow integer primary key, namespace {namespace} not null, id text not null, {receipt},
                 unique (namespace, id)) strict"
            )
        } else if self.ids == Ids::Blob {
            format!("{columns}, id text not null, {receipt}, primary key ({key})) strict, without rowid")
        } else {
            format!("{columns}, {receipt}, primary key ({key})) strict, without rowid")
        };
        let state = "name text not null, status text not null, step text not null, attempt integer not null,
            seq integer not null, rank integer, token blob, lease_until integer, wake text, due integer,
            created_at integer not null, updated_at integer not null";
        let heads = if self.ids == Ids::Surrogate {
            format!("workflow integer primary key, namespace {namespace} not null, {state}) strict")
        } else {
            format!("{columns}, {state}, primary key ({key})) strict, without rowid")
        };
        let kind = if self.types == Types::Label { "text" } else { "integer" };
        let event = format!("at integer not null, type {kind} not null, payload text not null");
        let events = match self.events {
            Placement::Clustered => {
                format!("{columns}, seq integer not null, {event}, primary key ({key}, seq)) strict, without rowid")
            }
            Placement::Appended => {
                format!("{columns}, seq integer not null, {event}, primary key ({key}, seq)) strict")
            }
            Placement::Packed => format!("place integer primary key, {event}) strict"),
        };
        let rowid = if self.scratchpad == Placement::Clustered { ", without rowid" } else { "" };
        format!(
            "create table admissions ({admissions};
             create table heads ({heads};
             create index ready on heads (name, step, rank) where rank is not null;
             create index timed on heads (wake, due) where due is not null;
             create table events ({events};
             create table scratchpad ({columns}, key text not null, value text not null, seq integer not null,
                primary key ({key}, key)) strict{rowid};"
        )
    }
}

/// What a candidate is run with.
#[derive(Clone, Copy, PartialEq)]
struct Scenario {
    page_size: u64,
    /// Commands in a transaction.
    batch: usize,
    /// Each step writes a key of its own, rather than the same one again.
    new_keys: bool,
    /// The share of `--workflows` that is run: single commits are slow.
    divisor: u64,
}

const SCENARIOS: [Scenario; 5] = [
    Scenario { page_size: 4_096, batch: 64, new_keys: false, divisor: 1 },
    Scenario { page_size: 4_096, batch: 256, new_keys: false, divisor: 1 },
    Scenario { page_size: 4_096, batch: 1, new_keys: false, divisor: 20 },
    Scenario { page_size: 4_096, batch: 64, new_keys: true, divisor: 1 },
    Scenario { page_size: 8_192, batch: 64, new_keys: false, divisor: 1 },
];

impl Scenario {
    fn label(&self) -> String {
        let keys = if self.new_keys { ", new keys" } else { "" };
        let page = if self.page_size == 4_096 { String::new() } else { format!(", page {}", self.page_size) };
        format!("{}/tx{keys}{page}", self.batch)
    }
}

/// What one run showed.
#[derive(Clone, Copy)]
struct Figure {
    steps_per_second: f64,
    /// Time on the processor, kernel included: steadier than the clock on a machine that does other work too.
    cpu_us_per_step: f64,
    /// Size of the file after the last checkpoint.
    file_bytes_per_step: f64,
    /// Pages appended to the write-ahead log.
    wal_bytes_per_step: f64,
    /// Reading the whole log of one workflow, from a warm cache or the page cache of the system.
    log_read_us: f64,
}

/// A namespace or workflow as the candidate stores it.
#[derive(Clone)]
enum Key {
    Text(String),
    Blob([u8; 16]),
    Integer(i64),
}

impl ToSql for Key {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Key::Text(text) => text.to_sql(),
            Key::Blob(bytes) => Ok(ToSqlOutput::from(bytes.as_slice())),
            Key::Integer(number) => number.to_sql(),
        }
    }
}

/// The types of event this workload has.
#[derive(Clone, Copy)]
enum EventType {
    Created = 1,
    StepStarted = 2,
    StepCompleted = 3,
    Completed = 4,
}

impl EventType {
    fn label(self) -> &'static str {
        match self {
            EventType::Created => "workflow_created",
            EventType::StepStarted => "step_started",
            EventType::StepCompleted => "step_completed",
            EventType::Completed => "workflow_completed",
        }
    }
}

/// Repeatable randomness (splitmix64): every candidate sees the same ids.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bytes(&mut self) -> [u8; 16] {
        ((u128::from(self.next()) << 64) | u128::from(self.next())).to_be_bytes()
    }
}

/// One place in flight and the workflow that holds it now.
struct Slot {
    workflow: Key,
    id: String,
    seq: i64,
    /// The step that runs; 0 before the start.
    step: i64,
    token: [u8; 16],
    /// Turns to sit out at the beginning, so that starts and finishes mix within a batch.
    idle: u64,
}

/// The statements of one candidate. `?1` is the namespace and `?2` the workflow in all of them.
struct Statements<'c> {
    begin: Statement<'c>,
    commit: Statement<'c>,
    admit: Statement<'c>,
    find: Statement<'c>,
    head: Statement<'c>,
    create_head: Statement<'c>,
    claim_head: Statement<'c>,
    step_head: Statement<'c>,
    finish_head: Statement<'c>,
    append: Statement<'c>,
    put: Statement<'c>,
    log: Statement<'c>,
}

impl<'c> Statements<'c> {
    fn prepare(connection: &'c Connection, candidate: &Candidate) -> Result<Self> {
        let (key, values, is) = (candidate.key(), candidate.key_values(), candidate.key_is());
        let admit = match candidate.ids {
            Ids::Text | Ids::TextOrdered => {
                "insert into admissions (namespace, workflow, fingerprint, accepted_at) values (?1, ?2, ?4, ?5)"
            }
            _ => {
                "insert into admissions (namespace, workflow, id, fingerprint, accepted_at) values (?1, ?2, ?3, ?4, ?5)"
            }
        };
        let find = if candidate.numbered() {
            "select workflow from admissions where namespace = ?1 and id = ?2"
        } else {
            "select workflow from admissions where namespace = ?1 and workflow = ?2"
        };
        let (append, log) = if candidate.events == Placement::Packed {
            (
                format!("insert into events (place, at, type, payload) values ((?2 << {SEQ_BITS}) | ?3, ?4, ?5, ?6)"),
                format!(
                    "select payload from events
                     where place >= (?2 << {SEQ_BITS}) and place < ((?2 + 1) << {SEQ_BITS}) order by place"
                ),
            )
        } else {
            (
                format!("insert into events ({key}, seq, at, type, payload) values ({values}, ?3, ?4, ?5, ?6)"),
                format!("select payload from events where {is} order by seq"),
            )
        };
        Ok(Statements {
            begin: connection.prepare("begin immediate")?,
            commit: connection.prepare("commit")?,
            admit: connection.prepare(admit)?,
            find: connection.prepare(find)?,
            head: connection.prepare(&format!(
                "select name, status, step, attempt, seq, rank, token, lease_until, wake, due, created_at
                 from heads where {is}"
            ))?,
            create_head: connection.prepare(
                "insert into heads (namespace, workflow, name, status, step, attempt, seq, rank, created_at, updated_at)
                 values (?1, ?2, 'order.fulfil', 'ready', ?3, 1, ?4, ?5, ?5, ?5)",
            )?,
            claim_head: connection.prepare(&format!(
                "update heads set status = 'running', seq = ?3, rank = null, token = ?4, lease_until = ?5,
                    wake = 'lease', due = ?5, updated_at = ?6 where {is}"
            ))?,
            step_head: connection.prepare(&format!(
                "update heads set status = 'running', step = ?3, attempt = 1, seq = ?4, token = ?5, lease_until = ?6,
                    updated_at = ?7 where {is}"
            ))?,
            finish_head: connection.prepare(&format!(
                "update heads set status = 'completed', seq = ?3, token = null, lease_until = null, wake = null,
                    due = null, updated_at = ?4 where {is}"
            ))?,
            append: connection.prepare(&append)?,
            put: connection.prepare(&format!(
                "insert into scratchpad ({key}, key, value, seq) values ({values}, ?3, ?4, ?5)
                 on conflict ({key}, key) do update set value = excluded.value, seq = excluded.seq"
            ))?,
            log: connection.prepare(&log)?,
        })
    }
}

/// One candidate at work on one file.
struct Run<'c> {
    candidate: Candidate,
    scenario: Scenario,
    statements: Statements<'c>,
    namespace: Key,
    random: Random,
    /// Milliseconds; moves by one with each command.
    now: i64,
    /// The last workflow admitted, counted from 1.
    admitted: i64,
    /// The keys of finished workflows.
    finished: Vec<Key>,
}

impl Run<'_> {
    /// Runs `total` workflows to their end, `batch` commands in a transaction.
    fn complete(&mut self, total: u64) -> Result<()> {
        let in_flight = IN_FLIGHT.max(self.scenario.batch).min(usize::try_from(total)?);
        let mut slots: Vec<Slot> = (0..in_flight).map(|place| self.slot(place as u64 % COMMANDS)).collect();
        let mut left = total - in_flight as u64;
        let mut place = 0;
        while !slots.is_empty() {
            self.statements.begin.execute([])?;
            for _ in 0..self.scenario.batch.min(slots.len()) {
                if place >= slots.len() {
                    place = 0;
                }
                let Some(slot) = slots.get_mut(place) else { break };
                if slot.idle > 0 {
                    slot.idle -= 1;
                } else if slot.step == 0 {
                    self.start(slot)?;
                } else {
                    self.step(slot)?;
                }
                if slot.step <= STEPS {
                    place += 1;
                } else if left > 0 {
                    left -= 1;
                    self.finished.push(slot.workflow.clone());
                    slots[place] = self.slot(0);
                    place += 1;
                } else {
                    self.finished.push(slot.workflow.clone());
                    slots.swap_remove(place);
                }
            }
            self.statements.commit.execute([])?;
        }
        Ok(())
    }

    fn slot(&mut self, idle: u64) -> Slot {
        self.admitted += 1;
        let mut bytes = self.random.bytes();
        if self.candidate.ids == Ids::TextOrdered {
            bytes[..8].copy_from_slice(&(0x0193_8000_0000_7000_u64 + self.admitted as u64).to_be_bytes());
        }
        let id = uuid_text(&bytes);
        let workflow = match self.candidate.ids {
            Ids::Text | Ids::TextOrdered => Key::Text(id.clone()),
            Ids::Blob => Key::Blob(bytes),
            Ids::Integer | Ids::Surrogate => Key::Integer(self.admitted),
        };
        Slot { workflow, id, seq: 0, step: 0, token: [0; 16], idle }
    }

    /// Admission, head, first event and input, and the claim of the first step with them.
    fn start(&mut self, slot: &mut Slot) -> Result<()> {
        self.now += 1;
        let found: Option<Key> = self.find(slot)?;
        if found.is_some() {
            return Err(format!("workflow {} was admitted before", slot.id).into());
        }
        let mut fingerprint = [1_u8; 33];
        fingerprint[1..17].copy_from_slice(&self.random.bytes());
        fingerprint[17..].copy_from_slice(&self.random.bytes());
        let fingerprint = fingerprint.as_slice();
        self.statements.admit.execute(params![self.namespace, slot.workflow, slot.id, fingerprint, self.now])?;
        let (step, input) = (step_name(1), value(0, self.now));
        self.statements.create_head.execute(params![self.namespace, slot.workflow, step, 1, self.now])?;
        self.append(slot, EventType::Created, &format!(r#"{{"name":"order.fulfil","input":{input}}}"#))?;
        self.statements.put.execute(params![self.namespace, slot.workflow, "input", input, slot.seq])?;

        slot.step = 1;
        slot.token = self.random.bytes();
        let started = self.started(slot);
        self.append(slot, EventType::StepStarted, &started)?;
        let (token, lease_until) = (slot.token.as_slice(), self.now + 30_000);
        self.statements.claim_head.execute(params![
            self.namespace,
            slot.workflow,
            slot.seq,
            token,
            lease_until,
            self.now
        ])?;
        Ok(())
    }

    /// Commits the running step and claims the next, or finishes the workflow.
    fn step(&mut self, slot: &mut Slot) -> Result<()> {
        self.now += 1;
        if self.candidate.by_id {
            slot.workflow = self.find(slot)?.ok_or("the admission is gone")?;
        }
        let (token, seq): ([u8; 16], i64) = self
            .statements
            .head
            .query_row(params![self.namespace, slot.workflow], |row| Ok((row.get("token")?, row.get("seq")?)))?;
        if (token, seq) != (slot.token, slot.seq) {
            return Err(format!("workflow {} lost its claim at seq {seq}", slot.id).into());
        }

        let result = value(slot.step, self.now);
        let key = if self.scenario.new_keys { format!("result-{}", slot.step) } else { "result".to_owned() };
        let completed = format!(
            r#"{{"step":"{}","attempt":1,"next":"{}","result":{result}}}"#,
            step_name(slot.step),
            step_name(slot.step + 1)
        );
        slot.step += 1;
        if slot.step <= STEPS {
            slot.token = self.random.bytes();
            let started = self.started(slot);
            if self.candidate.merged {
                let both = format!(r#"{{"completed":{completed},"started":{started}}}"#);
                self.append(slot, EventType::StepCompleted, &both)?;
            } else {
                self.append(slot, EventType::StepCompleted, &completed)?;
                self.append(slot, EventType::StepStarted, &started)?;
            }
            let (token, lease_until) = (slot.token.as_slice(), self.now + 30_000);
            self.statements.step_head.execute(params![
                self.namespace,
                slot.workflow,
                step_name(slot.step),
                slot.seq,
                token,
                lease_until,
                self.now
            ])?;
        } else {
            self.append(slot, EventType::StepCompleted, &completed)?;
            self.append(slot, EventType::Completed, &format!(r#"{{"result":{result}}}"#))?;
            self.statements.finish_head.execute(params![self.namespace, slot.workflow, slot.seq, self.now])?;
        }
        self.statements.put.execute(params![self.namespace, slot.workflow, key, result, slot.seq])?;
        Ok(())
    }

    fn find(&mut self, slot: &Slot) -> Result<Option<Key>> {
        let statement = &mut self.statements.find;
        let found = if self.candidate.numbered() {
            statement.query_row(params![self.namespace, slot.id], |row| Ok(Key::Integer(row.get(0)?))).optional()?
        } else {
            let known = statement.exists(params![self.namespace, slot.workflow])?;
            known.then(|| slot.workflow.clone())
        };
        Ok(found)
    }

    fn append(&mut self, slot: &mut Slot, event: EventType, payload: &str) -> Result<()> {
        slot.seq += 1;
        let (namespace, workflow, now) = (&self.namespace, &slot.workflow, self.now);
        let statement = &mut self.statements.append;
        match self.candidate.types {
            Types::Label => statement.execute(params![namespace, workflow, slot.seq, now, event.label(), payload])?,
            Types::Number => statement.execute(params![namespace, workflow, slot.seq, now, event as i64, payload])?,
        };
        Ok(())
    }

    /// About 140 bytes.
    fn started(&self, slot: &Slot) -> String {
        let token = u128::from_be_bytes(slot.token);
        format!(
            r#"{{"step":"{}","attempt":1,"visit":{},"worker":"worker-7f3a","token":"{token:032x}","lease_until":{}}}"#,
            step_name(slot.step),
            slot.step,
            self.now + 30_000
        )
    }

    /// Reads the logs of finished workflows from all over the file; the mean time of one.
    fn read_logs(&mut self) -> Result<Duration> {
        let stride = (self.finished.len() / LOGS_READ).max(1);
        let workflows: Vec<Key> = self.finished.iter().step_by(stride).cloned().collect();
        let (mut events, mut bytes) = (0, 0);
        let begun = Instant::now();
        for workflow in &workflows {
            let mut rows = self.statements.log.query(params![self.namespace, workflow])?;
            while let Some(row) = rows.next()? {
                events += 1;
                bytes += row.get_ref(0)?.as_str()?.len();
            }
        }
        let taken = begun.elapsed();
        if events < workflows.len() * 12 || bytes < events * 50 {
            return Err(format!("{} logs held only {events} events", workflows.len()).into());
        }
        Ok(taken / u32::try_from(workflows.len())?)
    }
}

fn step_name(step: i64) -> String {
    format!("step-{step}")
}

/// A JSON value of 100 bytes.
fn value(step: i64, now: i64) -> String {
    let start = format!(r#"{{"order":{now},"step":{step},"note":""#);
    format!("{start:x<98}\"}}")
}

/// The usual text form of 16 bytes.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(*bytes));
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// What this thread has spent on a processor so far; zero where the system does not tell (it does on Linux).
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Runs one candidate on a new file in `directory`.
fn measure(directory: &Path, candidate: &Candidate, scenario: &Scenario, workflows: u64) -> Result<Figure> {
    let folder = tempfile::tempdir_in(directory)?;
    let path = folder.path().join("layout.db");
    let mut connection = Connection::open(&path)?;
    connection.execute_batch(&format!(
        "pragma page_size = {}; pragma journal_mode = wal; pragma synchronous = full; pragma cache_size = -65536;",
        scenario.page_size
    ))?;
    connection.execute_batch(&candidate.schema())?;

    // Does what `wal_autocheckpoint` does, which this hook replaces, and counts what each commit appended.
    let appended = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&appended);
    let checkpoint_pages = CHECKPOINT_BYTES / scenario.page_size;
    let mut before = 0;
    connection.wal_hook(Some(move |wal: &mut rusqlite::hooks::Wal, pages: i32| {
        let pages = u64::from(pages.unsigned_abs());
        counter.fetch_add(if pages > before { pages - before } else { pages }, Ordering::Relaxed);
        before = pages;
        if pages >= checkpoint_pages { wal.checkpoint() } else { Ok(()) }
    }))?;

    let namespace = if candidate.text_namespace() { Key::Text("default".to_owned()) } else { Key::Integer(1) };
    let mut run = Run {
        candidate: *candidate,
        scenario: *scenario,
        statements: Statements::prepare(&connection, candidate)?,
        namespace,
        random: Random(20_261_201),
        now: 1_796_083_200_000,
        admitted: 0,
        finished: Vec::new(),
    };
    let (begun, cpu_begun) = (Instant::now(), cpu_time());
    run.complete(workflows)?;
    let (taken, cpu_taken) = (begun.elapsed(), cpu_time() - cpu_begun);
    let log_read = run.read_logs()?;
    drop(run);

    connection.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(()))?;
    let steps = (workflows * STEPS.unsigned_abs()) as f64;
    Ok(Figure {
        steps_per_second: steps / taken.as_secs_f64(),
        cpu_us_per_step: cpu_taken.as_secs_f64() * 1e6 / steps,
        file_bytes_per_step: std::fs::metadata(&path)?.len() as f64 / steps,
        wal_bytes_per_step: (appended.load(Ordering::Relaxed) * (scenario.page_size + 24)) as f64 / steps,
        log_read_us: log_read.as_secs_f64() * 1e6,
    })
}

/// The middle of some figures, each quantity by itself.
fn median(figures: &[Figure], quantity: impl Fn(&Figure) -> f64) -> f64 {
    let mut values: Vec<f64> = figures.iter().map(quantity).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What the command line asks for.
struct Options {
    rounds: u64,
    workflows: u64,
    candidates: Vec<Candidate>,
    scenarios: Vec<Scenario>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
        let mut options =
            Options { rounds: 3, workflows: 20_000, candidates: CANDIDATES.to_vec(), scenarios: SCENARIOS.to_vec() };
        while let Some(argument) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
            match argument.as_str() {
                "--rounds" => options.rounds = value.parse()?,
                "--workflows" => options.workflows = value.parse()?,
                "--only" => options.candidates.retain(|candidate| value.split(',').any(|name| name == candidate.name)),
                "--scenario" => {
                    let numbers = value.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>()?;
                    options.scenarios = numbers.iter().filter_map(|number| SCENARIOS.get(*number).copied()).collect();
                }
                _ => return Err(format!("unknown argument {argument}").into()),
            }
        }
        Ok(options)
    }
}

fn main() -> Result<()> {
    let options = Options::parse(std::env::args().skip(1))?;
    let executable = std::env::current_exe()?;
    let directory = executable.parent().ok_or("the executable has no directory")?;
    let mut results: Vec<(usize, usize, Figure)> = Vec::new();
    for round in 1..=options.rounds {
        for (row, scenario) in options.scenarios.iter().enumerate() {
            for (column, candidate) in options.candidates.iter().enumerate() {
                let workflows = (options.workflows / scenario.divisor).max(1);
                let figure = measure(directory, candidate, scenario, workflows)?;
                let line = serde_json::json!({
                    "round": round,
                    "candidate": candidate.name,
                    "scenario": scenario.label(),
                    "workflows": workflows,
                    "steps_per_second": figure.steps_per_second.round(),
                    "cpu_us_per_step": (figure.cpu_us_per_step * 10.0).round() / 10.0,
                    "file_bytes_per_step": figure.file_bytes_per_step.round(),
                    "wal_bytes_per_step": figure.wal_bytes_per_step.round(),
                    "log_read_us": (figure.log_read_us * 10.0).round() / 10.0,
                });
                println!("{line}");
                results.push((row, column, figure));
            }
        }
    }

    println!("\nSQLite {}, medians of {} rounds", rusqlite::version(), options.rounds);
    for (row, scenario) in options.scenarios.iter().enumerate() {
        println!("\n{}\n", scenario.label());
        println!(
            "| candidate | steps/s | best | CPU µs a step | file bytes a step | WAL bytes a step | log read µs |\n\
             |---|---:|---:|---:|---:|---:|---:|"
        );
        for (column, candidate) in options.candidates.iter().enumerate() {
            let figures: Vec<Figure> =
                results.iter().filter(|(r, c, _)| (*r, *c) == (row, column)).map(|(_, _, figure)| *figure).collect();
            println!(
                "| {} {} | {:.0} | {:.0} | {:.1} | {:.0} | {:.0} | {:.1} |",
                candidate.name,
                candidate.about,
                median(&figures, |figure| figure.steps_per_second),
                figures.iter().map(|figure| figure.steps_per_second).fold(0.0, f64::max),
                median(&figures, |figure| figure.cpu_us_per_step),
                median(&figures, |figure| figure.file_bytes_per_step),
                median(&figures, |figure| figure.wal_bytes_per_step),
                median(&figures, |figure| figure.log_read_us)
            );
        }
    }
    Ok(())
}
