//! Clock: the one time by which a store judges.
//!
//! Leases, sleeps and deadlines are compared with the store's clock only, never between machines. It never runs
//! backwards: when the machine's clock is set back, it goes on by elapsed time; when that is set forward, it follows.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch, never decreasing.
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// The store's now.
    fn now(&self) -> i64;

    /// Lets the clock know of a time the store has already written, so that it does not fall behind it.
    fn at_least(&self, at: i64);

    /// How long to wait, in real time, until the clock shows `at`; `None` when only a test moves it.
    fn until(&self, at: i64) -> Option<std::time::Duration>;
}

/// The machine's clock, guarded.
#[derive(Debug)]
pub struct SystemClock {
    last: Mutex<(i64, Instant)>,
}

impl SystemClock {
    /// Begins at the machine's time.
    pub fn new() -> Self {
        Self { last: Mutex::new((wall(), Instant::now())) }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

fn wall() -> i64 {
    // A machine whose clock stands before 1970 reads as 0; elapsed time then carries us on.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// What the guarded clock shows: the last reading plus the time elapsed since, or the machine's time if later.
fn guarded(last: i64, elapsed_ms: i64, wall: i64) -> i64 {
    last.saturating_add(elapsed_ms).max(wall)
}

impl Clock for SystemClock {
    fn now(&self) -> i64 {
        let mut last = self.last.lock().expect("the clock holds its lock for one reading");
        let (shown, at) = *last;
        let elapsed = i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX);
        let now = guarded(shown, elapsed, wall());
        // Keep the fraction of a millisecond: only move the mark when the reading moved.
        if now > shown {
            *last = (now, at + std::time::Duration::from_millis(u64::try_from(elapsed).unwrap_or(0)));
        }
        now
    }

    fn at_least(&self, at: i64) {
        let mut last = self.last.lock().expect("the clock holds its lock for one reading");
        if at > last.0 {
            *last = (at, Instant::now());
        }
    }

    fn until(&self, at: i64) -> Option<std::time::Duration> {
        Some(std::time::Duration::from_millis(u64::try_from(at.saturating_sub(self.now())).unwrap_or(0)))
    }
}

/// A clock that only a test moves.
#[derive(Debug)]
pub struct ManualClock {
    now: AtomicI64,
}

impl ManualClock {
    /// Begins at `now`.
    pub fn new(now: i64) -> Self {
        Self { now: AtomicI64::new(now) }
    }

    /// Moves on.
    pub fn advance(&self, ms: i64) {
        self.now.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> i64 {
        self.now.load(Ordering::SeqCst)
    }

    fn at_least(&self, at: i64) {
        self.now.fetch_max(at, Ordering::SeqCst);
    }

    fn until(&self, at: i64) -> Option<std::time::Duration> {
        (at <= self.now()).then_some(std::time::Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// BC-001: the machine's clock is set back 120 s while a 30 s sleep runs, then forward again: it ends once, on time.
    #[test]
    fn a_clock_set_back_does_not_hold_time_up() {
        let start = 1_000_000;
        let mut shown = start;
        let mut fired_at = None;
        for second in 1..=40 {
            let wall = start + second * 1_000 - if (5..35).contains(&second) { 120_000 } else { 0 };
            let now = guarded(shown, 1_000, wall);
            assert!(now > shown, "time moves on");
            shown = now;
            if shown >= start + 30_000 && fired_at.is_none() {
                fired_at = Some(second);
            }
        }
        assert_eq!(fired_at, Some(30));
        assert_eq!(shown, start + 40_000, "and nothing is left of the step when it is corrected");
    }

    #[test]
    fn it_never_runs_backwards_and_never_falls_behind_what_is_written() {
        let clock = SystemClock::new();
        let far = clock.now() + 5_000;
        clock.at_least(far);
        let mut last = far;
        for _ in 0..1_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
    }
}
