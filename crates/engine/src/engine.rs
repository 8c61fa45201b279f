//! Engine: a store, its committer, and the loops that keep work moving.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use steadfast_core::admission::{self, Asked, Start};
use steadfast_core::claim::{Announced, Terms};
use steadfast_core::command::{Command, Outcome};
use steadfast_core::control::{self, Cancel};
use steadfast_core::event::{Event, Writes};
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::head::{Head, WorkerRef};
use steadfast_core::json::Json;
use steadfast_core::limits::{Invalid, Limits};
use steadfast_core::options::{Options, StartOptions};
use steadfast_core::retry::RetryPolicy;
use steadfast_core::signal;
use steadfast_core::snapshot::Hints;
use steadfast_core::sweep::{GiveBack, Report, Sweep};
use steadfast_core::text::{Key, Name, Namespace, SignalId, SignalName, Step, Tag, WorkflowId, WorkflowKey};
use steadfast_core::why::{self, Why};
use steadfast_store::clock::Clock;
use steadfast_store::postgres::{self, PostgresStore};
use steadfast_store::seldom::Seldom;
use steadfast_store::sqlite::SqliteStore;
use steadfast_store::{Reader, Store};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::committer::{Bounds, Committers};
use crate::context::Seen;
use crate::definition::{Definition, Known, StepResult};
use crate::error::Error;
use crate::worker::{self, Slot};

/// How long a loop waits for a hint before it looks by itself.
const POLL: Duration = Duration::from_secs(1);
/// How much later than the first process of a store the others reach for what is due, in milliseconds.
const LATER_MS: i64 = 50;
const LATER_SPREAD_MS: u64 = 100;
/// How long ready steps wait for room in this process before they count as a backlog, and others are told of them. A
/// moment without room is none to share: what another process takes comes back slowly.
const SPILL: Duration = Duration::from_millis(20);
/// The longest that the sweeper rests while something stays due that it passes over. Meanwhile it does not see what is
/// due next, which is late by as much.
const PASSED_OVER: Duration = Duration::from_millis(100);
/// The longest that a loop rests after errors in a row.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// How soon who did not look into the store at first does so. Later than most workflows take, however many run: each
/// would be looked for once.
const POLL_SKIPPED: Duration = Duration::from_secs(1);
/// How often somebody who waits for an end looks by themselves; the end is told as it happens.
const POLL_END: Duration = Duration::from_secs(5);
/// How often a node looks for ends of workflows that run elsewhere, and for how many at a time.
const ENDS_POLL: Duration = Duration::from_millis(100);
const ENDS_MAX: usize = 2_000;
/// How often a node looks for others that are gone.
const NODES_POLL: Duration = Duration::from_secs(1);
/// Heads in one sweep: a slice that a claim or commit can wait behind.
const SWEEP_LIMIT: usize = 512;
/// Starts of a bulk that are under way together.
const BULK_SLICE: usize = 512;

/// Sets an engine up.
pub struct Builder {
    store: Arc<dyn Store>,
    definitions: Vec<Definition>,
    concurrency: usize,
    lease: Duration,
    limits: Limits,
    bounds: Bounds,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Builder {
    /// Registers a handler under a name. It takes every step that it does not answer with
    /// [`Ctx::unknown_step`](crate::Ctx::unknown_step); use [`Builder::define`] to list its steps.
    #[must_use]
    pub fn register<F, Fut>(self, name: impl Into<String>, handler: F) -> Self
    where
        F: Fn(crate::Ctx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = StepResult> + Send + 'static,
    {
        self.define(Definition::new(name, handler))
    }

    /// Registers a definition.
    #[must_use]
    pub fn define(mut self, definition: Definition) -> Self {
        self.definitions.push(definition);
        self
    }

    /// How many workflows run at once in this process; 64 unless said otherwise. 0 runs none: the engine then only
    /// admits, looks and repairs.
    #[must_use]
    pub fn concurrency(mut self, n: usize) -> Self {
        self.concurrency = n;
        self
    }

    /// How long a claim lasts without a sign of its worker; 30 s unless said otherwise. Signs are sent by
    /// themselves, at a third of it.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Other limits than [`Limits::default`].
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Other bounds of batches and queues than the default.
    #[must_use]
    pub fn bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// Starts the engine. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a definition with a bad name, step or policy, or two of one name; [`Error::Store`].
    pub fn run(self) -> Result<Engine, Error> {
        let inner = self.build(true)?;
        Ok(Engine { guard: Arc::new(Guard { inner }) })
    }

    /// Builds the engine; without loops, a test drives it step by step.
    pub(crate) fn build(self, loops: bool) -> Result<Arc<Inner>, Error> {
        let mut definitions = BTreeMap::new();
        for definition in self.definitions {
            let (name, known) = definition.check(&self.limits)?;
            if definitions.insert(name.clone(), known).is_some() {
                let problem = "is registered twice; give each definition a name of its own";
                return Err(Invalid::new("invalid_name", format!("definition {name}"), problem).into());
            }
        }
        let identity = self.store.identity();
        let announced = Announced {
            namespace: Namespace::default_namespace(),
            definitions: definitions.iter().map(|(name, known)| (name.clone(), known.steps.clone())).collect(),
        };
        let hub = Arc::new(Hub::default());
        let announced = Arc::new(RwLock::new(Arc::new(announced)));
        let (stage, watched) = watch::channel(Stage::Running);
        let listener = Listener {
            hub: hub.clone(),
            store: Arc::downgrade(&self.store),
            announced: announced.clone(),
            runs: self.concurrency > 0,
            stage: watched,
        };
        let store = Arc::downgrade(&self.store);
        let worth = move || store.upgrade().map_or(1, |store| store.writers_worth());
        let hear = move |hints| listener.hear(hints);
        let committer = Committers::start(&*self.store, worth, &self.bounds, self.limits.deliveries_max, hear)?;
        let ready = hub.ready.clone();
        self.store.on_hint(Box::new(move || ready.notify_one()));
        let inner = Arc::new(Inner {
            committer,
            reader: self.store.reader(),
            clock: self.store.clock(),
            fingerprint_key: identity.fingerprint_key,
            definitions,
            announced,
            worker: WorkerRef {
                label: format!("n{}.b{}.p{}", self.store.node(), identity.boot, std::process::id()).into(),
                boot: identity.boot,
                remote: false,
            },
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX).max(1),
            limits: Arc::new(self.limits),
            concurrency: self.concurrency,
            looks: Arc::new(Semaphore::new(self.store.looks())),
            slots: Arc::new(Semaphore::new(self.concurrency)),
            idle_slots: Mutex::default(),
            every_slot: Mutex::default(),
            backlog: AtomicBool::new(false),
            unlooked: AtomicBool::new(false),
            full_since: Mutex::default(),
            wake_worker: hub.ready.clone(),
            hub,
            stage,
            seeds: Seeds::new()?,
            commits_again: Mutex::default(),
            is_shared: self.store.is_shared(),
            store: Mutex::new(Some(self.store)),
        });
        if loops {
            inner.spawn_loops();
        }
        Ok(inner)
    }
}

/// What the committer's thread tells the loops, and who waits for which workflow.
#[derive(Default)]
struct Hub {
    ready: Arc<Notify>,
    /// How many steps became ready that this process can run, since its worker looked last.
    ready_count: AtomicUsize,
    due: Notify,
    /// The earliest time the sweeper has been told of since it last looked.
    due_at: DueAt,
    ends: Mutex<Ends>,
    seats_taken: Arc<AtomicUsize>,
    ended_count: std::sync::atomic::AtomicU64,
    /// Steps that were given back because the grace was over.
    given_back: AtomicUsize,
}

/// Who waits for which workflow, and which of them run here.
#[derive(Default)]
struct Ends {
    waiting: HashMap<WorkflowKey, Vec<oneshot::Sender<Event>>>,
    /// In a slot of this process. Who asks to be told and then finds it here need not look into the store yet: its
    /// end will be heard. Only one that was cancelled before it had taken its slot is here after its end, for a while.
    running: HashMap<WorkflowKey, Arc<Seat>>,
}

/// The room that a workflow takes while it runs. It is free when the workflow has ended, not only when the task that ran
/// it has noticed: whoever hears of an end and starts the next one at once finds room for it.
pub(crate) struct Seat {
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    /// How many seats of the process are taken. Room that a claim or a start on its way keeps free is no seat.
    taken: Arc<AtomicUsize>,
}

impl Seat {
    fn new(permit: OwnedSemaphorePermit, taken: &Arc<AtomicUsize>) -> Arc<Self> {
        taken.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { permit: Mutex::new(Some(permit)), taken: taken.clone() })
    }

