//! State: where a workflow stands, and the one match that says which event may follow.
//!
//! ```text
//!                 ┌───────────── step_failed (given back, lease lost) ─────────────┐
//!                 ▼                                                                │
//! created ──► Ready ── step_started ──► Running ── step_completed{next} ──► Ready or Sleeping
//!                 ▲                        │  │
//!                 │                        │  └── step_completed{end} ──► Completing ── workflow_completed ──► Completed
//!   time passes   │                        ├── step_failed{retry_at} ──► Backoff
//!   Sleeping, Backoff                      └── step_failed{final} ─────► Failing ───── workflow_failed ─────► Failed
//!
//!                                  Running ── step_completed{wait} ──► Waiting
//! Waiting ── signal_received, wait_timed_out ──► Ready
//!
//! Ready, Sleeping, Backoff, Waiting, Running ── workflow_cancelled ──► Cancelled
//! ```
//!
//! `Completing` and `Failing` exist only between two events of one commit: a log at rest never ends in them.
//! That a sleep is over is no event: `Sleeping` until T and `Ready` since T are the same log seen earlier and later.

use serde::Serialize;

use crate::event::{Cause, Event, Next, TokenDigest, Wait};
use crate::text::{FailureCode, Step};

/// One entry into a step, and how often it has been tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// The step.
    pub step: Step,
    /// How many steps this workflow has entered, this one included. It names the visit.
    pub visit: u64,
    /// The attempt that runs, or that the next start will make.
    pub attempt: u32,
    /// The delivery that runs, or that the next start will make.
    pub delivery: u32,
}

impl Visit {
    fn enter(step: Step, visit: u64) -> Self {
        Self { step, visit, attempt: 1, delivery: 1 }
    }
}

/// Where a workflow stands. Derived from its log by [`State::after`] and nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Can be claimed. A claim leads away; if none comes, the step's definition has no live worker (`blocked`).
    Ready {
        /// What will run.
        visit: Visit,
        /// Since when; fixes its place in the claim order.
        since: i64,
    },
    /// Waits for an instant it chose itself. The sweep makes it ready.
    Sleeping {
        /// What will run.
        visit: Visit,
        /// When.
        until: i64,
    },
    /// Waits for its next attempt. The sweep makes it ready.
    Backoff {
        /// What will run again.
        visit: Visit,
        /// When.
        until: i64,
    },
    /// Waits for a signal. One of its names that is accepted makes it ready, and so does the sweep when its time is over.
    Waiting {
        /// What will run with the signal; what runs when there is none has the same number.
        visit: Visit,
        /// For what.
        wait: Wait,
    },
    /// A worker holds the step. Its commit or failure leads away; the sweep notices a lost lease or a timeout.
    Running {
        /// What runs.
        visit: Visit,
        /// The fence in the log: digest of the token that may commit.
        token_digest: TokenDigest,
    },
    /// Between `step_completed` without next and `workflow_completed`, inside one commit.
    Completing,
    /// Between the last `step_failed` and `workflow_failed`, inside one commit.
    Failing {
        /// The attempt that ended it.
        cause: Cause,
    },
    /// Ended with a result. Nothing follows.
    Completed,
    /// Ended by a failure. Nothing follows.
    Failed {
        /// Why.
        code: FailureCode,
    },
    /// Ended from outside. Nothing follows.
    Cancelled,
}

/// The status word of a head. `blocked` is not among them: it is derived from `ready` and the live workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Can be claimed.
    Ready,
    /// Waits for an instant.
    Sleeping,
    /// A worker holds it.
    Running,
    /// Waits for its next attempt.
    Backoff,
    /// Waits for a signal.
    Waiting,
    /// Ended with a result.
    Completed,
    /// Ended by a failure.
    Failed,
    /// Ended from outside.
    Cancelled,
}

