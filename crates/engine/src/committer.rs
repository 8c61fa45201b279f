//! Committer: the one road of every change.
//!
//! One thread owns a writer of the store; where the store has several, each has a committer of its own, and a workflow
//! goes to one of them by its id, so that commands of one workflow never wait for each other's rows. It takes every command that waits, up to a bound, loads the rows they name,
//! decides each in order, saves the difference and commits once. Each caller hears its own outcome when that is
//! durable, see [`delivery`](crate::delivery). It never waits for a timer to fill a batch: while one is written the next
//! one gathers.
//!
//! # Failures
//! A save that certainly did not happen is retried command by command, so that one bad row cannot take the others
//! down; one that lost a race with another node is decided anew as a whole. A command that takes whatever stands first,
//! such as a sweep, goes on without a workflow that cannot be saved, see [`left_out`](crate::left_out). After a commit or
//! a sync of unknown outcome nothing is run again before the store has recovered. Where it can then tell what became of
//! the commit, the callers hear that or the batch is run again; elsewhere they hear *unknown*, and a repeated command
//! learns the truth from its id or token.
//!
//! # Rows that somebody holds
//! A person at a database shell, or a node that stands still, can hold a row for long. A batch waits for a row for a
//! second, and is then run in parts. The command that meets the row alone is set aside, with all that come later for
//! that workflow, and tried again between the batches of the others, so they wait for it a second at a time and not for
//! as long as the row is held.
//!
//! # Outages
//! While the store recovers, what finishes work waits: its workers have nothing better to do. What begins work is told
//! after two seconds that the store is away, and so is everybody who asks meanwhile.
//!
//! # Two lanes
//! What finishes work has a lane that what begins work can never fill. A full finishing lane makes callers wait; a
//! full beginning lane answers `overloaded`, so that workers never deadlock against their own queue.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use steadfast_core::admission;
use steadfast_core::command::{Command, Lane, Moment, Outcome, decide};
use steadfast_core::commit;
use steadfast_core::snapshot::{Handle, Hints, Snapshot, Stop, Wants};
use steadfast_core::sweep::{Boots, GiveBack};
use steadfast_core::text::WorkflowKey;
use steadfast_store::clock::Clock;
use steadfast_store::seldom::Seldom;
use steadfast_store::{Fate, Saved, Store, StoreError, Writer};
use tokio::sync::{Semaphore, oneshot};

use crate::delivery::{Delivery, Syncer};
use crate::error::Error;
use crate::left_out::{LeftOut, Narrow, Narrowed};
use crate::refusals::Refusals;

/// Why the lanes' lock is never poisoned.
const HELD: &str = "the lanes' lock is held for one push or take";
/// How long the thread looks for the next command before it sleeps. A step that waits for nothing is back sooner than
/// a sleeping thread wakes up.
const AWAKE: Duration = Duration::from_micros(100);
/// Nothing to do for so long is a quiet time.
const QUIET: Duration = Duration::from_millis(20);
/// Claims in one page of giving back.
const GIVE_BACK_LIMIT: usize = 512;
/// How soon what could not be given back is tried again in a quiet time.
const OWING: Duration = Duration::from_millis(250);
/// How often a batch that loses races with other nodes is decided anew before its commands are run one by one.
const RACES_MAX: u32 = 8;
/// How long one command may lose races before its caller is told that the store is busy.
const RACES_TIME: Duration = Duration::from_secs(20);
/// A race that took so long was a wait for a row that somebody holds; where rows are waited for, it is for a second.
const WAITED: Duration = Duration::from_millis(900);
/// How long a command that met such a row is left alone before it is tried again.
const ASIDE: Duration = Duration::from_secs(1);
/// How many may be set aside; whoever comes then is told at once that the store is busy.
const ASIDE_MAX: usize = 1_024;
/// How long what begins work waits for a store that recovers.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long callers wait to be told what became of a commit.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(10);

/// Bounds of a batch and of the queues before it.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// Commands in one batch.
    pub batch_commands: usize,
    /// Bytes that one batch is expected to write.
    pub batch_bytes: usize,
    /// Finishing commands that may wait; more make their callers wait.
    pub finish_waiting: usize,
    /// Beginning commands that may wait; more are refused as `overloaded`.
    pub begin_waiting: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { batch_commands: 1_024, batch_bytes: 8 << 20, finish_waiting: 8_192, begin_waiting: 8_192 }
    }
}

/// A command on its way, and who waits for its outcome.
pub(crate) struct Job {
    command: Command,
    pub(crate) reply: oneshot::Sender<Result<Outcome, Error>>,
}

#[derive(Default)]
struct Lanes {
    finish: VecDeque<Job>,
    begin: VecDeque<Job>,
    closed: bool,
    /// Something other than a command is to be looked at.
    woken: bool,
}

impl Lanes {
    /// No command waits.
    fn are_empty(&self) -> bool {
        self.finish.is_empty() && self.begin.is_empty()
    }
}

/// Hears what a batch led to: must be short. `None` says that hints were lost with a batch of unknown outcome, so that
/// whoever waits for any had better look.
pub(crate) type Listener = Box<dyn Fn(Option<Hints>) + Send + Sync>;

struct Shared {
    lanes: Mutex<Lanes>,
    arrived: Condvar,
    finish_room: Semaphore,
    begin_room: Semaphore,
    bounds: Bounds,
    /// False while the store recovers.
    well: AtomicBool,
    /// True when it has done so for long: what begins work is refused at once.
    refusing: AtomicBool,
    /// What the store has refused, whichever committer brought it.
    refusals: Arc<Refusals>,
}

