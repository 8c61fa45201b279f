//! The writing connection: a round trip to load a batch, and one to save and commit it; for what goes on where this
//! process left it, the second alone.
//!
//! # Without a look
//! A step's commit finds the head as this process wrote it last in memory, see [`remembered`](super::remembered), and a
//! start takes for granted that its id is new. Both are proved by the statements that save: a head is changed under the
//! revision that was decided on, a receipt has its primary key. Where it turns out otherwise nothing was written, and
//! the batch is decided anew from what is loaded. A batch that wants anything else, such as a head that is not remembered
//! or a page of ready ones, is loaded whole, which locks its heads.
//!
//! # Locks
//! The first load of a batch locks the heads that its commands name, in the order of their keys; pages of ready and due
//! heads pass over what is locked. What turns out to be needed later is not waited for: when another node holds it,
//! everything is let go of and the batch is decided anew, with all of it named from the beginning. A save changes heads
//! first, in the same order, and then writes receipts in the order of their keys. So nodes wait for each other in one
//! direction only.
//!
//! # A commit without an answer
//! Each batch has a number of its writer's and leaves it in a row of its own. When the connection is lost before the
//! answer to the commit, the writer puts in a void row of that number: where the batch has committed there is one already,
//! and where it has not it never can any more, though it may still be on its way. That holds on whatever server the
//! writer finds, also on a standby that was promoted: what is not there has not happened. A commit that waits for a
//! standby is left to wait, and the void row waits for the standby behind it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steadfast_core::claim::{Announced, Call, CallId, Steps};
use steadfast_core::fingerprint::Fingerprint;
use steadfast_core::head::{Claim, Head, Wake};
use steadfast_core::json::Json;
use steadfast_core::signal::{Pending, Receipt};
use steadfast_core::snapshot::{
    Admission, ChangedHead, ClaimCursor, Handle, HeadChange, PENDING_PAGE, Snapshot, Wants,
};
use steadfast_core::state::Status;
use steadfast_core::text::{Namespace, SignalId, SignalName, Step, WorkflowId, WorkflowKey};
use tokio::runtime::Runtime;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Row};

use super::floors::Queue;
use super::remembered::{Kept, Life};
use super::rows;
use super::session::{Backend, Kind, Purpose, Session, cause, kind, note, postgres, told};
use super::statements::{W, WRITER};
use super::{Shared, board, migrate};
use crate::contract::{Disk, Fate, Saved, StoreError, Writer};
use crate::stored::{Stored, signed, stored_options, wake_number};

/// How many workflows are remembered by number, so that a step need not look its workflow up by id.
const KNOWN_MAX: usize = 65_536;
/// Claim calls are remembered for a day.
const CALL_AGE_MS: i64 = 86_400_000;
/// A text that no step's name comes after.
const BEHIND_ALL: &str = "\u{10FFFF}";
/// How long a batch may take to load or to save before its connection is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// A batch costs a round trip and a commit however small it is: worth a little waiting.
const GATHERS: Duration = Duration::from_micros(200);
/// How many batches look for the receipts of their starts after one that took an id for new which was not: at first, and
/// at most where that happens again and again.
const LOOKS_FIRST: (u32, u32) = (16, 4_096);
/// Odd, so that no two batches of a writer come to the same revision; large, so that those of two writers are far apart.
const SPREAD: i64 = 0x5851_F42D_4C95_7F2D;
/// A writer's rows of batches: so many of the last are kept, and as many are deleted together.
const BATCHES_KEPT: i64 = 128;

/// One of the store's writers.
pub(super) struct PostgresWriter {
    shared: Arc<Shared>,
    /// Goes after the session, whose connection it carries.
    runtime: Option<Runtime>,
    /// `None` between the loss of a connection and the recovery from it.
    session: Option<Session>,
    epoch: u64,
    namespaces: Namespaces,
    /// Numbers never change: what was read once holds.
    known: HashMap<WorkflowKey, i64>,
    /// What this writer is called, and how many batches it has sent.
    name: i64,
    sent: i64,
    /// The rows of batches before this one are deleted.
    forgotten: i64,
    batch: Option<Batch>,
    /// Decides the next batch on what is loaded: the last one has met somebody.
    careful: bool,
    starts: Starts,
    /// A commit whose answer was lost.
    lost: Option<Lost>,
    /// The connection was made to ask what became of it.
    asks: bool,
    /// Numbers of heads that cannot be read: reported once, then left out of every page.
    corrupt: BTreeSet<i64>,
    /// Numbers of heads that could not be saved: left out of every page for now.
    left_out: BTreeSet<i64>,
}

/// A batch under way.
#[derive(Debug, Default)]
struct Batch {
    /// A transaction was sent for it, and may be open.
    begun: bool,
    /// What it looks at, by the number of the head.
    seen: HashMap<i64, Seen>,
    /// Those of them that were not loaded.
    unproved: BTreeSet<i64>,
    /// It admits by taking for granted that ids are new.
    trusts: bool,
    /// Numbers for what it may admit.
    numbers: Vec<i64>,
}

/// A head as it was before a batch.
#[derive(Debug, Clone)]
struct Seen {
    /// Which batch wrote it.
    revision: i64,
    /// The open claim.
    claim: Option<Claim>,
}

impl Seen {
    /// True when the same worker goes on: of its claim nothing has changed but what every step brings.
    fn goes_on(&self, head: &Head) -> bool {
        let (Some(was), Some(is)) = (&self.claim, &head.claim) else { return false };
        was.worker == is.worker
            && (was.epoch, was.lease_ms, was.look_at) == (is.epoch, is.lease_ms, is.look_at)
            && was.progress.is_none()
            && is.progress.is_none()
    }
}

/// Whether starts are worth a look at the receipts first: mostly not, but where many are sent a second time.
#[derive(Debug, Default)]
struct Starts {
    /// So many batches are still to look.
    look: u32,
    /// How many did after the last surprise.
    last: u32,
}

impl Starts {
    /// A batch with starts begins; true when it had better look.
    fn looks(&mut self) -> bool {
        let looks = self.look > 0;
        self.look = self.look.saturating_sub(1);
        looks
    }

    /// An id that was taken for new was not.
    fn surprised(&mut self) {
        self.last = (self.last * 2).clamp(LOOKS_FIRST.0, LOOKS_FIRST.1);
        self.look = self.last;
    }

    /// All ids were new.
    fn right(&mut self) {
        self.last -= self.last / 16;
    }
}

/// A batch without an answer.
#[derive(Debug, Clone)]
struct Lost {
    batch: i64,
    /// What carried it, where that is known.
    backend: Option<Backend>,
}

/// Namespaces by number and back; few, and never deleted.
#[derive(Default)]
struct Namespaces {
    by_name: BTreeMap<Namespace, i32>,
    by_number: BTreeMap<i32, Namespace>,
}

impl Namespaces {
    fn add(&mut self, number: i32, name: Namespace) {
        self.by_number.insert(number, name.clone());
        self.by_name.insert(name, number);
    }
}

/// Names of rows as arrays: by number where that is known, by id elsewhere.
#[derive(Default)]
struct Named {
    numbered: Vec<i64>,
    by_id: (Vec<i32>, Vec<String>),
}

impl Named {
    fn is_empty(&self) -> bool {
        self.numbered.is_empty() && self.by_id.0.is_empty()
    }
}

/// Statements of one round trip and what came back, in order.
type Sent<'a> = Vec<(W, Vec<&'a (dyn ToSql + Sync)>)>;

