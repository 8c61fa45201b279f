//! Snapshot: the rows a batch of commands looks at, what they changed, and what is still to be loaded.
//!
//! # One batch
//! The committer loads what its commands want ([`Wants`]) into a snapshot, decides each command in order on it and
//! saves the difference ([`Snapshot::changed_heads`] and its siblings). A later command sees what earlier ones decided.
//!
//! # Missing rows
//! A decision that finds a row not loaded stops with [`Stop::Missing`] *before it has changed anything*; the
//! committer loads that row and decides the command again. So the common case names its rows beforehand and the
//! rare one (a repeated completion that must look into the log) pays for its own look-up.
//!
//! # Loaded never overwrites decided
//! A row that is loaded a second time (a ready row that is also named by a completion) keeps what the snapshot
//! has: it is as new or newer.
#![expect(clippy::disallowed_types, reason = "hashed without a random seed, and put in order wherever order shows")]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use crate::claim::{Announced, Call, CallId};
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::head::{Claim, Head, Placed};
use crate::json::Json;
use crate::options::Options;
use crate::signal::{Pending, Receipt, Send};
use crate::state::{IllegalEvent, State, Status};
use crate::text::{Key, Name, Namespace, SignalId, SignalName, Step, WorkflowKey};

/// Hashes the same in every process: nothing here is random. Who chose ids that collide would slow down one batch.
type Hashed = BuildHasherDefault<DefaultHasher>;

/// Workflows in no order.
pub type Keys = HashSet<WorkflowKey, Hashed>;

/// The durable proof that a start was accepted. It outlives the workflow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// What was started.
    pub key: WorkflowKey,
    /// The digest of what was asked.
    pub fingerprint: Fingerprint,
    /// When.
    pub admitted_at: i64,
}

/// A position in the order of open claims, for paging through them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimCursor {
    /// The sweep time of the last one seen.
    pub look_at: i64,
    /// Its workflow.
    pub key: WorkflowKey,
}

/// Rows to load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wants {
    /// Admissions by key.
    pub admissions: Keys,
    /// Heads by key.
    pub heads: Keys,
    /// Single events by position.
    pub events: BTreeSet<(WorkflowKey, u64)>,
    /// Receipts of signals, each with the number of its workflow's last one.
    pub signals: BTreeSet<(WorkflowKey, SignalId)>,
    /// The first [`PENDING_PAGE`] pending signals of a name behind that number.
    pub pending: BTreeMap<(WorkflowKey, SignalName), u64>,
    /// Earlier claim calls by namespace and request id.
    pub calls: BTreeSet<(Namespace, CallId)>,
    /// The first so many ready heads that a worker knows, in claim order.
    pub ready: BTreeMap<Arc<Announced>, usize>,
    /// The first so many heads whose time has come at that instant, in order of time.
    pub due: Option<(i64, usize)>,
    /// The next so many heads with an open claim.
    pub open: Option<(Option<ClaimCursor>, usize)>,
}

/// How many pending signals are loaded at once.
pub const PENDING_PAGE: usize = 8;

fn one(key: &WorkflowKey) -> Keys {
    std::iter::once(key.clone()).collect()
}

impl Wants {
    /// True when nothing is wanted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds a page of ready heads; of two pages for the same announcement the larger wins.
    pub fn ready(&mut self, announced: &Arc<Announced>, limit: usize) {
        let wanted = self.ready.entry(announced.clone()).or_default();
        *wanted = (*wanted).max(limit);
    }
}

/// What a store calls a workflow among its rows: greater for one that was admitted later, and else without a meaning.
pub type Handle = i64;

/// Why a decision could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// Rows it needs are not in the snapshot. Nothing was changed.
    Missing(Box<Wants>),
    /// A rule tried to write an event that may not stand there: a fault of ours. The snapshot is spoiled.
    Illegal(IllegalEvent),
}