    /// Makes room.
    pub(crate) fn leave(&self) {
        if self.permit.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            self.taken.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Seat {
    /// A runtime that ends drops its tasks.
    fn drop(&mut self) {
        self.leave();
    }
}

impl Ends {
    fn tell(&mut self, key: &WorkflowKey, event: &Event) {
        for waiter in self.waiting.remove(key).into_iter().flatten() {
            // A waiter that went away hears nothing.
            let _ = waiter.send(event.clone());
        }
    }
}

struct DueAt(AtomicI64);

impl Default for DueAt {
    fn default() -> Self {
        Self(AtomicI64::new(i64::MAX))
    }
}

impl Hub {
    /// Hears what a batch led to, and how many of the steps that it made ready can be run here.
    fn hear(&self, hints: Option<Hints>, ready: usize) {
        let Some(hints) = hints else {
            self.ready.notify_one();
            self.due.notify_one();
            // Waiters that hear nothing more look for themselves.
            self.ends().waiting.clear();
            return;
        };
        if ready > 0 {
            self.ready_count.fetch_add(ready, Ordering::Relaxed);
            self.ready.notify_one();
        }
        if let Some(due) = hints.due
            && self.due_at.0.fetch_min(due, Ordering::SeqCst) > due
        {
            self.due.notify_one();
        }
        if !hints.ended.is_empty() {
            self.ended_count.fetch_add(hints.ended.len() as u64, Ordering::Relaxed);
            let mut ends = self.ends();
            for (key, event) in hints.ended {
                if let Some(seat) = ends.running.remove(&key)
                    // The step of one that was cancelled may go on for a while.
                    && !matches!(event, Event::WorkflowCancelled { .. })
                {
                    seat.leave();
                }
                ends.tell(&key, &event);
            }
        }
    }

    fn tell_end(&self, key: &WorkflowKey, event: &Event) {
        self.ends().tell(key, event);
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hears from the committers' threads what their batches led to.
#[derive(Clone)]
struct Listener {
    hub: Arc<Hub>,
    store: Weak<dyn Store>,
    announced: Arc<RwLock<Arc<Announced>>>,
    /// This process has room for workflows at all.
    runs: bool,
    stage: watch::Receiver<Stage>,
}

impl Listener {
    fn hear(&self, hints: Option<Hints>) {
        let (mut here, mut all) = (0, 0);
        if let Some(hints) = &hints
            && !hints.ready.is_empty()
        {
            let announced = self.announced.read().unwrap_or_else(PoisonError::into_inner).clone();
            for ((name, step), n) in &hints.ready {
                all += n;
                here += if announced.knows(name, step) { *n } else { 0 };
            }
        }
        // What cannot run here may run elsewhere.
        let runs = self.runs && *self.stage.borrow() < Stage::Draining;
        if (here < all || here > 0 && !runs)
            && let Some(store) = self.store.upgrade()
        {
            store.hint();
        }
        self.hub.hear(hints, here);
    }
}

/// How far the engine's life has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Running,
    /// Claims nothing more; what runs may finish its step.
    Draining,
    /// What still runs is given back.
    GraceOver,
}

/// Random 32-byte seeds, one for each claim: a secret of this process and a counter, hashed.
struct Seeds {
    secret: [u8; 32],
    count: std::sync::atomic::AtomicU64,
}

impl Seeds {
    fn new() -> Result<Self, Error> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| Error::Internal(format!("draw a secret: {error}")))?;
        Ok(Self { secret, count: std::sync::atomic::AtomicU64::new(0) })
    }

    fn next(&self) -> [u8; 32] {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        hash.update(self.secret);
        hash.update(self.count.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        hash.finalize().into()
    }
}

pub(crate) struct Inner {
    pub(crate) committer: Committers,
    pub(crate) reader: Arc<dyn Reader>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) definitions: BTreeMap<Name, Known>,
    announced: Arc<RwLock<Arc<Announced>>>,
    pub(crate) worker: WorkerRef,
    pub(crate) lease_ms: u64,
    pub(crate) limits: Arc<Limits>,
    fingerprint_key: FingerprintKey,
    concurrency: usize,
    /// Room for looks at the store.
    pub(crate) looks: Arc<Semaphore>,
    /// Room for workflows to run.
    pub(crate) slots: Arc<Semaphore>,
    idle_slots: Mutex<Vec<Arc<Slot>>>,
    every_slot: Mutex<Vec<Arc<Slot>>>,
    /// More was ready at the last claim than there was room for.
    backlog: AtomicBool,
    /// There was no room to look for ready steps when it was time to: whoever makes room looks.
    unlooked: AtomicBool,
    /// Since when there are ready steps and no room for them.
    full_since: Mutex<Option<Instant>>,
    pub(crate) wake_worker: Arc<Notify>,
    hub: Arc<Hub>,
    stage: watch::Sender<Stage>,
    seeds: Seeds,
    /// What is said of commits that are tried again, by all slots together.
    commits_again: Mutex<Seldom>,
    /// Other processes may have the store open too.
    is_shared: bool,
    /// Let go of by `shutdown`, so that the next owner can open it while handles of this engine are still around.
    store: Mutex<Option<Arc<dyn Store>>>,
}

impl Inner {
    pub(crate) fn is_draining(&self) -> bool {
        *self.stage.borrow() >= Stage::Draining
    }

