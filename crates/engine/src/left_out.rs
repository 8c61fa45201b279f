//! Left out: workflows that cannot be saved, and the pages that go on without them.
//!
//! A claim, a sweep and a giving back take whatever stands first, so each of them would meet such a workflow again and
//! do nothing for the others. A page that cannot be saved is asked for by halves until one workflow alone cannot be,
//! twice. That one is left out of all pages for a while, and of all commands that do not name it: a person may mend it
//! meanwhile.
//!
//! A store that refuses everything looks the same at first. So where several turn out not to be at fault, none is left
//! out, and the time grows only for one that failed while others were saved.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steadfast_core::command::Command;
use steadfast_core::snapshot::Handle;
use steadfast_core::text::WorkflowKey;

/// How long one is left out: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How many one page may be found unable to save; where there are more it is not about workflows.
const AT_ONCE: usize = 3;
/// How many may be left out together.
const MAX: usize = 1_024;
/// After so long without a failure one is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// What one committer leaves out.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    all: BTreeMap<Handle, One>,
    /// How many batches were saved.
    saved: u64,
}

#[derive(Debug)]
struct One {
    until: Instant,
    pause: Duration,
    /// How many batches had been saved when it was not.
    saved: u64,
    /// Its time is over.
    is_back: bool,
}

/// How far a command was narrowed.
#[derive(Debug, Default)]
pub(crate) struct Narrowed {
    /// How many workflows it asked for.
    whole: Option<usize>,
    /// The last that was met alone. What is refused for a moment is saved by its second try.
    alone: Option<Handle>,
    /// Those that it goes on without.
    without: Vec<Handle>,
}

/// How many workflows a command takes at most of those that stand first; `None` where it names its own.
fn page(command: &mut Command) -> Option<&mut usize> {
    match command {
        Command::Claim(request) => Some(&mut request.n),
        Command::Sweep(sweep) => Some(&mut sweep.limit),
        Command::GiveBack(give_back) => Some(&mut give_back.limit),
        Command::Start(_) | Command::Complete(_) | Command::Fail(_) | Command::Heartbeat(_) | Command::Cancel(_) => {
            None
        }
    }
}

impl LeftOut {
    /// A batch was saved.
    pub(crate) fn saved(&mut self) {
        self.saved += 1;
    }

    /// Those to leave out.
    pub(crate) fn handles(&self) -> BTreeSet<Handle> {
        self.all.iter().filter(|(_, one)| !one.is_back).map(|(handle, _)| *handle).collect()
    }

    /// Ends the time of some; true when there are any.
    pub(crate) fn is_over_for_some(&mut self, now: Instant) -> bool {
        let mut any = false;
        for one in self.all.values_mut().filter(|one| !one.is_back && one.until <= now) {
            one.is_back = true;
            any = true;
        }
        any
    }

    /// Makes another try of a command of which these could not be saved; false when there is nothing more to try.
    pub(crate) fn narrow(
        &mut self,
        command: &mut Command,
        unsaved: &[(Handle, WorkflowKey)],
        narrowed: &mut Narrowed,
        now: Instant,
    ) -> bool {
        let Some(limit) = page(command) else { return false };
        let whole = *narrowed.whole.get_or_insert(*limit);
        match unsaved {
            [(handle, _)] if narrowed.alone != Some(*handle) => {
                narrowed.alone = Some(*handle);
                true
            }
            [(handle, key)] if narrowed.without.len() < AT_ONCE && self.leave(*handle, key, now) => {
                narrowed.without.push(*handle);
                *limit = whole;
                true
            }
            [_] => self.give_up(narrowed),
            _ if *limit <= 1 => self.give_up(narrowed),
            _ => {
                *limit = if unsaved.is_empty() { *limit / 2 } else { (unsaved.len() / 2).min(*limit / 2) };
                true
            }
        }
    }

    /// Leaves one out, where there is room.
    fn leave(&mut self, handle: Handle, key: &WorkflowKey, now: Instant) -> bool {
        self.all.retain(|_, one| !one.is_back || now.duration_since(one.until) < FORGOTTEN);
        if self.all.len() >= MAX {
            return false;
        }
        let pause = match self.all.get(&handle) {
            Some(one) if one.saved == self.saved => one.pause,
            Some(one) => (one.pause * 2).min(PAUSE.1),
            None => PAUSE.0,
        };
        tracing::error!(
            workflow = %key,
            seconds = pause.as_secs(),
            "a workflow cannot be saved; claims and sweeps leave it out for a while; run verify"
        );
        metrics::counter!("steadfast_left_out_total").increment(1);
        self.all.insert(handle, One { until: now + pause, pause, saved: self.saved, is_back: false });
        true
    }