impl From<IllegalEvent> for Stop {
    fn from(illegal: IllegalEvent) -> Self {
        Self::Illegal(illegal)
    }
}

/// An event to be appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// Whose log.
    pub key: WorkflowKey,
    /// What the store calls it; `None` for one that this batch admits.
    pub handle: Option<Handle>,
    /// Its position.
    pub seq: u64,
    /// When, by the store's clock.
    pub at: i64,
    /// What happened.
    pub event: Event,
}

/// How a head differs from what the store has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadChange {
    /// The store has none.
    Insert,
    /// The same status and the same place in both scheduling indexes: they need not be touched.
    InPlace,
    /// Its status or its place in a scheduling index changes.
    Move,
}

#[derive(Debug)]
struct Cell {
    head: Head,
    /// `None` when there is no stored row.
    stored: Option<Was>,
    dirty: bool,
    /// What was written to its scratchpad.
    variables: BTreeMap<Key, NewValue>,
}

impl Cell {
    fn handle(&self) -> Option<Handle> {
        self.stored.as_ref().map(|was| was.handle)
    }
}

/// How far the ready index was read for one announcement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyPage {
    /// How many were asked for.
    pub limit: usize,
    /// The rank of the last row when there may be more behind it; `None` when the index was read to its end.
    pub until_rank: Option<i64>,
}

/// The page of open claims that was read last.
#[derive(Debug)]
struct OpenPage {
    after: Option<ClaimCursor>,
    limit: usize,
    keys: Vec<WorkflowKey>,
}

/// What a batch leads to besides rows: hints, never needed for correctness.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// How many heads became ready and were not claimed in the same batch, by definition and step.
    pub ready: BTreeMap<(Name, Step), usize>,
    /// The earliest instant at which a changed head becomes due.
    pub due: Option<i64>,
    /// Workflows that ended, with their terminal event.
    pub ended: Vec<(WorkflowKey, Event)>,
}

/// A variable's new value, or `None` to delete it.
#[derive(Debug)]
struct NewValue {
    value: Option<Json>,
    seq: u64,
}

/// A variable to be saved.
#[derive(Debug)]
pub struct ChangedVariable<'a> {
    /// Whose.
    pub workflow: &'a WorkflowKey,
    /// What the store calls that workflow; `None` for one that this batch admits.
    pub handle: Option<Handle>,
    /// Its name.
    pub key: &'a Key,
    /// Its value, or `None` to delete it.
    pub value: Option<&'a Json>,
    /// The event that wrote it.
    pub seq: u64,
}

/// A signal to be put into its workflow's inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSignal {
    /// Whose.
    pub workflow: WorkflowKey,
    /// What the store calls that workflow; `None` for one that this batch admits.
    pub handle: Option<Handle>,
    /// The signal.
    pub signal: Pending,
    /// The digest of what was asked.
    pub fingerprint: Fingerprint,
    /// The event that took it, in this batch: the inbox then keeps no payload.
    pub taken: Option<u64>,
}

/// A signal of a stored inbox that a wait has taken: the inbox keeps its receipt, the log has its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenSignal {
    /// Whose.
    pub workflow: WorkflowKey,
    /// What the store calls that workflow.
    pub handle: Option<Handle>,
    /// Its place in the inbox.
    pub number: u64,
    /// The event that took it.
    pub seq: u64,
}

/// How far the pending signals of one name are known.
#[derive(Debug, Default)]
struct Inbox {
    /// The next ones, in order.
    next: VecDeque<Pending>,
    /// Behind this number there may be others.
    until: u64,
    /// There are no others.
    all: bool,
}

/// A head to be saved.
#[derive(Debug)]
pub struct ChangedHead<'a> {
    /// Its new state.
    pub head: &'a Head,
    /// What the store calls it; `None` for one that this batch admits.
    pub handle: Option<Handle>,
    /// How it differs from what the store has.
    pub change: HeadChange,
    /// The stored row, where there is one.
    pub was: Option<&'a Was>,
}

