//! Retry: when a failed step is tried again, and when it is not.

use serde::{Deserialize, Serialize};

use crate::limits::Invalid;

/// How often and how soon a failed step is tried again.
///
/// Factors and jitter are whole percentages, so that a policy has one exact spelling and its delays are integer
/// arithmetic on every machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryPolicy {
    /// How many attempts one visit of a step gets, the first one included; 1 to 1,000,000,000.
    pub attempts_max: u32,
    /// Delay before the second attempt, in milliseconds.
    pub first_delay_ms: u64,
    /// What each further delay is multiplied by, in percent: 200 doubles. At least 100.
    pub factor_percent: u32,
    /// No delay is longer than this, in milliseconds, jitter included.
    pub max_delay_ms: u64,
    /// How far a delay may stray to either side, in percent, 0 to 100.
    pub jitter_percent: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts_max: 5, first_delay_ms: 500, factor_percent: 200, max_delay_ms: 60_000, jitter_percent: 20 }
    }
}

/// The most attempts a policy may name: at a delay of a second, thirty years of them.
const ATTEMPTS_MAX: u32 = 1_000_000_000;
/// The longest delay a policy may name: a year.
const DELAY_MS_MAX: u64 = 31_557_600_000;

impl RetryPolicy {
    /// One attempt, no retry.
    pub fn never() -> Self {
        Self { attempts_max: 1, ..Self::default() }
    }

    /// Refuses policies that mean nothing.
    ///
    /// # Errors
    /// [`Invalid`] with code `invalid_options`, naming the field.
    pub fn check(&self) -> Result<(), Invalid> {
        let refuse =
            |field: &str, problem: &str| Err(Invalid::new("invalid_options", format!("retry.{field}"), problem));
        if !(1..=ATTEMPTS_MAX).contains(&self.attempts_max) {
            return refuse("attempts_max", "is out of range; the first attempt counts, so give 1 to 1000000000");
        }
        if !(100..=10_000).contains(&self.factor_percent) {
            return refuse("factor_percent", "is out of range; give 100 (constant) to 10000");
        }
        if self.jitter_percent > 100 {
            return refuse("jitter_percent", "is out of range; give 0 to 100");
        }
        for (field, delay_ms) in [("first_delay_ms", self.first_delay_ms), ("max_delay_ms", self.max_delay_ms)] {
            if delay_ms > DELAY_MS_MAX {
                return refuse(field, "is over a year; give at most 31557600000 milliseconds");
            }
        }
        Ok(())
    }

    /// The delay after failed attempt number `attempt` (1 is the first), in milliseconds.
    ///
    /// `jitter` is a random number given by the caller; 0 is the shortest, `u32::MAX` the longest delay.
    /// The computation saturates: attempt 10,000 waits as long as the policy's maximum.
    pub fn delay_ms(&self, attempt: u32, jitter: u32) -> u64 {
        let max = u128::from(self.max_delay_ms);
        let mut delay = u128::from(self.first_delay_ms).min(max);
        // With a factor of 1 the loop would only count; with any other it ends at the maximum after a few rounds.
        if self.factor_percent > 100 {
            for _ in 1..attempt {
                if delay >= max || delay == 0 {
                    break;
                }
                // Round up, so that 1 ms times 1.2 still grows.
                delay = (delay * u128::from(self.factor_percent)).div_ceil(100).min(max);
            }
        }
        let spread = delay * u128::from(self.jitter_percent) / 100;
        let jittered = delay - spread + 2 * spread * u128::from(jitter) / u128::from(u32::MAX);
        u64::try_from(jittered.min(max)).unwrap_or(self.max_delay_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::RetryPolicy;

    const MIDDLE: u32 = u32::MAX / 2;

    #[test]
    fn delays_double_and_then_stay() {
        let policy = RetryPolicy { jitter_percent: 0, ..RetryPolicy::default() };
        let delays: Vec<u64> = (1..=9).map(|attempt| policy.delay_ms(attempt, MIDDLE)).collect();
        assert_eq!(delays, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]);
        assert_eq!(policy.delay_ms(10_000, MIDDLE), 60_000);
        assert_eq!(policy.delay_ms(u32::MAX, MIDDLE), 60_000);
    }

    #[test]
    fn jitter_stays_within_its_bounds_and_the_maximum() {
        let policy = RetryPolicy::default();
        assert_eq!((policy.delay_ms(1, 0), policy.delay_ms(1, u32::MAX)), (400, 600));
        assert_eq!((policy.delay_ms(50, 0), policy.delay_ms(50, u32::MAX)), (48_000, 60_000));
    }

    #[test]
    fn the_extremes_do_not_overflow() {
        let policy = RetryPolicy {
            attempts_max: u32::MAX,
            first_delay_ms: u64::MAX,
            factor_percent: u32::MAX,
            max_delay_ms: u64::MAX,
            jitter_percent: 100,
        };
        assert_eq!(policy.delay_ms(u32::MAX, u32::MAX), u64::MAX);
        let slow = RetryPolicy { first_delay_ms: 1, factor_percent: 101, jitter_percent: 0, ..RetryPolicy::default() };
        assert_eq!(slow.delay_ms(u32::MAX, 0), 60_000);
        let none = RetryPolicy { first_delay_ms: 0, ..RetryPolicy::default() };
        assert_eq!(none.delay_ms(u32::MAX, u32::MAX), 0);
    }

    #[test]
    fn policies_that_mean_nothing_are_refused() {
        assert!(RetryPolicy::default().check().is_ok());
        for (policy, field) in [
            (RetryPolicy { attempts_max: 0, ..RetryPolicy::default() }, "retry.attempts_max"),
            (RetryPolicy { factor_percent: 99, ..RetryPolicy::default() }, "retry.factor_percent"),
            (RetryPolicy { jitter_percent: 101, ..RetryPolicy::default() }, "retry.jitter_percent"),
            (RetryPolicy { max_delay_ms: u64::MAX, ..RetryPolicy::default() }, "retry.max_delay_ms"),
        ] {
            assert_eq!(policy.check().unwrap_err().field, field);
        }
    }
}