impl PostgresWriter {
    /// Connects.
    pub(super) fn new(shared: Arc<Shared>) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|source| {
            StoreError::File { doing: "start a runtime for", path: shared.place.to_string().into(), source }
        })?;
        let mut writer = Self {
            epoch: shared.identity.epoch,
            shared,
            runtime: Some(runtime),
            session: None,
            namespaces: Namespaces::default(),
            known: HashMap::new(),
            name: random_name()?,
            sent: 0,
            forgotten: 0,
            batch: None,
            careful: false,
            starts: Starts::default(),
            lost: None,
            asks: false,
            corrupt: BTreeSet::new(),
            left_out: BTreeSet::new(),
        };
        // On a thread of its own: the caller may stand in a runtime, where blocking is forbidden.
        std::thread::scope(|scope| scope.spawn(|| writer.connect()).join()).unwrap_or(Err(StoreError::Recovering))?;
        Ok(writer)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until the writer is dropped")
    }

    /// Connects, and raises the epoch when this is another cluster or timeline than the last writer's.
    fn connect(&mut self) -> Result<(), StoreError> {
        let (session, epoch, namespaces) = self.runtime().block_on(async {
            let shared = &self.shared;
            let session = Session::connect(&shared.place, &shared.learned, &WRITER, Purpose::Write).await?;
            let epoch = board::come_again(&session, &shared.place).await?;
            // As a text: a pooler that nobody has noticed may not know what was prepared.
            let text = shared.place.text(WRITER[W::Namespaces as usize].text);
            let namespaces = session.client.query_typed(&text, &[]).await.map_err(postgres("read the namespaces"))?;
            Ok::<_, StoreError>((session, epoch, namespaces))
        })?;
        self.take_namespaces(&namespaces);
        if epoch != self.epoch {
            tracing::warn!(epoch, "the store has a new epoch: claims of the one before are void");
        }
        self.epoch = epoch;
        self.session = Some(session);
        self.batch = None;
        // In another history the same names may stand for something else.
        self.known.clear();
        self.shared.remembered.clear();
        self.shared.floors.clear();
        self.shared.numbers.clear();
        Ok(())
    }

    /// The life of the store that this connection is in.
    fn life(&self) -> Option<Life> {
        let server = self.session.as_ref()?.server.clone();
        Some(Life { server, epoch: self.epoch })
    }

    fn take_namespaces(&mut self, rows: &[Row]) {
        for row in rows {
            self.namespaces.add(row.get(0), Namespace::trusted(row.get::<_, String>(1)));
        }
    }

    fn namespace(&self, namespace: &Namespace) -> Option<i32> {
        self.namespaces.by_name.get(namespace).copied()
    }

    fn remember(&mut self, key: &WorkflowKey, number: i64) {
        if self.known.contains_key(key) {
            return;
        }
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(key.clone(), number);
    }

    /// Sends statements in one piece, opening the transaction first where none is open, and waits for what comes back.
    fn exchange(&self, sent: &Sent<'_>, begin: bool, commit: bool) -> Result<Vec<Vec<Row>>, Failed> {
        let session = self.session.as_ref().filter(|session| !session.is_overtaken()).ok_or(Failed::None)?;
        let work = async {
            let begun = async { if begin { session.begin().await } else { Ok(()) } };
            let statements =
                futures_util::future::join_all(sent.iter().map(|(which, args)| session.run(*which as usize, args)));
            let committed = async {
                // Not prepared: poolers watch for it, and there is nothing to plan.
                if commit { session.client.batch_execute("commit").await } else { Ok(()) }
            };
            futures_util::join!(begun, statements, committed)
        };
        let timed = self.runtime().block_on(async { tokio::time::timeout(PATIENCE, work).await });
        let Ok((begun, answers, committed)) = timed else { return Err(Failed::Silent) };
        begun.map_err(Failed::Before)?;
        let answers = answers.into_iter().collect::<Result<Vec<_>, _>>().map_err(Failed::Before)?;
        committed.map_err(Failed::AtCommit)?;
        Ok(answers)
    }

    /// Gives the connection up.
    fn lose(&mut self, why: &str) -> StoreError {
        if self.session.take().is_some() {
            tracing::warn!(why, "the connection to the database is lost");
        }
        self.batch = None;
        StoreError::Recovering
    }

    /// What a failure before the commit means; the transaction is then over.
    fn failed(&mut self, doing: &'static str, failed: Failed) -> StoreError {
        match failed {
            Failed::None => StoreError::Recovering,
            Failed::Silent => self.lose("no answer for 30 s"),
            Failed::Before(error) | Failed::AtCommit(error) => {
                note(&self.shared.learned, &error);
                match kind(&error) {
                    Kind::Gone => self.lose(&told(&error)),
                    Kind::Raced => {
                        tracing::debug!(doing, why = told(&error), "another node came first");
                        metrics::counter!("steadfast_raced_total", "cause" => cause(&error)).increment(1);
                        let trusted = self.batch.as_ref().is_some_and(|batch| batch.trusts);
                        let key = error.as_db_error().and_then(|error| error.constraint()).unwrap_or_default();
                        if trusted && key.starts_with("admissions") {
                            self.starts.surprised();
                        }
                        self.careful = true;
                        self.abandon();
                        StoreError::Raced { doing }
                    }
                    Kind::Refused => {
                        self.abandon();
                        postgres(doing)(error)
                    }
                }
            }
        }
    }

    fn named<'k>(&self, keys: impl Iterator<Item = &'k WorkflowKey>) -> Named {
        let mut named = Named::default();
        for key in keys {
            let Some(namespace) = self.namespace(&key.namespace) else { continue };
            match self.known.get(key) {
                Some(number) => named.numbered.push(*number),
                None => {
                    named.by_id.0.push(namespace);
                    named.by_id.1.push(key.id.as_str().to_owned());
                }
            }
        }
        named
    }

    /// Reads the namespaces that are wanted and not known yet: another node may have added them.
    fn learn_namespaces(&mut self, wants: &Wants) -> Result<(), StoreError> {
        let keys = wants.admissions.iter().chain(&wants.heads).map(|key| &key.namespace);
        let calls = wants.calls.iter().map(|(namespace, _)| namespace);
        let ready = wants.ready.keys().map(|announced| &announced.namespace);
        if keys.chain(calls).chain(ready).all(|namespace| self.namespace(namespace).is_some()) {
            return Ok(());
        }
        let answers = self
            .exchange(&vec![(W::Namespaces, vec![])], false, false)
            .map_err(|failed| self.failed("read the namespaces", failed))?;
        self.take_namespaces(&answers[0]);
        Ok(())
    }

    fn page(&self, limit: usize) -> i64 {
        i64::try_from(limit + self.corrupt.len() + self.left_out.len()).unwrap_or(i64::MAX)
    }

    fn report(&mut self, number: i64, error: &StoreError) {
        if self.corrupt.insert(number) {
            tracing::error!(workflow = number, %error, "a stored head cannot be read; run verify");
        }
    }

    /// The heads of a page. Rows that cannot be read are left out: one bad row must not stop a sweep or a claim.
    fn heads_of(&mut self, rows: &[Row], limit: usize) -> Result<Vec<(Handle, Head)>, StoreError> {
        let bound = usize::try_from(self.page(limit)).unwrap_or(usize::MAX);
        if rows.len() > bound {
            let problem = format!("{} rows were locked where {bound} were asked for", rows.len());
            return Err(StoreError::Corrupt { what: "page", key: "?".to_owned(), problem });
        }
        let mut heads = Vec::with_capacity(rows.len());
        for row in rows {
            let (namespace, number) = rows::numbers(row)?;
            if self.left_out.contains(&number) {
                continue;
            }
            let Some(name) = self.namespaces.by_number.get(&namespace) else { continue };
            match rows::head(row, 0, name) {
                Ok(head) if heads.len() < limit => {
                    self.remember(&head.key.clone(), number);
                    self.see(number, row, &head)?;
                    heads.push((number, head));
                }
                Ok(_) => break,
                Err(error) => self.report(number, &error),
            }
        }
        Ok(heads)
    }

    /// The queue that a head stands in, and where.
    fn queue(&self, head: &Head) -> Option<(Queue, i64)> {
        let namespace = self.namespace(&head.key.namespace)?;
        let placed = head.placed();
        if let Some((wake, due)) = placed.due {
            return Some((Queue::Timed(namespace, kind_of(wake)), due));
        }
        let step = head.visit()?.step.to_string();
        Some((Queue::Ready(namespace, head.name.to_string(), step), placed.rank?))
    }

    /// Notes a head that the snapshot gets. What that has already stays, and counts as before.
    fn see(&mut self, number: i64, row: &Row, head: &Head) -> Result<(), StoreError> {
        let revision = rows::revision(row, 0)?;
        if let Some(batch) = &mut self.batch {
            batch.seen.entry(number).or_insert_with(|| Seen { revision, claim: head.claim.clone() });
        }
        Ok(())
    }

    /// Loads a batch from memory, if that is all it takes: heads that this process wrote last, and starts of ids that are
    /// taken for new.
    fn load_nothing(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> bool {
        let Wants { admissions, heads, events, signals, pending, calls, ready, due, open } = wants;
        let inboxes = !(signals.is_empty() && pending.is_empty());
        let others =
            inboxes || !(events.is_empty() && calls.is_empty() && ready.is_empty() && due.is_none() && open.is_none());
        if self.batch.is_some() {
            return false;
        }
        if std::mem::take(&mut self.careful) || others {
            return false;
        }
        let Some(life) = self.life() else { return false };
        if !admissions.is_empty() {
            let is_new = |key: &WorkflowKey| self.namespace(&key.namespace).is_some() && !self.known.contains_key(key);
            let can = admissions.iter().all(is_new);
            // Every batch with starts counts.
            if self.starts.looks() || !can {
                return false;
            }
        }
        if !heads.iter().all(|key| self.namespace(&key.namespace).is_some()) {
            return false;
        }
        let Some(kept) = self.shared.remembered.take(&life, heads.iter()) else { return false };
        let Some(numbers) = self.shared.numbers.take(admissions.len(), Instant::now()) else { return false };
        let mut batch = Batch { trusts: !admissions.is_empty(), numbers, ..Batch::default() };
        for Kept { number, revision, head } in kept {
            batch.seen.insert(number, Seen { revision, claim: head.claim.clone() });
            batch.unproved.insert(number);
            snapshot.load_head(head.key.clone(), Some((number, head)));
        }
        for key in admissions {
            snapshot.load_admission(key.clone(), None);
        }
        self.batch = Some(batch);
        true
    }

    fn load_all(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        self.learn_namespaces(wants)?;
        let is_new = self.batch.is_none();
        let batch = self.batch.get_or_insert_default();
        let first = !std::mem::replace(&mut batch.begun, true);
        let waits = first && batch.unproved.is_empty();
        // Events and the cursor of open claims go by number: whoever is not known by it is looked up first.
        let keys = wants.events.iter().map(|(key, _)| key);
        let cursor = wants.open.iter().filter_map(|(after, _)| after.as_ref()).map(|after| &after.key);
        let unknown = self.named(keys.chain(cursor)).by_id;

        let admissions: Vec<&WorkflowKey> =
            wants.admissions.iter().filter(|key| !snapshot.has_admission(key)).collect();
        let mut receipts: (Vec<i32>, Vec<&str>) = Default::default();
        for key in &admissions {
            if let Some(namespace) = self.namespace(&key.namespace) {
                receipts.0.push(namespace);
                receipts.1.push(key.id.as_str());
            }
        }
        let heads: Vec<&WorkflowKey> = wants.heads.iter().filter(|key| !snapshot.has_head(key)).collect();
        let named = self.named(heads.iter().copied());
        // For these, and as many for the next ones.
        let new = i32::try_from(admissions.len() * 2).unwrap_or(i32::MAX);
        let calls: Vec<(i32, &str)> =
            wants.calls.iter().filter_map(|(namespace, id)| Some((self.namespace(namespace)?, &*id.0))).collect();
        let calls: (Vec<i32>, Vec<&str>) = calls.into_iter().unzip();
        let reads = !wants.ready.is_empty() || wants.due.is_some();
        let read = if reads { self.shared.floors.begin() } else { None };
        let signals = Keyed::of(wants.signals.iter().filter_map(|(key, id)| self.keyed(key, id.as_str(), 0)));
        let pending = wants.pending.iter();
        let pending = Keyed::of(pending.filter_map(|((key, name), after)| self.keyed(key, name.as_str(), *after)));
        let page_of_pending = i64::try_from(PENDING_PAGE).expect("a page is small");
        let ready: Vec<Announcement> =
            wants.ready.iter().map(|(announced, limit)| Announcement::new(self, announced, *limit)).collect();
        let due = wants.due.map(|(now, limit)| (now, self.page(limit), self.shared.floors.timed()));

        let mut sent: Sent<'_> = Vec::new();
        if first {
            sent.push((W::Moment, vec![&new]));
        }
        if !named.is_empty() {
            let which = if waits { W::Heads } else { W::HeadsAtOnce };
            sent.push((which, vec![&named.numbered, &named.by_id.0, &named.by_id.1]));
        }
        if !receipts.0.is_empty() {
            sent.push((W::Admissions, vec![&receipts.0, &receipts.1]));
        }
        if !unknown.0.is_empty() {
            sent.push((W::Admissions, vec![&unknown.0, &unknown.1]));
        }
        if !signals.ids.is_empty() {
            sent.push((W::Signals, vec![&signals.namespaces, &signals.ids, &signals.texts]));
        }
        if !pending.ids.is_empty() {
            let after = &pending.after;
            sent.push((W::Pending, vec![&pending.namespaces, &pending.ids, &pending.texts, after, &page_of_pending]));
        }
        if !calls.0.is_empty() {
            sent.push((W::Calls, vec![&calls.0, &calls.1]));
        }
        for ready in &ready {
            if let Some(namespace) = &ready.namespace {
                sent.push((
                    W::Ready,
                    vec![
                        namespace,
                        &ready.places.0,
                        &ready.places.1,
                        &ready.places.2,
                        &ready.stretches.0,
                        &ready.stretches.1,
                        &ready.stretches.2,
                        &ready.page,
                    ],
                ));
            }
        }
        if let Some((now, page, (namespaces, wakes, low))) = &due {
            sent.push((W::Due, vec![now, page, namespaces, wakes, low]));
        }
        let which: Vec<W> = sent.iter().map(|(which, _)| *which).collect();
        let began = Instant::now();
        let answers = if sent.is_empty() {
            Vec::new()
        } else {
            self.exchange(&sent, first, false).map_err(|failed| self.failed("load a batch", failed))?
        };
        let mut answers = which.into_iter().zip(answers).peekable();
        let mut next =
            |wanted: W| -> Option<Vec<Row>> { answers.next_if(|(which, _)| *which == wanted).map(|(_, rows)| rows) };

        if let Some(moment) = next(W::Moment) {
            let epoch = self.epoch;
            let mut numbers = self.take_moment(&moment)?;
            if self.epoch != epoch && !is_new {
                // Some of it was decided before.
                metrics::counter!("steadfast_raced_total", "cause" => "changed").increment(1);
                self.careful = true;
                return Err(StoreError::Raced { doing: "load a batch" });
            }
            let spare = numbers.split_off(numbers.len() / 2);
            self.shared.numbers.given(&numbers);
            self.shared.numbers.add(spare, began);
            if let Some(batch) = &mut self.batch {
                batch.numbers.extend(numbers);
            }
        }
        let mut found: HashMap<WorkflowKey, (Handle, Head)> = HashMap::new();
        for row in next(W::Heads).or_else(|| next(W::HeadsAtOnce)).into_iter().flatten() {
            let (namespace, number) = rows::numbers(&row)?;
            let Some(name) = self.namespaces.by_number.get(&namespace).cloned() else { continue };
            match rows::head(&row, 0, &name) {
                Ok(head) => {
                    self.remember(&head.key, number);
                    self.see(number, &row, &head)?;
                    found.insert(head.key.clone(), (number, head));
                }
                Err(error) => self.report(number, &error),
            }
        }
        for key in heads {
            snapshot.load_head(key.clone(), found.remove(key));
        }
        let mut receipts_found = HashMap::new();
        let sets = [!receipts.0.is_empty(), !unknown.0.is_empty()];
        for _ in sets.into_iter().filter(|sent| *sent) {
            for row in next(W::Admissions).into_iter().flatten() {
                let admission = self.admission(&row)?;
                receipts_found.insert(admission.key.clone(), admission);
            }
        }
        for key in admissions {
            snapshot.load_admission(key.clone(), receipts_found.remove(key));
        }
        let mut signals_found: BTreeMap<(WorkflowKey, SignalId), (Option<Receipt>, u64)> = BTreeMap::new();
        for row in next(W::Signals).into_iter().flatten() {
            let Some(key) = self.key_of(&row) else { continue };
            let receipt = match row.get::<_, Option<&[u8]>>(4) {
                Some(bytes) => Some(Receipt { fingerprint: fingerprint(bytes, &key)?, accepted_at: row.get(5) }),
                None => None,
            };
            let last = row.get::<_, i64>(3).unsigned_abs();
            signals_found.insert((key, SignalId::trusted(row.get::<_, &str>(2))), (receipt, last));
        }
        for (key, id) in &wants.signals {
            let (receipt, last) = signals_found.remove(&(key.clone(), id.clone())).unwrap_or((None, 0));
            snapshot.load_signal(key.clone(), id.clone(), receipt, last);
        }
        let mut pending_found: BTreeMap<(WorkflowKey, SignalName), Vec<Pending>> = BTreeMap::new();
        for row in next(W::Pending).into_iter().flatten() {
            let Some(key) = self.key_of(&row) else { continue };
            let name = SignalName::trusted(row.get::<_, &str>(2));
            pending_found.entry((key, name.clone())).or_default().push(Pending {
                number: row.get::<_, i64>(3).unsigned_abs(),
                name,
                id: SignalId::trusted(row.get::<_, &str>(4)),
                payload: Json::trusted(row.get::<_, &str>(5)),
                accepted_at: row.get(6),
            });
        }
        for inbox in wants.pending.keys() {
            let mut found = pending_found.remove(inbox).unwrap_or_default();
            found.sort_unstable_by_key(|pending| pending.number);
            snapshot.load_pending(inbox.0.clone(), inbox.1.clone(), found);
        }
        let mut calls_found = BTreeMap::new();
        for row in next(W::Calls).into_iter().flatten() {
            if let Some(call) = self.call(&row)? {
                calls_found.insert((call.namespace.clone(), call.id.clone()), call);
            }
        }
        for call in &wants.calls {
            snapshot.load_call(call.0.clone(), call.1.clone(), calls_found.remove(call));
        }
        let mut lowest = HashMap::new();
        for ready in ready {
            let rows = if ready.namespace.is_some() { next(W::Ready).unwrap_or_default() } else { Vec::new() };
            let heads = self.heads_of(&rows, ready.limit)?;
            if read.is_some() {
                for (_, head) in &heads {
                    note_lowest(&mut lowest, self.queue(head));
                }
            }
            snapshot.load_ready(ready.announced, ready.limit, heads);
        }
        if let Some((now, limit)) = wants.due {
            let heads = self.heads_of(&next(W::Due).unwrap_or_default(), limit)?;
            if read.is_some() {
                // Nothing else is due: every kind was read up to now.
                if heads.len() < limit {
                    let kinds = self.namespaces.by_number.keys().flat_map(|namespace| {
                        [Wake::Lease, Wake::Timer].map(|wake| Some((Queue::Timed(*namespace, kind_of(wake)), now)))
                    });
                    kinds.for_each(|kind| note_lowest(&mut lowest, kind));
                }
                for (_, head) in &heads {
                    note_lowest(&mut lowest, self.queue(head));
                }
            }
            snapshot.load_due(heads);
        }
        if let Some(read) = read {
            read.found(lowest);
        }
        self.load_by_number(wants, snapshot)
    }

    /// What goes by number, once every number is known: a second round trip, and rare.
    fn load_by_number(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        if wants.events.is_empty() && wants.open.is_none() {
            return Ok(());
        }
        let mut places: BTreeMap<(i64, i64), (&WorkflowKey, u64)> = BTreeMap::new();
        for (key, seq) in &wants.events {
            if let Some(number) = self.known.get(key) {
                places.insert((*number, signed(*seq)), (key, *seq));
            }
        }
        let (numbers, seqs): (Vec<i64>, Vec<i64>) = places.keys().copied().unzip();
        let open = wants.open.as_ref().map(|(after, limit)| {
            let (look_at, namespace, number) = self.cursor(after.as_ref());
            (look_at, namespace, number, self.page(*limit))
        });
        let mut sent: Sent<'_> = Vec::new();
        if !places.is_empty() {
            sent.push((W::Events, vec![&numbers, &seqs]));
        }
        if let Some((look_at, namespace, number, page)) = &open {
            sent.push((W::Open, vec![look_at, namespace, number, page]));
        }
        let answers = self.exchange(&sent, false, false).map_err(|failed| self.failed("load a batch", failed))?;
        let mut answers = answers.into_iter();
        let mut events = BTreeMap::new();
        if !places.is_empty() {
            for row in answers.next().into_iter().flatten() {
                let at = (row.get::<_, i64>(0), row.get::<_, i64>(1));
                if let Some((key, seq)) = places.get(&at) {
                    events.insert(((*key).clone(), *seq), rows::event(&row, 2, key, *seq)?);
                }
            }
        }
        for (key, seq) in &wants.events {
            snapshot.load_event(key.clone(), *seq, events.remove(&(key.clone(), *seq)));
        }
        if let Some((after, limit)) = &wants.open {
            let heads = self.heads_of(&answers.next().unwrap_or_default(), *limit)?;
            snapshot.load_open(after.clone(), *limit, heads);
        }
        Ok(())
    }

    fn cursor(&self, after: Option<&ClaimCursor>) -> (i64, i32, i64) {
        let Some(after) = after else { return (i64::MIN, 0, 0) };
        match (self.namespace(&after.key.namespace), self.known.get(&after.key)) {
            (Some(namespace), Some(number)) => (after.look_at, namespace, *number),
            _ => (after.look_at, i32::MAX, i64::MAX),
        }
    }

    /// Takes the answer to the statement that every transaction begins with. Answers the numbers in it.
    fn take_moment(&mut self, rows: &[Row]) -> Result<Vec<i64>, StoreError> {
        let corrupt =
            || StoreError::Corrupt { what: "store row", key: "-".to_owned(), problem: "there is none".to_owned() };
        let row = rows.first().ok_or_else(corrupt)?;
        migrate::may_use(&self.shared.place, row.get::<_, Option<i32>>(3).ok_or_else(corrupt)?)?;
        self.shared.read_clock(row.get(0));
        let epoch: i64 = row.get::<_, Option<i64>>(1).ok_or_else(corrupt)?;
        self.epoch = epoch.unsigned_abs();
        Ok(row.get(2))
    }

    fn admission(&mut self, row: &Row) -> Result<Admission, StoreError> {
        let id: &str = row.get(1);
        let namespace = self.namespaces.by_number.get(&row.get(0)).cloned();
        let key = WorkflowKey {
            namespace: namespace.unwrap_or_else(Namespace::default_namespace),
            id: WorkflowId::trusted(id),
        };
        let fingerprint = fingerprint(row.get(3), &key)?;
        self.remember(&key, row.get(2));
        Ok(Admission { key, fingerprint, admitted_at: row.get(4) })
    }

    /// What is wanted of a workflow, by the name that it has in an array.
    fn keyed<'k>(&self, key: &'k WorkflowKey, text: &'k str, after: u64) -> Option<(i32, &'k str, &'k str, i64)> {
        Some((self.namespace(&key.namespace)?, key.id.as_str(), text, signed(after)))
    }

    /// The workflow that a row names by namespace and id in its first two columns.
    fn key_of(&self, row: &Row) -> Option<WorkflowKey> {
        let namespace = self.namespaces.by_number.get(&row.get(0))?.clone();
        Some(WorkflowKey { namespace, id: WorkflowId::trusted(row.get::<_, &str>(1)) })
    }

    fn call(&self, row: &Row) -> Result<Option<Call>, StoreError> {
        let Some(namespace) = self.namespaces.by_number.get(&row.get(0)) else { return Ok(None) };
        let id = CallId(row.get::<_, &str>(1).into());
        let granted: Vec<(String, u64)> = serde_json::from_str(row.get(3)).map_err(|error| StoreError::Corrupt {
            what: "claim call",
            key: id.0.to_string(),
            problem: format!("column {}", error.column()),
        })?;
        let key = |id: String| WorkflowKey { namespace: namespace.clone(), id: WorkflowId::trusted(id) };
        let granted = granted.into_iter().map(|(id, seq)| (key(id), seq)).collect();
        Ok(Some(Call { namespace: namespace.clone(), id, at: row.get(2), granted }))
    }

    /// Adds the namespaces that this batch is the first to use. Another node that adds one of them at the same time is
    /// waited for, and then came first.
    fn add_namespaces(&mut self, snapshot: &Snapshot) -> Result<(), Failed> {
        let new: BTreeSet<&Namespace> = snapshot
            .new_admissions()
            .iter()
            .map(|admission| &admission.key.namespace)
            .filter(|namespace| self.namespace(namespace).is_none())
            .collect();
        for namespace in new {
            let name = namespace.as_str();
            let answers = self.exchange(&vec![(W::AddNamespace, vec![&name])], false, false)?;
            // Remembered although the batch may still fail: `forget` below takes it back.
            if let Some(row) = answers[0].first() {
                self.namespaces.add(row.get(0), namespace.clone());
            }
        }
        Ok(())
    }

    fn send_save(&mut self, snapshot: &Snapshot) -> Result<Result<Admitted, Failed>, StoreError> {
        let Some(batch) = &mut self.batch else { return Ok(Err(Failed::None)) };
        let begun = batch.begun;
        let (seen, mut unproved) = (std::mem::take(&mut batch.seen), std::mem::take(&mut batch.unproved));
        let seen_of = |number: i64| {
            seen.get(&number).ok_or_else(|| StoreError::Corrupt {
                what: "revision",
                key: number.to_string(),
                problem: "its head was decided on without being loaded".to_owned(),
            })
        };
        let mut numbers = std::mem::take(&mut batch.numbers).into_iter();
        let mut admitted = Admitted::default();
        for admission in snapshot.new_admissions() {
            let number = numbers.next().ok_or_else(|| StoreError::Corrupt {
                what: "number",
                key: admission.key.to_string(),
                problem: "more was admitted than was asked for".to_owned(),
            })?;
            admitted.insert(admission.key.clone(), number);
        }
        let place = |key: &WorkflowKey, handle: Option<Handle>| -> Result<(i32, i64), StoreError> {
            let number = handle.or_else(|| admitted.get(key).copied());
            self.namespace(&key.namespace).zip(number).ok_or_else(|| StoreError::Corrupt {
                what: "number",
                key: key.to_string(),
                problem: "it was decided without being loaded".to_owned(),
            })
        };
        let receipts = Receipts::new(snapshot, place)?;
        let events = Events::new(snapshot, place)?;
        // Two statements that change heads lock them in two orders: not where another node may want some of both. Within
        // this process every command that waits for one head goes to the same committer.
        let alone = self.shared.lease().company.alone;
        let (mut new, mut changed, mut going_on) = (Heads::default(), Heads::default(), Heads::default());
        let (mut leaving, mut entering) = (Ready::default(), Ready::default());
        let (mut untimed, mut timed) = (Timed::default(), Timed::default());
        let mut ended_badly = EndedBadly::default();
        for ChangedHead { head, handle, change, was } in snapshot.changed_heads() {
            let at = place(&head.key, handle)?;
            if change == HeadChange::Insert {
                new.insert(at, head);
            } else {
                let was = seen_of(at.1)?;
                unproved.remove(&at.1);
                let goes_on = alone && change == HeadChange::InPlace && was.goes_on(head);
                if goes_on { &mut going_on } else { &mut changed }.update(at, head, was.revision);
            }
            if change == HeadChange::InPlace {
                continue;
            }
            let placed = head.placed();
            if let Some((Some(rank), Some(step))) = was.map(|was| (was.placed.rank, was.step.as_ref())) {
                leaving.push(at, head.name.as_str(), step.as_str(), rank);
            }
            if let (Some(rank), Some(visit)) = (placed.rank, head.visit()) {
                entering.push(at, head.name.as_str(), visit.step.as_str(), rank);
            }
            let due = was.and_then(|was| was.placed.due);
            if due != placed.due {
                untimed.extend(due.map(|due| (at, due)));
                timed.extend(placed.due.map(|due| (at, due)));
            }
            let status = head.status();
            if matches!(status, Status::Failed | Status::Cancelled) && was.is_none_or(|was| was.status != status) {
                ended_badly.push(at, status.label());
            }
        }
        let variables = Variables::new(snapshot, place)?;
        let signals = Signals::new(snapshot, place)?;
        let taken = TakenSignals::new(snapshot, place)?;
        let calls = Calls::new(snapshot, |namespace| self.namespace(namespace));

        // What is decided on in memory alone, proved with the rest.
        let same: Vec<i64> = unproved.into_iter().collect();
        let same_revisions =
            same.iter().map(|number| Ok(seen_of(*number)?.revision)).collect::<Result<Vec<_>, StoreError>>()?;
        self.sent += 1;
        let boot = signed(self.shared.identity.boot);
        let (name, number, epoch, at) = (self.name, self.sent, signed(self.epoch), self.shared.clock.now());
        let release = migrate::known();
        let (kept, forgotten) = (number - BATCHES_KEPT, self.forgotten);
        let forgets = kept - forgotten >= BATCHES_KEPT;
        // No two batches of any writer have the same.
        let revision = name.wrapping_add(number.wrapping_mul(SPREAD));
        // The next batches may have more starts than this one.
        let refill = i32::try_from(receipts.ids.len() * 2).unwrap_or(i32::MAX);

        let mut sent: Sent<'_> = Vec::new();
        if !begun {
            sent.push((W::Moment, vec![&refill]));
        }
        if !changed.numbers.is_empty() {
            sent.push((W::UpdateHeads, changed.args(&revision)));
        }
        if !going_on.numbers.is_empty() {
            sent.push((W::GoOn, going_on.args_of_steps(&revision)));
        }
        if !same.is_empty() {
            sent.push((W::SameHeads, vec![&same, &same_revisions]));
        }
        if !receipts.ids.is_empty() {
            sent.push((W::InsertAdmissions, receipts.args()));
        }
        if !events.seqs.is_empty() {
            sent.push((W::InsertEvents, events.args()));
        }
        if !new.numbers.is_empty() {
            sent.push((W::InsertHeads, new.all_args(&revision)));
        }
        if !leaving.namespaces.is_empty() {
            sent.push((W::LeaveReady, leaving.args()));
        }
        if !entering.namespaces.is_empty() {
            sent.push((W::EnterReady, entering.args()));
        }
        if !untimed.numbers.is_empty() {
            sent.push((W::LeaveTimed, untimed.args()));
        }
        if !timed.numbers.is_empty() {
            sent.push((W::EnterTimed, timed.args()));
        }
        if !ended_badly.numbers.is_empty() {
            sent.push((W::EndBadly, ended_badly.args()));
        }
        if !variables.put.keys.is_empty() {
            sent.push((W::PutVariables, variables.put.args()));
        }
        if !variables.dropped.keys.is_empty() {
            sent.push((W::DropVariables, variables.dropped.key_args()));
        }
        if !signals.ids.is_empty() {
            sent.push((W::InsertSignals, signals.args()));
        }
        if !taken.numbers.is_empty() {
            sent.push((W::TakeSignals, taken.args()));
        }
        if !calls.requests.is_empty() {
            sent.push((W::ForgetCalls, vec![&calls.forget]));
            sent.push((W::InsertCalls, calls.args()));
        }
        sent.push((W::Seal, vec![&boot, &name, &number, &at, &epoch, &release]));
        if forgets {
            sent.push((W::ForgetBatches, vec![&boot, &name, &forgotten, &kept]));
        }
        if let Some(batch) = &mut self.batch {
            batch.begun = true;
        }
        let began = Instant::now();
        let exchanged = self.exchange(&sent, !begun, true);
        let life = self.life();
        let answers = match exchanged {
            Ok(answers) => answers,
            Err(failed) => return Ok(Err(failed)),
        };
        if forgets {
            self.forgotten = kept;
        }
        // It has committed, whatever this says.
        if !begun && let Some(moment) = answers.first() {
            match self.take_moment(moment) {
                Ok(numbers) => self.shared.numbers.add(numbers, began),
                Err(error) => tracing::error!(%error, "the store's row cannot be read"),
            }
        }
        let written = snapshot.changed_heads().filter_map(|ChangedHead { head, handle, .. }| {
            let number = match handle {
                Some(number) => number,
                None => *admitted.get(&head.key)?,
            };
            Some(Kept { number, revision, head: head.clone() })
        });
        if let Some(life) = life {
            self.shared.remembered.keep(&life, written);
        }
        if self.shared.floors.are_used() {
            let moved = snapshot.changed_heads().filter(|changed| changed.change != HeadChange::InPlace);
            self.shared.floors.came_in(moved.filter_map(|changed| self.queue(changed.head)));
        }
        Ok(Ok(admitted))
    }

    /// Asks what became of a batch, and makes sure that it stays so.
    fn fate(&mut self, lost: &Lost) -> Result<Fate, StoreError> {
        let session = self.session.as_ref().ok_or(StoreError::Recovering)?;
        let (boot, at) = (signed(self.shared.identity.boot), self.shared.clock.now());
        let void: [(&(dyn ToSql + Sync), Type); 4] =
            [(&boot, Type::INT8), (&self.name, Type::INT8), (&lost.batch, Type::INT8), (&at, Type::INT8)];
        let place = &self.shared.place;
        let work = async {
            if let Some(Backend { pid, since }) = &lost.backend {
                // Best effort: what cannot be ended is waited for.
                let text = "select pg_terminate_backend(a.pid) from pg_stat_activity a where a.pid = $1
                                and a.backend_start::text = $2 and a.wait_event is distinct from 'SyncRep'";
                let ended = session.client.query_typed(text, &[(pid, Type::INT4), (since, Type::TEXT)]).await;
                if let Err(error) = ended
                    && kind(&error) == Kind::Gone
                {
                    return Err(error);
                }
            }
            session.begin().await?;
            // Waits for the batch if that is still under way, and writes in any case: what the batch waits for, a standby
            // perhaps, this commit waits for too.
            let rows = session
                .client
                .query_typed(
                    &place.text(
                        "insert into {schema}.batches as b (boot, writer, batch, at, void) values ($1, $2, $3, $4, true)
                         on conflict (boot, writer, batch) do update set void = b.void returning void",
                    ),
                    &void,
                )
                .await?;
            session.client.batch_execute("commit").await?;
            Ok::<_, Error>(rows.first().map(|row| row.get::<_, bool>(0)))
        };
        let asked = self.runtime().block_on(async { tokio::time::timeout(Duration::from_secs(5), work).await });
        match asked {
            Ok(Ok(Some(true))) => Ok(Fate::NotCommitted),
            Ok(Ok(Some(false))) => Ok(Fate::Committed),
            Ok(Ok(None)) => Ok(Fate::Unknown),
            Ok(Err(error)) => match kind(&error) {
                Kind::Gone => Err(self.lose(&told(&error))),
                // It is still under way.
                Kind::Raced => {
                    self.batch = Some(Batch { begun: true, ..Batch::default() });
                    self.abandon();
                    Err(StoreError::Recovering)
                }
                Kind::Refused => {
                    tracing::warn!(why = told(&error), "the fate of a batch cannot be asked for here");
                    self.batch = Some(Batch { begun: true, ..Batch::default() });
                    self.abandon();
                    Ok(Fate::Unknown)
                }
            },
            Err(_) => Err(self.lose("no answer for 5 s")),
        }
    }
}