/// What a decision may not forget of the row that the store has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Was {
    /// What the store calls it.
    pub handle: Handle,
    /// Where it stands.
    pub placed: Placed,
    /// Its status.
    pub status: Status,
    /// The step it stands on.
    pub step: Option<Step>,
}

/// The rows of one batch.
#[derive(Debug, Default)]
pub struct Snapshot {
    admissions: HashMap<WorkflowKey, Option<Admission>, Hashed>,
    heads: HashMap<WorkflowKey, Option<Cell>, Hashed>,
    events: BTreeMap<(WorkflowKey, u64), Option<Event>>,
    signals: BTreeMap<(WorkflowKey, SignalId), Option<Receipt>>,
    last_signals: BTreeMap<WorkflowKey, u64>,
    inboxes: BTreeMap<(WorkflowKey, SignalName), Inbox>,
    calls: BTreeMap<(Namespace, CallId), Option<Call>>,
    ready: BTreeMap<Arc<Announced>, ReadyPage>,
    due_loaded: Option<usize>,
    open_loaded: Option<OpenPage>,

    new_admissions: Vec<Admission>,
    appended: Vec<Appended>,
    new_calls: Vec<Call>,
    new_signals: Vec<NewSignal>,
    taken_signals: Vec<TakenSignal>,
}

impl Snapshot {
    /// An empty snapshot.
    pub fn new() -> Self {
        Self::default()
    }

    // ---- loading: called by stores ----

    /// Puts in an admission look-up.
    pub fn load_admission(&mut self, key: WorkflowKey, admission: Option<Admission>) {
        self.admissions.entry(key).or_insert(admission);
    }

    /// Puts in a head look-up.
    pub fn load_head(&mut self, key: WorkflowKey, found: Option<(Handle, Head)>) {
        self.heads.entry(key).or_insert_with(|| {
            found.map(|(handle, head)| {
                let step = head.visit().map(|visit| visit.step.clone());
                let stored = Some(Was { handle, placed: head.placed(), status: head.status(), step });
                Cell { head, stored, dirty: false, variables: BTreeMap::new() }
            })
        });
    }

    /// Puts in an event look-up.
    pub fn load_event(&mut self, key: WorkflowKey, seq: u64, event: Option<Event>) {
        self.events.entry((key, seq)).or_insert(event);
    }

    /// Puts in a look-up of a signal, with the number of its workflow's last one, 0 where there is none.
    pub fn load_signal(&mut self, key: WorkflowKey, id: SignalId, receipt: Option<Receipt>, last: u64) {
        self.last_signals.entry(key.clone()).or_insert(last);
        self.signals.entry((key, id)).or_insert(receipt);
    }

    /// Puts in the first [`PENDING_PAGE`] pending signals of a name behind the number that was wanted.
    pub fn load_pending(&mut self, key: WorkflowKey, name: SignalName, pending: Vec<Pending>) {
        let inbox = self.inboxes.entry((key.clone(), name.clone())).or_default();
        if inbox.all || !inbox.next.is_empty() {
            return;
        }
        inbox.all = pending.len() < PENDING_PAGE;
        inbox.until = pending.last().map_or(inbox.until, |last| last.number);
        inbox.next.extend(pending);
        if inbox.all {
            let new = self.new_signals.iter().filter(|new| new.taken.is_none());
            let new = new.filter(|new| new.workflow == key && new.signal.name == name);
            inbox.next.extend(new.map(|new| new.signal.clone()));
        }
    }

    /// Puts in a claim call look-up.
    pub fn load_call(&mut self, namespace: Namespace, id: CallId, call: Option<Call>) {
        self.calls.entry((namespace, id)).or_insert(call);
    }

