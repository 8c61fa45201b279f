//! Sweep: what is overdue, and what the rules say about it.
//!
//! # What it finds
//! Claims whose lease ended or whose attempt timed out, sleeps, backoffs and waits that are over. It finds them by one
//! index in order of time, a bounded page at a time, and never looks at history or at what is not due.
//!
//! # Races
//! A worker that commits in the same batch before the sweep is decided has committed; one that comes after it has
//! lost. The row that was read is judged again here, so a stale page changes nothing.
//!
//! # Giving back
//! The in-process workers of a boot that has ended are gone, and their steps are given back at once, so a killed
//! process costs nobody a lease wait. Where a store has one owner at a time, every earlier boot has ended; where it has
//! several, those have whose node lease is over. The same goes for claims of an earlier epoch.

use std::collections::BTreeSet;

use crate::command::Moment;
use crate::commit::{Ending, end_attempt};
use crate::event::Event;
use crate::head::{Claim, Token};
use crate::snapshot::{ClaimCursor, Snapshot, Stop};
use crate::state::State;
use crate::text::{FailureCode, WorkflowKey};

/// Repairs what is overdue.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// How many heads at most.
    pub limit: usize,
    /// A random number for the jitter of retries.
    pub jitter: u32,
    /// After how many deliveries without an attempt a workflow fails.
    pub deliveries_max: u32,
}

/// Which owners of the store live, as far as the one who asks knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boots {
    /// The last boot that was counted when this was looked up. Nothing is known of later ones.
    pub until: u64,
    /// Those of them whose process may still run.
    pub alive: BTreeSet<u64>,
}

impl Boots {
    /// Of a store with one owner at a time: every earlier one is gone.
    pub fn only(boot: u64) -> Self {
        Self { until: boot, alive: [boot].into() }
    }

    /// True when the process of this boot is known to have ended.
    pub fn is_gone(&self, boot: u64) -> bool {
        boot <= self.until && !self.alive.contains(&boot)
    }
}

/// Gives back the claims of workers that are known to be gone.
#[derive(Debug, Clone)]
pub struct GiveBack {
    /// Which boots' in-process workers are gone.
    pub boots: Boots,
    /// Seeds of claim calls whose callers never heard what they were given: nobody holds what they granted.
    pub orphaned: Vec<[u8; 32]>,
    /// Where the last page ended.
    pub after: Option<ClaimCursor>,
    /// How many heads at most.
    pub limit: usize,
    /// After how many deliveries without an attempt a workflow fails.
    pub deliveries_max: u32,
}

/// What a sweep did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Sleeps and backoffs that are over.
    pub woken: usize,
    /// Waits that ended without a signal.
    pub waits_over: usize,
    /// How late each of these was found to be over, in milliseconds.
    pub late_ms: Vec<u64>,
    /// Claims lost with their lease.
    pub leases_lost: usize,
    /// Attempts timed out.
    pub timed_out: usize,
    /// Claims given back.
    pub given_back: usize,
    /// Claims that turned out alive.
    pub alive: usize,
    /// Heads that stand where no rule expects them: left alone, to be looked at by `verify`.
    pub skipped: usize,
    /// There may be more: sweep again.
    pub more: bool,
    /// Where the next page of open claims begins.
    pub after: Option<ClaimCursor>,
}

/// Judges a page of heads whose time has come.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn decide(snapshot: &mut Snapshot, sweep: &Sweep, moment: &Moment) -> Result<Report, Stop> {
    let (keys, more) = snapshot.due(moment.now, sweep.limit)?;
    let mut report = Report { more, ..Report::default() };
    for key in keys {
        let Some(head) = snapshot.head(&key)? else { continue };
        match (head.state.clone(), head.claim.clone()) {
            (State::Sleeping { until, .. } | State::Backoff { until, .. }, _) => {
                snapshot.touch(&key, |head| head.state = head.state.at(moment.now));
                report.woken += 1;
                report.late_ms.push(u64::try_from(moment.now.saturating_sub(until)).unwrap_or(0));
            }
            // What it could have taken it has: a signal that it waits for is taken when it is accepted.
            (State::Waiting { wait, .. }, _) => match wait.timeout {
                Some(timeout) if timeout.at <= moment.now => {
                    let event = Event::WaitTimedOut { signals: wait.signals, next: timeout.then };
                    snapshot.append(&key, event, None, moment.now)?;
                    report.waits_over += 1;
                    report.late_ms.push(u64::try_from(moment.now.saturating_sub(timeout.at)).unwrap_or(0));
                }
                _ => report.skipped += 1,
            },
            (State::Running { visit, .. }, Some(claim)) if claim.lease_until <= moment.now => {
                let code = FailureCode::trusted("lease_lost");
                let reason = format!("no sign of {} for {} ms", claim.worker.label, claim.lease_ms);
                end_attempt(snapshot, &key, &visit, &code, &reason, Ending::Uncounted, sweep.deliveries_max, moment)?;
                report.leases_lost += 1;
            }
            (State::Running { visit, .. }, Some(claim)) if claim.step_deadline <= moment.now => {
                let policy = head.options.retry.clone();
                let ending = Ending::Counted {
                    retryable: true,
                    delay_ms: policy.delay_ms(visit.attempt, sweep.jitter),
                    attempts_max: policy.attempts_max,
                };
                let code = FailureCode::trusted("step_timeout");
                let reason = format!("attempt took longer than {} ms", head.options.step_timeout_ms);
                end_attempt(snapshot, &key, &visit, &code, &reason, ending, sweep.deliveries_max, moment)?;
                report.timed_out += 1;
            }
            (State::Running { .. }, Some(_)) => {
                snapshot.touch(&key, |head| {
                    let claim = head.claim.as_mut().expect("it was there a line ago");
                    claim.look_at = claim.ends_at();
                });
                report.alive += 1;
            }
            _ => report.skipped += 1,
        }
    }
    Ok(report)
}

/// Judges a page of open claims.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn give_back(snapshot: &mut Snapshot, give_back: &GiveBack, moment: &Moment) -> Result<Report, Stop> {
    let keys = snapshot.open(give_back.after.as_ref(), give_back.limit)?;
    let mut report = Report { more: keys.len() >= give_back.limit, ..Report::default() };
    for key in keys {
        let Some(head) = snapshot.head(&key)? else { continue };
        let (State::Running { visit, .. }, Some(claim)) = (head.state.clone(), head.claim.clone()) else {
            continue;
        };
        report.after = Some(ClaimCursor { look_at: claim.look_at, key: key.clone() });
        match gone(&claim, &key, head.seq, give_back, moment) {
            Some(reason) => {
                let code = FailureCode::trusted("given_back");
                let ending = Ending::Uncounted;
                end_attempt(snapshot, &key, &visit, &code, &reason, ending, give_back.deliveries_max, moment)?;
                report.given_back += 1;
            }
            None => report.alive += 1,
        }
    }
    Ok(report)
}

/// Why nobody can commit this claim any more, if so.
fn gone(claim: &Claim, key: &WorkflowKey, seq: u64, give_back: &GiveBack, moment: &Moment) -> Option<String> {
    let label = &claim.worker.label;
    if claim.epoch != moment.epoch {
        return Some(format!("the claim of {label} belongs to an earlier life of the store"));
    }
    if claim.worker.remote {
        return None;
    }
    if give_back.boots.is_gone(claim.worker.boot) {
        return Some(format!("the process of {label} is gone"));
    }
    let orphaned = give_back.orphaned.iter().any(|seed| Token::derive(seed, key, seq) == claim.token);
    orphaned.then(|| format!("{label} never heard that it was given it"))
}