impl Status {
    /// Every status, live ones first.
    pub const ALL: [Self; 8] = [
        Self::Ready,
        Self::Sleeping,
        Self::Running,
        Self::Backoff,
        Self::Waiting,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// The stable word.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Sleeping => "sleeping",
            Self::Running => "running",
            Self::Backoff => "backoff",
            Self::Waiting => "waiting",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// The status of a stable word.
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.label() == label)
    }

    /// True for the three ends.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// No log may hold this event here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {event} cannot follow state {state}")]
pub struct IllegalEvent {
    /// Label of the state, `none` before the first event.
    pub state: &'static str,
    /// The event's type.
    pub event: &'static str,
}

impl State {
    /// The state after the first event of a log.
    ///
    /// # Errors
    /// [`IllegalEvent`] unless it is `workflow_created`.
    pub fn first(event: &Event, at: i64) -> Result<Self, IllegalEvent> {
        match event {
            Event::WorkflowCreated { .. } => Ok(Self::Ready { visit: Visit::enter(Step::start(), 1), since: at }),
            other => Err(IllegalEvent { state: "none", event: other.kind() }),
        }
    }

    /// The state after `event`, which was written at `at`, or why no log may hold that event here.
    ///
    /// # Errors
    /// [`IllegalEvent`] with both sides.
    pub fn after(&self, event: &Event, at: i64) -> Result<Self, IllegalEvent> {
        use Event as E;
        match (self, event) {
            (Self::Ready { visit, .. }, E::StepStarted { step, visit: n, attempt, delivery, token_digest, .. })
                if visit.is(step, *n, *attempt, *delivery) =>
            {
                Ok(Self::Running { visit: visit.clone(), token_digest: *token_digest })
            }
            // The sweep wakes sleepers without an event, so a log shows a start directly after a sleep: never early.
            (
                Self::Sleeping { visit, until } | Self::Backoff { visit, until },
                E::StepStarted { step, visit: n, attempt, delivery, token_digest, .. },
            ) if at >= *until && visit.is(step, *n, *attempt, *delivery) => {
                Ok(Self::Running { visit: visit.clone(), token_digest: *token_digest })
            }

            (Self::Running { visit, .. }, E::StepCompleted { step, attempt, next, .. })
                if visit.step == *step && visit.attempt == *attempt =>
            {
                Ok(match next {
                    None => Self::Completing,
                    Some(Next::Step { step, run_at }) => {
                        let entered = Visit::enter(step.clone(), visit.visit + 1);
                        match run_at {
                            Some(until) if *until > at => Self::Sleeping { visit: entered, until: *until },
                            _ => Self::Ready { visit: entered, since: at },
                        }
                    }
                    Some(Next::Wait(wait)) => {
                        let visit = Visit::enter(wait.then.clone(), visit.visit + 1);
                        Self::Waiting { visit, wait: wait.clone() }
                    }
                })
            }
            (
                Self::Running { visit, .. },
                E::StepFailed { step, visit: n, attempt, delivery, retryable, retry_at, counts, .. },
            ) if visit.is(step, *n, *attempt, *delivery) => {
                let delivery = visit.delivery.saturating_add(1);
                Ok(match (retryable, counts, retry_at) {
                    (true, true, Some(until)) => Self::Backoff {
                        visit: Visit { attempt: visit.attempt.saturating_add(1), delivery, ..visit.clone() },
                        until: *until,
                    },
                    (true, false, None) => Self::Ready { visit: Visit { delivery, ..visit.clone() }, since: at },
                    _ => Self::Failing { cause: Cause { step: step.clone(), attempt: *attempt } },
                })
            }

            (Self::Waiting { visit, wait }, E::SignalReceived { name, next, visit: n, .. })
                if wait.signals.contains(name) && wait.then == *next && visit.visit == *n =>
            {
                Ok(Self::Ready { visit: visit.clone(), since: at })
            }
            (Self::Waiting { visit, wait }, E::WaitTimedOut { signals, next })
                if wait.signals == *signals
                    && wait.timeout.as_ref().is_some_and(|timeout| timeout.at <= at && timeout.then == *next) =>
            {
                Ok(Self::Ready { visit: Visit::enter(next.clone(), visit.visit), since: at })
            }

            (Self::Completing, E::WorkflowCompleted { .. }) => Ok(Self::Completed),
            (Self::Failing { .. }, E::WorkflowFailed { code, .. }) => Ok(Self::Failed { code: code.clone() }),

            (
                Self::Ready { .. }
                | Self::Sleeping { .. }
                | Self::Backoff { .. }
                | Self::Waiting { .. }
                | Self::Running { .. },
                E::WorkflowCancelled { .. },
            ) => Ok(Self::Cancelled),

            (state, event) => Err(IllegalEvent { state: state.label(), event: event.kind() }),
        }
    }

