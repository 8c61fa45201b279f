//! Wire: the JSON that goes out, converted by hand so that the engine's types stay free to change.
//!
//! Times are whole milliseconds since the epoch by the store's clock. User values are embedded byte for byte.

use serde::Serialize;
use steadfast::core::event::Event;
use steadfast::core::head::Head;
use steadfast::core::signal;
use steadfast::core::state::State;
use steadfast::core::text::{SignalName, Step};
use steadfast::store::{Cursor, Logged, Variable};
use steadfast::{Accepted, Engine, Json, Why};

use crate::problem::Document;

/// What a start is answered.
#[derive(Debug, Serialize)]
pub(crate) struct Started<'a> {
    pub(crate) id: &'a str,
    pub(crate) replay: bool,
    /// No worker knows the definition: the workflow waits for one that does. Not said while other nodes may know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) warning: Option<&'static str>,
}

impl<'a> Started<'a> {
    pub(crate) fn of(accepted: &'a Accepted) -> Self {
        let warns = !accepted.replay && !accepted.known;
        Self { id: accepted.id.as_str(), replay: accepted.replay, warning: warns.then_some("no_worker") }
    }
}

/// What a line of a bulk is answered.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum LineOutcome<'a> {
    Started {
        line: usize,
        #[serde(flatten)]
        started: Started<'a>,
    },
    Refused {
        line: usize,
        error: Document<'a>,
    },
}

/// How a workflow ended, if it has: one of the two, or none.
#[derive(Debug, Default, Serialize)]
pub(crate) struct End {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) result: Option<Json>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Failure>,
}

/// Why a workflow has no result.
#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    code: String,
    reason: String,
}

impl End {
    /// The end that the last event of a log tells.
    pub(crate) fn of(event: Event) -> Self {
        let failed = |code: String, reason| Self { result: None, error: Some(Failure { code, reason }) };
        match event {
            Event::WorkflowCompleted { result } => Self { result: Some(result), error: None },
            Event::WorkflowFailed { code, reason, .. } => failed(code.as_str().to_owned(), reason),
            Event::WorkflowCancelled { reason, .. } => failed("cancelled".to_owned(), reason),
            _ => Self::default(),
        }
    }
}

/// The current state of a workflow.
#[derive(Debug, Serialize)]
pub(crate) struct Workflow {
    id: String,
    name: String,
    status: &'static str,
    /// The step that runs or is next; null after the end, like the three that count it.
    step: Option<String>,
    visit: Option<u64>,
    attempt: Option<u32>,
    delivery: Option<u32>,
    seq: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    due: Option<i64>,
    /// The signals that it waits for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waits_for: Vec<String>,
    priority: i32,
    tags: Vec<String>,
    created_at: i64,
    updated_at: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocked: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<Claim>,
    #[serde(flatten)]
    end: End,
}

/// Who runs its step.
#[derive(Debug, Serialize)]
struct Claim {
    worker: String,
    started_at: i64,
    lease_until: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<Json>,
}

impl Workflow {
    pub(crate) fn of(head: Head, end: End, engine: &Engine) -> Self {
        let visit = head.visit();
        let (due, waits_for) = match &head.state {
            State::Sleeping { until, .. } | State::Backoff { until, .. } => (Some(*until), Vec::new()),
            State::Waiting { wait, .. } => (wait.timeout.as_ref().map(|timeout| timeout.at), names(&wait.signals)),
            _ => (None, Vec::new()),
        };
        Self {
            id: head.key.id.as_str().to_owned(),
            name: head.name.as_str().to_owned(),
            status: head.status().label(),
            step: visit.map(|visit| visit.step.as_str().to_owned()),
            visit: visit.map(|visit| visit.visit),
            attempt: visit.map(|visit| visit.attempt),
            delivery: visit.map(|visit| visit.delivery),
            seq: head.seq,
            due,
            waits_for,
            priority: head.options.priority,
            tags: head.options.tags.iter().map(|tag| tag.as_str().to_owned()).collect(),
            created_at: head.created_at,
            updated_at: head.updated_at,
            blocked: engine.is_blocked(&head).then_some("unknown_step"),
            claim: head.claim.map(|claim| Claim {
                worker: claim.worker.label.to_string(),
                started_at: claim.started_at,
                lease_until: claim.lease_until,
                progress: claim.progress,
            }),
            end,
        }
    }
}

/// Why a workflow does not run, or who runs it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Reason<'a> {
    id: &'a str,
    why: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    signals: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_timeout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
}