    pub(crate) async fn grace_over(&self) {
        let mut stage = self.stage.subscribe();
        // The sender lives as long as `self`.
        let _ = stage.wait_for(|stage| *stage >= Stage::GraceOver).await;
    }

    pub(crate) fn has_backlog(&self) -> bool {
        self.backlog.load(Ordering::Relaxed)
    }

    pub(crate) fn set_backlog(&self, backlog: bool) {
        self.backlog.store(backlog, Ordering::Relaxed);
    }

    /// How many steps became ready here since this was last asked.
    pub(crate) fn take_ready(&self) -> usize {
        self.hub.ready_count.swap(0, Ordering::Relaxed)
    }

    /// There is no room now to look for ready steps, of which so many are known.
    pub(crate) fn look_later(&self, known: usize) {
        self.hub.ready_count.fetch_add(known, Ordering::Relaxed);
        self.unlooked.store(true, Ordering::SeqCst);
    }

    /// There is room again: looks for ready steps if any are known to wait, or nobody could look.
    pub(crate) fn room(&self) {
        if self.unlooked.swap(false, Ordering::SeqCst) || self.has_backlog() {
            self.wake_worker.notify_one();
        }
    }

    /// Whether to say of a commit that it is tried again: how often that was left out before.
    pub(crate) fn commits_again(&self) -> Option<u64> {
        self.commits_again.lock().unwrap_or_else(PoisonError::into_inner).says(Instant::now())
    }

    pub(crate) fn terms(&self) -> Terms {
        worker::terms(self)
    }

    pub(crate) fn random_seed(&self) -> [u8; 32] {
        self.seeds.next()
    }

    pub(crate) fn random_u32(&self) -> u32 {
        let seed = self.seeds.next();
        u32::from_be_bytes([seed[0], seed[1], seed[2], seed[3]])
    }