    /// Folds a whole log.
    ///
    /// # Errors
    /// [`IllegalEvent`] at the first event that may not stand where it stands; `None` for an empty log.
    pub fn fold<'a>(log: impl IntoIterator<Item = (&'a Event, i64)>) -> Result<Option<Self>, IllegalEvent> {
        let mut state: Option<Self> = None;
        for (event, at) in log {
            state = Some(match &state {
                None => Self::first(event, at)?,
                Some(state) => state.after(event, at)?,
            });
        }
        Ok(state)
    }

    /// The stable word of this state.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Completing => "completing",
            Self::Failing { .. } => "failing",
            state => state.status().map_or("between", Status::label),
        }
    }

    /// The status a head shows; `None` between two events of one commit.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Ready { .. } => Some(Status::Ready),
            Self::Sleeping { .. } => Some(Status::Sleeping),
            Self::Running { .. } => Some(Status::Running),
            Self::Backoff { .. } => Some(Status::Backoff),
            Self::Waiting { .. } => Some(Status::Waiting),
            Self::Completed => Some(Status::Completed),
            Self::Failed { .. } => Some(Status::Failed),
            Self::Cancelled => Some(Status::Cancelled),
            Self::Completing | Self::Failing { .. } => None,
        }
    }

    /// The visit in progress, for the live states.
    pub fn visit(&self) -> Option<&Visit> {
        match self {
            Self::Ready { visit, .. }
            | Self::Sleeping { visit, .. }
            | Self::Backoff { visit, .. }
            | Self::Waiting { visit, .. }
            | Self::Running { visit, .. } => Some(visit),
            _ => None,
        }
    }

    /// The same log seen at `now`: a sleep or backoff that is over is ready since its end.
    pub fn at(&self, now: i64) -> Self {
        match self {
            Self::Sleeping { visit, until } | Self::Backoff { visit, until } if *until <= now => {
                Self::Ready { visit: visit.clone(), since: *until }
            }
            other => other.clone(),
        }
    }
}

impl Visit {
    fn is(&self, step: &Step, visit: u64, attempt: u32, delivery: u32) -> bool {
        self.step == *step && self.visit == visit && self.attempt == attempt && self.delivery == delivery
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Timeout, samples};
    use crate::text::{SignalId, SignalName};

    fn wait(until: i64) -> Wait {
        let timeout = Some(Timeout { at: until, then: Step::trusted("remind") });
        let signals = vec![SignalName::trusted("paid"), SignalName::trusted("void")];
        Wait { signals, then: Step::trusted("charge"), timeout }
    }

    fn states() -> Vec<State> {
        let visit = || Visit::enter(Step::start(), 1);
        vec![
            State::Ready { visit: visit(), since: 1_000 },
            State::Sleeping { visit: visit(), until: 2_000 },
            State::Backoff { visit: visit(), until: 2_000 },
            State::Running { visit: visit(), token_digest: TokenDigest([1; 16]) },
            State::Waiting { visit: Visit::enter(Step::trusted("charge"), 2), wait: wait(2_000) },
            State::Completing,
            State::Failing { cause: Cause { step: Step::start(), attempt: 1 } },
            State::Completed,
            State::Failed { code: FailureCode::trusted("boom") },
            State::Cancelled,
        ]
    }

