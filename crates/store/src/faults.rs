//! Faults: any store, made to fail where a test says.
//!
//! The places where a batch can break, each with the outcome a real database has there: a load that fails, a commit
//! that certainly did not happen, the two halves of an unknown one (it happened and the answer was lost, or it did
//! not), and a sync that fails after the commit. A sync can also be held, to see what happens meanwhile.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use steadfast_core::snapshot::{Handle, Snapshot, Wants};
use steadfast_core::sweep::Boots;

use crate::clock::Clock;
use crate::contract::{Disk, Fate, Identity, Reader, Saved, Store, StoreError, Writer};

/// What to do at the next save (or load) instead of the plain thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: let one pass.
    Pass,
    /// The load fails.
    Load,
    /// The load finds the database away; nothing works before a recovery.
    Away,
    /// The save fails before the commit; nothing is written.
    NotCommitted,
    /// The commit happens and its answer is lost.
    UnknownWritten,
    /// The commit does not happen and nobody can tell.
    UnknownNotWritten,
    /// What was saved cannot be made durable.
    Sync,
}

impl Fault {
    fn meets_a_save(self) -> bool {
        !matches!(self, Self::Load | Self::Away | Self::Sync)
    }
}

/// The faults still to come, in order; an empty plan injects nothing.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    next: Arc<Mutex<VecDeque<Fault>>>,
    /// How many syncs may still begin; `None` when none is held.
    held: Arc<(Mutex<Option<usize>>, Condvar)>,
}

impl Plan {
    /// Adds faults for the following saves.
    pub fn add(&self, faults: impl IntoIterator<Item = Fault>) {
        self.next.lock().expect("plans hold their lock for one change").extend(faults);
    }

    /// Lets so many syncs begin and holds the others until [`Plan::release_syncs`].
    pub fn hold_syncs_after(&self, n: usize) {
        *self.held.0.lock().expect("held for one change") = Some(n);
        self.held.1.notify_all();
    }

    /// Lets them go on.
    pub fn release_syncs(&self) {
        *self.held.0.lock().expect("held for one change") = None;
        self.held.1.notify_all();
    }

    fn sync(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let held = self.held.0.lock().expect("held for one change");
        let mut held = self.held.1.wait_while(held, |held| *held == Some(0)).expect("held for one change");
        *held = held.map(|left| left - 1);
        drop(held);
        match self.take(|fault| fault == Fault::Sync) {
            Some(_) => Err(StoreError::Injected("sync")),
            None => disk.sync(),
        }
    }

    /// How many are left.
    pub fn left(&self) -> usize {
        self.next.lock().expect("plans hold their lock for one change").len()
    }

    fn meets_next_save(&self) -> bool {
        let next = self.next.lock().expect("plans hold their lock for one change");
        next.front().copied().is_some_and(Fault::meets_a_save)
    }

    fn put_back(&self, fault: Option<Fault>) {
        let mut next = self.next.lock().expect("plans hold their lock for one change");
        fault.into_iter().for_each(|fault| next.push_front(fault));
    }

    fn take(&self, when: impl Fn(Fault) -> bool) -> Option<Fault> {
        let mut next = self.next.lock().expect("plans hold their lock for one change");
        if next.front().copied().is_some_and(when) { next.pop_front() } else { None }
    }
}

/// A store whose writer follows a plan of faults.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    plan: Plan,
}

impl<S> Faulty<S> {
    /// Wraps a store.
    pub fn new(inner: S) -> Self {
        Self { inner, plan: Plan::default() }
    }

    /// Where to add faults.
    pub fn plan(&self) -> Plan {
        self.plan.clone()
    }
}

