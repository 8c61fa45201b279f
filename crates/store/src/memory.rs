//! A store in memory: the same contract without a file, for tests and for the test kit.
//!
//! It keeps typed rows where SQLite keeps text, so the two disagree loudly when one of them reads or orders rows
//! differently. Nothing in it survives the process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use steadfast_core::claim::{Announced, Call, CallId};
use steadfast_core::event::Event;
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::head::{Head, Placed, Wake};
use steadfast_core::json::Json;
use steadfast_core::signal::{Pending, Receipt};
use steadfast_core::snapshot::{
    Admission, ChangedHead, ChangedVariable, ClaimCursor, NewSignal, PENDING_PAGE, Snapshot, TakenSignal, Wants,
};
use steadfast_core::text::{Key, Namespace, SignalId, SignalName, WorkflowKey};
use steadfast_core::verify::{Fault, Rebuilt};

use crate::clock::Clock;
use crate::contract::{
    Cursor, Disk, Fate, Filter, Identity, Listed, Logged, Page, Reader, Saved, Store, StoreError, Variable, Verified,
    Writer,
};

/// How many rows a page of a list looks at before it gives a cursor instead of going on.
const LOOK_MAX: usize = 10_000;
/// Claim calls are remembered for a day.
const CALL_AGE_MS: i64 = 86_400_000;

/// A store in memory.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    identity: Identity,
    tables: Mutex<Tables>,
    writer_taken: AtomicBool,
}

#[derive(Debug, Default)]
struct Tables {
    admissions: BTreeMap<WorkflowKey, Admission>,
    heads: BTreeMap<WorkflowKey, (i64, Head)>,
    numbers: BTreeMap<i64, WorkflowKey>,
    events: BTreeMap<WorkflowKey, Vec<(i64, Event)>>,
    scratchpad: BTreeMap<WorkflowKey, BTreeMap<Key, (Json, u64)>>,
    signals: BTreeMap<WorkflowKey, Vec<Signal>>,
    calls: BTreeMap<(Namespace, CallId), Call>,
    /// In the order of their first receipt, which numbers them.
    namespaces: Vec<Namespace>,
    /// Rank and number, as the index of the SQLite store orders them.
    ready: BTreeSet<(i64, i64)>,
    /// Kind, time, number of the namespace and number, likewise.
    timed: BTreeSet<(Wake, i64, usize, i64)>,
}

/// A row of an inbox: its payload is there until it is taken.
#[derive(Debug)]
struct Signal {
    name: SignalName,
    id: SignalId,
    receipt: Receipt,
    payload: Option<Json>,
    taken: Option<u64>,
}

impl Tables {
    /// The signals of an inbox that no wait has taken, from behind number `after` on.
    fn pending(&self, key: &WorkflowKey, after: u64) -> impl Iterator<Item = Pending> {
        let inbox = (1..).zip(self.signals.get(key).into_iter().flatten());
        inbox.filter(move |(number, signal)| *number > after && signal.taken.is_none()).map(|(number, signal)| {
            Pending {
                number,
                name: signal.name.clone(),
                id: signal.id.clone(),
                payload: signal.payload.clone().expect("it was not taken"),
                accepted_at: signal.receipt.accepted_at,
            }
        })
    }
}

impl MemoryStore {
    /// An empty store that judges by `clock`.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let identity = Identity { epoch: 1, boot: 1, fingerprint_key: FingerprintKey([0x5f; 32]) };
        Self {
            shared: Arc::new(Shared {
                clock,
                identity,
                tables: Mutex::new(Tables { namespaces: vec![Namespace::default_namespace()], ..Tables::default() }),
                writer_taken: AtomicBool::new(false),
            }),
        }
    }

    /// The same content under a new owner, as after a restart of the process; `restored` raises the epoch too.
    ///
    /// The old owner's handles keep the old content, as an old process would keep nothing.
    #[must_use]
    pub fn reopened(&self, restored: bool) -> Self {
        let mut identity = self.shared.identity;
        identity.boot += 1;
        identity.epoch += u64::from(restored);
        let tables = std::mem::take(&mut *self.tables());
        Self {
            shared: Arc::new(Shared {
                clock: self.shared.clock.clone(),
                identity,
                tables: Mutex::new(tables),
                writer_taken: AtomicBool::new(false),
            }),
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.shared.tables.lock().expect("no thread panics while it holds the tables")
    }
}

