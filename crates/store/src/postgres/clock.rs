//! Clock: the database's time, carried on between two looks at it.
//!
//! Every batch reads the server's `clock_timestamp()`; between two readings elapsed time of this machine is added. All
//! nodes so judge by one clock, to within the time a message takes. A server whose clock turns out a second or more
//! behind is believed, else nodes that came before and after would disagree; each log still never runs backwards.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::clock::Clock;

/// The clock may be so far ahead of a reading, in milliseconds, without being set back: messages take time.
const AHEAD_MAX: i64 = 1_000;

/// The time of a PostgreSQL server.
#[derive(Debug)]
pub(super) struct ServerClock {
    reading: Mutex<Reading>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at: i64,
    taken: Instant,
    /// The last time shown.
    shown: i64,
}

impl Reading {
    fn now(&self) -> i64 {
        self.at.saturating_add(i64::try_from(self.taken.elapsed().as_millis()).unwrap_or(i64::MAX))
    }

    fn read(&mut self, at: i64) {
        let now = self.now();
        let ahead = now.saturating_sub(at);
        if ahead >= AHEAD_MAX {
            self.shown = at;
        } else if ahead > 0 {
            // Ahead by the way of a message, or by a drift: lean to the reading, so that a drift does not stay.
            let lean = Duration::from_millis(u64::try_from(ahead).unwrap_or(0)) / 64;
            self.taken += lean.min(self.taken.elapsed());
            return;
        }
        *self = Self { at, taken: Instant::now(), shown: self.shown };
    }
}

impl ServerClock {
    /// Begins with a reading.
    pub(super) fn new(at: i64) -> Self {
        Self { reading: Mutex::new(Reading { at, taken: Instant::now(), shown: at }) }
    }

    /// Takes a reading of the server's clock, in milliseconds since the epoch.
    pub(super) fn read(&self, at: i64) {
        self.reading.lock().expect("the clock holds its lock for one reading").read(at);
    }
}

impl Clock for ServerClock {
    fn now(&self) -> i64 {
        let mut reading = self.reading.lock().expect("the clock holds its lock for one reading");
        reading.shown = reading.now().max(reading.shown);
        reading.shown
    }

    fn at_least(&self, at: i64) {
        let mut reading = self.reading.lock().expect("the clock holds its lock for one reading");
        reading.shown = reading.shown.max(at);
    }

    fn until(&self, at: i64) -> Option<Duration> {
        Some(Duration::from_millis(u64::try_from(at.saturating_sub(self.now())).unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_server_and_is_not_set_back_by_a_slow_message() {
        let clock = ServerClock::new(1_000_000);
        clock.read(1_005_000);
        let ahead = clock.now();
        assert!(ahead >= 1_005_000);
        clock.read(1_004_900);
        assert!(clock.now() >= ahead, "a reading that was long on its way changes nothing that shows");
    }

    #[test]
    fn a_server_that_is_far_behind_is_believed() {
        let clock = ServerClock::new(1_000_000);
        clock.read(5_000_000);
        assert!(clock.now() >= 5_000_000);
        clock.read(2_000_000);
        assert!((2_000_000..2_001_000).contains(&clock.now()));
    }
}