    /// It was not about them.
    fn give_up(&mut self, narrowed: &mut Narrowed) -> bool {
        for handle in narrowed.without.drain(..) {
            self.all.remove(&handle);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use steadfast_core::sweep::Sweep;
    use steadfast_core::text::{Namespace, WorkflowId};

    use super::*;

    fn sweep() -> Command {
        Command::Sweep(Sweep { limit: 512, jitter: 0, deliveries_max: 20 })
    }

    /// Sweeps workflows with these numbers, all due, of which some cannot be saved: how often it took a try, and whether
    /// the last was saved.
    fn swept(left_out: &mut LeftOut, due: std::ops::Range<Handle>, bad: &[Handle], now: Instant) -> (u32, bool) {
        let (mut command, mut narrowed, mut tries) = (sweep(), Narrowed::default(), 0);
        left_out.is_over_for_some(now);
        loop {
            tries += 1;
            assert!(tries < 1_000, "it ends");
            let without = left_out.handles();
            let limit = *page(&mut command).unwrap();
            let named = |n: Handle| {
                let key =
                    WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(n.to_string()) };
                (n, key)
            };
            let met: Vec<_> = due.clone().filter(|n| !without.contains(n)).take(limit).map(named).collect();
            if !met.iter().any(|(n, _)| bad.contains(n)) {
                if !met.is_empty() {
                    left_out.saved();
                }
                return (tries, true);
            }
            if !left_out.narrow(&mut command, &met, &mut narrowed, now) {
                return (tries, false);
            }
        }
    }

    fn out(left_out: &LeftOut) -> Vec<Handle> {
        left_out.handles().into_iter().collect()
    }

    #[test]
    fn one_that_cannot_be_saved_is_found_by_halves() {
        let now = Instant::now();
        let mut left_out = LeftOut::default();
        // 100, 50, 25, 12, 6, 3, 1, once more, and then all others.
        assert_eq!(swept(&mut left_out, 0..100, &[0], now), (9, true));
        assert_eq!(out(&left_out), [0]);
        // Somewhere behind: the half before it is swept first.
        assert_eq!(swept(&mut left_out, 0..100, &[0, 99], now), (2, true));
        assert_eq!(swept(&mut left_out, 50..100, &[99], now), (2, true));
        assert_eq!(swept(&mut left_out, 99..100, &[99], now), (3, true));
        assert_eq!(out(&left_out), [0, 99]);
    }

    #[test]
    fn one_that_is_refused_for_a_moment_is_not_left_out() {
        let now = Instant::now();
        let (mut left_out, mut narrowed, mut command) = (LeftOut::default(), Narrowed::default(), sweep());
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("w") };
        assert!(left_out.narrow(&mut command, &[(7, key)], &mut narrowed, now));
        assert_eq!((out(&left_out), page(&mut command).copied()), (vec![], Some(512)), "it is tried once more");
    }

    #[test]
    fn a_store_that_refuses_everything_is_not_taken_for_workflows() {
        let now = Instant::now();
        let all: Vec<Handle> = (0..100).collect();
        let mut left_out = LeftOut::default();
        let (tries, saved) = swept(&mut left_out, 0..100, &all, now);
        assert!(!saved && tries < 40, "{tries}");
        assert_eq!(out(&left_out), [0; 0]);
    }

    #[test]
    fn the_time_grows_while_others_are_saved() {
        let mut now = Instant::now();
        let mut left_out = LeftOut::default();
        let mut told = Vec::new();
        for others in [0, 0, 0, 1, 1, 1, 1, 1, 1] {
            assert!(swept(&mut left_out, 7..8, &[7], now).1);
            let begin = now;
            while !out(&left_out).is_empty() {
                now += Duration::from_secs(1);
                left_out.is_over_for_some(now);
            }
            told.push((now - begin).as_secs());
            (0..others).for_each(|_| left_out.saved());
        }
        assert_eq!(told, [5, 5, 5, 5, 10, 20, 40, 60, 60]);
    }
}
