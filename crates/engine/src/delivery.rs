//! Delivery: the way from a written batch to those who wait for it, by the disk.
//!
//! ```text
//! committer ── written, nothing else to do ──► sync ──► told
//!      └────── written, more waits ──► syncer's thread ─► one sync for all that lies there ──► told
//! ```
//! Under load the committer writes the next batch while the one before it is on its way to the disk, and one sync
//! covers every batch that was written meanwhile. Nobody hears of a batch before its sync; an answer that wrote
//! nothing itself may rest on what is not durable yet, so it takes the same way.
//!
//! After a failed sync nothing is told any more: all that lies here goes back to the committer, whose callers hear
//! that the outcome is unknown.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use steadfast_core::command::Outcome;
use steadfast_core::snapshot::Hints;
use steadfast_store::{Disk, StoreError};
use tokio::sync::mpsc;

use crate::committer::{Job, Listener};

/// Why the lock is never poisoned.
const HELD: &str = "the deliveries' lock is held for one change";
/// So many written batches may wait for the disk; the committer waits when there are more.
const AHEAD_MAX: usize = 8;
/// So many callers are told at once by whoever has the answer; more of them by a task beside them.
const DIRECT_MAX: usize = 4;

/// What a batch led to.
pub(crate) struct Delivery {
    pub(crate) jobs: Vec<Job>,
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) hints: Hints,
    /// False when there was nothing to save.
    pub(crate) written: bool,
}

/// Tells callers what became of their commands.
#[derive(Clone)]
struct Teller {
    listener: Arc<Listener>,
    many: mpsc::UnboundedSender<Delivery>,
}

impl Teller {
    fn start(listener: Listener) -> Self {
        let listener = Arc::new(listener);
        // No bound of its own: it holds what the lanes let through, a batch at a time.
        let (many, mut deliveries) = mpsc::unbounded_channel();
        let heard = listener.clone();
        tokio::spawn(async move {
            while let Some(delivery) = deliveries.recv().await {
                tell(delivery, &heard);
            }
        });
        Self { listener, many }
    }

    /// Many are told by a task among them: this thread is back at its work after one wake-up instead of hundreds.
    fn tell(&self, delivery: Delivery) {
        if delivery.jobs.len() <= DIRECT_MAX {
            tell(delivery, &self.listener);
        } else {
            // Without a runtime nobody waits any more either.
            let _ = self.many.send(delivery);
        }
    }
}

fn tell(delivery: Delivery, listener: &Listener) {
    for (job, outcome) in delivery.jobs.into_iter().zip(delivery.outcomes) {
        // A caller that goes away withdraws nothing; the outcome stands.
        let _ = job.reply.send(Ok(outcome));
    }
    listener(Some(delivery.hints));
}

/// The batches on their way to the disk, and the thread that syncs for them.
pub(crate) struct Syncer {
    shared: Arc<Shared>,
    disk: Arc<dyn Disk>,
    teller: Teller,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    deliveries: VecDeque<Delivery>,
    /// The thread syncs or tells.
    busy: bool,
    /// The sync that failed, with those who waited for it.
    failed: Option<(Vec<Job>, StoreError)>,
    closed: bool,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect(HELD)
    }
}

impl Syncer {
    /// Starts the thread. `wake` is called after a failed sync, for the committer to look.
    pub(crate) fn start(
        disk: Arc<dyn Disk>,
        listener: Listener,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared { waiting: Mutex::default(), changed: Condvar::new() });
        let teller = Teller::start(listener);
        let run = {
            let (shared, disk, teller) = (shared.clone(), disk.clone(), teller.clone());
            move || run(&shared, &*disk, &teller, &wake)
        };
        let thread = std::thread::Builder::new().name("steadfast-syncer".to_owned()).spawn(run).map_err(|source| {
            StoreError::File { doing: "start the syncer's thread for", path: "store".into(), source }
        })?;
        Ok(Self { shared, disk, teller, thread: Some(thread) })
    }

    /// Sees a batch through. With `more` to do the caller gets on with it at once; without, and with nothing before
    /// this batch, it syncs here and saves itself two changes of threads.
    ///
    /// # Errors
    /// The jobs, when their outcome is unknown because the sync here has failed.
    pub(crate) fn settle(&self, delivery: Delivery, more: bool) -> Result<(), (Vec<Job>, StoreError)> {
        let mut waiting = self.shared.waiting();
        let clear = waiting.deliveries.is_empty() && !waiting.busy && waiting.failed.is_none();
        if clear && !(delivery.written && more) {
            drop(waiting);
            if delivery.written
                && let Err(error) = self.disk.sync()
            {
                return Err((delivery.jobs, error));
            }
            self.teller.tell(delivery);
            return Ok(());
        }
        waiting.deliveries.push_back(delivery);
        drop(waiting);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// After batches of unknown outcome: lets everybody look who would have been told by hints.
    pub(crate) fn hints_were_lost(&self) {
        (self.teller.listener)(None);
    }

    /// Waits while too many batches are on their way.
    pub(crate) fn wait_for_room(&self) {
        let waiting = self.shared.waiting();
        let full = |waiting: &mut Waiting| waiting.deliveries.len() >= AHEAD_MAX && waiting.failed.is_none();
        drop(self.shared.changed.wait_while(waiting, full).expect(HELD));
    }

    /// Waits until no batch is on its way.
    pub(crate) fn wait_until_clear(&self) {
        let waiting = self.shared.waiting();
        let under_way =
            |waiting: &mut Waiting| (waiting.busy || !waiting.deliveries.is_empty()) && waiting.failed.is_none();
        drop(self.shared.changed.wait_while(waiting, under_way).expect(HELD));
    }

    /// After a failed sync: everybody whose outcome is unknown.
    pub(crate) fn take_failed(&self) -> Option<(Vec<Job>, StoreError)> {
        let mut waiting = self.shared.waiting();
        let (mut jobs, error) = waiting.failed.take()?;
        jobs.extend(std::mem::take(&mut waiting.deliveries).into_iter().flat_map(|delivery| delivery.jobs));
        Some((jobs, error))
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.shared.waiting().closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the syncer's thread ended by a panic");
        }
    }
}

fn run(shared: &Shared, disk: &dyn Disk, teller: &Teller, wake: &dyn Fn()) {
    loop {
        let taken = {
            let waiting = shared.waiting();
            let idle =
                |waiting: &mut Waiting| (waiting.deliveries.is_empty() || waiting.failed.is_some()) && !waiting.closed;
            let mut waiting = shared.changed.wait_while(waiting, idle).expect(HELD);
            if waiting.deliveries.is_empty() || waiting.failed.is_some() {
                return;
            }
            waiting.busy = true;
            std::mem::take(&mut waiting.deliveries)
        };
        shared.changed.notify_all();
        let synced = if taken.iter().any(|delivery| delivery.written) { disk.sync() } else { Ok(()) };
        match synced {
            Ok(()) => {
                taken.into_iter().for_each(|delivery| teller.tell(delivery));
                shared.waiting().busy = false;
            }
            Err(error) => {
                let jobs = taken.into_iter().flat_map(|delivery| delivery.jobs).collect();
                let mut waiting = shared.waiting();
                waiting.busy = false;
                waiting.failed = Some((jobs, error));
                drop(waiting);
                wake();
            }
        }
        shared.changed.notify_all();
    }
}
