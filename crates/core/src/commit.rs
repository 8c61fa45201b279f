//! Commit: how a step's decision, or its failure, becomes history.
//!
//! # Fence
//! Judged in the transaction that writes, in this order: the same token and content already in the log →
//! `already_committed`; then token and epoch; then seq. A token that is no longer the claim's has lost, and nothing
//! is written. An expired lease refuses nothing by itself: until the sweep's `step_failed` the token commits.
//!
//! # Crashes
//! A worker that does not know whether its commit arrived commits again with the same token. The handler is never
//! run again for that.
//!
//! # The next step
//! A commit may bring the claim of the same workflow's next step (`claim_next`): a sequential workflow of ten steps
//! costs eleven commits, not twenty.

use crate::admission::check_writes;
use crate::claim::{self, Granted, Held, Terms};
use crate::command::Moment;
use crate::event::{Cause, Event, Next, Timeout, Wait, Writes};
use crate::head::{Claim, Token};
use crate::json::Json;
use crate::limits::{Invalid, Limits, cut};
use crate::retry::RetryPolicy;
use crate::signal;
use crate::snapshot::{Snapshot, Stop};
use crate::state::{State, Status, Visit};
use crate::text::{FailureCode, SignalName, Step, WorkflowKey};

/// When a next step may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At once.
    Now,
    /// At an instant, in milliseconds since the epoch; at once when it is past.
    At(i64),
    /// So many milliseconds after the commit, by the store's clock.
    After(u64),
}

/// What a step that succeeded leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Continuation {
    /// Run this step.
    Step {
        /// Its name.
        step: Step,
        /// Not before.
        when: When,
    },
    /// Run a step with the first signal of these names.
    Wait {
        /// The names.
        signals: Vec<SignalName>,
        /// The step.
        then: Step,
        /// How long to wait, and the step to run when there was none.
        timeout: Option<(When, Step)>,
    },
    /// The workflow is complete.
    Done(Json),
}

/// Commits what a step decided.
#[derive(Debug, Clone)]
pub struct Complete {
    /// The claim.
    pub held: Held,
    /// Scratchpad changes.
    pub writes: Writes,
    /// What comes next.
    pub continuation: Continuation,
    /// Claims the next step in the same commit when it is due and the worker knows it.
    pub claim_next: Option<Terms>,
}

impl Complete {
    /// About how many bytes it will write.
    pub(crate) fn bytes(&self) -> usize {
        let result = match &self.continuation {
            Continuation::Done(result) => result.len(),
            Continuation::Step { .. } | Continuation::Wait { .. } => 0,
        };
        self.writes.bytes() + result
    }
}

/// What kind of end an attempt had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailKind {
    /// The handler returned an error, panicked, or was refused for good: it counts as an attempt.
    Error {
        /// Whether another try makes sense.
        retryable: bool,
        /// The failure's own wish for the delay, in milliseconds, instead of the policy's.
        retry_after_ms: Option<u64>,
    },
    /// The worker gives the step back unharmed (shutdown, a step its code does not know): no attempt is counted.
    GivenBack,
}

/// Ends an attempt without a commit.
#[derive(Debug, Clone)]
pub struct Fail {
    /// The claim.
    pub held: Held,
    /// How it ended.
    pub kind: FailKind,
    /// A short stable word.
    pub code: FailureCode,
    /// For people; cut at the limit.
    pub reason: String,
    /// The step's own retry policy, when it has one.
    pub retry: Option<RetryPolicy>,
    /// A random number for the delay's jitter.
    pub jitter: u32,
    /// After how many deliveries without an attempt the workflow fails.
    pub deliveries_max: u32,
}

/// What became of a commit or failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Written now.
    Committed(After),
    /// The same was written before, by this token; nothing is new.
    AlreadyCommitted(After),
    /// The claim is gone; nothing was written.
    Lost,
}

/// Where the workflow stands after a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct After {
    /// Its status at the time of the answer.
    pub status: Status,
    /// The claim of its next step, when one was asked for and could be given.
    pub next: Option<Granted>,
}