/// The way to the committer's thread.
pub(crate) struct Committer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().expect(HELD)
    }

    /// Lets the committer's thread look around.
    fn wake(&self) {
        self.lanes().woken = true;
        self.arrived.notify_all();
    }
}

impl Committer {
    /// Starts the thread.
    pub(crate) fn start(
        store: &dyn Store,
        bounds: Bounds,
        deliveries_max: u32,
        refusals: Arc<Refusals>,
        listener: Listener,
    ) -> Result<Self, StoreError> {
        let writer = store.writer()?;
        let shared = Arc::new(Shared {
            lanes: Mutex::default(),
            arrived: Condvar::new(),
            finish_room: Semaphore::new(bounds.finish_waiting),
            begin_room: Semaphore::new(bounds.begin_waiting),
            bounds,
            well: AtomicBool::new(true),
            refusing: AtomicBool::new(false),
            refusals,
        });
        let woken = shared.clone();
        let syncer = Syncer::start(writer.disk(), listener, move || woken.wake())?;
        let runner = Runner {
            shared: shared.clone(),
            syncer,
            writer,
            clock: store.clock(),
            deliveries_max,
            expected: 0,
            give_back_all: false,
            orphaned: Vec::new(),
            owing: Seldom::new(),
            aside: VecDeque::new(),
            unsaved: Vec::new(),
            left_out: LeftOut::default(),
        };
        let thread =
            std::thread::Builder::new().name("steadfast-committer".to_owned()).spawn(move || runner.run()).map_err(
                |source| StoreError::File { doing: "start the committer's thread for", path: "store".into(), source },
            )?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Sends a command that finishes work; waits for room.
    pub(crate) async fn finish(&self, command: Command) -> Result<Outcome, Error> {
        debug_assert_eq!(command.lane(), Lane::Finish);
        self.shared.finish_room.acquire().await.map_err(|_| Error::Closed)?.forget();
        self.send(command)?.await.unwrap_or(Err(Error::Closed))
    }

    /// Sends a command that begins work; refused when too many wait.
    pub(crate) async fn begin(&self, command: Command) -> Result<Outcome, Error> {
        debug_assert_eq!(command.lane(), Lane::Begin);
        self.refuse()?;
        match self.shared.begin_room.try_acquire() {
            Ok(room) => room.forget(),
            Err(tokio::sync::TryAcquireError::Closed) => return Err(Error::Closed),
            // About the time of a few full batches.
            Err(tokio::sync::TryAcquireError::NoPermits) => return Err(Error::Overloaded { retry_after_ms: 100 }),
        }
        self.send(command)?.await.unwrap_or(Err(Error::Closed))
    }

    /// Sends many commands that begin work as one caller that waits for room: for bulk, which is sliced anyway.
    pub(crate) async fn begin_waiting(&self, command: Command) -> Result<Outcome, Error> {
        self.refuse()?;
        self.shared.begin_room.acquire().await.map_err(|_| Error::Closed)?.forget();
        self.send(command)?.await.unwrap_or(Err(Error::Closed))
    }

    fn send(&self, command: Command) -> Result<oneshot::Receiver<Result<Outcome, Error>>, Error> {
        let (reply, answer) = oneshot::channel();
        let lane = command.lane();
        let job = Job { command, reply };
        let mut lanes = self.shared.lanes();
        if lanes.closed {
            return Err(Error::Closed);
        }
        let idle = lanes.are_empty();
        match lane {
            Lane::Finish => lanes.finish.push_back(job),
            Lane::Begin => lanes.begin.push_back(job),
        }
        drop(lanes);
        // When others wait already the thread is awake or about to be.
        if idle {
            self.shared.arrived.notify_one();
        }
        Ok(answer)
    }

    fn refuse(&self) -> Result<(), Error> {
        if self.shared.refusing.load(Ordering::Relaxed) { Err(StoreError::Recovering.into()) } else { Ok(()) }
    }

    /// True while the store serves.
    pub(crate) fn is_well(&self) -> bool {
        self.shared.well.load(Ordering::Relaxed)
    }

    /// How many commands wait.
    pub(crate) fn waiting(&self) -> usize {
        let lanes = self.shared.lanes();
        lanes.finish.len() + lanes.begin.len()
    }

    /// Takes no more commands; those that wait are still run.
    pub(crate) fn close(&self) {
        self.shared.lanes().closed = true;
        self.shared.finish_room.close();
        self.shared.begin_room.close();
        self.shared.arrived.notify_all();
    }

    /// Waits until the thread has run what waited. Blocks.
    pub(crate) fn join(&self) {
        let thread = self.thread.lock().expect("held for one take").take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the committer's thread ended by a panic");
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The committers of a store, one for each of its writers.
pub(crate) struct Committers {
    all: Vec<Committer>,
    refusals: Arc<Refusals>,
    /// How many of them are worth using now.
    worth: Box<dyn Fn() -> usize + Send + Sync>,
    /// Whose turn it is to claim.
    turn: AtomicUsize,
}

impl Committers {
    /// Starts one thread for each writer that the store has. Of these, commands go to as many as `worth` says.
    pub(crate) fn start(
        store: &dyn Store,
        worth: impl Fn() -> usize + Send + Sync + 'static,
        bounds: &Bounds,
        deliveries_max: u32,
        listener: impl Fn(Option<Hints>) + Clone + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let refusals = Arc::<Refusals>::default();
        let one =
            |_| Committer::start(store, bounds.clone(), deliveries_max, refusals.clone(), Box::new(listener.clone()));
        let all = (0..store.writers()).map(one).collect::<Result<_, _>>()?;
        Ok(Self { all, refusals, worth: Box::new(worth), turn: AtomicUsize::new(0) })
    }

    /// The one for this command. Those that name one workflow go by its id.
    fn of(&self, command: &Command) -> &Committer {
        let worth = if self.all.len() == 1 { 1 } else { (self.worth)().clamp(1, self.all.len()) };
        let n = match workflow(command) {
            _ if worth == 1 => 0,
            Some(key) => {
                let mut hash = DefaultHasher::new();
                key.hash(&mut hash);
                usize::try_from(hash.finish() % worth as u64).unwrap_or_default()
            }
            None if matches!(command, Command::Claim(_)) => self.turn.fetch_add(1, Ordering::Relaxed) % worth,
            None => 0,
        };
        &self.all[n]
    }

    /// Sends a command that finishes work; waits for room.
    pub(crate) async fn finish(&self, command: Command) -> Result<Outcome, Error> {
        self.of(&command).finish(command).await
    }

    /// Sends a command that begins work; refused when too many wait.
    pub(crate) async fn begin(&self, command: Command) -> Result<Outcome, Error> {
        self.of(&command).begin(command).await
    }

    /// Sends many commands that begin work as one caller that waits for room.
    pub(crate) async fn begin_waiting(&self, command: Command) -> Result<Outcome, Error> {
        self.of(&command).begin_waiting(command).await
    }

    /// True while the store serves.
    pub(crate) fn is_well(&self) -> bool {
        self.all.iter().all(Committer::is_well)
    }

    /// True when the store has refused everything for a while.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusals.are_lasting(Instant::now())
    }

    /// How many commands wait.
    pub(crate) fn waiting(&self) -> usize {
        self.all.iter().map(Committer::waiting).sum()
    }

    /// Takes no more commands; those that wait are still run.
    pub(crate) fn close(&self) {
        self.all.iter().for_each(Committer::close);
    }

    /// Waits until every thread has run what waited. Blocks.
    pub(crate) fn join(&self) {
        self.all.iter().for_each(Committer::join);
    }
}

/// The one workflow that a command names.
fn workflow(command: &Command) -> Option<&WorkflowKey> {
    match command {
        Command::Start(start) => Some(&start.key),
        Command::Complete(complete) => Some(&complete.held.key),
        Command::Fail(fail) => Some(&fail.held.key),
        Command::Cancel(cancel) => Some(&cancel.key),
        Command::Signal(send) => Some(&send.key),
        Command::Heartbeat(request) => match &request.beats[..] {
            [beat] => Some(&beat.held.key),
            _ => None,
        },
        Command::Claim(_) | Command::Sweep(_) | Command::GiveBack(_) => None,
    }
}

/// True for a command that waits for the row of a workflow that is there; the others pass over rows that are held.
fn waits_for_a_row(command: &Command) -> bool {
    match command {
        Command::Complete(_) | Command::Fail(_) | Command::Cancel(_) | Command::Signal(_) | Command::Heartbeat(_) => {
            true
        }
        Command::Start(_) | Command::Claim(_) | Command::Sweep(_) | Command::GiveBack(_) => false,
    }
}

/// A command whose row somebody holds.
struct Aside {
    job: Job,
    since: Instant,
    again: Instant,
}

/// How a batch ended.
enum Ended {
    Decided(Delivery),
    /// Certainly nothing was written: the jobs are to be run one by one, or to be told.
    NotCommitted(Vec<Job>, Error),
    /// What its callers hear if it turns out to be there.
    Unknown(Delivery, StoreError),
}

struct Runner {
    shared: Arc<Shared>,
    /// Goes before the writer: its thread may still sync.
    syncer: Syncer,
    writer: Box<dyn Writer>,
    clock: Arc<dyn Clock>,
    deliveries_max: u32,
    /// How many claims the last batch handed out: so many commands are likely to come back at once.
    expected: usize,
    /// The epoch has changed: every claim of the one before is yet to be given back.
    give_back_all: bool,
    /// Seeds of claims that nobody will ever hear of, yet to be given back.
    orphaned: Vec<[u8; 32]>,
    /// What is said of claims that cannot be given back.
    owing: Seldom,
    /// In the order in which they are tried again.
    aside: VecDeque<Aside>,
    /// What the last batch would have changed, or where a rule failed what it looked at, where it was one command and was
    /// not saved.
    unsaved: Vec<(Handle, WorkflowKey)>,
    left_out: LeftOut,
}

impl Drop for Runner {
    /// Also after a panic: nobody shall wait for a thread that is gone.
    fn drop(&mut self) {
        let mut lanes = self.shared.lanes();
        lanes.closed = true;
        let left: Vec<Job> = lanes.finish.drain(..).collect();
        let left: Vec<Job> = left.into_iter().chain(lanes.begin.drain(..)).collect();
        drop(lanes);
        self.shared.finish_room.close();
        self.shared.begin_room.close();
        tell(left, &Error::Closed);
    }
}

impl Runner {
    fn run(mut self) {
        while let Some(batch) = self.take() {
            if !batch.is_empty() {
                self.syncer.wait_for_room();
                self.run_batch(batch);
            }
            self.try_aside();
            self.look_after_syncs();
            self.give_back();
        }
        self.syncer.wait_until_clear();
        self.look_after_syncs();
    }

    fn look_after_syncs(&mut self) {
        if let Some((jobs, error)) = self.syncer.take_failed() {
            self.unknown(jobs, &error, Vec::new());
        }
    }

    /// Looks for a command for a moment, giving the processor to whoever makes it.
    fn stay_awake(&self) -> MutexGuard<'_, Lanes> {
        let begin = Instant::now();
        loop {
            let lanes = self.shared.lanes();
            let idle = lanes.are_empty() && !lanes.closed && !lanes.woken;
            if !idle || begin.elapsed() >= AWAKE {
                return lanes;
            }
            drop(lanes);
            std::thread::yield_now();
        }
    }

    /// Where small batches are dear, waits a moment for the commands that the last batch leads to: all of its workers go
    /// on at the same time, and without this the first of them would go alone, and then the others behind it.
    fn gather<'l>(&'l self, mut lanes: MutexGuard<'l, Lanes>) -> MutexGuard<'l, Lanes> {
        let patience = self.writer.gathers();
        if patience.is_zero() || lanes.are_empty() {
            return lanes;
        }
        let expected = self.expected.min(self.shared.bounds.batch_commands);
        let begin = Instant::now();
        while lanes.finish.len() + lanes.begin.len() < expected && !lanes.closed && begin.elapsed() < patience {
            drop(lanes);
            std::thread::yield_now();
            lanes = self.shared.lanes();
        }
        lanes
    }

    /// Waits for commands and takes as many as a batch holds, none when there is something else to look at; `None`
    /// when closed and empty.
    fn take(&mut self) -> Option<Vec<Job>> {
        let mut rested = false;
        let mut lanes = self.stay_awake();
        loop {
            if std::mem::take(&mut lanes.woken) || !lanes.are_empty() {
                break;
            }
            if lanes.closed && self.aside.is_empty() {
                return None;
            }
            if rested && (self.owes() || !self.aside.is_empty()) {
                let waited;
                (lanes, waited) = self.shared.arrived.wait_timeout(lanes, OWING).expect(HELD);
                if waited.timed_out() {
                    break;
                }
                continue;
            }
            if rested {
                lanes = self.shared.arrived.wait(lanes).expect(HELD);
                continue;
            }
            let waited;
            (lanes, waited) = self.shared.arrived.wait_timeout(lanes, QUIET).expect(HELD);
            if waited.timed_out() {
                // Time for housekeeping. A queue that is empty for a moment is not: under load it often is.
                drop(lanes);
                self.writer.rest();
                rested = true;
                lanes = self.shared.lanes();
            }
        }
        let mut lanes = self.gather(lanes);
        let bounds = &self.shared.bounds;
        let mut batch = Vec::new();
        let mut bytes = 0;
        // A quarter of every batch is kept for beginnings while any wait: finishing goes first, but not alone.
        let kept = if lanes.begin.is_empty() { 0 } else { bounds.batch_commands / 4 };
        let (mut finished, mut begun) = (0, 0);
        for (limit, finishing) in [(bounds.batch_commands - kept, true), (bounds.batch_commands, false)] {
            while batch.len() < limit && (bytes < bounds.batch_bytes || batch.is_empty()) {
                let lane = if finishing { &mut lanes.finish } else { &mut lanes.begin };
                let Some(job) = lane.pop_front() else { break };
                bytes += job.command.bytes();
                *(if finishing { &mut finished } else { &mut begun }) += 1;
                batch.push(job);
            }
        }
        drop(lanes);
        self.shared.finish_room.add_permits(finished);
        self.shared.begin_room.add_permits(begun);
        Some(batch)
    }

    fn run_batch(&mut self, batch: Vec<Job>) {
        let now = Instant::now();
        if self.left_out.is_over_for_some(now) {
            self.writer.leave_out(self.left_out.handles());
        }
        let batch = self.keep_behind(batch, now);
        if !batch.is_empty() {
            self.run_since(batch, now);
        }
    }

    /// Sets aside what names a workflow of which a command is set aside already, and answers the others.
    fn keep_behind(&mut self, batch: Vec<Job>, now: Instant) -> Vec<Job> {
        if self.aside.is_empty() {
            return batch;
        }
        let is_held = |job: &Job| {
            workflow(&job.command)
                .is_some_and(|key| self.aside.iter().any(|aside| workflow(&aside.job.command) == Some(key)))
        };
        let (held, batch) = batch.into_iter().partition(is_held);
        self.set_aside(held, now);
        batch
    }

    fn set_aside(&mut self, jobs: Vec<Job>, since: Instant) {
        for job in jobs {
            if self.aside.len() >= ASIDE_MAX || since.elapsed() >= RACES_TIME {
                metrics::counter!("steadfast_commands_refused_by_store_total").increment(1);
                tell(vec![job], &StoreError::Raced { doing: "wait for a row" }.into());
            } else {
                self.aside.push_back(Aside { job, since, again: Instant::now() + ASIDE });
            }
        }
    }

    /// Tries the commands of one workflow again that were set aside.
    fn try_aside(&mut self) {
        let now = Instant::now();
        let Some(at) = self.aside.iter().position(|aside| aside.again <= now) else { return };
        let Some(first) = self.aside.remove(at) else { return };
        let since = first.since;
        let mut batch = vec![first.job];
        if let Some(key) = workflow(&batch[0].command).cloned() {
            let (same, others) = std::mem::take(&mut self.aside)
                .into_iter()
                .partition::<VecDeque<Aside>, _>(|aside| workflow(&aside.job.command) == Some(&key));
            self.aside = others;
            batch.extend(same.into_iter().map(|aside| aside.job));
        }
        self.run_since(batch, since);
    }

    /// Runs a batch whose first command has waited since then.
    fn run_since(&mut self, mut batch: Vec<Job>, began: Instant) {
        let mut races = 0;
        let mut narrowed = Narrowed::default();
        // What earlier decisions turned out to need: named from the beginning when they are made anew.
        let mut wants = Wants::default();
        loop {
            let tried = Instant::now();
            match self.attempt(batch, &mut wants) {
                Ended::Decided(delivery) => return self.settle(delivery),
                Ended::Unknown(delivery, error) => match self.learn(delivery, &error) {
                    Some(jobs) => batch = jobs,
                    None => return,
                },
                // An earlier batch has failed on its way to the disk, or the database is away: not these commands' fault.
                Ended::NotCommitted(jobs, Error::Store(error)) if matches!(*error, StoreError::Recovering) => {
                    self.syncer.wait_until_clear();
                    let (told, error) = self.syncer.take_failed().unwrap_or((Vec::new(), StoreError::Recovering));
                    match self.unknown(told, &error, jobs) {
                        Some(jobs) if jobs.is_empty() => return,
                        Some(jobs) => batch = jobs,
                        None => return,
                    }
                }
                Ended::NotCommitted(jobs, Error::Store(error))
                    if matches!(*error, StoreError::Raced { .. }) && tried.elapsed() >= WAITED =>
                {
                    return self.part(jobs, began);
                }
                Ended::NotCommitted(jobs, Error::Store(error))
                    if matches!(*error, StoreError::Raced { .. }) && races < RACES_MAX =>
                {
                    races += 1;
                    // Who raced once may race again; a little apart they do not.
                    std::thread::sleep(Duration::from_micros(u64::from(races.min(20)) * 100 * (1 + jitter() % 4)));
                    batch = jobs;
                }
                Ended::NotCommitted(mut jobs, error) if jobs.len() == 1 => {
                    if self.narrow(&mut jobs[0].command, &mut narrowed) {
                        // Once more where it has met another node: that may have been another one.
                        races = races.min(RACES_MAX - 1);
                        wants = Wants::default();
                        batch = jobs;
                        continue;
                    }
                    if is_raced(&error) {
                        return self.set_aside(jobs, began);
                    }
                    metrics::counter!("steadfast_commands_refused_by_store_total").increment(1);
                    if matches!(error, Error::Store(_)) {
                        self.shared.refusals.refused(workflow(&jobs[0].command), Instant::now());
                    }
                    return tell(jobs, &error);
                }
                Ended::NotCommitted(jobs, error) => {
                    tracing::warn!(commands = jobs.len(), %error, "a batch was not committed; its commands are run one by one");
                    return jobs.into_iter().for_each(|job| self.run_batch(vec![job]));
                }
            }
        }
    }

    /// Makes another try of a command that takes whatever stands first and could not be saved.
    fn narrow(&mut self, command: &mut Command, narrowed: &mut Narrowed) -> bool {
        let (unsaved, now) = (std::mem::take(&mut self.unsaved), Instant::now());
        match self.left_out.narrow(command, &unsaved, narrowed, now) {
            Narrow::Again => true,
            Narrow::Without(key) => {
                self.shared.refusals.refused(Some(&key), now);
                self.writer.leave_out(self.left_out.handles());
                true
            }
            Narrow::Over => false,
        }
    }

    /// After a wait for a row that somebody holds: parts its commands from those that need not wait.
    fn part(&mut self, jobs: Vec<Job>, began: Instant) {
        let alike = |job: &Job| workflow(&job.command) == workflow(&jobs[0].command);
        if jobs.len() == 1 || workflow(&jobs[0].command).is_some() && jobs.iter().all(alike) {
            return self.set_aside(jobs, began);
        }
        tracing::warn!(
            commands = jobs.len(),
            "somebody holds a row for long; the commands that wait for one are run one by one"
        );
        let (waiting, others): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| waits_for_a_row(&job.command));
        if waiting.is_empty() {
            return others.into_iter().for_each(|job| self.run_batch(vec![job]));
        }
        if !others.is_empty() {
            self.run_batch(others);
        }
        waiting.into_iter().for_each(|job| self.run_batch(vec![job]));
    }