    /// Puts in a page of ready heads in claim order.
    pub fn load_ready(&mut self, announced: Arc<Announced>, limit: usize, heads: Vec<(Handle, Head)>) {
        let until_rank = if heads.len() < limit { None } else { heads.last().and_then(|(_, head)| head.placed().rank) };
        for found in heads {
            self.load_head(found.1.key.clone(), Some(found));
        }
        self.ready.insert(announced, ReadyPage { limit, until_rank });
    }

    /// Puts in the heads whose time has come.
    pub fn load_due(&mut self, heads: Vec<(Handle, Head)>) {
        self.due_loaded = Some(heads.len());
        for found in heads {
            self.load_head(found.1.key.clone(), Some(found));
        }
    }

    /// Puts in the page of heads with an open claim that was wanted with these bounds.
    pub fn load_open(&mut self, after: Option<ClaimCursor>, limit: usize, heads: Vec<(Handle, Head)>) {
        let keys = heads.iter().map(|(_, head)| head.key.clone()).collect();
        self.open_loaded = Some(OpenPage { after, limit, keys });
        for found in heads {
            self.load_head(found.1.key.clone(), Some(found));
        }
    }

    /// The heads that the store has.
    pub fn stored(&self) -> impl Iterator<Item = (Handle, WorkflowKey)> {
        self.heads.values().flatten().filter_map(|cell| Some((cell.handle()?, cell.head.key.clone())))
    }

    /// True when this head was already looked up.
    pub fn has_head(&self, key: &WorkflowKey) -> bool {
        self.heads.contains_key(key)
    }

    /// True when this admission was already looked up.
    pub fn has_admission(&self, key: &WorkflowKey) -> bool {
        self.admissions.contains_key(key)
    }

    // ---- looking: called by decisions ----

    /// The admission of `key`.
    pub(crate) fn admission(&self, key: &WorkflowKey) -> Result<Option<&Admission>, Stop> {
        self.admissions
            .get(key)
            .map(Option::as_ref)
            .ok_or_else(|| Stop::Missing(Box::new(Wants { admissions: one(key), ..Wants::default() })))
    }

    /// The head of `key`.
    pub(crate) fn head(&self, key: &WorkflowKey) -> Result<Option<&Head>, Stop> {
        self.heads
            .get(key)
            .map(|cell| cell.as_ref().map(|cell| &cell.head))
            .ok_or_else(|| Stop::Missing(Box::new(Wants { heads: one(key), ..Wants::default() })))
    }

    /// The events of `key` at `seqs`, those decided in this batch included.
    pub(crate) fn events<const N: usize>(
        &self,
        key: &WorkflowKey,
        seqs: [u64; N],
    ) -> Result<[Option<&Event>; N], Stop> {
        let mut wants = Wants::default();
        let found = seqs.map(|seq| {
            if let Some(new) = self.appended.iter().find(|new| new.seq == seq && new.key == *key) {
                return Some(&new.event);
            }
            match self.events.get(&(key.clone(), seq)) {
                Some(event) => event.as_ref(),
                None => {
                    wants.events.insert((key.clone(), seq));
                    None
                }
            }
        });
        if wants.is_empty() { Ok(found) } else { Err(Stop::Missing(Box::new(wants))) }
    }

    /// The receipt of this signal.
    pub(crate) fn signal(&self, key: &WorkflowKey, id: &SignalId) -> Result<Option<&Receipt>, Stop> {
        let signal = (key.clone(), id.clone());
        match self.signals.get(&signal) {
            Some(receipt) => Ok(receipt.as_ref()),
            None => Err(Stop::Missing(Box::new(Wants { signals: [signal].into(), ..Wants::default() }))),
        }
    }

    /// The first pending signal of this name.
    pub(crate) fn pending(&self, key: &WorkflowKey, name: &SignalName) -> Result<Option<&Pending>, Stop> {
        let inbox = (key.clone(), name.clone());
        let until = match self.inboxes.get(&inbox) {
            Some(inbox) if inbox.all || !inbox.next.is_empty() => return Ok(inbox.next.front()),
            Some(inbox) => inbox.until,
            None => 0,
        };
        Err(Stop::Missing(Box::new(Wants { pending: [(inbox, until)].into(), ..Wants::default() })))
    }