    pub(crate) fn announced(&self) -> Arc<Announced> {
        self.announced.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn learn_unknown_step(&self, name: &Name, step: &Step) {
        let mut announced = self.announced.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(steps) = announced.definitions.get(name)
            && steps.knows(step)
        {
            tracing::warn!(definition = %name, %step, "this code does not know a step; its workflows wait for code that does");
            let mut learned = (**announced).clone();
            learned.definitions.insert(name.clone(), worker::without_step(steps, step));
            *announced = Arc::new(learned);
        }
    }

    pub(crate) fn take_slot(&self) -> Arc<Slot> {
        let idle = self.idle_slots.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.unwrap_or_else(|| {
            let slot = Arc::new(Slot::new());
            self.every_slot.lock().unwrap_or_else(PoisonError::into_inner).push(slot.clone());
            slot
        })
    }

    pub(crate) fn return_slot(&self, slot: Arc<Slot>) {
        self.idle_slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }

    pub(crate) fn all_slots(&self) -> Vec<Arc<Slot>> {
        self.every_slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn spawn_loops(self: &Arc<Self>) {
        supervise(self, "worker", |engine| async move {
            if engine.concurrency == 0 {
                engine.drained().await;
                return Ok(());
            }
            let left = worker::claim(&engine).await?;
            let pause = engine.spill(left, Instant::now()).await?;
            wait(&engine, engine.wake_worker.notified(), pause).await;
            Ok(())
        });
        supervise(self, "heartbeat", |engine| async move {
            worker::heartbeat(&engine).await?;
            let pause = Duration::from_millis(engine.lease_ms / 6).clamp(Duration::from_millis(10), POLL);
            tokio::time::sleep(pause).await;
            Ok(())
        });
        let in_vain = Arc::new(AtomicU32::new(0));
        supervise(self, "sweeper", move |engine| {
            let in_vain = in_vain.clone();
            async move { engine.sweep_when_due(&in_vain).await }
        });
        if self.is_shared {
            supervise(self, "ends", |engine| async move {
                wait(&engine, std::future::pending(), ENDS_POLL).await;
                engine.look_for_ends().await
            });
            supervise(self, "nodes", |engine| async move {
                wait(&engine, std::future::pending(), NODES_POLL).await;
                engine.reap().await
            });
        }
        let engine = self.clone();
        tokio::spawn(async move {
            let mut seldom = Seldom::new();
            loop {
                match engine.give_back().await {
                    Ok(_) | Err(Error::Closed) => return,
                    Err(error) => {
                        if let Some(left_out) = seldom.says(Instant::now()) {
                            tracing::warn!(%error, left_out, "giving back what earlier processes held is tried again");
                        }
                        wait(&engine, std::future::pending(), POLL).await;
                    }
                }
            }
        });
    }

    /// Ready steps for which there has been no room for a while are a backlog: what runs is put back for them from time to
    /// time, starts no longer go before them, and other nodes are told. Answers how soon to look again.
    async fn spill(&self, left: bool, now: Instant) -> Result<Duration, Error> {
        let full = {
            let mut since = self.full_since.lock().unwrap_or_else(PoisonError::into_inner);
            if !left {
                *since = None;
                return Ok(POLL);
            }
            let full = now.duration_since(*since.get_or_insert(now));
            if full >= SPILL {
                *since = Some(now);
            }
            full
        };
        if full < SPILL {
            return Ok(SPILL - full);
        }
        self.set_backlog(true);
        if self.is_shared {
            self.ask(|store| {
                store.hint();
                Ok(())
            })
            .await?;
        }
        Ok(POLL)
    }

    async fn drained(&self) {
        let mut stage = self.stage.subscribe();
        // The sender lives as long as `self`.
        let _ = stage.wait_for(|stage| *stage >= Stage::Draining).await;
    }

    /// Repairs what is overdue, and waits for what will be next. Several processes of a store do not all reach for it at
    /// the same moment: the first of them does, and the others see a moment later whether it has.
    /// `in_vain` counts how often in a row nothing of what is due could be repaired.
    async fn sweep_when_due(&self, in_vain: &AtomicU32) -> Result<(), Error> {
        let is_first = self.is_first();
        let mut swept = if is_first { Some(self.sweep().await?) } else { None };
        // Told of an earlier time meanwhile, or not: what the store says is what counts.
        self.hub.due_at.0.store(i64::MAX, Ordering::SeqCst);
        let mut next = self.look(|reader| reader.next_due()).await?;
        if !is_first && next.is_some_and(|next| next.saturating_add(LATER_MS) <= self.clock.now()) {
            swept = Some(self.sweep().await?);
            next = self.look(|reader| reader.next_due()).await?;
        }
        let mut pause = next.and_then(|next| self.clock.until(next)).map_or(POLL, |pause| pause.min(POLL));
        // What is due and was just passed over cannot be read or saved, or somebody holds it: it is not for us to wait for it
        // without a pause.
        if pause.is_zero() && swept == Some(Report::default()) {
            let times = in_vain.fetch_add(1, Ordering::Relaxed);
            pause = PASSED_OVER.min(Duration::from_millis(1 << times.min(16)));
        } else {
            in_vain.store(0, Ordering::Relaxed);
        }
        self.hub.due_at.0.fetch_min(next.unwrap_or(i64::MAX), Ordering::SeqCst);
        let later = if is_first { 0 } else { LATER_MS.unsigned_abs() + u64::from(self.random_u32()) % LATER_SPREAD_MS };
        wait(self, self.hub.due.notified(), pause + Duration::from_millis(later)).await;
        Ok(())
    }

    /// Repairs what is overdue now.
    pub(crate) async fn sweep(&self) -> Result<Report, Error> {
        let mut total = Report::default();
        loop {
            let sweep =
                Sweep { limit: SWEEP_LIMIT, jitter: self.random_u32(), deliveries_max: self.limits.deliveries_max };
            let Outcome::Sweep(report) = self.committer.finish(Command::Sweep(sweep)).await? else {
                return Err(Error::Internal("a sweep was answered as something else".to_owned()));
            };
            for (kind, count) in
                [("woken", report.woken), ("lease_lost", report.leases_lost), ("step_timeout", report.timed_out)]
            {
                if count > 0 {
                    metrics::counter!("steadfast_swept_total", "kind" => kind).increment(count as u64);
                }
            }
            for late_ms in &report.late_ms {
                metrics::histogram!("steadfast_timer_lateness_seconds")
                    .record(Duration::from_millis(*late_ms).as_secs_f64());
            }
            total.woken += report.woken;
            total.leases_lost += report.leases_lost;
            total.timed_out += report.timed_out;
            total.alive += report.alive;
            if !report.more {
                return Ok(total);
            }
        }
    }

    /// Gives back the claims of earlier processes, page by page, so that they cost nobody a lease.
    pub(crate) async fn give_back(&self) -> Result<usize, Error> {
        let boots = self.ask(|store| store.boots()).await?;
        let (mut given_back, mut after) = (0, None);
        let mut seldom = Seldom::new();
        loop {
            let command = Command::GiveBack(GiveBack {
                boots: boots.clone(),
                orphaned: Vec::new(),
                after: after.clone(),
                limit: SWEEP_LIMIT,
                deliveries_max: self.limits.deliveries_max,
            });
            match self.committer.finish(command).await {
                Ok(Outcome::Sweep(report)) => {
                    given_back += report.given_back;
                    if !report.more {
                        if given_back > 0 {
                            tracing::info!(given_back, "steps of an earlier process were given back");
                        }
                        return Ok(given_back);
                    }
                    after = report.after.or(after);
                }
                Ok(_) => return Err(Error::Internal("a give-back was answered as something else".to_owned())),
                Err(Error::Closed) => return Err(Error::Closed),
                Err(error) => {
                    if let Some(left_out) = seldom.says(Instant::now()) {
                        tracing::warn!(%error, left_out, "giving back is tried again");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// True when no other process can run steps of this store.
    fn is_alone(&self) -> bool {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(|store| store.is_alone())
    }

    /// A step was given back.
    pub(crate) fn gave_back(&self) {
        if *self.stage.borrow() >= Stage::GraceOver {
            self.hub.given_back.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// True when what any process of the store could do is this one's to do first.
    fn is_first(&self) -> bool {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(|store| store.is_first())
    }

    /// False when what the store writes by itself has failed for several seconds.
    fn is_writable(&self) -> bool {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(|store| store.is_writable())
    }

    /// Asks the store something beside the async threads.
    async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&dyn Store) -> Result<T, steadfast_store::StoreError> + Send + 'static,
    ) -> Result<T, Error> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)?;
        let asked = tokio::task::spawn_blocking(move || ask(&*store)).await;
        asked
            .map_err(|error| Error::Internal(format!("a question to the store ended early: {error}")))?
            .map_err(Error::from)
    }

    /// Tells those who wait for workflows that run elsewhere, all of them by one look.
    async fn look_for_ends(&self) -> Result<(), Error> {
        let waited: Vec<WorkflowKey> = {
            let ends = self.hub.ends();
            ends.waiting.keys().filter(|key| !ends.running.contains_key(*key)).take(ENDS_MAX).cloned().collect()
        };
        if waited.is_empty() {
            return Ok(());
        }
        for (key, event) in self.look(move |reader| reader.ended(&waited)).await? {
            self.hub.tell_end(&key, &event);
        }
        Ok(())
    }

    /// Gives back what an owner of the store held that is gone, one after the other.
    async fn reap(&self) -> Result<(), Error> {
        while let Some(boot) = self.ask(|store| store.next_gone()).await? {
            tracing::warn!(boot, "a node is gone; its steps are given back");
            self.give_back().await?;
            self.ask(move |store| store.bury(boot)).await?;
        }
        Ok(())
    }

    /// Runs a short look at the store beside the async threads.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&dyn Reader) -> Result<T, steadfast_store::StoreError> + Send + 'static,
    ) -> Result<T, Error> {
        look_beside(&self.looks, &self.reader, look).await
    }

    /// A workflow takes a slot.
    pub(crate) fn enters(&self, key: &WorkflowKey, permit: OwnedSemaphorePermit) -> Arc<Seat> {
        let seat = Seat::new(permit, &self.hub.seats_taken);
        self.hub.ends().running.insert(key.clone(), seat.clone());
        seat
    }

    /// A workflow has left its slot.
    pub(crate) fn leaves(&self, key: &WorkflowKey, seat: &Arc<Seat>) {
        let mut ends = self.hub.ends();
        // It may have been claimed anew meanwhile, and run in another slot.
        if ends.running.get(key).is_some_and(|there| Arc::ptr_eq(there, seat)) {
            ends.running.remove(key);
        }
        drop(ends);
        seat.leave();
    }

    /// Checks a request to start and fills in its definition's options.
    pub(crate) fn check(&self, request: Request) -> Result<Start, Error> {
        let Request { name, id, input, writes, options } = request;
        let limits = &self.limits;
        let name = Name::parse_as("name", &name, limits)?;
        let id = match id {
            Some(id) => WorkflowId::parse_as("id", &id, limits)?,
            None => WorkflowId::trusted(uuid::Uuid::now_v7().to_string()),
        };
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id };
        let standard = Options::default();
        let definition = self.definitions.get(&name).map_or(&standard, |known| &known.options);
        let asked = Asked { key, name, input: input?, writes: writes?, options };
        Ok(asked.check(definition, &self.fingerprint_key, limits)?)
    }

    /// Admits a workflow, and claims its first step with it when there is room and nothing else waits.
    pub(crate) async fn admit(self: &Arc<Self>, mut start: Start, bulk: bool) -> Result<Accepted, Error> {
        let id = start.key.id.clone();
        let runs_here = self.announced().knows(&start.name, &Step::start());
        let known = runs_here || !self.is_alone();
        let mut permit = if runs_here && !bulk && !self.has_backlog() && !self.is_draining() {
            self.slots.clone().try_acquire_owned().ok()
        } else {
            None
        };
        let input = permit.is_some().then(|| (start.input.clone(), start.writes.clone()));
        start.claim = permit.is_some().then(|| self.terms());
        let command = Command::Start(Box::new(start));
        let sent = if bulk { self.committer.begin_waiting(command).await } else { self.committer.begin(command).await };
        let outcome = match sent {
            Ok(Outcome::Start(outcome)) => Ok(outcome),
            Ok(_) => Err(Error::Internal("a start was answered as something else".to_owned())),
            Err(error) => Err(error),
        };
        let claims = matches!(outcome, Ok(admission::Outcome::Started { claimed: Some(_) }));
        if !claims && permit.take().is_some() {
            // Somebody may have looked for room meanwhile.
            self.room();
        }
        match outcome? {
            admission::Outcome::Started { claimed } => {
                if let (Some(granted), Some(permit), Some((input, writes))) = (claimed, permit.take(), input) {
                    let mut seen: Seen = writes.iter().map(|write| (write.key.clone(), write.value.clone())).collect();
                    seen.insert(Key::trusted("input"), Some(input));
                    worker::spawn(self, granted, seen, permit);
                }
                Ok(Accepted { id, replay: false, known })
            }
            admission::Outcome::Replay { .. } => Ok(Accepted { id, replay: true, known }),
            admission::Outcome::IdentityConflict { admitted_at } => Err(Error::IdentityConflict { id, admitted_at }),
        }
    }
}

/// Runs a short look on a thread that may block, no more of them at a time than the store can serve.
pub(crate) async fn look_beside<T: Send + 'static>(
    looks: &Arc<Semaphore>,
    reader: &Arc<dyn Reader>,
    look: impl FnOnce(&dyn Reader) -> Result<T, steadfast_store::StoreError> + Send + 'static,
) -> Result<T, Error> {
    let reader = reader.clone();
    let place = looks.clone().acquire_owned().await.map_err(|_| Error::Closed)?;
    let looked = tokio::task::spawn_blocking(move || {
        let looked = look(&*reader);
        drop(place);
        looked
    });
    looked
        .await
        .map_err(|error| Error::Internal(format!("a look at the store ended early: {error}")))?
        .map_err(Error::from)
}

/// Runs `body` again and again until the engine is closed; an error is reported and waited out, a panic too.
fn supervise<F, Fut>(engine: &Arc<Inner>, name: &'static str, body: F)
where
    F: Fn(Arc<Inner>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Error>> + Send + 'static,
{
    let engine = engine.clone();
    let body = Arc::new(body);
    tokio::spawn(async move {
        let mut pause = Duration::from_millis(50);
        let mut seldom = Seldom::new();
        // The heartbeat and the sweep go on while what runs may finish.
        let last = if name == "worker" { Stage::Draining } else { Stage::GraceOver };
        while *engine.stage.borrow() < last {
            let (body, inner) = (body.clone(), engine.clone());
            match tokio::spawn(async move { body(inner).await }).await {
                Ok(Ok(())) => {
                    pause = Duration::from_millis(50);
                    seldom.over();
                }
                Ok(Err(Error::Closed)) => return,
                Ok(Err(error)) => {
                    // An overloaded lane is no fault: the next look finds room.
                    if !matches!(error, Error::Overloaded { .. })
                        && let Some(left_out) = seldom.says(Instant::now())
                    {
                        tracing::warn!(r#loop = name, %error, left_out, "a loop goes on after an error");
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Err(error) => {
                    metrics::counter!("steadfast_loop_panics_total", "loop" => name).increment(1);
                    tracing::error!(r#loop = name, %error, "a loop is started again after a panic");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    });
}

/// Waits for a hint, the pause, or the end of the loop's life.
async fn wait(engine: &Inner, hint: impl Future<Output = ()>, pause: Duration) {
    tokio::select! {
        () = hint => {}
        () = tokio::time::sleep(pause) => {}
        () = engine.grace_over() => {}
    }
}

/// A running engine. Cheap to clone; it runs until [`Engine::shutdown`] or until the last clone is dropped.
#[derive(Clone)]
pub struct Engine {
    pub(crate) guard: Arc<Guard>,
}

pub(crate) struct Guard {
    pub(crate) inner: Arc<Inner>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Without a grace: what runs is given back, and the committer runs what waits.
        self.inner.stage.send_replace(Stage::GraceOver);
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("worker", &self.inner().worker.label).finish_non_exhaustive()
    }
}

/// What a start was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The workflow.
    pub id: WorkflowId,
    /// True when the same request had been accepted before.
    pub replay: bool,
    /// False when no handler is known for its first step, which then waits for a worker that has one: there is none in
    /// this process, and no other one has the store open.
    pub known: bool,
}

/// A request to start a workflow, before it is checked.
#[derive(Debug, Clone)]
pub struct Request {
    /// The definition.
    pub name: String,
    /// The workflow's id; a new UUIDv7 when absent.
    pub id: Option<String>,
    /// The input.
    pub input: Result<Json, Invalid>,
    /// Further initial variables.
    pub writes: Result<Writes, Invalid>,
    /// How it shall run.
    pub options: StartOptions,
}

impl Request {
    /// A request with null input.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            id: None,
            input: Ok(Json::null()),
            writes: Ok(Writes::default()),
            options: StartOptions::default(),
        }
    }

    /// Gives the workflow an id: the same request with the same id is accepted once, however often it is sent.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets the input.
    #[must_use]
    pub fn input<T: Serialize + ?Sized>(mut self, input: &T) -> Self {
        self.input =
            Json::from_serialize(input).map_err(|error| Invalid::new(error.code(), "input", error.to_string()));
        self
    }

    /// Sets the input to a JSON text that was checked.
    #[must_use]
    pub fn input_json(mut self, input: Json) -> Self {
        self.input = Ok(input);
        self
    }

    /// Sets an initial variable.
    #[must_use]
    pub fn variable<T: Serialize + ?Sized>(mut self, key: &str, value: &T) -> Self {
        let value = Json::from_serialize(value).map_err(|error| Invalid::new(error.code(), key, error.to_string()));
        self.writes = self.writes.and_then(|mut writes| {
            writes.put(Key::trusted(key), Some(value?));
            Ok(writes)
        });
        self
    }

    /// Sets the retry policy.
    #[must_use]
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.options.retry = Some(policy);
        self
    }

    /// Sets the priority, -100 to 100, higher first.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.options.priority = Some(priority);
        self
    }

    /// Adds a tag.
    #[must_use]
    pub fn tag(mut self, tag: &str) -> Self {
        self.options.tags.push(Tag::trusted(tag));
        self
    }
}

/// A message to a workflow, before it is checked.
#[derive(Debug, Clone)]
pub struct Signal {
    /// Its name, which waits go by.
    pub name: String,
    /// What to call it among the signals of its workflow; a new UUIDv7 when absent.
    pub id: Option<String>,
    /// What it carries.
    pub payload: Result<Json, Invalid>,
}

impl Signal {
    /// A signal that carries null.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), id: None, payload: Ok(Json::null()) }
    }

    /// Gives it an id: the same signal with the same id is accepted once, however often it is sent.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets what it carries.
    #[must_use]
    pub fn payload<T: Serialize + ?Sized>(mut self, payload: &T) -> Self {
        self.payload =
            Json::from_serialize(payload).map_err(|error| Invalid::new(error.code(), "payload", error.to_string()));
        self
    }

    /// Sets what it carries to a JSON text that was checked.
    #[must_use]
    pub fn payload_json(mut self, payload: Json) -> Self {
        self.payload = Ok(payload);
        self
    }
}

/// What a signal was answered: it is accepted for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// What it is called.
    pub id: SignalId,
    /// True when the same signal had been accepted before.
    pub replay: bool,
}

/// A start on its way: give it an id or options, then await it.
#[derive(Debug)]
#[must_use = "a start is sent when it is awaited"]
pub struct StartCall {
    engine: Engine,
    request: Request,
}

impl StartCall {
    /// Gives the workflow an id: the same request with the same id is accepted once, however often it is sent.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.request = self.request.id(id);
        self
    }

    /// Sets an initial variable.
    pub fn variable<T: Serialize + ?Sized>(mut self, key: &str, value: &T) -> Self {
        self.request = self.request.variable(key, value);
        self
    }

    /// Sets the retry policy.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.request = self.request.retry(policy);
        self
    }

    /// Sets the priority, -100 to 100, higher first.
    pub fn priority(mut self, priority: i32) -> Self {
        self.request = self.request.priority(priority);
        self
    }

    /// Adds a tag.
    pub fn tag(mut self, tag: &str) -> Self {
        self.request = self.request.tag(tag);
        self
    }
}

impl IntoFuture for StartCall {
    type Output = Result<Handle, Error>;
    type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let accepted = self.engine.start_request(self.request).await?;
            Ok(self.engine.handle(accepted.id.as_str()))
        })
    }
}

/// How a shutdown went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// How long it took.
    pub took: Duration,
    /// Workflows whose step did not end within the grace and was given back.
    pub given_back: usize,
    /// Workflows whose handler did not yield: whoever looks after this process's steps next gives them back.
    pub left: usize,
}

