//! Chance that a seed decides, so that a plan can be made again.

use std::time::Duration;

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn of(seed: u64) -> Self {
        Self(seed)
    }

    /// Another one, which depends on this one and a number alone.
    pub fn apart(&self, n: u64) -> Self {
        let mut apart = Self(self.0 ^ n.wrapping_mul(0xd6e8_feb8_6659_fd93));
        apart.next();
        apart
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(range.start + self.below(range.end - range.start))
    }
}