fn kind_of(wake: Wake) -> i16 {
    i16::try_from(wake_number(wake)).expect("kinds are few")
}

fn note_lowest(lowest: &mut HashMap<Queue, i64>, at: Option<(Queue, i64)>) {
    if let Some((queue, at)) = at {
        let least = lowest.entry(queue).or_insert(at);
        *least = at.min(*least);
    }
}

/// What a writer is called: no other one has ever been called so, also in a history of the store that was lost.
fn random_name() -> Result<i64, StoreError> {
    let mut name = [0; 8];
    getrandom::fill(&mut name).map_err(|error| StoreError::File {
        doing: "draw a number for",
        path: "a writer".into(),
        source: error.into(),
    })?;
    Ok(i64::from_be_bytes(name))
}

/// How an exchange with the server failed.
enum Failed {
    /// There is no connection.
    None,
    /// Nothing came back.
    Silent,
    /// At a statement.
    Before(Error),
    /// At the commit alone: every statement was well.
    AtCommit(Error),
}

/// The numbers that a batch gave out.
type Admitted = HashMap<WorkflowKey, i64>;

impl Writer for PostgresWriter {
    fn load(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        if self.session.is_none() {
            return Err(StoreError::Recovering);
        }
        if self.load_nothing(wants, snapshot) {
            return Ok(());
        }
        self.load_all(wants, snapshot)
    }