impl<'a> Reason<'a> {
    pub(crate) fn of(id: &'a str, why: Why) -> Self {
        let label = why.label();
        let at = |step: Step| Self { id, why: label, step: Some(step.as_str().to_owned()), ..Self::default() };
        match why {
            Why::Running { step, worker, since, until } => {
                Self { worker: Some(worker), since: Some(since), until: Some(until), ..at(step) }
            }
            Why::Sleeping { step, until } => Self { until: Some(until), ..at(step) },
            Why::Waiting { signals, step, timeout } => Self {
                signals: names(&signals),
                until: timeout.as_ref().map(|timeout| timeout.at),
                on_timeout: timeout.map(|timeout| timeout.then.as_str().to_owned()),
                ..at(step)
            },
            Why::Backoff { step, attempt, until } => Self { attempt: Some(attempt), until: Some(until), ..at(step) },
            Why::Ready { step, since } | Why::Blocked { step, since } => Self { since: Some(since), ..at(step) },
            Why::Ended { status, code } => Self {
                id,
                why: label,
                status: Some(status.label()),
                code: code.map(|code| code.as_str().to_owned()),
                ..Self::default()
            },
        }
    }
}

fn names(signals: &[SignalName]) -> Vec<String> {
    signals.iter().map(|name| name.as_str().to_owned()).collect()
}

/// What a signal is answered.
#[derive(Debug, Serialize)]
pub(crate) struct Sent<'a> {
    pub(crate) signal_id: &'a str,
    pub(crate) replay: bool,
}

/// A signal that no wait has taken yet.
#[derive(Debug, Serialize)]
pub(crate) struct Pending {
    number: u64,
    name: String,
    signal_id: String,
    payload: Json,
    accepted_at: i64,
}

impl Pending {
    pub(crate) fn of(pending: signal::Pending) -> Self {
        let signal::Pending { number, name, id, payload, accepted_at } = pending;
        let (name, signal_id) = (name.as_str().to_owned(), id.as_str().to_owned());
        Self { number, name, signal_id, payload, accepted_at }
    }
}

/// A page of an inbox, in the order of acceptance.
#[derive(Debug, Serialize)]
pub(crate) struct Signals {
    pub(crate) signals: Vec<Pending>,
    pub(crate) next: Option<u64>,
}

/// A page of workflows, newest first.
#[derive(Debug, Serialize)]
pub(crate) struct Workflows {
    pub(crate) workflows: Vec<Workflow>,
    pub(crate) next: Option<String>,
}

/// Writes a cursor so that nobody takes it for a number to count with.
pub(crate) fn cursor(cursor: Cursor) -> String {
    format!("c{:x}", cursor.0)
}

/// Reads a cursor that [`cursor`] wrote.
pub(crate) fn read_cursor(text: &str) -> Option<Cursor> {
    let digits = text.strip_prefix('c').filter(|digits| !digits.starts_with(['+', '-']))?;
    let read = Cursor(i64::from_str_radix(digits, 16).ok()?);
    (cursor(read) == text).then_some(read)
}

/// An event of a log.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    seq: u64,
    at: i64,
    r#type: &'static str,
    pub(crate) payload: Json,
}

impl Entry {
    pub(crate) fn of(logged: Logged) -> Self {
        let Logged { seq, at, event } = logged;
        Self { seq, at, r#type: event.kind(), payload: Json::trusted(event.payload()) }
    }
}

/// A page of a log.
#[derive(Debug, Serialize)]
pub(crate) struct Events {
    pub(crate) events: Vec<Entry>,
    pub(crate) next: Option<u64>,
}

/// A variable of a scratchpad.
#[derive(Debug, Serialize)]
pub(crate) struct Value {
    pub(crate) key: String,
    pub(crate) value: Json,
    seq: u64,
}

impl Value {
    pub(crate) fn of(variable: Variable) -> Self {
        let Variable { key, value, seq } = variable;
        Self { key: key.as_str().to_owned(), value, seq }
    }
}

/// A page of a scratchpad, in key order.
#[derive(Debug, Serialize)]
pub(crate) struct Scratchpad {
    pub(crate) variables: Vec<Value>,
    pub(crate) next: Option<String>,
}

/// Where a workflow stands, with its end if it has one.
#[derive(Debug, Serialize)]
pub(crate) struct Standing {
    pub(crate) status: &'static str,
    #[serde(flatten)]
    pub(crate) end: End,
}

/// What a cancel did.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub(crate) enum Cancelled {
    Cancelled,
    AlreadyFinished(Standing),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_back_and_nothing_else_does() {
        for number in [0, 1, 31, i64::MAX] {
            assert_eq!(read_cursor(&cursor(Cursor(number))), Some(Cursor(number)));
        }
        for text in ["", "c", "1", "c-1", "c+1", "cG", "C1", "c01", "c8000000000000000", "c1 "] {
            assert_eq!(read_cursor(text), None, "{text:?}");
        }
    }
}
