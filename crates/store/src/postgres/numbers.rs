//! Numbers: numbers for workflows to come, read beforehand, so that a start need not wait for one.
//!
//! Lists go by them, newest first. Within one process they are given out in their order: who starts one workflow after
//! another was answered finds it above the other. Another node may hold smaller ones for as long as [`AGE`].

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a number is kept.
const AGE: Duration = Duration::from_millis(100);

/// The numbers that the writers of one process share.
#[derive(Debug, Default)]
pub(super) struct Numbers(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    free: BTreeMap<i64, Instant>,
    /// The greatest that was given out.
    last: i64,
}

impl Numbers {
    /// Takes so many, or none when there are not enough.
    pub(super) fn take(&self, n: usize, now: Instant) -> Option<Vec<i64>> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = inner.last;
        inner.free.retain(|number, read| *number > last && now.duration_since(*read) <= AGE);
        if inner.free.len() < n {
            return None;
        }
        let taken: Vec<i64> = inner.free.keys().take(n).copied().collect();
        for number in &taken {
            inner.free.remove(number);
            inner.last = *number;
        }
        Some(taken)
    }

    /// Adds what was read then.
    pub(super) fn add(&self, numbers: impl IntoIterator<Item = i64>, read: Instant) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.free.retain(|_, before| read.saturating_duration_since(*before) <= AGE);
        inner.free.extend(numbers.into_iter().map(|number| (number, read)));
    }

    /// Forgets everything: another server may count from somewhere else.
    pub(super) fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Inner::default();
    }

    /// Notes that these were given out without having been here.
    pub(super) fn given(&self, numbers: &[i64]) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.last = numbers.iter().copied().fold(inner.last, i64::max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_given_out_in_their_order_while_they_are_fresh() {
        let (numbers, begin) = (Numbers::default(), Instant::now());
        assert_eq!(numbers.take(0, begin), Some(vec![]));
        assert_eq!(numbers.take(1, begin), None);
        numbers.add([6, 7, 8], begin);
        numbers.add([3, 4], begin);
        assert_eq!(numbers.take(6, begin), None, "there are five");
        assert_eq!(numbers.take(3, begin), Some(vec![3, 4, 6]));
        numbers.add([5, 9], begin);
        assert_eq!(numbers.take(1, begin), Some(vec![7]), "5 comes too late");
        numbers.given(&[8]);
        assert_eq!(numbers.take(1, begin), Some(vec![9]));
        numbers.add([10], begin);
        assert_eq!(numbers.take(1, begin + AGE * 2), None, "others may have given out greater ones");
        numbers.add([11], begin);
        numbers.add([12], begin + AGE * 2);
        assert_eq!(numbers.0.lock().expect("held by nobody").free.len(), 1, "what is too old goes");
        numbers.clear();
        numbers.add([1], begin);
        assert_eq!(numbers.take(1, begin), Some(vec![1]));
    }
}