    fn careful(&mut self) {
        self.careful = true;
    }

    fn leave_out(&mut self, handles: BTreeSet<Handle>) {
        self.left_out = handles;
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn gathers(&self) -> Duration {
        GATHERS
    }

    fn save(&mut self, snapshot: &Snapshot) -> Saved {
        if self.batch.is_none() {
            return Saved::NotCommitted(StoreError::Recovering);
        }
        let before = self.namespaces.by_name.len();
        let forget = |writer: &mut Self| {
            if writer.namespaces.by_name.len() != before {
                writer.namespaces = Namespaces::default();
            }
        };
        if let Err(failed) = self.add_namespaces(snapshot) {
            let error = self.failed("add a namespace", failed);
            forget(self);
            return Saved::NotCommitted(error);
        }
        let saved = match self.send_save(snapshot) {
            Ok(saved) => saved,
            Err(error) => {
                self.abandon();
                forget(self);
                return Saved::NotCommitted(error);
            }
        };
        match saved {
            Ok(admitted) => {
                if self.batch.take().is_some_and(|batch| batch.trusts) {
                    self.starts.right();
                }
                for (key, number) in admitted {
                    self.remember(&key, number);
                }
                Saved::Written
            }
            Err(Failed::None) => Saved::NotCommitted(StoreError::Recovering),
            Err(failed) => {
                forget(self);
                // The commit went out with the rest. Only a server that refused a statement, or the commit itself for
                // a reason that undoes it, has certainly not done it.
                let refused = match &failed {
                    Failed::Before(error) => error.as_db_error().is_some() && kind(error) != Kind::Gone,
                    Failed::AtCommit(error) => kind(error) == Kind::Raced,
                    _ => false,
                };
                if refused {
                    // The commit behind it has ended the transaction.
                    if let Some(batch) = &mut self.batch {
                        batch.begun = false;
                    }
                    return Saved::NotCommitted(self.failed("save a batch", failed));
                }
                let backend = self.session.as_ref().and_then(|session| session.backend.clone());
                self.lost = Some(Lost { batch: self.sent, backend });
                Saved::Unknown(self.failed("save a batch", failed))
            }
        }
    }

    fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(Answered)
    }

