//! Seldom: what is worth saying once, and not several times a second.
//!
//! While a database is away every loop meets the same error again and again, and each has a reason to go on. The log gets
//! the first of them, and one a minute with how many there were between.

use std::time::{Duration, Instant};

/// How long others are left out after one was said.
const PAUSE: Duration = Duration::from_secs(60);

/// Which of many messages are said.
#[derive(Debug, Default)]
pub struct Seldom {
    said: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Nothing was said yet.
    pub const fn new() -> Self {
        Self { said: None, left_out: 0 }
    }

    /// How many were left out before this one; `None` when it is left out too.
    pub fn says(&mut self, now: Instant) -> Option<u64> {
        if self.said.is_some_and(|said| now.duration_since(said) < PAUSE) {
            self.left_out += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }

    /// The trouble is over: the next message is about another one.
    pub fn over(&mut self) {
        *self = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_said_and_then_one_a_minute() {
        let begin = Instant::now();
        let mut seldom = Seldom::new();
        let mut said = String::new();
        for (second, over) in [(0, false), (1, false), (30, false), (59, false), (60, false), (119, false), (120, true)]
        {
            if let Some(left_out) = seldom.says(begin + Duration::from_secs(second)) {
                said += &format!("{second}:{left_out} ");
            }
            if over {
                seldom.over();
            }
        }
        said += &format!("after:{:?}", seldom.says(begin + Duration::from_secs(121)));
        assert_eq!(said, "0:0 60:3 120:1 after:Some(0)");
    }
}