/// Checks what a step wants to commit, before it is sent.
///
/// # Errors
/// [`Invalid`] with the code of the limit that was passed, or `invalid_continuation`. It fails the attempt for good.
pub fn check(writes: &Writes, continuation: &Continuation, now: i64, limits: &Limits) -> Result<(), Invalid> {
    check_writes(writes, limits)?;
    if writes.get("input").is_some() {
        return Err(Invalid::new(
            "invalid_key",
            "writes.input",
            "is the workflow's input and cannot be set; choose another key",
        ));
    }
    match continuation {
        Continuation::Done(result) if result.len() > limits.value_bytes_max => {
            let remedy = "store the content elsewhere and return a reference";
            Err(Invalid::over("value_too_large", "result", result.len(), limits.value_bytes_max, remedy))
        }
        Continuation::Done(_) => Ok(()),
        Continuation::Step { step, when } => {
            check_step("next.step", step, limits)?;
            check_when("next.run_at", *when, now, limits)
        }
        Continuation::Wait { signals, then, timeout } => {
            let (n, most) = (signals.len(), limits.wait_signals_max);
            if n == 0 || n > most {
                return refuse("wait_for.signals", format!("names {n} signals; name 1 to {most}"));
            }
            for (at, name) in signals.iter().enumerate() {
                if let Err(invalid) = SignalName::parse_as("wait_for.signals", name.as_str(), limits) {
                    return refuse("wait_for.signals", invalid.problem);
                }
                if signals[..at].contains(name) {
                    return refuse("wait_for.signals", format!("names {name:?} twice; name each signal once"));
                }
            }
            check_step("wait_for.then", then, limits)?;
            match timeout {
                None => Ok(()),
                Some((when, step)) => {
                    check_step("wait_for.on_timeout", step, limits)?;
                    check_when("wait_for.timeout_at", *when, now, limits)
                }
            }
        }
    }
}

fn refuse(field: &str, problem: String) -> Result<(), Invalid> {
    Err(Invalid::new("invalid_continuation", field, problem))
}

fn check_step(field: &str, step: &Step, limits: &Limits) -> Result<(), Invalid> {
    Step::parse_as(field, step.as_str(), limits).map(drop).or_else(|invalid| refuse(field, invalid.problem))
}

fn check_when(field: &str, when: When, now: i64, limits: &Limits) -> Result<(), Invalid> {
    let ahead = match when {
        When::Now => 0,
        When::At(at) => at.saturating_sub(now),
        When::After(ms) => i64::try_from(ms).unwrap_or(i64::MAX),
    };
    if ahead > limits.sleep_ms_max || matches!(when, When::At(at) if at < 0) {
        let days = limits.sleep_ms_max / 86_400_000;
        return refuse(field, format!("is not within {days} days from now; times are milliseconds"));
    }
    Ok(())
}

impl When {
    /// The instant of a commit at `at`; `None` for at once.
    fn instant(self, at: i64) -> Option<i64> {
        match self {
            Self::Now => None,
            Self::At(instant) => Some(instant),
            Self::After(ms) => Some(at.saturating_add_unsigned(ms)),
        }
    }

    /// True when a commit with this may have written `instant`.
    fn may_be(self, instant: Option<i64>) -> bool {
        match (self, instant) {
            (Self::Now, None) => true,
            (Self::At(at), Some(instant)) => at == instant,
            // The instant was computed from the commit's own time, which a repeat does not know.
            (Self::After(_), Some(_)) => true,
            _ => false,
        }
    }
}

/// Commits what a step decided.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn complete(snapshot: &mut Snapshot, complete: &Complete, moment: &Moment) -> Result<Outcome, Stop> {
    let Some((visit, look_at)) = holds(snapshot, &complete.held, moment)? else {
        return late(snapshot, &complete.held, complete.claim_next.as_ref(), moment, |started, event| {
            match (&complete.continuation, event) {
                (
                    Continuation::Step { step, when },
                    Event::StepCompleted { writes, next: Some(Next::Step { step: same, run_at }), .. },
                ) => writes.same_as(&complete.writes) && same == step && when.may_be(*run_at),
                (
                    Continuation::Wait { signals, then, timeout },
                    Event::StepCompleted { writes, next: Some(Next::Wait(wait)), .. },
                ) => {
                    let same_timeout = match (timeout, &wait.timeout) {
                        (None, None) => true,
                        (Some((when, then)), Some(timeout)) => {
                            timeout.then == *then && (*when == When::Now || when.may_be(Some(timeout.at)))
                        }
                        _ => false,
                    };
                    writes.same_as(&complete.writes) && (&wait.signals, &wait.then) == (signals, then) && same_timeout
                }
                (Continuation::Done(_), Event::StepCompleted { writes, next: None, .. }) => {
                    writes.same_as(&complete.writes) && started.result_is(&complete.continuation)
                }
                _ => false,
            }
        });
    };
    let Held { key, .. } = &complete.held;
    let at = moment.now.max(snapshot.head(key)?.expect("its holder was just checked").updated_at);
    let next = match &complete.continuation {
        Continuation::Done(_) => None,
        Continuation::Step { step, when } => Some(Next::Step { step: step.clone(), run_at: when.instant(at) }),
        Continuation::Wait { signals, then, timeout } => Some(Next::Wait(Wait {
            signals: signals.clone(),
            then: then.clone(),
            timeout: timeout
                .as_ref()
                .map(|(when, then)| Timeout { at: when.instant(at).unwrap_or(at), then: then.clone() }),
        })),
    };
    let wait = match &next {
        Some(Next::Wait(wait)) => Some(wait.clone()),
        _ => None,
    };
    if let Some(wait) = &wait {
        // All that is needed, before anything is written.
        signal::first(snapshot, key, wait)?;
    }
    let event =
        Event::StepCompleted { step: visit.step, attempt: visit.attempt, writes: complete.writes.clone(), next };
    snapshot.append(key, event, None, moment.now)?;
    if let Continuation::Done(result) = &complete.continuation {
        snapshot.append(key, Event::WorkflowCompleted { result: result.clone() }, None, moment.now)?;
        return Ok(Outcome::Committed(After { status: Status::Completed, next: None }));
    }
    if let Some(wait) = &wait {
        signal::take(snapshot, key, wait, moment)?;
    }
    let next = match &complete.claim_next {
        Some(terms) => claim_next(snapshot, key, terms, look_at, moment)?,
        None => None,
    };
    let status = snapshot.head(key)?.expect("it was there a line ago").status();
    Ok(Outcome::Committed(After { status, next }))
}