    fn confirm(&mut self) -> Result<(), StoreError> {
        let Some(batch) = &self.batch else { return Ok(()) };
        if batch.unproved.is_empty() {
            self.abandon();
            return Ok(());
        }
        let numbers: Vec<i64> = batch.unproved.iter().copied().collect();
        let revisions: Vec<i64> = numbers.iter().map(|number| batch.seen[number].revision).collect();
        let proof = vec![(W::SameHeads, vec![&numbers as &(dyn ToSql + Sync), &revisions])];
        match self.exchange(&proof, false, false) {
            Ok(_) => {
                self.abandon();
                Ok(())
            }
            Err(failed) => Err(self.failed("prove what was decided on", failed)),
        }
    }

    fn abandon(&mut self) {
        // What was not begun has left nothing there.
        if !self.batch.take().is_some_and(|batch| batch.begun) {
            return;
        }
        let Some(session) = &self.session else { return };
        let ended = self
            .runtime()
            .block_on(async { tokio::time::timeout(PATIENCE, session.client.batch_execute("rollback")).await });
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => drop(self.lose(&told(&error))),
            Err(_) => drop(self.lose("no answer to a rollback")),
        }
    }

    fn recover(&mut self) -> Result<Fate, StoreError> {
        // A connection that was kept, after an outcome that was unknown for a reason of its own, may be in the middle of
        // anything; one that was made for the same question is not.
        let is_old = self.lost.is_some() && !self.asks;
        if is_old || self.batch.is_some() || self.session.as_ref().is_none_or(Session::is_over) {
            self.session = None;
        }
        if self.session.is_none() {
            self.connect()?;
        }
        let Some(lost) = self.lost.clone() else { return Ok(Fate::Unknown) };
        self.asks = true;
        let fate = self.fate(&lost)?;
        self.asks = false;
        self.lost = None;
        tracing::info!(?fate, "what became of the last commit");
        Ok(fate)
    }
}