/// How a workflow ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With a result.
    Completed(Json),
    /// By a failure.
    Failed {
        /// Its code.
        code: String,
        /// Its reason.
        reason: String,
    },
    /// From outside.
    Cancelled {
        /// The reason given.
        reason: String,
    },
}

/// A workflow, by its id.
#[derive(Debug, Clone)]
pub struct Handle {
    engine: Engine,
    pub(crate) key: WorkflowKey,
}

impl Handle {
    /// The workflow's id.
    pub fn id(&self) -> &str {
        self.key.id.as_str()
    }

    /// Waits until the workflow has ended and answers its result.
    ///
    /// # Errors
    /// As [`Handle::end`]; [`Error::WorkflowFailed`], [`Error::WorkflowCancelled`], [`Error::Value`] when the result has
    /// another form.
    pub async fn result<T: DeserializeOwned>(&self) -> Result<T, Error> {
        match self.end().await? {
            End::Completed(result) => result.to().map_err(|error| Error::Value {
                what: "result".to_owned(),
                problem: format!("line {} column {}", error.line(), error.column()),
            }),
            End::Failed { code, reason } => Err(Error::WorkflowFailed { failure: code, reason }),
            End::Cancelled { reason } => Err(Error::WorkflowCancelled { reason }),
        }
    }