    /// After a commit of unknown outcome: learns what became of it where the store can tell. Answers the jobs when they
    /// are to be run again.
    fn learn(&mut self, delivery: Delivery, error: &StoreError) -> Option<Vec<Job>> {
        // Those before it are as unknown as it is, and they are not told by the same answer.
        self.syncer.wait_until_clear();
        let earlier = self.syncer.take_failed().map(|(jobs, _)| jobs).unwrap_or_default();
        let mut unknown = Some(delivery);
        let (fate, orphaned) = self.recover(error, earlier, &mut unknown, &mut Vec::new());
        let (Some(fate), Some(delivery)) = (fate, unknown) else {
            self.after_recovery(fate.is_some(), orphaned);
            return None;
        };
        match fate {
            Fate::Committed => {
                self.after_recovery(true, orphaned);
                self.settle(delivery);
                None
            }
            Fate::NotCommitted => {
                self.after_recovery(true, orphaned);
                Some(delivery.jobs)
            }
            Fate::Unknown => {
                let orphaned = orphaned.into_iter().chain(tell_unknown(delivery.jobs)).collect();
                self.after_recovery(true, orphaned);
                None
            }
        }
    }

    fn settle(&mut self, delivery: Delivery) {
        self.expected = delivery.outcomes.iter().map(followed_by).sum();
        let more = !self.shared.lanes().are_empty();
        if let Err((jobs, error)) = self.syncer.settle(delivery, more) {
            self.unknown(jobs, &error, Vec::new());
        }
    }