impl<S: Store> Store for Faulty<S> {
    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }

    fn writer(&self) -> Result<Box<dyn Writer>, StoreError> {
        Ok(Box::new(FaultyWriter { inner: self.inner.writer()?, plan: self.plan.clone(), is_away: false }))
    }

    fn reader(&self) -> Arc<dyn Reader> {
        self.inner.reader()
    }

    fn boots(&self) -> Result<Boots, StoreError> {
        self.inner.boots()
    }

    fn node(&self) -> u32 {
        self.inner.node()
    }

    fn writers(&self) -> usize {
        self.inner.writers()
    }

    fn looks(&self) -> usize {
        self.inner.looks()
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    fn writers_worth(&self) -> usize {
        self.inner.writers_worth()
    }

    fn is_alone(&self) -> bool {
        self.inner.is_alone()
    }

    fn is_first(&self) -> bool {
        self.inner.is_first()
    }

    fn is_writable(&self) -> bool {
        self.inner.is_writable()
    }

    fn next_gone(&self) -> Result<Option<u64>, StoreError> {
        self.inner.next_gone()
    }

    fn hint(&self) {
        self.inner.hint();
    }

    fn on_hint(&self, hear: Box<dyn Fn() + Send + Sync>) {
        self.inner.on_hint(hear);
    }

    fn bury(&self, boot: u64) -> Result<(), StoreError> {
        self.inner.bury(boot)
    }
}

struct FaultyWriter {
    inner: Box<dyn Writer>,
    plan: Plan,
    is_away: bool,
}

impl fmt::Debug for FaultyWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyWriter").field("plan", &self.plan).finish_non_exhaustive()
    }
}

struct FaultyDisk {
    inner: Arc<dyn Disk>,
    plan: Plan,
}

impl Disk for FaultyDisk {
    fn sync(&self) -> Result<(), StoreError> {
        self.plan.sync(&*self.inner)
    }
}

impl Writer for FaultyWriter {
    fn load(&mut self, wants: &Wants, snapshot: &mut Snapshot) -> Result<(), StoreError> {
        if self.plan.take(|fault| fault == Fault::Load).is_some() {
            return Err(StoreError::Injected("load"));
        }
        self.is_away |= self.plan.take(|fault| fault == Fault::Away).is_some();
        if self.is_away {
            return Err(StoreError::Recovering);
        }
        if self.plan.meets_next_save() {
            // Only what would really be saved meets a fault.
            self.inner.careful();
        }
        self.inner.load(wants, snapshot)
    }

    fn careful(&mut self) {
        self.inner.careful();
    }

    fn leave_out(&mut self, handles: BTreeSet<Handle>) {
        self.inner.leave_out(handles);
    }

    fn save(&mut self, snapshot: &Snapshot) -> Saved {
        let fault = self.plan.take(Fault::meets_a_save);
        let saved = self.save_with(fault, snapshot);
        if matches!(saved, Saved::NotCommitted(StoreError::Raced { .. })) {
            // It is saved again, and meets its fault then.
            self.plan.put_back(fault);
        }
        saved
    }

    fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(FaultyDisk { inner: self.inner.disk(), plan: self.plan.clone() })
    }

    fn confirm(&mut self) -> Result<(), StoreError> {
        self.inner.confirm()
    }

    fn abandon(&mut self) {
        self.inner.abandon();
    }

    fn rest(&mut self) {
        self.inner.rest();
    }

    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    fn gathers(&self) -> Duration {
        self.inner.gathers()
    }

    fn recover(&mut self) -> Result<Fate, StoreError> {
        // What was made up here is not known to the store below.
        self.inner.recover().map(|_| Fate::Unknown).inspect(|_| self.is_away = false)
    }
}

impl FaultyWriter {
    fn save_with(&mut self, fault: Option<Fault>, snapshot: &Snapshot) -> Saved {
        match fault {
            None | Some(Fault::Pass | Fault::Load | Fault::Away | Fault::Sync) => self.inner.save(snapshot),
            Some(Fault::NotCommitted) => {
                self.inner.abandon();
                Saved::NotCommitted(StoreError::Injected("save"))
            }
            Some(Fault::UnknownWritten) => match self.inner.save(snapshot) {
                Saved::Written => Saved::Unknown(StoreError::Injected("commit answer lost")),
                other => other,
            },
            Some(Fault::UnknownNotWritten) => {
                self.inner.abandon();
                Saved::Unknown(StoreError::Injected("commit"))
            }
        }
    }
}