impl Drop for PostgresWriter {
    fn drop(&mut self) {
        self.abandon();
        self.session = None;
        if let Some(runtime) = self.runtime.take() {
            // Also where waiting is forbidden.
            runtime.shutdown_background();
        }
        self.shared.writer_returned();
    }
}

/// A commit that was answered is durable: PostgreSQL has waited for its disk.
struct Answered;

impl Disk for Answered {
    fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

fn fingerprint(bytes: &[u8], key: &WorkflowKey) -> Result<Fingerprint, StoreError> {
    bytes.try_into().map(Fingerprint).map_err(|_| StoreError::Corrupt {
        what: "receipt",
        key: key.to_string(),
        problem: "its fingerprint is not 33 bytes long".to_owned(),
    })
}

/// What is wanted of workflows, as arrays.
#[derive(Default)]
struct Keyed<'a> {
    namespaces: Vec<i32>,
    ids: Vec<&'a str>,
    texts: Vec<&'a str>,
    after: Vec<i64>,
}

impl<'a> Keyed<'a> {
    fn of(wanted: impl Iterator<Item = (i32, &'a str, &'a str, i64)>) -> Self {
        let mut keyed = Self::default();
        for (namespace, id, text, after) in wanted {
            keyed.namespaces.push(namespace);
            keyed.ids.push(id);
            keyed.texts.push(text);
            keyed.after.push(after);
        }
        keyed
    }
}