    /// Loads, decides and saves one batch.
    fn attempt(&mut self, jobs: Vec<Job>, wants: &mut Wants) -> Ended {
        let started = Instant::now();
        self.unsaved.clear();
        // Of this attempt: what was not committed left no trace, and what waited for the store, perhaps for long, is
        // granted no lease that has ended meanwhile.
        let now = self.clock.now();
        for job in &jobs {
            job.command.wants(&Moment { now, epoch: self.writer.epoch() }, wants);
        }
        let mut snapshot = Snapshot::new();
        // A panic in a rule is a fault of ours; it must not end the thread that every command depends on.
        let decided = catch_unwind(AssertUnwindSafe(|| self.decide_all(&jobs, now, wants, &mut snapshot)));
        let outcomes = match decided {
            Ok(Ok(outcomes)) => outcomes,
            Ok(Err(error)) => {
                self.writer.abandon();
                if jobs.len() == 1 && matches!(error, Error::Internal(_)) {
                    self.unsaved = snapshot.stored().collect();
                }
                return Ended::NotCommitted(jobs, error);
            }
            Err(_) => {
                self.writer.abandon();
                if jobs.len() == 1 {
                    self.unsaved = snapshot.stored().collect();
                }
                return Ended::NotCommitted(jobs, Error::Internal("a rule panicked".to_owned()));
            }
        };
        if !snapshot.is_changed() {
            return match self.writer.confirm() {
                Ok(()) => Ended::Decided(Delivery { jobs, outcomes, hints: Hints::default(), written: false }),
                Err(error) => Ended::NotCommitted(jobs, error.into()),
            };
        }
        // Neither may a panic while saving; then nobody knows how far that came.
        let saved = catch_unwind(AssertUnwindSafe(|| {
            let hints = snapshot.hints();
            (self.writer.save(&snapshot), hints)
        }));
        let Ok((saved, hints)) = saved else {
            let delivery = Delivery { jobs, outcomes, hints: snapshot.hints(), written: true };
            return Ended::Unknown(delivery, StoreError::Recovering);
        };
        match saved {
            Saved::Written => {
                self.shared.refusals.written();
                self.left_out.saved(Instant::now());
                metrics::counter!("steadfast_commits_total").increment(1);
                metrics::counter!("steadfast_events_total").increment(snapshot.appended().len() as u64);
                metrics::histogram!("steadfast_batch_commands").record(jobs.len() as f64);
                metrics::histogram!("steadfast_commit_seconds").record(started.elapsed().as_secs_f64());
                Ended::Decided(Delivery { jobs, outcomes, hints, written: true })
            }
            Saved::NotCommitted(error) => {
                if jobs.len() == 1 {
                    let changed = snapshot.changed_heads();
                    self.unsaved = changed.filter_map(|head| Some((head.handle?, head.head.key.clone()))).collect();
                }
                Ended::NotCommitted(jobs, error.into())
            }
            Saved::Unknown(error) => Ended::Unknown(Delivery { jobs, outcomes, hints, written: true }, error),
        }
    }