    /// Waits until the workflow has ended.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an id that no workflow can have, [`Error::UnknownWorkflow`], or [`Error::Closed`] when the
    /// engine shuts down first.
    pub async fn end(&self) -> Result<End, Error> {
        self.engine.key(self.id())?;
        let inner = self.engine.inner();
        let mut first = true;
        loop {
            // Ask to be told before looking: an end between the two is then heard, not missed.
            let (mut waiter, runs) = Waiter::new(&inner.hub, &self.key);
            let skips = std::mem::take(&mut first) && runs;
            if !skips && let Some(end) = self.engine.look_end(&self.key).await? {
                return Ok(end);
            }
            tokio::select! {
                event = &mut waiter.told => if let Ok(event) = event && let Some(end) = end_of(event) { return Ok(end) },
                () = tokio::time::sleep(if skips { POLL_SKIPPED } else { POLL_END }) => {}
                () = inner.grace_over() => return Err(Error::Closed),
            }
        }
    }

    /// Sends the workflow a signal.
    ///
    /// # Errors
    /// As [`Engine::signal`].
    pub async fn signal(&self, signal: Signal) -> Result<Sent, Error> {
        self.engine.signal(self.id(), signal).await
    }

    /// Cancels the workflow.
    ///
    /// # Errors
    /// As [`Engine::cancel`].
    pub async fn cancel(&self, reason: &str) -> Result<control::Outcome, Error> {
        self.engine.cancel(self.id(), reason, "api").await
    }
}

/// Waits to be told of one workflow's end; leaves nothing behind when it goes away first.
struct Waiter<'a> {
    hub: &'a Hub,
    key: &'a WorkflowKey,
    told: oneshot::Receiver<Event>,
}

impl<'a> Waiter<'a> {
    /// Asks to be told, and says whether the workflow runs here.
    fn new(hub: &'a Hub, key: &'a WorkflowKey) -> (Self, bool) {
        let (tell, told) = oneshot::channel();
        let mut ends = hub.ends();
        ends.waiting.entry(key.clone()).or_default().push(tell);
        let runs = ends.running.contains_key(key);
        (Self { hub, key, told }, runs)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.told.close();
        let mut ends = self.hub.ends();
        if let Some(waiters) = ends.waiting.get_mut(self.key) {
            waiters.retain(|waiter| !waiter.is_closed());
            if waiters.is_empty() {
                ends.waiting.remove(self.key);
            }
        }
    }
}

fn end_of(event: Event) -> Option<End> {
    match event {
        Event::WorkflowCompleted { result } => Some(End::Completed(result)),
        Event::WorkflowFailed { code, reason, .. } => Some(End::Failed { code: code.to_string(), reason }),
        Event::WorkflowCancelled { reason, .. } => Some(End::Cancelled { reason }),
        _ => None,
    }
}

impl Engine {
    /// Opens a store: `sqlite:PATH`, a path, or `postgres://USER@HOST/DATABASE`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another kind of URL, [`Error::Store`] when it cannot be opened.
    pub fn open(url: &str) -> Result<Builder, Error> {
        if postgres::is_postgres(url) {
            return Ok(Self::on(PostgresStore::open(url)?));
        }
        let path = match url.split_once(':') {
            Some(("sqlite", path)) => path.strip_prefix("//").unwrap_or(path),
            Some((scheme, _)) if scheme.len() > 1 && !scheme.contains('/') => {
                let problem = format!(
                    "has the scheme {scheme}, which this release cannot open; give sqlite:PATH or postgres://.."
                );
                return Err(Invalid::new("invalid_store", "store", problem).into());
            }
            _ => url,
        };
        Ok(Self::on(SqliteStore::open(Path::new(path))?))
    }