/// What a worker can run, as arrays.
struct Announcement {
    announced: Arc<Announced>,
    limit: usize,
    page: i64,
    namespace: Option<i32>,
    /// Definitions, steps, and the ranks from which on they are read.
    places: (Vec<String>, Vec<String>, Vec<i64>),
    /// Definitions, and the steps between which they are searched for others, both excluded.
    stretches: (Vec<String>, Vec<String>, Vec<String>),
}

impl Announcement {
    fn new(writer: &PostgresWriter, announced: &Arc<Announced>, limit: usize) -> Self {
        let namespace = writer.namespace(&announced.namespace);
        let (floors, all) = namespace.map_or_else(Default::default, |namespace| writer.shared.floors.ready(namespace));
        let mut ready = Self {
            announced: announced.clone(),
            limit,
            page: writer.page(limit),
            namespace,
            places: Default::default(),
            stretches: Default::default(),
        };
        for (name, steps) in &announced.definitions {
            let name = name.as_str();
            let floors = floors.iter().filter(|(of, _, _)| of == name).map(|(_, step, low)| (step.as_str(), *low));
            let floors: BTreeMap<&str, i64> = floors.collect();
            match steps {
                Steps::Listed(steps) => {
                    for step in steps.iter().map(Step::as_str) {
                        match floors.get(step) {
                            Some(low) => ready.place(name, step, *low),
                            None if all => {}
                            None => ready.place(name, step, i64::MIN),
                        }
                    }
                }
                Steps::AllBut(unknown) => {
                    let unknown: BTreeSet<&str> = unknown.iter().map(Step::as_str).collect();
                    for (step, low) in floors.iter().filter(|(step, _)| !unknown.contains(*step)) {
                        ready.place(name, step, *low);
                    }
                    if all {
                        continue;
                    }
                    let mut after = "";
                    for before in unknown.into_iter().chain(floors.into_keys()).collect::<BTreeSet<_>>() {
                        ready.stretch(name, after, before);
                        after = before;
                    }
                    ready.stretch(name, after, BEHIND_ALL);
                }
            }
        }
        ready
    }

    fn place(&mut self, name: &str, step: &str, low: i64) {
        self.places.0.push(name.to_owned());
        self.places.1.push(step.to_owned());
        self.places.2.push(low);
    }

    fn stretch(&mut self, name: &str, after: &str, before: &str) {
        self.stretches.0.push(name.to_owned());
        self.stretches.1.push(after.to_owned());
        self.stretches.2.push(before.to_owned());
    }
}

#[derive(Default)]
struct Receipts<'a> {
    namespaces: Vec<i32>,
    ids: Vec<&'a str>,
    numbers: Vec<i64>,
    fingerprints: Vec<&'a [u8]>,
    admitted_at: Vec<i64>,
}

impl<'a> Receipts<'a> {
    fn new(
        snapshot: &'a Snapshot,
        place: impl Fn(&WorkflowKey, Option<Handle>) -> Result<(i32, i64), StoreError>,
    ) -> Result<Self, StoreError> {
        let mut new = snapshot
            .new_admissions()
            .iter()
            .map(|admission| Ok((place(&admission.key, None)?, admission)))
            .collect::<Result<Vec<_>, StoreError>>()?;
        // In the order of their keys: two nodes that admit the same ids then wait in one direction.
        new.sort_unstable_by(|((a, _), one), ((b, _), other)| a.cmp(b).then_with(|| one.key.id.cmp(&other.key.id)));
        let mut receipts = Self::default();
        for ((namespace, number), admission) in new {
            receipts.namespaces.push(namespace);
            receipts.ids.push(admission.key.id.as_str());
            receipts.numbers.push(number);
            receipts.fingerprints.push(&admission.fingerprint.0);
            receipts.admitted_at.push(admission.admitted_at);
        }
        Ok(receipts)
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.ids, &self.numbers, &self.fingerprints, &self.admitted_at]
    }
}

#[derive(Default)]
struct Events {
    namespaces: Vec<i32>,
    numbers: Vec<i64>,
    seqs: Vec<i64>,
    types: Vec<&'static str>,
    versions: Vec<i32>,
    at: Vec<i64>,
    payloads: Vec<String>,
}

impl Events {
    fn new(
        snapshot: &Snapshot,
        place: impl Fn(&WorkflowKey, Option<Handle>) -> Result<(i32, i64), StoreError>,
    ) -> Result<Self, StoreError> {
        let mut events = Self::default();
        let version = i32::try_from(steadfast_core::event::VERSION).expect("versions are small");
        for new in snapshot.appended() {
            let (namespace, number) = place(&new.key, new.handle)?;
            events.namespaces.push(namespace);
            events.numbers.push(number);
            events.seqs.push(signed(new.seq));
            events.types.push(new.event.kind());
            events.versions.push(version);
            events.at.push(new.at);
            events.payloads.push(new.event.payload());
        }
        Ok(events)
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.numbers, &self.seqs, &self.types, &self.versions, &self.at, &self.payloads]
    }
}

/// Heads as arrays, a column each.
#[derive(Default)]
struct Heads<'a> {
    numbers: Vec<i64>,
    /// Of those that are there: which batch had written each when it was decided on.
    revisions: Vec<i64>,
    seqs: Vec<i64>,
    updated_at: Vec<i64>,
    statuses: Vec<&'a str>,
    codes: Vec<Option<&'a str>>,
    steps: Vec<Option<&'a str>>,
    visits: Vec<Option<i64>>,
    attempts: Vec<Option<i32>>,
    deliveries: Vec<Option<i32>>,
    tokens: Vec<Option<&'a [u8]>>,
    epochs: Vec<Option<i64>>,
    workers: Vec<Option<&'a str>>,
    boots: Vec<Option<i64>>,
    remotes: Vec<Option<bool>>,
    started_at: Vec<Option<i64>>,
    leases: Vec<Option<i64>>,
    leases_until: Vec<Option<i64>>,
    deadlines: Vec<Option<i64>>,
    progress: Vec<Option<&'a str>>,
    waits: Vec<Option<String>>,
    ranks: Vec<Option<i64>>,
    wakes: Vec<Option<i16>>,
    due: Vec<Option<i64>>,
    // What never changes, of new ones alone.
    namespaces: Vec<i32>,
    ids: Vec<&'a str>,
    names: Vec<&'a str>,
    options: Vec<Option<String>>,
    priorities: Vec<i32>,
    created_at: Vec<i64>,
}

fn small<T: TryFrom<i64>>(value: Option<i64>) -> Option<T> {
    value.map(|value| T::try_from(value).ok().expect("attempts, deliveries and wakes are small"))
}

impl<'a> Heads<'a> {
    /// A head that is there already.
    fn update(&mut self, (_, number): (i32, i64), head: &'a Head, revision: i64) {
        self.revisions.push(revision);
        self.push(number, &Stored::of(head));
    }

    /// A new head.
    fn insert(&mut self, (namespace, number): (i32, i64), head: &'a Head) {
        let columns = Stored::of(head);
        self.push(number, &columns);
        self.namespaces.push(namespace);
        self.ids.push(columns.id);
        self.names.push(columns.name);
        self.options.push(stored_options(&head.options));
        self.priorities.push(head.options.priority);
        self.created_at.push(columns.created_at);
    }

    fn push(&mut self, number: i64, columns: &Stored<'a>) {
        self.numbers.push(number);
        self.seqs.push(columns.seq);
        self.updated_at.push(columns.updated_at);
        self.statuses.push(columns.status);
        self.codes.push(columns.code);
        self.steps.push(columns.step);
        self.visits.push(columns.visit);
        self.attempts.push(small(columns.attempt));
        self.deliveries.push(small(columns.delivery));
        self.tokens.push(columns.token);
        self.epochs.push(columns.epoch);
        self.workers.push(columns.worker);
        self.boots.push(columns.boot);
        self.remotes.push(columns.remote);
        self.started_at.push(columns.started_at);
        self.leases.push(columns.lease_ms);
        self.leases_until.push(columns.lease_until);
        self.deadlines.push(columns.step_deadline);
        self.progress.push(columns.progress);
        self.waits.push(columns.wait.as_ref().map(ToString::to_string));
        self.ranks.push(columns.rank);
        self.wakes.push(small(columns.wake));
        self.due.push(columns.due);
    }