    /// Every pair, so that a changed rule shows as a changed cell.
    #[test]
    fn every_pair_of_state_and_event() {
        let events = samples::all();
        let mut grid = format!("{:<12}", "");
        for (label, _) in &events {
            grid += &format!("{label:<18}");
        }
        let row = |grid: &mut String, label: &str, next: &dyn Fn(&Event) -> Option<&'static str>| {
            *grid += &format!("\n{label:<12}");
            for (_, event) in &events {
                *grid += &format!("{:<18}", next(event).unwrap_or("."));
            }
        };
        row(&mut grid, "none", &|event| State::first(event, 3_000).ok().map(|state| state.label()));
        for state in states() {
            row(&mut grid, state.label(), &|event| state.after(event, 3_000).ok().map(|state| state.label()));
        }
        let grid: Vec<&str> = grid.lines().map(str::trim_end).collect();
        insta::assert_snapshot!(grid.join("\n"));
    }

    #[test]
    fn no_start_before_its_time_or_of_another_attempt() {
        let visit = Visit::enter(Step::start(), 1);
        let start = |attempt, delivery| Event::StepStarted {
            step: Step::start(),
            visit: 1,
            attempt,
            delivery,
            worker: String::new(),
            epoch: 1,
            token_digest: TokenDigest([0; 16]),
        };
        let sleeping = State::Sleeping { visit: visit.clone(), until: 2_000 };
        assert!(sleeping.after(&start(1, 1), 1_999).is_err());
        assert!(sleeping.after(&start(1, 1), 2_000).is_ok());
        let ready = State::Ready { visit, since: 0 };
        assert!(ready.after(&start(2, 1), 0).is_err());
        assert!(ready.after(&start(1, 2), 0).is_err());
    }

    #[test]
    fn a_wait_takes_its_own_signals_and_ends_in_its_own_time() {
        let waiting = |wait| State::Waiting { visit: Visit::enter(Step::trusted("charge"), 2), wait };
        let received = |name: &str, next: &str| Event::SignalReceived {
            name: SignalName::trusted(name),
            signal_id: SignalId::trusted("s"),
            payload: crate::json::Json::trusted("1"),
            next: Step::trusted(next),
            visit: 2,
        };
        let after = |event: &Event, at| waiting(wait(2_000)).after(event, at).ok().map(|state| state.visit().cloned());
        assert_eq!(after(&received("paid", "charge"), 9_000), Some(Some(Visit::enter(Step::trusted("charge"), 2))));
        assert!(after(&received("void", "charge"), 0).is_some());
        assert_eq!(after(&received("other", "charge"), 0), None);
        assert_eq!(after(&received("paid", "remind"), 0), None);
        let over = Event::WaitTimedOut { signals: wait(0).signals, next: Step::trusted("remind") };
        assert_eq!(after(&over, 1_999), None);
        assert_eq!(after(&over, 2_000), Some(Some(Visit::enter(Step::trusted("remind"), 2))));
        let endless = waiting(Wait { timeout: None, ..wait(0) });
        assert!(endless.after(&over, 9_000).is_err());
    }

    #[test]
    fn attempts_and_deliveries_are_counted_apart() {
        let running = State::Running { visit: Visit::enter(Step::start(), 1), token_digest: TokenDigest([0; 16]) };
        let counts = |event: &str| {
            let (_, event) = samples::all().into_iter().find(|(label, _)| *label == event).unwrap();
            let state = running.after(&event, 0).unwrap();
            let visit = state.visit().unwrap();
            (visit.visit, visit.attempt, visit.delivery)
        };
        assert_eq!(counts("failed_retry"), (1, 2, 2));
        assert_eq!(counts("failed_given_back"), (1, 1, 2));
        assert_eq!(counts("completed_next"), (2, 1, 1));
    }

    #[test]
    fn a_status_word_reads_back() {
        for status in Status::ALL {
            assert_eq!(Status::from_label(status.label()), Some(status));
        }
        assert_eq!(Status::from_label("blocked"), None);
    }
}