impl Store for MemoryStore {
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
        Ok(Box::new(MemoryWriter { store: self.clone() }))
    }

    fn reader(&self) -> Arc<dyn Reader> {
        Arc::new(self.clone())
    }
}

struct MemoryWriter {
    store: MemoryStore,
}

impl Drop for MemoryWriter {
    fn drop(&mut self) {
        self.store.shared.writer_taken.store(false, Ordering::SeqCst);
    }
}

impl Tables {
    fn ready_page(&self, announced: &Announced, limit: usize) -> Vec<(i64, Head)> {
        let known = |head: &Head| {
            head.key.namespace == announced.namespace
                && head.visit().is_some_and(|visit| announced.knows(&head.name, &visit.step))
        };
        self.ready
            .iter()
            .map(|(_, number)| self.numbered(*number))
            .filter(|(_, head)| known(head))
            .take(limit)
            .cloned()
            .collect()
    }

    fn open_page(&self, after: Option<&ClaimCursor>, limit: usize) -> Vec<(i64, Head)> {
        let after = after.map(|after| {
            let number = self.number(&after.key);
            (Wake::Lease, after.look_at, self.namespace(&after.key), number)
        });
        self.timed
            .iter()
            .filter(|open| open.0 == Wake::Lease && after.as_ref().is_none_or(|after| *open > after))
            .take(limit)
            .map(|(_, _, _, number)| self.numbered(*number).clone())
            .collect()
    }

    fn numbered(&self, number: i64) -> &(i64, Head) {
        &self.heads[&self.numbers[&number]]
    }

    fn namespace(&self, key: &WorkflowKey) -> usize {
        self.namespaces.iter().position(|namespace| *namespace == key.namespace).unwrap_or(usize::MAX)
    }

    fn number(&self, key: &WorkflowKey) -> i64 {
        self.heads.get(key).map_or(i64::MIN, |(number, _)| *number)
    }

    fn place(&mut self, number: i64, placed: Placed, there: bool) {
        if let Some(rank) = placed.rank {
            if there {
                self.ready.insert((rank, number))
            } else {
                self.ready.remove(&(rank, number))
            };
        }
        if let Some((wake, due)) = placed.due {
            let namespace = self.namespace(&self.numbers[&number]);
            if there {
                self.timed.insert((wake, due, namespace, number))
            } else {
                self.timed.remove(&(wake, due, namespace, number))
            };
        }
    }
}

/// Nothing is durable, so nothing is to be waited for.
struct NoDisk;