    /// Sets an engine up on a store.
    pub fn on(store: impl Store) -> Builder {
        Builder {
            store: Arc::new(store),
            definitions: Vec::new(),
            concurrency: 64,
            lease: Duration::from_secs(30),
            limits: Limits::default(),
            bounds: Bounds::default(),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.guard.inner
    }

    /// Starts a workflow of the definition `name` with `input`.
    pub fn start<T: Serialize + ?Sized>(&self, name: &str, input: &T) -> StartCall {
        StartCall { engine: self.clone(), request: Request::new(name).input(input) }
    }

    /// Starts a workflow and tells whether it is a replay.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::IdentityConflict`], [`Error::Overloaded`], [`Error::OutcomeUnknown`],
    /// [`Error::Store`], [`Error::Closed`].
    pub async fn start_request(&self, request: Request) -> Result<Accepted, Error> {
        let start = self.inner().check(request)?;
        let inner = self.inner().clone();
        // A task of its own: a caller that goes away must not leave a claim behind that nobody works on.
        let admitted = tokio::spawn(async move { inner.admit(start, false).await });
        admitted.await.unwrap_or_else(|error| Err(Error::Internal(format!("a start ended early: {error}"))))
    }

    /// Starts many workflows; each has its own outcome, in order.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are more than the limit; each other error stands in its place.
    pub async fn start_many(&self, requests: Vec<Request>) -> Result<Vec<Result<Accepted, Error>>, Error> {
        let limit = self.inner().limits.bulk_max;
        if requests.len() > limit {
            let remedy = "send several calls";
            return Err(Invalid::over("bulk_too_large", "requests", requests.len(), limit, remedy).into());
        }
        let mut outcomes = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter();
        loop {
            // A slice at a time, so that others' commands wait behind one slice and not behind the whole.
            let slice: Vec<_> = requests
                .by_ref()
                .take(BULK_SLICE)
                .map(|request| async move {
                    let start = self.inner().check(request)?;
                    self.inner().admit(start, true).await
                })
                .collect();
            if slice.is_empty() {
                return Ok(outcomes);
            }
            outcomes.extend(futures_util::future::join_all(slice).await);
        }
    }

    /// The key of a workflow, for an id that one can have.
    fn key(&self, id: &str) -> Result<WorkflowKey, Error> {
        let id = WorkflowId::parse_as("id", id, &self.inner().limits)?;
        Ok(WorkflowKey { namespace: Namespace::default_namespace(), id })
    }

    /// A workflow by its id, whether it exists or not.
    pub fn handle(&self, id: &str) -> Handle {
        Handle {
            engine: self.clone(),
            key: WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) },
        }
    }

    /// Ends a workflow from outside and answers what that really did.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Overloaded`], [`Error::OutcomeUnknown`], [`Error::Store`], [`Error::Closed`].
    pub async fn cancel(&self, id: &str, reason: &str, by: &str) -> Result<control::Outcome, Error> {
        let key = self.key(id)?;
        let cancel = Cancel { key: key.clone(), reason: reason.to_owned(), by: by.to_owned() };
        match self.inner().committer.begin(Command::Cancel(cancel)).await? {
            Outcome::Cancel(outcome) => {
                // A step that runs here need not wait for its heartbeat to hear of it.
                worker::lose(self.inner(), &key);
                Ok(outcome)
            }
            _ => Err(Error::Internal("a cancel was answered as something else".to_owned())),
        }
    }

    /// Sends a workflow a signal. It waits in the workflow's inbox until a step waits for one of its name.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::SignalConflict`], [`Error::WorkflowFinished`], [`Error::UnknownWorkflow`],
    /// [`Error::Overloaded`], [`Error::SignalUnknown`], [`Error::Store`], [`Error::Closed`].
    pub async fn signal(&self, id: &str, signal: Signal) -> Result<Sent, Error> {
        let (key, inner) = (self.key(id)?, self.inner());
        let Signal { name, id: signal_id, payload } = signal;
        let name = SignalName::parse_as("name", &name, &inner.limits)?;
        let signal_id = match signal_id {
            Some(id) => SignalId::parse_as("signal_id", &id, &inner.limits)?,
            None => SignalId::trusted(uuid::Uuid::now_v7().to_string()),
        };
        let asked = signal::Asked { key: key.clone(), name, id: signal_id.clone(), payload: payload? };
        let send = asked.check(&inner.fingerprint_key, &inner.limits)?;
        let id = key.id;
        match inner.committer.begin(Command::Signal(Box::new(send))).await {
            Ok(Outcome::Signal(outcome)) => match outcome {
                signal::Outcome::Accepted { .. } => Ok(Sent { id: signal_id, replay: false }),
                signal::Outcome::Replay { .. } => Ok(Sent { id: signal_id, replay: true }),
                signal::Outcome::IdentityConflict { accepted_at } => {
                    Err(Error::SignalConflict { id, signal_id, accepted_at })
                }
                signal::Outcome::Finished { status } => Err(Error::WorkflowFinished { id, status }),
                signal::Outcome::Unknown => Err(Error::UnknownWorkflow { id }),
            },
            Ok(_) => Err(Error::Internal("a signal was answered as something else".to_owned())),
            Err(Error::OutcomeUnknown { .. }) => Err(Error::SignalUnknown { id, signal_id }),
            Err(error) => Err(error),
        }
    }

    /// The current state of a workflow.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::UnknownWorkflow`], [`Error::Store`].
    pub async fn head(&self, id: &str) -> Result<Head, Error> {
        let key = self.key(id)?;
        let id = key.id.clone();
        self.inner().look(move |reader| reader.head(&key)).await?.ok_or(Error::UnknownWorkflow { id })
    }

    /// How a workflow ended; `None` while it has not.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::UnknownWorkflow`], [`Error::Store`].
    pub async fn end(&self, id: &str) -> Result<Option<End>, Error> {
        self.look_end(&self.key(id)?).await
    }

    async fn look_end(&self, key: &WorkflowKey) -> Result<Option<End>, Error> {
        let wanted = key.clone();
        let looked = self
            .inner()
            .look(move |reader| {
                let Some(head) = reader.head(&wanted)? else { return Ok(None) };
                if !head.status().is_terminal() {
                    return Ok(Some(None));
                }
                let last = reader.events(&wanted, head.seq, 1)?.pop();
                Ok(Some(last.and_then(|last| end_of(last.event))))
            })
            .await?;
        looked.ok_or_else(|| Error::UnknownWorkflow { id: key.id.clone() })
    }

    /// Runs a short look at the store beside the async threads.
    ///
    /// # Errors
    /// [`Error::Store`] when the look fails.
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&dyn Reader) -> Result<T, steadfast_store::StoreError> + Send + 'static,
    ) -> Result<T, Error> {
        self.inner().look(look).await
    }

    /// What `head` waits for now, or who runs it. That nobody knows its step is said only while no other process has the
    /// store open that might.
    pub fn why(&self, head: &Head) -> Why {
        let inner = self.inner();
        let announced = inner.is_alone().then(|| inner.announced());
        why::why(head, announced.as_deref(), inner.clock.now())
    }

    /// True when `head` waits for a worker that knows its step, and there is none; see [`why`](Self::why).
    pub fn is_blocked(&self, head: &Head) -> bool {
        matches!(self.why(head), Why::Blocked { .. })
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.inner().limits
    }

    /// The store's now, in milliseconds since the epoch.
    pub fn now(&self) -> i64 {
        self.inner().clock.now()
    }

    /// True while the store serves; false while it recovers from a failed commit, and while it [refuses
    /// writes](Engine::refuses_writes).
    pub fn is_ready(&self) -> bool {
        self.inner().committer.is_well() && !self.refuses_writes()
    }

    /// True when the store answers, and has refused for several seconds whatever was to be written.
    pub fn refuses_writes(&self) -> bool {
        let inner = self.inner();
        inner.committer.is_well() && (inner.committer.is_refused() || !inner.is_writable())
    }

    /// How many commands wait for the committer, and how many workflows run here.
    pub fn load(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.committer.waiting(), inner.hub.seats_taken.load(Ordering::Relaxed))
    }

    /// How many workflows have ended since this engine began, whoever ran them.
    pub fn ended(&self) -> u64 {
        self.inner().hub.ended_count.load(Ordering::Relaxed)
    }

    /// Stops: claims nothing more, lets running steps finish within `grace`, gives back the rest without costing
    /// them an attempt, commits what waits, and lets go of the store. Tells how that went.
    pub async fn shutdown(self, grace: Duration) -> Drained {
        let begin = Instant::now();
        let inner = self.inner().clone();
        let mut left = 0;
        inner.stage.send_replace(Stage::Draining);
        inner.wake_worker.notify_waiters();
        let all = u32::try_from(inner.concurrency).unwrap_or(u32::MAX);
        let idle = |inner: Arc<Inner>| async move {
            // Every slot's permit back means that every step has committed or was given back.
            let _ = inner.slots.acquire_many(all).await;
        };
        if tokio::time::timeout(grace, idle(inner.clone())).await.is_err() {
            inner.stage.send_replace(Stage::GraceOver);
            if tokio::time::timeout(Duration::from_secs(5), idle(inner.clone())).await.is_err() {
                left = inner.hub.seats_taken.load(Ordering::Relaxed);
                tracing::warn!("a handler does not yield; its step is given back by the next owner of the store");
            }
        }
        inner.stage.send_replace(Stage::GraceOver);
        inner.committer.close();
        let joined = inner.clone();
        // The thread runs what waits, which ends in bounded time.
        let _ = tokio::task::spawn_blocking(move || joined.committer.join()).await;
        drop(inner.store.lock().unwrap_or_else(PoisonError::into_inner).take());
        Drained { took: begin.elapsed(), given_back: inner.hub.given_back.load(Ordering::Relaxed), left }
    }
}

