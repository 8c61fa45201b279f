//! Left out: workflows that cannot be saved, and the pages that go on without them.
//!
//! A claim, a sweep and a giving back take whatever stands first, so each of them would meet such a workflow again and
//! do nothing for the others. A page that cannot be saved is asked for by halves until one workflow alone cannot be,
//! twice. That one is left out of all pages for a while, and of all commands that do not name it: a person may mend it
//! meanwhile.
//!
//! A store that refuses everything looks the same until something is saved. So nobody is named as at fault before that,
//! and where more were left out meanwhile than one command would, all of them come back soon, once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steadfast_core::command::Command;
use steadfast_core::snapshot::Handle;
use steadfast_core::text::WorkflowKey;

/// How long one is left out: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How many one command leaves out; it then fails, and whoever sent it comes again.
const AT_ONCE: usize = 3;
/// How many may be left out together.
const MAX: usize = 1_024;
/// After so long without a failure one is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// What one committer leaves out.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    all: BTreeMap<Handle, One>,
    /// Left out since something was saved last.
    unproved: BTreeSet<Handle>,
}

#[derive(Debug)]
struct One {
    key: WorkflowKey,
    until: Instant,
    pause: Duration,
    /// Its time is over.
    is_back: bool,
    /// It was let off once, when perhaps the store was at fault.
    let_off: bool,
}

/// How far a command was narrowed.
#[derive(Debug, Default)]
pub(crate) struct Narrowed {
    /// How many workflows it asked for.
    whole: Option<usize>,
    /// The last that was met alone. What is refused for a moment is saved by its second try.
    alone: Option<Handle>,
    /// How many it goes on without.
    without: usize,
}

/// What to do about a command that could not be saved.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Narrow {
    /// It is tried again, for fewer.
    Again,
    /// It is tried again without this one.
    Without(WorkflowKey),
    /// There is nothing more to try.
    Over,
}

/// How many workflows a command takes at most of those that stand first; `None` where it names its own.
fn page(command: &mut Command) -> Option<&mut usize> {
    match command {
        Command::Claim(request) => Some(&mut request.n),
        Command::Sweep(sweep) => Some(&mut sweep.limit),
        Command::GiveBack(give_back) => Some(&mut give_back.limit),
        Command::Start(_)
        | Command::Complete(_)
        | Command::Fail(_)
        | Command::Heartbeat(_)
        | Command::Cancel(_)
        | Command::Signal(_) => None,
    }
}