    fn decide_all(
        &mut self,
        jobs: &[Job],
        now: i64,
        wants: &mut Wants,
        snapshot: &mut Snapshot,
    ) -> Result<Vec<Outcome>, Error> {
        self.writer.load(wants, snapshot)?;
        let moment = Moment { now, epoch: self.writer.epoch() };
        let mut outcomes = Vec::with_capacity(jobs.len());
        for job in jobs {
            outcomes.push(loop {
                match decide(snapshot, &job.command, &moment) {
                    Ok(outcome) => break outcome,
                    Err(Stop::Missing(missing)) => {
                        self.writer.load(&missing, snapshot)?;
                        wants.heads.extend(missing.heads);
                    }
                    Err(Stop::Illegal(illegal)) => return Err(Error::Internal(illegal.to_string())),
                }
            });
        }
        Ok(outcomes)
    }

    /// Tells everybody whose outcome is unknown, and makes the store well before the next batch; `waiting` are those
    /// that were certainly not run. Answers whom of these to run now; `None` when the engine is closed.
    fn unknown(&mut self, mut jobs: Vec<Job>, error: &StoreError, mut waiting: Vec<Job>) -> Option<Vec<Job>> {
        // Nothing may be on its way to the disk while the store recovers; what fails on it has the same fate.
        self.syncer.wait_until_clear();
        if let Some((more, _)) = self.syncer.take_failed() {
            jobs.extend(more);
        }
        let (fate, orphaned) = self.recover(error, jobs, &mut None, &mut waiting);
        self.after_recovery(fate.is_some(), orphaned);
        if fate.is_none() {
            tell(waiting, &Error::Closed);
            return None;
        }
        Some(waiting)
    }