    /// The earlier claim call of this request id.
    pub(crate) fn call(&self, namespace: &Namespace, id: &CallId) -> Result<Option<&Call>, Stop> {
        let call = (namespace.clone(), id.clone());
        match self.calls.get(&call) {
            Some(found) => Ok(found.as_ref()),
            None => Err(Stop::Missing(Box::new(Wants { calls: [call].into(), ..Wants::default() }))),
        }
    }

    /// The first `n` ready heads that the worker knows, in claim order, as the batch sees them.
    pub(crate) fn ready(&self, announced: &Arc<Announced>, n: usize) -> Result<Vec<WorkflowKey>, Stop> {
        let more = |limit| {
            let mut wants = Wants::default();
            wants.ready(announced, limit);
            Err(Stop::Missing(Box::new(wants)))
        };
        let Some(page) = self.ready.get(announced) else { return more(n) };
        // Of those that became ready in the same millisecond the one that was admitted first, as the page has them.
        let mut found: Vec<(i64, Handle, &WorkflowKey)> = self
            .heads
            .values()
            .flatten()
            .filter_map(|cell| Some((cell.head.placed().rank?, cell.handle().unwrap_or(Handle::MAX), &cell.head)))
            .filter(|(_, _, head)| head.key.namespace == announced.namespace)
            .filter(|(_, _, head)| head.visit().is_some_and(|visit| announced.knows(&head.name, &visit.step)))
            // Behind the end of the page, stored rows that were not loaded may come first.
            .filter(|(rank, _, _)| page.until_rank.is_none_or(|until| *rank <= until))
            .map(|(rank, handle, head)| (rank, handle, &head.key))
            .collect();
        found.sort_unstable();
        if found.len() < n && page.until_rank.is_some() {
            return more((page.limit * 2).max(n));
        }
        Ok(found.into_iter().take(n).map(|(_, _, key)| key.clone()).collect())
    }

    /// Up to `limit` heads whose time has come at `now`, and whether the store may have more.
    pub(crate) fn due(&self, now: i64, limit: usize) -> Result<(Vec<WorkflowKey>, bool), Stop> {
        let Some(loaded) = self.due_loaded else {
            return Err(Stop::Missing(Box::new(Wants { due: Some((now, limit)), ..Wants::default() })));
        };
        let mut found: Vec<(i64, &WorkflowKey)> = self
            .heads
            .values()
            .flatten()
            .filter_map(|cell| Some((cell.head.placed().due?.1, &cell.head.key)))
            .filter(|(due, _)| *due <= now)
            .collect();
        found.sort_unstable();
        found.truncate(limit);
        Ok((found.into_iter().map(|(_, key)| key.clone()).collect(), loaded >= limit))
    }

    /// The loaded page of heads with an open claim.
    pub(crate) fn open(&self, after: Option<&ClaimCursor>, limit: usize) -> Result<Vec<WorkflowKey>, Stop> {
        match &self.open_loaded {
            Some(page) if page.after.as_ref() == after && page.limit == limit => Ok(page.keys.clone()),
            // None yet, or that of another command of the batch.
            _ => Err(Stop::Missing(Box::new(Wants { open: Some((after.cloned(), limit)), ..Wants::default() }))),
        }
    }

    // ---- deciding: called by decisions, after every look ----

