//! Refusals: whether the store refuses every write.
//!
//! A store can be well to be read and to be connected to, and refuse all the same whatever is to be written: a full disk,
//! rights that were taken away. No single answer tells that from one command that cannot be written. So it counts as
//! refusing when for several seconds commands of several workflows were refused and not one was written. Some time after
//! the last refusal it counts no more, or whoever sends no work here because of it would never learn that it is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use steadfast_core::text::WorkflowKey;

/// Refusals over so long a time are no accident.
const LASTING: Duration = Duration::from_secs(5);
/// After so long without a word nobody knows.
const FORGOTTEN: Duration = Duration::from_secs(30);

/// What was refused since the last write; of all committers of a store together.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// False in good times, when a write has nothing to end.
    any: AtomicBool,
    since: Mutex<Option<Since>>,
}

#[derive(Debug)]
struct Since {
    first: Instant,
    last: Instant,
    /// Whose the first one was, where it named one workflow.
    key: Option<WorkflowKey>,
    /// Others were refused too.
    several: bool,
}

impl Refusals {
    fn since(&self) -> std::sync::MutexGuard<'_, Option<Since>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command was refused, of this workflow where it named one.
    pub(crate) fn refused(&self, key: Option<&WorkflowKey>, now: Instant) {
        self.any.store(true, Ordering::Relaxed);
        let mut since = self.since();
        match &mut *since {
            Some(since) if now.duration_since(since.last) < FORGOTTEN => {
                since.last = now;
                since.several |= key != since.key.as_ref();
            }
            _ => *since = Some(Since { first: now, last: now, key: key.cloned(), several: key.is_none() }),
        }
    }

    /// Something was written.
    pub(crate) fn written(&self) {
        if self.any.swap(false, Ordering::Relaxed) {
            *self.since() = None;
        }
    }

    /// True when nothing can be written, and that for a while.
    pub(crate) fn are_lasting(&self, now: Instant) -> bool {
        self.any.load(Ordering::Relaxed)
            && self.since().as_ref().is_some_and(|since| {
                since.several
                    && since.last.duration_since(since.first) >= LASTING
                    && now.duration_since(since.last) < FORGOTTEN
            })
    }
}

#[cfg(test)]
mod tests {
    use steadfast_core::text::{Namespace, WorkflowId};

    use super::*;

    /// At each second a refusal of a workflow, of `-` for a claim, or a write, and then whether writes are refused.
    #[test]
    fn what_is_refused_for_long_and_to_several_is_everything() {
        let begin = Instant::now();
        let told = |story: &str| {
            let refusals = Refusals::default();
            let mut told = String::new();
            for (second, what) in story.split(' ').map(|event| event.split_once(':').unwrap()) {
                let now = begin + Duration::from_secs(second.parse().unwrap());
                let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(what) };
                match what {
                    "written" => refusals.written(),
                    "?" => {}
                    "-" => refusals.refused(None, now),
                    _ => refusals.refused(Some(&key), now),
                }
                told += if refusals.are_lasting(now) { "yes " } else { "no " };
            }
            told.trim_end().to_owned()
        };
        assert_eq!(told("0:a 3:b 5:a 9:?"), "no no yes yes");
        assert_eq!(told("0:a 3:a 5:a 60:a"), "no no no no", "one that cannot be written");
        assert_eq!(told("0:a 4:written 5:b 6:c 10:d"), "no no no no yes");
        assert_eq!(told("0:- 6:- 35:? 36:?"), "no yes yes no", "long ago");
        assert_eq!(told("0:a 29:b 60:a 61:b 65:a"), "no yes no no yes", "and then anew");
    }
}