    /// Makes the store well again. `unknown` are told at once that their outcome is not known, `delivery` when it takes
    /// long, and what begins work among `waiting` that the store is away. Answers what became of the last save, `None`
    /// when the engine is closed, and the seeds of claims that nobody will ever hear of.
    fn recover(
        &mut self,
        error: &StoreError,
        unknown: Vec<Job>,
        delivery: &mut Option<Delivery>,
        waiting: &mut Vec<Job>,
    ) -> (Option<Fate>, Vec<[u8; 32]>) {
        let commands = unknown.len() + delivery.as_ref().map_or(0, |delivery| delivery.jobs.len());
        if commands > 0 {
            tracing::error!(commands, %error, "the outcome of a commit is unknown; the store recovers");
            metrics::counter!("steadfast_commits_unknown_total").increment(1);
        } else {
            tracing::warn!(%error, "the store is away; it recovers");
        }
        let began = Instant::now();
        self.shared.well.store(false, Ordering::Relaxed);
        let mut orphaned = tell_unknown(unknown);
        let epoch = self.writer.epoch();
        let mut pause = Duration::from_millis(10);
        let mut seldom = Seldom::new();
        let fate = loop {
            match self.writer.recover() {
                Ok(fate) => break Some(fate),
                Err(error) => {
                    if let Some(left_out) = seldom.says(Instant::now()) {
                        tracing::warn!(%error, left_out, "the store is not well yet");
                    }
                }
            }
            if self.shared.lanes().closed {
                break None;
            }
            if began.elapsed() >= PATIENCE {
                self.refuse_beginnings(waiting);
            }
            if began.elapsed() >= UNKNOWN_PATIENCE
                && let Some(delivery) = delivery.take()
            {
                orphaned.extend(tell_unknown(delivery.jobs));
            }
            // Every process of a store meets the same outage; they shall not all knock at the same moment.
            std::thread::sleep(pause / 2 + pause * u32::try_from(jitter() % 64).expect("it is small") / 64);
            pause = (pause * 2).min(Duration::from_millis(250));
        };
        if fate.is_none()
            && let Some(delivery) = delivery.take()
        {
            orphaned.extend(tell_unknown(delivery.jobs));
        }
        if fate.is_some() {
            self.shared.well.store(true, Ordering::Relaxed);
            self.shared.refusing.store(false, Ordering::Relaxed);
            tracing::info!(seconds = began.elapsed().as_secs_f64(), "the store is well again");
            // Claims of an earlier epoch are void: whoever waits for their lease would wait for nothing.
            if self.writer.epoch() != epoch {
                self.give_back_all = true;
            }
        }
        (fate, orphaned)
    }