    /// Admits a workflow: receipt, first event, head and initial scratchpad.
    pub(crate) fn create(
        &mut self,
        admission: Admission,
        name: &Name,
        options: Options,
        event: Event,
        at: i64,
    ) -> Result<(), IllegalEvent> {
        let key = admission.key.clone();
        let head = Head {
            key: key.clone(),
            name: name.clone(),
            options: Arc::new(options),
            seq: 0,
            state: State::first(&event, at)?,
            claim: None,
            created_at: at,
            updated_at: at,
        };
        let mut cell = Cell { head, stored: None, dirty: true, variables: BTreeMap::new() };
        remember_writes(&mut cell.variables, &event, 0);
        self.admissions.insert(key.clone(), Some(admission.clone()));
        self.heads.insert(key.clone(), Some(cell));
        self.new_admissions.push(admission);
        self.appended.push(Appended { key, handle: None, seq: 0, at, event });
        Ok(())
    }

    /// Appends an event to the log of `key` and moves its head along. `claim` is the open claim after it.
    ///
    /// # Panics
    /// If the head is not loaded: decisions look before they write.
    pub(crate) fn append(
        &mut self,
        key: &WorkflowKey,
        event: Event,
        claim: Option<Claim>,
        now: i64,
    ) -> Result<u64, IllegalEvent> {
        let cell = self.heads.get_mut(key).and_then(Option::as_mut).expect("decisions look before they write");
        let head = &mut cell.head;
        // The store's clock never runs backwards within one log, whatever the caller's batch says.
        let at = now.max(head.updated_at);
        let state = head.state.after(&event, at)?;
        assert_eq!(
            matches!(state, State::Running { .. }),
            claim.is_some(),
            "a claim is open exactly while a step runs"
        );
        head.seq += 1;
        head.state = state;
        head.claim = claim;
        head.updated_at = at;
        cell.dirty = true;
        let seq = head.seq;
        let handle = cell.handle();
        remember_writes(&mut cell.variables, &event, seq);
        self.appended.push(Appended { key: key.clone(), handle, seq, at, event });
        Ok(seq)
    }

    /// Changes a head without an event: what the log does not hold (lease, progress, a sleep that is over).
    pub(crate) fn touch(&mut self, key: &WorkflowKey, change: impl FnOnce(&mut Head)) {
        let cell = self.heads.get_mut(key).and_then(Option::as_mut).expect("decisions look before they write");
        change(&mut cell.head);
        cell.dirty = true;
    }

    /// Puts a signal into its workflow's inbox.
    ///
    /// # Panics
    /// If its receipt is not looked up: decisions look before they write.
    pub(crate) fn accept(&mut self, send: &Send, accepted_at: i64) {
        let last = self.last_signals.get_mut(&send.key).expect("decisions look before they write");
        *last += 1;
        let Send { key, name, id, payload, fingerprint } = send.clone();
        let signal = Pending { number: *last, name: name.clone(), id: id.clone(), payload, accepted_at };
        self.signals.insert((key.clone(), id), Some(Receipt { fingerprint, accepted_at }));
        let inbox = self.inboxes.get_mut(&(key.clone(), name));
        if let Some(inbox) = inbox.filter(|inbox| inbox.all) {
            inbox.next.push_back(signal.clone());
        }
        let handle = self.heads.get(&key).and_then(Option::as_ref).and_then(Cell::handle);
        self.new_signals.push(NewSignal { workflow: key, handle, signal, fingerprint, taken: None });
    }

    /// Notes that the first pending signal of a name was taken by the event `seq`.
    ///
    /// # Panics
    /// If there is none: decisions look before they write.
    pub(crate) fn taken(&mut self, key: &WorkflowKey, name: &SignalName, seq: u64) {
        let inbox = self.inboxes.get_mut(&(key.clone(), name.clone())).expect("decisions look before they write");
        let Pending { number, .. } = inbox.next.pop_front().expect("decisions look before they write");
        let new = self.new_signals.iter_mut().find(|new| new.workflow == *key && new.signal.number == number);
        if let Some(new) = new {
            new.taken = Some(seq);
            return;
        }
        let handle = self.heads.get(key).and_then(Option::as_ref).and_then(Cell::handle);
        self.taken_signals.push(TakenSignal { workflow: key.clone(), handle, number, seq });
    }