/// Claims the next step when it is ready and the worker knows it.
fn claim_next(
    snapshot: &mut Snapshot,
    key: &WorkflowKey,
    terms: &Terms,
    look_at: i64,
    moment: &Moment,
) -> Result<Option<Granted>, Stop> {
    let head = snapshot.head(key)?.expect("it was there a line ago");
    let State::Ready { visit, .. } = &head.state else { return Ok(None) };
    if !terms.announced.knows(&head.name, &visit.step) {
        return Ok(None);
    }
    let granted = claim::grant(snapshot, key, terms, moment)?;
    snapshot.touch(key, |head| {
        let claim = head.claim.as_mut().expect("it was granted a line ago");
        // The row keeps its place in the timed index while that place is in time for the new claim.
        if look_at > moment.now {
            claim.look_at = look_at.min(claim.ends_at());
        }
    });
    Ok(Some(granted))
}

/// Ends an attempt without a commit.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn fail(snapshot: &mut Snapshot, fail: &Fail, moment: &Moment) -> Result<Outcome, Stop> {
    let Some((visit, _)) = holds(snapshot, &fail.held, moment)? else {
        return late(snapshot, &fail.held, None, moment, |_, event| match event {
            Event::StepFailed { code, counts, .. } => {
                *code == fail.code && *counts == matches!(fail.kind, FailKind::Error { .. })
            }
            _ => false,
        });
    };
    let key = &fail.held.key;
    let policy = match &fail.retry {
        Some(policy) => policy.clone(),
        None => snapshot.head(key)?.expect("its holder was just checked").options.retry.clone(),
    };
    let ending = match fail.kind {
        FailKind::GivenBack => Ending::Uncounted,
        FailKind::Error { retryable, retry_after_ms } => Ending::Counted {
            retryable,
            delay_ms: retry_after_ms.unwrap_or_else(|| policy.delay_ms(visit.attempt, fail.jitter)),
            attempts_max: policy.attempts_max,
        },
    };
    end_attempt(snapshot, key, &visit, &fail.code, &fail.reason, ending, fail.deliveries_max, moment)?;
    let status = snapshot.head(key)?.expect("its holder was just checked").status();
    Ok(Outcome::Committed(After { status, next: None }))
}

/// How an attempt ends, for [`end_attempt`].
pub(crate) enum Ending {
    /// It counts as an attempt.
    Counted {
        /// Whether another try makes sense.
        retryable: bool,
        /// How long until then, in milliseconds.
        delay_ms: u64,
        /// How many attempts there are.
        attempts_max: u32,
    },
    /// It counts as a delivery only: given back, or the lease was lost.
    Uncounted,
}