    /// For heads that are there.
    fn args<'s>(&'s self, revision: &'s i64) -> Vec<&'s (dyn ToSql + Sync)> {
        let mut args = self.columns();
        args.insert(1, &self.revisions);
        args.push(revision);
        args
    }

    /// For those whose worker goes on.
    fn args_of_steps<'s>(&'s self, revision: &'s i64) -> Vec<&'s (dyn ToSql + Sync)> {
        vec![
            &self.numbers,
            &self.revisions,
            &self.seqs,
            &self.updated_at,
            &self.steps,
            &self.visits,
            &self.attempts,
            &self.deliveries,
            &self.tokens,
            &self.started_at,
            &self.leases_until,
            &self.deadlines,
            revision,
        ]
    }

    fn columns(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.numbers,
            &self.seqs,
            &self.updated_at,
            &self.statuses,
            &self.codes,
            &self.steps,
            &self.visits,
            &self.attempts,
            &self.deliveries,
            &self.tokens,
            &self.epochs,
            &self.workers,
            &self.boots,
            &self.remotes,
            &self.started_at,
            &self.leases,
            &self.leases_until,
            &self.deadlines,
            &self.progress,
            &self.waits,
            &self.ranks,
            &self.wakes,
            &self.due,
        ]
    }

    fn all_args<'s>(&'s self, revision: &'s i64) -> Vec<&'s (dyn ToSql + Sync)> {
        let mut args = self.columns();
        args.extend([
            &self.namespaces as &(dyn ToSql + Sync),
            &self.ids as &(dyn ToSql + Sync),
            &self.names as &(dyn ToSql + Sync),
            &self.options as &(dyn ToSql + Sync),
            &self.priorities as &(dyn ToSql + Sync),
            &self.created_at as &(dyn ToSql + Sync),
            revision,
        ]);
        args
    }
}

/// Rows of the table of what waits for time.
#[derive(Default)]
struct Timed {
    namespaces: Vec<i32>,
    numbers: Vec<i64>,
    wakes: Vec<i16>,
    due: Vec<i64>,
}

impl Timed {
    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.numbers, &self.wakes, &self.due]
    }
}

impl Extend<((i32, i64), (Wake, i64))> for Timed {
    fn extend<I: IntoIterator<Item = ((i32, i64), (Wake, i64))>>(&mut self, rows: I) {
        for ((namespace, number), (wake, due)) in rows {
            self.namespaces.push(namespace);
            self.numbers.push(number);
            self.wakes.push(i16::try_from(wake_number(wake)).expect("wakes are small"));
            self.due.push(due);
        }
    }
}

/// Rows of the table of what ended badly.
#[derive(Default)]
struct EndedBadly {
    namespaces: Vec<i32>,
    numbers: Vec<i64>,
    statuses: Vec<&'static str>,
}

impl EndedBadly {
    fn push(&mut self, (namespace, number): (i32, i64), status: &'static str) {
        self.namespaces.push(namespace);
        self.numbers.push(number);
        self.statuses.push(status);
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.numbers, &self.statuses]
    }
}

/// Rows of the table of what is ready.
#[derive(Default)]
struct Ready<'a> {
    namespaces: Vec<i32>,
    numbers: Vec<i64>,
    names: Vec<&'a str>,
    steps: Vec<&'a str>,
    ranks: Vec<i64>,
}

impl<'a> Ready<'a> {
    fn push(&mut self, (namespace, number): (i32, i64), name: &'a str, step: &'a str, rank: i64) {
        self.namespaces.push(namespace);
        self.numbers.push(number);
        self.names.push(name);
        self.steps.push(step);
        self.ranks.push(rank);
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.numbers, &self.names, &self.steps, &self.ranks]
    }
}

#[derive(Default)]
struct Variables<'a> {
    put: Variable<'a>,
    dropped: Variable<'a>,
}

#[derive(Default)]
struct Variable<'a> {
    namespaces: Vec<i32>,
    numbers: Vec<i64>,
    keys: Vec<&'a str>,
    values: Vec<&'a str>,
    seqs: Vec<i64>,
}

impl<'a> Variables<'a> {
    fn new(
        snapshot: &'a Snapshot,
        place: impl Fn(&WorkflowKey, Option<Handle>) -> Result<(i32, i64), StoreError>,
    ) -> Result<Self, StoreError> {
        let mut variables = Self::default();
        for changed in snapshot.changed_variables() {
            let (namespace, number) = place(changed.workflow, changed.handle)?;
            let set = if changed.value.is_some() { &mut variables.put } else { &mut variables.dropped };
            set.namespaces.push(namespace);
            set.numbers.push(number);
            set.keys.push(changed.key.as_str());
            set.seqs.push(signed(changed.seq));
            set.values.extend(changed.value.map(|value| value.as_str()));
        }
        Ok(variables)
    }
}

impl Variable<'_> {
    fn key_args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.numbers, &self.keys]
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.numbers, &self.keys, &self.values, &self.seqs]
    }
}

/// Rows of inboxes.
#[derive(Default)]
struct Signals<'a> {
    namespaces: Vec<i32>,
    workflows: Vec<i64>,
    numbers: Vec<i64>,
    ids: Vec<&'a str>,
    names: Vec<&'a str>,
    accepted_at: Vec<i64>,
    fingerprints: Vec<&'a [u8]>,
    seqs: Vec<Option<i64>>,
    payloads: Vec<Option<&'a str>>,
}

impl<'a> Signals<'a> {
    fn new(
        snapshot: &'a Snapshot,
        place: impl Fn(&WorkflowKey, Option<Handle>) -> Result<(i32, i64), StoreError>,
    ) -> Result<Self, StoreError> {
        let mut signals = Self::default();
        for new in snapshot.new_signals() {
            let (namespace, workflow) = place(&new.workflow, new.handle)?;
            signals.namespaces.push(namespace);
            signals.workflows.push(workflow);
            signals.numbers.push(signed(new.signal.number));
            signals.ids.push(new.signal.id.as_str());
            signals.names.push(new.signal.name.as_str());
            signals.accepted_at.push(new.signal.accepted_at);
            signals.fingerprints.push(&new.fingerprint.0);
            signals.seqs.push(new.taken.map(signed));
            signals.payloads.push(new.taken.is_none().then_some(new.signal.payload.as_str()));
        }
        Ok(signals)
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.namespaces,
            &self.workflows,
            &self.numbers,
            &self.ids,
            &self.names,
            &self.accepted_at,
            &self.fingerprints,
            &self.seqs,
            &self.payloads,
        ]
    }
}

/// Signals of stored inboxes that waits have taken.
#[derive(Default)]
struct TakenSignals {
    workflows: Vec<i64>,
    numbers: Vec<i64>,
    seqs: Vec<i64>,
}

impl TakenSignals {
    fn new(
        snapshot: &Snapshot,
        place: impl Fn(&WorkflowKey, Option<Handle>) -> Result<(i32, i64), StoreError>,
    ) -> Result<Self, StoreError> {
        let mut taken = Self::default();
        for signal in snapshot.taken_signals() {
            taken.workflows.push(place(&signal.workflow, signal.handle)?.1);
            taken.numbers.push(signed(signal.number));
            taken.seqs.push(signed(signal.seq));
        }
        Ok(taken)
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.workflows, &self.numbers, &self.seqs]
    }
}

#[derive(Default)]
struct Calls<'a> {
    namespaces: Vec<i32>,
    requests: Vec<&'a str>,
    at: Vec<i64>,
    granted: Vec<String>,
    /// What was given before this is forgotten.
    forget: i64,
}

impl<'a> Calls<'a> {
    fn new(snapshot: &'a Snapshot, number: impl Fn(&Namespace) -> Option<i32>) -> Self {
        let mut new: Vec<(i32, &Call)> =
            snapshot.new_calls().iter().filter_map(|call| Some((number(&call.namespace)?, call))).collect();
        new.sort_unstable_by(|(a, one), (b, other)| a.cmp(b).then_with(|| one.id.cmp(&other.id)));
        let mut calls = Self::default();
        for (namespace, call) in new {
            let granted: Vec<(&str, u64)> = call.granted.iter().map(|(key, seq)| (key.id.as_str(), *seq)).collect();
            calls.namespaces.push(namespace);
            calls.requests.push(&call.id.0);
            calls.at.push(call.at);
            calls.granted.push(serde_json::to_string(&granted).expect("strings and integers serialize"));
            calls.forget = calls.forget.max(call.at - CALL_AGE_MS);
        }
        calls
    }

    fn args(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.namespaces, &self.requests, &self.at, &self.granted]
    }
}