impl Disk for NoDisk {
    fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl Writer for MemoryWriter {
    fn load(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        let tables = self.store.tables();
        for key in &wants.admissions {
            snapshot.load_admission(key.clone(), tables.admissions.get(key).cloned());
        }
        for key in &wants.heads {
            snapshot.load_head(key.clone(), tables.heads.get(key).cloned());
        }
        for (key, seq) in &wants.events {
            let log = tables.events.get(key);
            let event = log.and_then(|log| log.get(usize::try_from(*seq).ok()?)).map(|(_, event)| event.clone());
            snapshot.load_event(key.clone(), *seq, event);
        }
        for (key, id) in &wants.signals {
            let inbox = tables.signals.get(key).map_or(&[][..], Vec::as_slice);
            let receipt = inbox.iter().find(|signal| signal.id == *id).map(|signal| signal.receipt.clone());
            snapshot.load_signal(key.clone(), id.clone(), receipt, inbox.len() as u64);
        }
        for ((key, name), after) in &wants.pending {
            let pending = tables.pending(key, *after).filter(|pending| pending.name == *name);
            snapshot.load_pending(key.clone(), name.clone(), pending.take(PENDING_PAGE).collect());
        }
        for call in &wants.calls {
            let (namespace, id) = call.clone();
            snapshot.load_call(namespace, id, tables.calls.get(call).cloned());
        }
        for (announced, limit) in &wants.ready {
            snapshot.load_ready(announced.clone(), *limit, tables.ready_page(announced, *limit));
        }
        if let Some((now, limit)) = wants.due {
            let due = tables.timed.iter().filter(|(_, due, _, _)| *due <= now);
            let mut due: Vec<_> = due.map(|(wake, due, namespace, n)| (*due, *wake, *namespace, *n)).collect();
            due.sort_unstable();
            snapshot.load_due(due.into_iter().take(limit).map(|(_, _, _, n)| tables.numbered(n).clone()).collect());
        }
        if let Some((after, limit)) = &wants.open {
            snapshot.load_open(after.clone(), *limit, tables.open_page(after.as_ref(), *limit));
        }
        Ok(())
    }

    fn save(&mut self, snapshot: &Snapshot) -> Saved {
        let mut tables = self.store.tables();
        // Keys first, as a database would refuse them, before anything is changed.
        if snapshot.new_admissions().iter().any(|new| tables.admissions.contains_key(&new.key)) {
            return Saved::NotCommitted(StoreError::Injected("an admission exists already"));
        }
        let mut next_seq: BTreeMap<&WorkflowKey, u64> = BTreeMap::new();
        for new in snapshot.appended() {
            let stored = tables.events.get(&new.key).map_or(0, |log| log.len() as u64);
            let next = next_seq.entry(&new.key).or_insert(stored);
            if new.seq != *next {
                return Saved::NotCommitted(StoreError::Injected("an event exists already at that position"));
            }
            *next += 1;
        }
        for new in snapshot.new_signals() {
            if tables.signals.get(&new.workflow).into_iter().flatten().any(|signal| signal.id == new.signal.id) {
                return Saved::NotCommitted(StoreError::Injected("a signal exists already"));
            }
        }
        for admission in snapshot.new_admissions() {
            tables.admissions.insert(admission.key.clone(), admission.clone());
        }
        for new in snapshot.appended() {
            tables.events.entry(new.key.clone()).or_default().push((new.at, new.event.clone()));
        }
        // Numbers follow the order of admission, not of keys.
        for admission in snapshot.new_admissions() {
            let number = tables.numbers.last_key_value().map_or(1, |(last, _)| last + 1);
            tables.numbers.insert(number, admission.key.clone());
            if !tables.namespaces.contains(&admission.key.namespace) {
                tables.namespaces.push(admission.key.namespace.clone());
            }
        }
        let numbers: BTreeMap<WorkflowKey, i64> = tables
            .numbers
            .iter()
            .rev()
            .take(snapshot.new_admissions().len())
            .map(|(number, key)| (key.clone(), *number))
            .collect();
        for ChangedHead { head, handle, .. } in snapshot.changed_heads() {
            let number = handle.unwrap_or_else(|| numbers[&head.key]);
            if let Some((_, old)) = tables.heads.insert(head.key.clone(), (number, head.clone())) {
                tables.place(number, old.placed(), false);
            }
            tables.place(number, head.placed(), true);
        }
        for ChangedVariable { workflow, key, value, seq, .. } in snapshot.changed_variables() {
            let variables = tables.scratchpad.entry(workflow.clone()).or_default();
            match value {
                Some(value) => variables.insert(key.clone(), (value.clone(), seq)),
                None => variables.remove(key),
            };
        }
        for NewSignal { workflow, signal, fingerprint, taken, .. } in snapshot.new_signals() {
            let Pending { number, name, id, payload, accepted_at } = signal.clone();
            let inbox = tables.signals.entry(workflow.clone()).or_default();
            assert_eq!(number, inbox.len() as u64 + 1, "inboxes have no gaps");
            let receipt = Receipt { fingerprint: *fingerprint, accepted_at };
            inbox.push(Signal { name, id, receipt, payload: taken.is_none().then_some(payload), taken: *taken });
        }
        for TakenSignal { workflow, number, seq, .. } in snapshot.taken_signals() {
            let inbox = tables.signals.get_mut(workflow).expect("it was loaded");
            let signal = &mut inbox[usize::try_from(*number - 1).expect("inboxes are small")];
            assert!(signal.taken.is_none(), "a signal is taken once");
            (signal.payload, signal.taken) = (None, Some(*seq));
        }
        for call in snapshot.new_calls() {
            tables.calls.retain(|_, old| old.at >= call.at - CALL_AGE_MS);
            tables.calls.insert((call.namespace.clone(), call.id.clone()), call.clone());
        }
        Saved::Written
    }

    fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(NoDisk)
    }

    fn abandon(&mut self) {}

    fn epoch(&self) -> u64 {
        self.store.shared.identity.epoch
    }

    fn recover(&mut self) -> Result<Fate, StoreError> {
        Ok(Fate::Unknown)
    }
}