/// Appends `step_failed`, and in the same commit `workflow_failed` when nothing may follow.
#[expect(clippy::too_many_arguments, reason = "one rule for handlers, the sweep and give-backs; all of it matters")]
pub(crate) fn end_attempt(
    snapshot: &mut Snapshot,
    key: &WorkflowKey,
    visit: &Visit,
    code: &FailureCode,
    reason: &str,
    ending: Ending,
    deliveries_max: u32,
    moment: &Moment,
) -> Result<(), Stop> {
    let at = moment.now.max(snapshot.head(key)?.expect("the caller has looked").updated_at);
    let reason = cut(reason, Limits::default().reason_bytes_max).to_owned();
    // Deliveries that were no attempts: those that a worker-killer or a rolling deploy burns.
    let uncounted = visit.delivery.saturating_sub(visit.attempt - 1);
    let (retryable, retry_at, counts, end) = match ending {
        Ending::Counted { retryable: true, delay_ms, attempts_max } if visit.attempt < attempts_max => {
            (true, Some(at.saturating_add_unsigned(delay_ms)), true, None)
        }
        Ending::Counted { retryable: true, attempts_max, .. } => {
            let why = format!("attempt {} of {attempts_max} failed with {code}: {reason}", visit.attempt);
            (true, None, true, Some(("attempts_exhausted", why)))
        }
        Ending::Counted { retryable: false, .. } => (false, None, true, Some((code.as_str(), reason.clone()))),
        Ending::Uncounted if uncounted >= deliveries_max => {
            let why = format!("handed out {uncounted} times without an attempt that ended, last {code}: {reason}");
            (false, None, false, Some(("deliveries_exhausted", why)))
        }
        Ending::Uncounted => (true, None, false, None),
    };
    let event = Event::StepFailed {
        step: visit.step.clone(),
        visit: visit.visit,
        attempt: visit.attempt,
        delivery: visit.delivery,
        code: code.clone(),
        reason,
        retryable,
        retry_at,
        counts,
    };
    snapshot.append(key, event, None, moment.now)?;
    if let Some((code, why)) = end {
        let event = Event::WorkflowFailed {
            code: FailureCode::trusted(code),
            reason: cut(&why, Limits::default().reason_bytes_max).to_owned(),
            cause: Some(Cause { step: visit.step.clone(), attempt: visit.attempt }),
        };
        snapshot.append(key, event, None, moment.now)?;
    }
    Ok(())
}

/// True when `held` is the open claim of its head in the present epoch.
pub(crate) fn is_open(head: &crate::head::Head, held: &Held, moment: &Moment) -> bool {
    let Some(Claim { token, epoch, .. }) = &head.claim else { return false };
    *token == held.token && *epoch == held.epoch && *epoch == moment.epoch && head.seq == held.seq
}

/// The visit and index place of the open claim, when `held` is it.
fn holds(snapshot: &Snapshot, held: &Held, moment: &Moment) -> Result<Option<(Visit, i64)>, Stop> {
    Ok(match snapshot.head(&held.key)? {
        Some(head) if is_open(head, held, moment) => {
            let look_at = head.claim.as_ref().map_or(i64::MIN, |claim| claim.look_at);
            head.visit().map(|visit| (visit.clone(), look_at))
        }
        _ => None,
    })
}

/// The events that follow a claim in the log, for comparing a repeated commit.
struct Written<'a> {
    end: Option<&'a Event>,
}

impl Written<'_> {
    fn result_is(&self, continuation: &Continuation) -> bool {
        matches!((self.end, continuation), (Some(Event::WorkflowCompleted { result }), Continuation::Done(same)) if result == same)
    }
}

/// The answer to a claim that is not open: the same token and content in the log, or lost.
fn late(
    snapshot: &Snapshot,
    held: &Held,
    claim_next: Option<&Terms>,
    moment: &Moment,
    same: impl FnOnce(&Written<'_>, &Event) -> bool,
) -> Result<Outcome, Stop> {
    let Some(head) = snapshot.head(&held.key)? else { return Ok(Outcome::Lost) };
    // Not written yet, or written over: only a log that went on past the claim can hold its commit.
    if head.seq <= held.seq {
        return Ok(Outcome::Lost);
    }
    let [started, outcome, end] = snapshot.events(&held.key, [held.seq, held.seq + 1, held.seq + 2])?;
    let (Some(Event::StepStarted { token_digest, .. }), Some(outcome)) = (started, outcome) else {
        return Ok(Outcome::Lost);
    };
    if *token_digest != held.token.digest() || !same(&Written { end }, outcome) {
        return Ok(Outcome::Lost);
    }
    // The claim of the next step, when this commit was granted it and the answer was lost. A claim that somebody was
    // given since is his alone: the seed tells them apart, and with his token two workers would run the step.
    let next = claim_next.and_then(|terms| {
        let granted = claim::granted_of(head)?;
        let own = Token::derive(&terms.seed, &held.key, head.seq);
        // Behind the commit, and the signal that it took if there was one.
        let behind = (held.seq + 2..=held.seq + 3).contains(&head.seq);
        let is_own = behind && granted.held.token == own && granted.held.epoch == moment.epoch;
        is_own.then_some(granted)
    });
    Ok(Outcome::AlreadyCommitted(After { status: head.status(), next }))
}