impl LeftOut {
    /// A batch was saved: the store takes writes, and whoever it does not take is at fault.
    pub(crate) fn saved(&mut self, now: Instant) {
        if self.unproved.is_empty() {
            return;
        }
        let unproved = std::mem::take(&mut self.unproved);
        let too_many = unproved.len() > AT_ONCE;
        for handle in unproved {
            let Some(one) = self.all.get_mut(&handle) else { continue };
            if too_many && !one.let_off {
                (one.until, one.pause, one.let_off) = (one.until.min(now + PAUSE.0), PAUSE.0, true);
                continue;
            }
            tracing::error!(
                workflow = %one.key,
                seconds = one.pause.as_secs(),
                "a workflow cannot be saved; claims and sweeps leave it out for a while; run verify"
            );
            metrics::counter!("steadfast_left_out_total").increment(1);
        }
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

    /// Judges a command of which these could not be saved, and narrows it where it is to be tried again.
    pub(crate) fn narrow(
        &mut self,
        command: &mut Command,
        unsaved: &[(Handle, WorkflowKey)],
        narrowed: &mut Narrowed,
        now: Instant,
    ) -> Narrow {
        let Some(limit) = page(command) else { return Narrow::Over };
        let whole = *narrowed.whole.get_or_insert(*limit);
        match unsaved {
            // What fails whoever stands first is not about them.
            [] => Narrow::Over,
            [(handle, _)] if narrowed.alone != Some(*handle) => {
                narrowed.alone = Some(*handle);
                Narrow::Again
            }
            [(handle, key)] if narrowed.without < AT_ONCE && self.leave(*handle, key, now) => {
                narrowed.without += 1;
                *limit = whole;
                Narrow::Without(key.clone())
            }
            [_] => Narrow::Over,
            _ if *limit <= 1 => Narrow::Over,
            _ => {
                *limit = (unsaved.len() / 2).min(*limit / 2);
                Narrow::Again
            }
        }
    }

    /// Leaves one out, where there is room.
    fn leave(&mut self, handle: Handle, key: &WorkflowKey, now: Instant) -> bool {
        self.all.retain(|_, one| !one.is_back || now.duration_since(one.until) < FORGOTTEN);
        if self.all.len() >= MAX {
            return false;
        }
        let (pause, let_off) = match self.all.get(&handle) {
            Some(one) => ((one.pause * 2).min(PAUSE.1), one.let_off),
            None => (PAUSE.0, false),
        };
        self.all.insert(handle, One { key: key.clone(), until: now + pause, pause, is_back: false, let_off });
        self.unproved.insert(handle);
        true
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

    fn key(n: Handle) -> WorkflowKey {
        WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(n.to_string()) }
    }

    /// Sweeps workflows with these numbers, all due, of which some cannot be saved: how often it took a try, and how many
    /// were saved by the last.
    fn swept(left_out: &mut LeftOut, due: std::ops::Range<Handle>, bad: &[Handle], now: Instant) -> (u32, usize) {
        let (mut command, mut narrowed, mut tries) = (sweep(), Narrowed::default(), 0);
        left_out.is_over_for_some(now);
        loop {
            tries += 1;
            assert!(tries < 1_000, "it ends");
            let without = left_out.handles();
            let limit = *page(&mut command).unwrap();
            let met: Vec<_> = due.clone().filter(|n| !without.contains(n)).take(limit).map(|n| (n, key(n))).collect();
            if !met.iter().any(|(n, _)| bad.contains(n)) {
                if !met.is_empty() {
                    left_out.saved(now);
                }
                return (tries, met.len());
            }
            if left_out.narrow(&mut command, &met, &mut narrowed, now) == Narrow::Over {
                return (tries, 0);
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
        assert_eq!(swept(&mut left_out, 0..100, &[0], now), (9, 99));
        assert_eq!(out(&left_out), [0]);
        // Somewhere behind: the half before it is swept first.
        assert_eq!(swept(&mut left_out, 0..100, &[0, 99], now), (2, 49));
        assert_eq!(swept(&mut left_out, 50..100, &[99], now), (2, 25));
        assert_eq!(swept(&mut left_out, 99..100, &[99], now), (3, 0));
        assert_eq!(out(&left_out), [0, 99]);
    }

    /// However many stand in front, the others have their turn.
    #[test]
    fn any_number_in_front_is_passed() {
        for n in [4, 10, 100] {
            let bad: Vec<Handle> = (0..n).collect();
            let (mut left_out, now) = (LeftOut::default(), Instant::now());
            let mut rounds = 0;
            while swept(&mut left_out, 0..n + 100, &bad, now).1 == 0 {
                rounds += 1;
                assert!(rounds < 40, "{n}: {rounds} rounds");
            }
        }
    }

    #[test]
    fn one_that_is_refused_for_a_moment_is_not_left_out() {
        let now = Instant::now();
        let (mut left_out, mut narrowed, mut command) = (LeftOut::default(), Narrowed::default(), sweep());
        assert_eq!(left_out.narrow(&mut command, &[(7, key(7))], &mut narrowed, now), Narrow::Again);
        assert_eq!((out(&left_out), page(&mut command).copied()), (vec![], Some(512)), "it is tried once more");
    }

    #[test]
    fn what_fails_whoever_stands_first_is_about_none_of_them() {
        let (mut left_out, mut command) = (LeftOut::default(), sweep());
        let narrow = left_out.narrow(&mut command, &[], &mut Narrowed::default(), Instant::now());
        assert_eq!((narrow, out(&left_out)), (Narrow::Over, vec![]));
    }

    /// A store that refused everything for long: with the first that is saved nobody waits for long any more.
    #[test]
    fn after_a_store_that_refused_everything_all_are_back_soon() {
        let mut now = Instant::now();
        let all: Vec<Handle> = (0..100).collect();
        let mut left_out = LeftOut::default();
        for _ in 0..600 {
            let (tries, saved) = swept(&mut left_out, 0..100, &all, now);
            assert!(saved == 0 && tries < 40, "{tries}");
            now += Duration::from_secs(1);
        }
        left_out.saved(now);
        left_out.is_over_for_some(now + PAUSE.0);
        assert_eq!(out(&left_out), [0; 0]);
        // Who fails again, while others are saved, is at fault.
        while swept(&mut left_out, 0..100, &[0, 1, 2, 3, 4], now).1 == 0 {}
        left_out.is_over_for_some(now + PAUSE.0);
        assert_eq!(out(&left_out), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn the_time_grows_with_each_failure() {
        let mut now = Instant::now();
        let mut left_out = LeftOut::default();
        let mut told = Vec::new();
        for _ in 0..6 {
            assert_eq!(swept(&mut left_out, 7..9, &[7], now).1, 1);
            let begin = now;
            while !out(&left_out).is_empty() {
                now += Duration::from_secs(1);
                left_out.is_over_for_some(now);
            }
            told.push((now - begin).as_secs());
        }
        assert_eq!(told, [5, 10, 20, 40, 60, 60]);
    }
}