    /// Tells everybody who wants to begin something that the store is away.
    fn refuse_beginnings(&self, waiting: &mut Vec<Job>) {
        self.shared.refusing.store(true, Ordering::Relaxed);
        let refused: Vec<Job> = self.shared.lanes().begin.drain(..).collect();
        self.shared.begin_room.add_permits(refused.len());
        let (begin, finish) = std::mem::take(waiting).into_iter().partition(|job| job.command.lane() == Lane::Begin);
        *waiting = finish;
        tell(refused, &StoreError::Recovering.into());
        tell(begin, &StoreError::Recovering.into());
    }

    /// What is to be done once after the store is well again.
    fn after_recovery(&mut self, well: bool, orphaned: Vec<[u8; 32]>) {
        if !well {
            return;
        }
        self.syncer.hints_were_lost();
        self.orphaned.extend(orphaned);
        self.give_back();
    }

    /// Some claims are yet to be given back.
    fn owes(&self) -> bool {
        self.give_back_all || !self.orphaned.is_empty()
    }

    /// Gives back what claims of unknown outcome were granted, before anything else runs. What the store refuses is
    /// tried again after the next batch or a moment later: otherwise these workflows would wait for a lease.
    fn give_back(&mut self) {
        if !self.owes() {
            return;
        }
        let orphaned = std::mem::take(&mut self.orphaned);
        let mut after = None;
        let (mut limit, mut narrowed, mut races) = (GIVE_BACK_LIMIT, Narrowed::default(), 0);
        loop {
            let command = Command::GiveBack(GiveBack {
                // Whose process has ended is judged elsewhere.
                boots: Boots { until: 0, alive: BTreeSet::new() },
                orphaned: orphaned.clone(),
                after: after.clone(),
                limit,
                deliveries_max: self.deliveries_max,
            });
            let (reply, _) = oneshot::channel();
            let outcome = match self.attempt(vec![Job { command, reply }], &mut Wants::default()) {
                Ended::Decided(delivery) => {
                    let outcome = delivery.outcomes.first().cloned();
                    match self.syncer.settle(delivery, false) {
                        Ok(()) => outcome,
                        Err((jobs, error)) => {
                            self.unknown(jobs, &error, Vec::new());
                            return;
                        }
                    }
                }
                // Nobody else may send a command that would make the store well again.
                Ended::NotCommitted(_, Error::Store(error)) if matches!(*error, StoreError::Recovering) => {
                    self.orphaned = orphaned;
                    self.syncer.wait_until_clear();
                    let (told, error) = self.syncer.take_failed().unwrap_or((Vec::new(), StoreError::Recovering));
                    let (_, more) = self.recover(&error, told, &mut None, &mut Vec::new());
                    self.syncer.hints_were_lost();
                    self.orphaned.extend(more);
                    return;
                }
                Ended::NotCommitted(_, ref error) if is_raced(error) && races < RACES_MAX => {
                    races += 1;
                    std::thread::sleep(Duration::from_micros(u64::from(races) * 100 * (1 + jitter() % 4)));
                    continue;
                }
                Ended::NotCommitted(mut jobs, error) => {
                    if self.narrow(&mut jobs[0].command, &mut narrowed) {
                        if let Command::GiveBack(narrower) = &jobs[0].command {
                            limit = narrower.limit;
                        }
                        races = races.min(RACES_MAX - 1);
                        continue;
                    }
                    if matches!(error, Error::Store(_)) {
                        if let Some(left_out) = self.owing.says(Instant::now()) {
                            tracing::warn!(%error, left_out, "claims that nobody heard of are not given back yet");
                        }
                        self.orphaned = orphaned;
                        return;
                    }
                    // A fault of ours, the same next time. Their leases end them; later, but as surely.
                    tracing::error!(%error, "claims that nobody heard of wait for their lease");
                    None
                }
                Ended::Unknown(delivery, error) => {
                    self.unknown(delivery.jobs, &error, Vec::new());
                    return;
                }
            };
            match outcome {
                Some(Outcome::Sweep(report)) if report.more => {
                    after = report.after.or(after);
                    (limit, narrowed, races) = (GIVE_BACK_LIMIT, Narrowed::default(), 0);
                }
                _ => {
                    self.give_back_all = false;
                    self.owing.over();
                    return;
                }
            }
        }
    }
}

/// Another node came first, or somebody holds a row.
fn is_raced(error: &Error) -> bool {
    matches!(error, Error::Store(error) if matches!(**error, StoreError::Raced { .. }))
}

