//! Why: what keeps a workflow from running at this moment, told by the predicates that claims and sweeps go by.

use crate::claim::Announced;
use crate::event::Timeout;
use crate::head::Head;
use crate::state::{State, Status};
use crate::text::{FailureCode, SignalName, Step};

/// What a workflow waits for, or who runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// A worker runs its step.
    Running {
        /// The step.
        step: Step,
        /// Who.
        worker: String,
        /// Since when.
        since: i64,
        /// When the step is taken from that worker unless it is heard of again, or however alive it is: the earlier of
        /// lease and deadline.
        until: i64,
    },
    /// It sleeps because its last step said so.
    Sleeping {
        /// What will run.
        step: Step,
        /// When.
        until: i64,
    },
    /// It waits for a signal.
    Waiting {
        /// Any of these.
        signals: Vec<SignalName>,
        /// What will run with it.
        step: Step,
        /// When it waits no longer, and what runs then.
        timeout: Option<Timeout>,
    },
    /// Its step failed and is tried again.
    Backoff {
        /// What will run again.
        step: Step,
        /// As which attempt.
        attempt: u32,
        /// When.
        until: i64,
    },
    /// Its step could be claimed by any worker that knows it and has room.
    Ready {
        /// What will run.
        step: Step,
        /// Since when.
        since: i64,
    },
    /// Its step could be claimed, and no worker knows it.
    Blocked {
        /// What nobody knows.
        step: Step,
        /// Since when.
        since: i64,
    },
    /// It has ended.
    Ended {
        /// How.
        status: Status,
        /// Why it failed.
        code: Option<FailureCode>,
    },
}

impl Why {
    /// The stable word.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Running { .. } => "running",
            Self::Sleeping { .. } => "sleeping",
            Self::Waiting { .. } => "waiting",
            Self::Backoff { .. } => "backoff",
            Self::Ready { .. } => "ready",
            Self::Blocked { .. } => "blocked",
            Self::Ended { .. } => "ended",
        }
    }
}

/// What `head` waits for at `now`. `announced` is all that any worker knows; `None` while there may be workers that are
/// not known here.
///
/// A sleep or backoff that is over is ready, whether or not the sweep has seen it. An overdue claim is shown as it stands:
/// until the sweep has judged it, its worker may commit.
///
/// # Panics
/// If the head stands between two events of one commit, which no saved head does.
pub fn why(head: &Head, announced: Option<&Announced>, now: i64) -> Why {
    match head.state.at(now) {
        State::Running { visit, .. } => {
            let claim = head.claim.as_ref().expect("a running head has a claim");
            Why::Running {
                step: visit.step,
                worker: claim.worker.label.to_string(),
                since: claim.started_at,
                until: claim.ends_at(),
            }
        }
        State::Sleeping { visit, until } => Why::Sleeping { step: visit.step, until },
        State::Backoff { visit, until } => Why::Backoff { step: visit.step, attempt: visit.attempt, until },
        State::Waiting { visit, wait } => {
            Why::Waiting { signals: wait.signals, step: visit.step, timeout: wait.timeout }
        }
        State::Ready { visit, since } => match announced {
            Some(announced) if !announced.knows(&head.name, &visit.step) => Why::Blocked { step: visit.step, since },
            _ => Why::Ready { step: visit.step, since },
        },
        State::Failed { code } => Why::Ended { status: Status::Failed, code: Some(code) },
        State::Completed | State::Cancelled | State::Completing | State::Failing { .. } => {
            Why::Ended { status: head.status(), code: None }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::claim::Steps;
    use crate::event::{Cause, TokenDigest, Wait};
    use crate::head::{Claim, Token, WorkerRef};
    use crate::options::Options;
    use crate::state::Visit;
    use crate::text::{Name, Namespace, WorkflowId, WorkflowKey};

    fn head(state: State) -> Head {
        let claim = matches!(state, State::Running { .. }).then(|| Claim {
            token: Token([0; 16]),
            epoch: 1,
            worker: WorkerRef { label: "n1.2".into(), boot: 2, remote: false },
            started_at: 900,
            lease_ms: 500,
            lease_until: 1_400,
            step_deadline: 1_300,
            look_at: 1_000,
            progress: None,
        });
        Head {
            key: WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("w") },
            name: Name::trusted("order"),
            options: Arc::new(Options::default()),
            seq: 1,
            state,
            claim,
            created_at: 0,
            updated_at: 0,
        }
    }

    fn knows(step: &str) -> Announced {
        let steps = Steps::Listed([Step::trusted(step)].into());
        Announced {
            namespace: Namespace::default_namespace(),
            definitions: BTreeMap::from([(Name::trusted("order"), steps)]),
        }
    }

    #[test]
    fn each_state_has_its_reason() {
        let visit = || Visit { step: Step::trusted("pay"), visit: 3, attempt: 2, delivery: 4 };
        let step = || Step::trusted("pay");
        let wait = || {
            let timeout = Some(Timeout { at: 5, then: Step::trusted("remind") });
            Wait { signals: vec![SignalName::trusted("paid")], then: step(), timeout }
        };
        let digest = TokenDigest([0; 16]);
        let ended = |status, code| Why::Ended { status, code };
        for (state, now, expected) in [
            (
                State::Running { visit: visit(), token_digest: digest },
                2_000,
                Why::Running { step: step(), worker: "n1.2".to_owned(), since: 900, until: 1_300 },
            ),
            (State::Sleeping { visit: visit(), until: 5 }, 4, Why::Sleeping { step: step(), until: 5 }),
            (State::Sleeping { visit: visit(), until: 5 }, 5, Why::Ready { step: step(), since: 5 }),
            (State::Backoff { visit: visit(), until: 5 }, 4, Why::Backoff { step: step(), attempt: 2, until: 5 }),
            (State::Backoff { visit: visit(), until: 5 }, 6, Why::Ready { step: step(), since: 5 }),
            (State::Ready { visit: visit(), since: 7 }, 9, Why::Ready { step: step(), since: 7 }),
            (
                State::Waiting { visit: visit(), wait: wait() },
                9,
                Why::Waiting { signals: wait().signals, step: step(), timeout: wait().timeout },
            ),
            (State::Completed, 9, ended(Status::Completed, None)),
            (State::Cancelled, 9, ended(Status::Cancelled, None)),
            (
                State::Failed { code: FailureCode::trusted("boom") },
                9,
                ended(Status::Failed, Some(FailureCode::trusted("boom"))),
            ),
        ] {
            assert_eq!(why(&head(state.clone()), Some(&knows("pay")), now), expected, "{state:?}");
        }
    }

    #[test]
    fn a_step_is_blocked_only_when_certainly_nobody_knows_it() {
        let ready = || {
            let visit = Visit { step: Step::trusted("pay"), visit: 1, attempt: 1, delivery: 1 };
            head(State::Sleeping { visit, until: 5 })
        };
        assert_eq!(why(&ready(), Some(&knows("paid")), 9), Why::Blocked { step: Step::trusted("pay"), since: 5 });
        assert_eq!(why(&ready(), None, 9).label(), "ready");
        assert_eq!(why(&ready(), Some(&knows("paid")), 4).label(), "sleeping", "it does not wait for code yet");
    }

    #[test]
    #[should_panic(expected = "between commits")]
    fn nobody_looks_between_two_events() {
        why(&head(State::Failing { cause: Cause { step: Step::start(), attempt: 1 } }), None, 0);
    }
}