impl Reader for MemoryStore {
    fn head(&self, key: &WorkflowKey) -> Result<Option<Head>, StoreError> {
        Ok(self.tables().heads.get(key).map(|(_, head)| head.clone()))
    }

    fn admission(&self, key: &WorkflowKey) -> Result<Option<Admission>, StoreError> {
        Ok(self.tables().admissions.get(key).cloned())
    }

    fn events(&self, key: &WorkflowKey, from: u64, limit: usize) -> Result<Vec<Logged>, StoreError> {
        let tables = self.tables();
        let Some(log) = tables.events.get(key) else { return Ok(Vec::new()) };
        let page = (0u64..).zip(log).skip(usize::try_from(from).unwrap_or(usize::MAX)).take(limit);
        Ok(page.map(|(seq, (at, event))| Logged { seq, at: *at, event: event.clone() }).collect())
    }

    fn variable(&self, key: &WorkflowKey, name: &Key) -> Result<Option<Variable>, StoreError> {
        let tables = self.tables();
        let found = tables.scratchpad.get(key).and_then(|variables| variables.get(name));
        Ok(found.map(|(value, seq)| Variable { key: name.clone(), value: value.clone(), seq: *seq }))
    }

    fn variables(&self, key: &WorkflowKey, after: Option<&Key>, limit: usize) -> Result<Vec<Variable>, StoreError> {
        let tables = self.tables();
        let Some(variables) = tables.scratchpad.get(key) else { return Ok(Vec::new()) };
        let page = variables.iter().filter(|(name, _)| after.is_none_or(|after| *name > after)).take(limit);
        Ok(page.map(|(key, (value, seq))| Variable { key: key.clone(), value: value.clone(), seq: *seq }).collect())
    }

    fn signals(&self, key: &WorkflowKey, after: u64, limit: usize) -> Result<Vec<Pending>, StoreError> {
        Ok(self.tables().pending(key, after).take(limit).collect())
    }

    fn list(&self, filter: &Filter, before: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let tables = self.tables();
        let mut items = Vec::new();
        let mut last = None;
        let before = before.map_or(i64::MAX, |cursor| cursor.0);
        let rows = tables.numbers.range(..before).rev();
        for (looked, (number, key)) in rows.enumerate() {
            if items.len() == limit || looked == LOOK_MAX {
                return Ok(Page { items, next: last });
            }
            last = Some(Cursor(*number));
            let (_, head) = &tables.heads[key];
            if key.namespace == filter.namespace
                && filter.name.as_ref().is_none_or(|name| *name == head.name)
                && filter.status.is_none_or(|status| status == head.status())
            {
                items.push(Listed { cursor: Cursor(*number), head: head.clone() });
            }
        }
        Ok(Page { items, next: None })
    }

    fn next_due(&self) -> Result<Option<i64>, StoreError> {
        let tables = self.tables();
        let first = |wake: Wake| tables.timed.iter().find(|(w, _, _, _)| *w == wake).map(|(_, due, _, _)| *due);
        Ok([first(Wake::Lease), first(Wake::Timer)].into_iter().flatten().min())
    }

    fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Verified, StoreError> {
        let tables = self.tables();
        let mut verified = Verified::default();
        for (key, log) in &tables.events {
            let mut rebuilt = Rebuilt::new(key.clone());
            for (seq, (at, event)) in (0u64..).zip(log) {
                rebuilt.event(seq, *at, event);
                verified.events += 1;
            }
            for (name, (value, seq)) in tables.scratchpad.get(key).into_iter().flatten() {
                rebuilt.variable(name, value, *seq);
            }
            for signal in tables.signals.get(key).into_iter().flatten() {
                rebuilt.signal(&signal.name, &signal.id, signal.taken);
            }
            let head = tables.heads.get(key).map(|(_, head)| head);
            rebuilt.finish(head).into_iter().for_each(|fault| verified.fault(fault));
            if !tables.admissions.contains_key(key) {
                let detail = "there is a log without a receipt".to_owned();
                verified.fault(Fault { key: key.clone(), code: "no_receipt", detail });
            }
            verified.workflows += 1;
            progress(verified.workflows);
        }
        Ok(verified)
    }

    fn bytes(&self) -> Result<u64, StoreError> {
        Ok(0)
    }
}