/// How many claims an outcome hands out.
fn followed_by(outcome: &Outcome) -> usize {
    match outcome {
        Outcome::Start(admission::Outcome::Started { claimed }) => usize::from(claimed.is_some()),
        Outcome::Claim(page) => page.granted.len(),
        // Another start is likely to follow an end, and nothing else follows a sleep.
        Outcome::Commit(commit::Outcome::Committed(after)) => {
            usize::from(after.next.is_some() || after.status.is_terminal())
        }
        _ => 0,
    }
}

/// Tells that an outcome is not known. Answers the seeds of claims that nobody will ever hear of.
fn tell_unknown(jobs: Vec<Job>) -> Vec<[u8; 32]> {
    let mut orphaned = Vec::new();
    for job in jobs {
        let id = match &job.command {
            Command::Start(start) => Some(start.key.id.clone()),
            _ => None,
        };
        match job.command {
            Command::Claim(request) if request.id.is_none() => orphaned.push(request.terms.seed),
            Command::Start(start) => orphaned.extend(start.claim.map(|terms| terms.seed)),
            // Those of an earlier time that were about to be given back.
            Command::GiveBack(give_back) => orphaned.extend(give_back.orphaned),
            _ => {}
        }
        // A caller that went away learns it from its id.
        let _ = job.reply.send(Err(Error::OutcomeUnknown { id }));
    }
    orphaned
}

/// A number that differs from node to node and from time to time, for waiting apart.
fn jitter() -> u64 {
    std::collections::hash_map::RandomState::new().hash_one(Instant::now())
}

fn tell(jobs: Vec<Job>, error: &Error) {
    for job in jobs {
        let _ = job.reply.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI64;

    use steadfast_core::admission::{Asked, Start};
    use steadfast_core::claim::{Announced, Steps, Terms};
    use steadfast_core::event::Writes;
    use steadfast_core::fingerprint::FingerprintKey;
    use steadfast_core::head::WorkerRef;
    use steadfast_core::json::Json;
    use steadfast_core::limits::Limits;
    use steadfast_core::options::{Options, StartOptions};
    use steadfast_core::text::{Name, Namespace, WorkflowId};
    use steadfast_store::clock::ManualClock;
    use steadfast_store::faults::{Fault, Faulty};
    use steadfast_store::memory::MemoryStore;

    use super::*;

    const LEASE_MS: i64 = 30_000;

    /// Goes on by 40 s whenever it is read.
    #[derive(Debug)]
    struct Hasty(AtomicI64);

    impl Clock for Hasty {
        fn now(&self) -> i64 {
            self.0.fetch_add(40_000, Ordering::SeqCst) + 40_000
        }

        fn at_least(&self, at: i64) {
            self.0.fetch_max(at, Ordering::SeqCst);
        }

        fn until(&self, _: i64) -> Option<Duration> {
            None
        }
    }

    /// A start of `id` that claims its first step.
    fn start(id: &str) -> Command {
        let name = Name::trusted("a");
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) };
        let asked =
            Asked { key, name, input: Json::null(), writes: Writes::default(), options: StartOptions::default() };
        let mut start: Start = asked
            .check(&Options::default(), &FingerprintKey([0x5f; 32]), &Limits::default())
            .expect("it is well formed");
        start.claim = Some(Terms {
            worker: WorkerRef { label: "n1".into(), boot: 1, remote: false },
            announced: Arc::new(Announced {
                namespace: Namespace::default_namespace(),
                definitions: [(start.name.clone(), Steps::AllBut(BTreeSet::new()))].into(),
            }),
            lease_ms: LEASE_MS.unsigned_abs(),
            seed: [7; 32],
        });
        Command::Start(Box::new(start))
    }

    /// A claim that waited for the database was granted by the time of its first try: its lease could be over at once.
    #[tokio::test]
    async fn what_waited_for_the_store_is_decided_by_the_time_at_which_it_is_back() {
        let clock = Arc::new(Hasty(AtomicI64::new(0)));
        let store = Faulty::new(MemoryStore::new(clock.clone()));
        store.plan().add([Fault::Away]);
        let committer =
            Committer::start(&store, Bounds::default(), 20, Arc::default(), Box::new(|_| ())).expect("it starts");
        let outcome = committer.begin(start("w")).await.expect("it is answered");
        assert!(matches!(&outcome, Outcome::Start(admission::Outcome::Started { claimed: Some(_) })), "{outcome:?}");
        let Command::Start(asked) = start("w") else { unreachable!() };
        let head = store.reader().head(&asked.key).expect("it is looked at").expect("it is there");
        let claim = head.claim.expect("its first step is claimed");
        assert_eq!(claim.lease_until, clock.0.load(Ordering::SeqCst) + LEASE_MS);
        assert_eq!(clock.0.load(Ordering::SeqCst), 80_000, "it was tried twice");
    }

    /// The connection was lost again while what nobody had heard of was given back: that waited for somebody to send a
    /// command, by which the store was made well.
    #[tokio::test]
    async fn giving_back_makes_a_store_well_that_is_away_again() {
        let clock = Arc::new(ManualClock::new(1_000));
        let store = Faulty::new(MemoryStore::new(clock));
        store.plan().add([Fault::UnknownWritten, Fault::Away]);
        let committer =
            Committer::start(&store, Bounds::default(), 20, Arc::default(), Box::new(|_| ())).expect("it starts");
        let lost = committer.begin(start("w")).await;
        assert!(matches!(lost, Err(Error::OutcomeUnknown { .. })), "{lost:?}");
        let Command::Start(asked) = start("w") else { unreachable!() };
        let begin = Instant::now();
        while store.reader().head(&asked.key).expect("it is looked at").expect("it is there").claim.is_some() {
            assert!(begin.elapsed() < Duration::from_secs(10), "it is not given back");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(store.plan().left(), 0);
    }
}
