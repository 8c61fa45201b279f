//! Remembered: running workflows as this process wrote their heads last, so that the command that goes on with one need
//! not load it.
//!
//! Nothing rests on it alone. A head that was not loaded is changed under the revision that was remembered, and the
//! commit fails where somebody else has changed it since; then it is loaded after all. It holds within one life of the
//! store: on another timeline the same revision may be another state.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steadfast_core::head::Head;
use steadfast_core::json::Json;
use steadfast_core::snapshot::Handle;
use steadfast_core::text::WorkflowKey;

use super::session::Server;

/// How many heads are kept, about half a kilobyte each.
const HEADS_MAX: usize = 16_384;
/// One with a longer report of its progress, in bytes, is not kept.
const PROGRESS_MAX: usize = 1_024;

/// Which history the rows of a store belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Life {
    pub server: Server,
    pub epoch: u64,
}

/// A head with what its row is called and which batch wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kept {
    pub number: Handle,
    pub revision: i64,
    pub head: Head,
}

/// The heads that the writers of one process share.
#[derive(Debug, Default)]
pub(super) struct Remembered(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    life: Option<Life>,
    heads: HashMap<WorkflowKey, Kept>,
}

impl Remembered {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all of these out, or none when one of them is not there.
    pub(super) fn take<'k>(
        &self,
        life: &Life,
        keys: impl Iterator<Item = &'k WorkflowKey> + Clone,
    ) -> Option<Vec<Kept>> {
        let mut inner = self.inner();
        if inner.life.as_ref() != Some(life) || !keys.clone().all(|key| inner.heads.contains_key(key)) {
            return None;
        }
        Some(keys.filter_map(|key| inner.heads.remove(key)).collect())
    }

    /// Keeps what a batch has written: those that run are likely to be asked for next.
    pub(super) fn keep(&self, life: &Life, written: impl Iterator<Item = Kept>) {
        let mut inner = self.inner();
        if inner.life.as_ref() != Some(life) {
            inner.heads.clear();
            inner.life = Some(life.clone());
        }
        for kept in written {
            let is_long = |text: &Json| text.len() > PROGRESS_MAX;
            if kept.head.claim.as_ref().is_none_or(|claim| claim.progress.as_ref().is_some_and(is_long)) {
                inner.heads.remove(&kept.head.key);
                continue;
            }
            if inner.heads.len() >= HEADS_MAX {
                // Those that are still at work come back with their next step.
                inner.heads.clear();
            }
            inner.heads.insert(kept.head.key.clone(), kept);
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.inner().heads.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use steadfast_core::head::{Claim, Token, WorkerRef};
    use steadfast_core::state::{State, Visit};
    use steadfast_core::text::{Name, Namespace, Step, WorkflowId};

    use super::*;

    fn key(id: &str) -> WorkflowKey {
        WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) }
    }

    fn kept(id: &str, revision: i64, runs: bool) -> Kept {
        let visit = Visit { step: Step::start(), visit: 1, attempt: 1, delivery: 1 };
        let token = Token([1; 16]);
        let claim = Claim {
            token,
            epoch: 1,
            worker: WorkerRef { label: "w".into(), boot: 1, remote: false },
            started_at: 1,
            lease_ms: 1,
            lease_until: 1,
            step_deadline: 1,
            look_at: 1,
            progress: None,
        };
        let head = Head {
            key: key(id),
            name: Name::trusted("flow"),
            options: Arc::default(),
            seq: 1,
            state: if runs {
                State::Running { visit, token_digest: token.digest() }
            } else {
                State::Ready { visit, since: 1 }
            },
            claim: runs.then_some(claim),
            created_at: 1,
            updated_at: 1,
        };
        Kept { number: 1, revision, head }
    }

    fn life(timeline: i64, epoch: u64) -> Life {
        Life { server: Server { system: "s".to_owned(), timeline }, epoch }
    }

    #[test]
    fn what_is_taken_is_the_last_that_was_written_in_the_same_life() {
        let remembered = Remembered::default();
        let took = |life: &Life, ids: &[&str]| {
            let keys: Vec<WorkflowKey> = ids.iter().map(|id| key(id)).collect();
            remembered.take(life, keys.iter()).map(|all| all.iter().map(|kept| kept.revision).collect::<Vec<_>>())
        };
        let (here, promoted, restored) = (life(1, 1), life(2, 1), life(1, 2));
        assert_eq!(took(&here, &["a"]), None);
        remembered.keep(&here, [kept("a", 1, true), kept("b", 1, true), kept("a", 2, true)].into_iter());
        assert_eq!(took(&here, &["a", "c"]), None, "all or none");
        assert_eq!((took(&promoted, &["a"]), took(&restored, &["a"])), (None, None));
        assert_eq!(took(&here, &["a", "b"]), Some(vec![2, 1]));
        assert_eq!(took(&here, &["a"]), None, "it is decided on once");
        remembered.keep(&here, [kept("a", 3, true), kept("a", 4, false), kept("b", 5, true)].into_iter());
        assert_eq!(took(&here, &["a"]), None, "nobody is about to go on with it");
        remembered.keep(&promoted, [kept("c", 1, true)].into_iter());
        assert_eq!((took(&here, &["b"]), took(&promoted, &["b"])), (None, None), "of another life");
        assert_eq!(took(&promoted, &["c"]), Some(vec![1]));
        let mut long = kept("c", 2, true);
        long.head.claim.as_mut().expect("it runs").progress =
            Some(Json::trusted(format!("{:>1$}", 0, PROGRESS_MAX + 1)));
        remembered.keep(&promoted, [kept("c", 1, true), long].into_iter());
        assert_eq!(took(&promoted, &["c"]), None, "it is too long");
        remembered.keep(&promoted, [kept("c", 2, true)].into_iter());
        remembered.clear();
        assert_eq!(took(&promoted, &["c"]), None);
    }

    #[test]
    fn no_more_are_kept_than_there_is_room_for() {
        let remembered = Remembered::default();
        let many = (0..HEADS_MAX * 2 + 10).map(|n| kept(&n.to_string(), 1, true));
        remembered.keep(&life(1, 1), many);
        assert!(remembered.inner().heads.len() <= HEADS_MAX);
    }
}