    /// Remembers what a claim call was given.
    pub(crate) fn remember_call(&mut self, call: Call) {
        self.calls.insert((call.namespace.clone(), call.id.clone()), Some(call.clone()));
        self.new_calls.push(call);
    }

    // ---- saving: called by stores ----

    /// True when there is something to save.
    pub fn is_changed(&self) -> bool {
        !self.new_admissions.is_empty()
            || !self.appended.is_empty()
            || !self.new_calls.is_empty()
            || !self.new_signals.is_empty()
            || self.heads.values().flatten().any(|cell| cell.dirty)
    }

    /// The receipts to insert, first of all: their primary key is the last line of defence.
    pub fn new_admissions(&self) -> &[Admission] {
        &self.new_admissions
    }

    /// The events to append, in order.
    pub fn appended(&self) -> &[Appended] {
        &self.appended
    }

    /// What changed, in the order of the store's own rows; what this batch admits comes last.
    fn changed(&self) -> impl Iterator<Item = &Cell> {
        let mut changed: Vec<&Cell> = self.heads.values().flatten().filter(|cell| cell.dirty).collect();
        let place = |cell: &Cell| cell.handle().unwrap_or(Handle::MAX);
        changed.sort_unstable_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.head.key.cmp(&b.head.key)));
        changed.into_iter()
    }

    /// The heads to save, in the order of the store's rows.
    pub fn changed_heads(&self) -> impl Iterator<Item = ChangedHead<'_>> {
        self.changed().map(|cell| ChangedHead {
            head: &cell.head,
            handle: cell.handle(),
            was: cell.stored.as_ref(),
            change: match &cell.stored {
                None => HeadChange::Insert,
                // A sleep and a backoff may end at the same instant: the same place, but another status.
                Some(was) if (was.placed, was.status) == (cell.head.placed(), cell.head.status()) => {
                    HeadChange::InPlace
                }
                Some(_) => HeadChange::Move,
            },
        })
    }

    /// The scratchpad rows to save, in the order of the store's rows.
    pub fn changed_variables(&self) -> impl Iterator<Item = ChangedVariable<'_>> {
        self.changed().flat_map(|cell| {
            cell.variables.iter().map(|(key, new)| ChangedVariable {
                workflow: &cell.head.key,
                handle: cell.handle(),
                key,
                value: new.value.as_ref(),
                seq: new.seq,
            })
        })
    }

    /// The signals to put into inboxes, in order.
    pub fn new_signals(&self) -> &[NewSignal] {
        &self.new_signals
    }

    /// The signals of stored inboxes that were taken.
    pub fn taken_signals(&self) -> &[TakenSignal] {
        &self.taken_signals
    }

    /// The claim calls to remember.
    pub fn new_calls(&self) -> &[Call] {
        &self.new_calls
    }

    /// What to wake after the commit.
    pub fn hints(&self) -> Hints {
        let mut hints = Hints::default();
        for cell in self.heads.values().flatten().filter(|cell| cell.dirty) {
            let placed = cell.head.placed();
            if let (Some(_), Some(visit)) = (placed.rank, cell.head.visit()) {
                *hints.ready.entry((cell.head.name.clone(), visit.step.clone())).or_default() += 1;
            }
            if let Some((_, due)) = placed.due {
                hints.due = Some(hints.due.map_or(due, |earlier| earlier.min(due)));
            }
        }
        let ended = self.appended.iter().filter(|new| new.event.is_terminal());
        hints.ended = ended.map(|new| (new.key.clone(), new.event.clone())).collect();
        hints
    }
}

fn remember_writes(variables: &mut BTreeMap<Key, NewValue>, event: &Event, seq: u64) {
    for write in event.writes().iter().flat_map(|writes| writes.iter()) {
        variables.insert(write.key.clone(), NewValue { value: write.value.clone(), seq });
    }
}