#[cfg(test)]
mod tests {
    use steadfast_store::clock::ManualClock;
    use steadfast_store::memory::MemoryStore;

    use super::*;

    fn ended(key: &WorkflowKey, event: Event) -> Option<Hints> {
        Some(Hints { ended: vec![(key.clone(), event)], ..Hints::default() })
    }

    /// Whoever hears of an end and starts the next workflow finds room for it.
    #[tokio::test]
    async fn an_end_makes_room_before_it_is_told() {
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("w") };
        let completed = Event::WorkflowCompleted { result: Json::null() };
        let cancelled = Event::WorkflowCancelled { reason: String::new(), by: String::new() };
        for (event, room) in [(completed, 1), (cancelled, 0)] {
            let (hub, slots) = (Hub::default(), Arc::new(Semaphore::new(1)));
            let permit = slots.clone().try_acquire_owned().expect("there is room");
            // The task that runs it has the seat too.
            let seat = Seat::new(permit, &hub.seats_taken);
            hub.ends().running.insert(key.clone(), seat.clone());
            let (waiter, runs) = Waiter::new(&hub, &key);
            assert!(runs);
            hub.hear(ended(&key, event.clone()), 0);
            assert_eq!(slots.available_permits(), room, "{event:?}");
            drop((waiter, seat));
        }
    }

    /// Room that is kept for a claim on its way holds no workflow yet.
    #[tokio::test]
    async fn what_runs_is_counted_by_seats() {
        let store = MemoryStore::new(Arc::new(ManualClock::new(1_000)));
        let inner = Engine::on(store).concurrency(4).build(false).expect("it is set up");
        let engine = Engine { guard: Arc::new(Guard { inner: inner.clone() }) };
        let room = || inner.slots.clone().try_acquire_owned().expect("there is room");
        let (permit, _asked) = (room(), room());
        assert_eq!(engine.load().1, 0);
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("w") };
        let seat = inner.enters(&key, permit);
        assert_eq!(engine.load().1, 1);
        seat.leave();
        assert_eq!(engine.load().1, 0);
        inner.leaves(&key, &seat);
        assert_eq!(engine.load().1, 0, "it leaves once");
    }

    /// A worker without room knows of no backlog: what runs there is not put back for others, and starts go on to claim
    /// their first step. Whoever makes room looks.
    #[tokio::test]
    async fn a_full_worker_is_no_backlog() {
        let store = MemoryStore::new(Arc::new(ManualClock::new(1_000)));
        let inner = Engine::on(store).concurrency(1).build(false).expect("it is set up");
        let permit = inner.slots.clone().try_acquire_owned().expect("there is room");
        worker::claim(&inner).await.expect("it has nothing to do");
        assert!(!inner.has_backlog());
        drop(permit);
        inner.room();
        let woken = tokio::time::timeout(Duration::from_secs(5), inner.wake_worker.notified()).await;
        woken.expect("the worker is told to look");
        inner.room();
        let woken = tokio::time::timeout(Duration::from_millis(50), inner.wake_worker.notified()).await;
        assert!(woken.is_err(), "nobody waits for room any more");
    }

    /// What is known to be ready is not forgotten when there is no room for it, and becomes a backlog after a while.
    #[tokio::test]
    async fn ready_steps_that_find_no_room_for_long_are_a_backlog() {
        let store = MemoryStore::new(Arc::new(ManualClock::new(1_000)));
        let inner = Engine::on(store).concurrency(1).build(false).expect("it is set up");
        let _permit = inner.slots.clone().try_acquire_owned().expect("there is room");
        inner.hub.ready_count.store(3, Ordering::Relaxed);
        let begin = Instant::now();
        let mut told = Vec::new();
        for ms in [0, 5, 19, 20] {
            let left = worker::claim(&inner).await.expect("it has nothing to do");
            let pause = inner.spill(left, begin + Duration::from_millis(ms)).await.expect("it is well");
            told.push((left, pause.as_millis(), inner.has_backlog()));
        }
        assert_eq!(told, [(true, 20, false), (true, 15, false), (true, 1, false), (true, 1_000, true)]);
        assert_eq!(inner.take_ready(), 3);
    }
}
