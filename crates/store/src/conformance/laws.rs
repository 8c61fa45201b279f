//! Laws: what holds of every log and head, whatever happened. And the dump, by which two stores are compared.
//!
//! Written apart from the rules and without them, so that a mistake in a rule does not excuse itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use steadfast_core::event::{Event, Next, Wait};
use steadfast_core::head::Head;
use steadfast_core::state::{State, Status};
use steadfast_core::text::{Key, Namespace, SignalId, Step, WorkflowKey};

use super::diary::since;
use super::verbs::tell_head;
use crate::contract::{Filter, Logged, Reader, StoreError};

/// Everything that readers can see of these namespaces, as text: equal on two stores after the same history.
///
/// # Errors
/// [`StoreError`] when a look fails.
pub fn dump(reader: &dyn Reader, namespaces: &BTreeSet<Namespace>) -> Result<String, StoreError> {
    let mut text = String::new();
    let due = reader.next_due()?.map_or("-".to_owned(), since);
    let _ = writeln!(text, "next due {due}");
    for namespace in namespaces {
        for key in keys(reader, namespace)? {
            let name = format!("{namespace}/{key}");
            let Some(head) = reader.head(&key)? else {
                let _ = writeln!(text, "{name} listed without a head");
                continue;
            };
            // Tokens do not print; their digests do, in the state and in the log.
            let _ = writeln!(text, "{name} {}\n{name} {head:?}", tell_head(&head));
            let _ = writeln!(text, "{name} {:?}", reader.admission(&key)?);
            for logged in log(reader, &key)? {
                let Logged { seq, at, event } = logged;
                let _ = writeln!(text, "{name}@{seq} {} {} {}", since(at), event.kind(), event.payload());
            }
            for signal in reader.signals(&key, 0, usize::MAX)? {
                let _ = writeln!(text, "{name} holds {signal:?}");
            }
            for variable in reader.variables(&key, None, usize::MAX)? {
                let _ = writeln!(text, "{name}.{} = {} @{}", variable.key, variable.value, variable.seq);
            }
        }
    }
    Ok(text)
}

fn keys(reader: &dyn Reader, namespace: &Namespace) -> Result<Vec<WorkflowKey>, StoreError> {
    let (mut keys, mut before) = (Vec::new(), None);
    loop {
        let page = reader.list(&Filter::all(namespace.clone()), before, 100)?;
        keys.extend(page.items.into_iter().map(|listed| listed.head.key));
        before = page.next;
        if before.is_none() {
            return Ok(keys);
        }
    }
}

fn log(reader: &dyn Reader, key: &WorkflowKey) -> Result<Vec<Logged>, StoreError> {
    let mut log: Vec<Logged> = Vec::new();
    loop {
        let page = reader.events(key, log.len() as u64, 1_000)?;
        let end = page.len() < 1_000;
        log.extend(page);
        if end {
            return Ok(log);
        }
    }
}

/// Which laws are broken, and where.
///
/// # Errors
/// [`StoreError`] when a look fails.
pub fn laws(reader: &dyn Reader, namespaces: &BTreeSet<Namespace>) -> Result<Vec<String>, StoreError> {
    let mut broken = Vec::new();
    for namespace in namespaces {
        for key in keys(reader, namespace)? {
            let log = log(reader, &key)?;
            let mut break_law = |law: String| broken.push(format!("{namespace}/{key}: {law}"));
            of_log(&log, &mut break_law);
            match reader.head(&key)? {
                Some(head) => of_head(&head, &log, &mut break_law),
                None => break_law("it has no head".to_owned()),
            }
            let stored: Vec<(Key, String, u64)> = reader
                .variables(&key, None, usize::MAX)?
                .into_iter()
                .map(|variable| (variable.key, variable.value.to_string(), variable.seq))
                .collect();
            if stored != folded(&log) {
                break_law("its scratchpad is not what its log wrote".to_owned());
            }
            match reader.admission(&key)? {
                Some(admission) if Some(admission.admitted_at) == log.first().map(|first| first.at) => {}
                other => break_law(format!("its receipt does not fit: {other:?}")),
            }
        }
    }
    Ok(broken)
}

/// The scratchpad as the log alone tells it.
fn folded(log: &[Logged]) -> Vec<(Key, String, u64)> {
    let mut variables: BTreeMap<Key, (String, u64)> = BTreeMap::new();
    for logged in log {
        for write in logged.event.writes().iter().flat_map(|writes| writes.iter()) {
            match &write.value {
                Some(value) => variables.insert(write.key.clone(), (value.to_string(), logged.seq)),
                None => variables.remove(&write.key),
            };
        }
    }
    variables.into_iter().map(|(key, (value, seq))| (key, value, seq)).collect()
}

fn of_log(log: &[Logged], break_law: &mut impl FnMut(String)) {
    /// The claim that is open, and what the next one must be.
    struct Visit {
        attempt: u32,
        delivery: u32,
        due: i64,
        step: String,
    }
    let mut next = Visit { attempt: 1, delivery: 1, due: i64::MIN, step: "start".to_owned() };
    let mut open: Option<(String, u32, u32)> = None;
    let mut waits: Option<&Wait> = None;
    let mut received: BTreeSet<SignalId> = BTreeSet::new();
    let mut visits = 1;
    let mut last_at = i64::MIN;
    for (expected, Logged { seq, at, event }) in (0u64..).zip(log) {
        let mut law = |holds: bool, law: &str| {
            if !holds {
                break_law(format!("event {seq} ({}): {law}", event.kind()));
            }
        };
        law(*seq == expected, "seqs have no gaps");
        law(*at >= last_at, "time does not run back");
        last_at = *at;
        law((*seq == 0) == matches!(event, Event::WorkflowCreated { .. }), "a log begins with its creation, once");
        let follower = usize::try_from(expected).ok().and_then(|at| log.get(at + 1));
        law(!event.is_terminal() || follower.is_none(), "nothing follows an end");
        let ends_as = |kind: &str| follower.is_some_and(|next| next.event.kind() == kind && next.at == *at);
        match event {
            Event::WorkflowCreated { .. } => {}
            Event::StepStarted { step, visit, attempt, delivery, .. } => {
                law(open.is_none(), "one claim at a time");
                law(*visit == visits, "visits have no gaps");
                law(*attempt == next.attempt, "attempts have no gaps");
                law(*delivery == next.delivery, "deliveries have no gaps");
                law(step.as_str() == next.step, "the step is the one that is next");
                law(*at >= next.due, "no attempt before its time");
                open = Some((step.to_string(), *attempt, *delivery));
            }
            Event::StepCompleted { step, attempt, next: then, .. } => {
                let of_open = open.take().is_some_and(|open| (open.0.as_str(), open.1) == (step.as_str(), *attempt));
                law(of_open, "a commit belongs to the open claim");
                law(then.is_none() == ends_as("workflow_completed"), "what leads nowhere is an end, in one commit");
                let enter = |due, step: &Step| Visit { attempt: 1, delivery: 1, due, step: step.to_string() };
                match then {
                    None => {}
                    Some(Next::Step { step, run_at }) => {
                        visits += 1;
                        next = enter(run_at.unwrap_or(i64::MIN), step);
                    }
                    Some(Next::Wait(wait)) => {
                        visits += 1;
                        // Nothing runs before something ends the wait.
                        next = enter(i64::MAX, &wait.then);
                        waits = Some(wait);
                    }
                }
            }
            Event::StepFailed { step, attempt, delivery, retryable, retry_at, counts, .. } => {
                let failed = Some((step.to_string(), *attempt, *delivery));
                law(open.take() == failed, "a failure belongs to the open claim");
                let goes_on = *retryable && *counts == retry_at.is_some();
                law(goes_on != ends_as("workflow_failed"), "a failure is tried again or is the end, in one commit");
                next.attempt += u32::from(*counts);
                next.delivery += 1;
                next.due = retry_at.unwrap_or(i64::MIN);
            }
            Event::SignalReceived { name, signal_id, next: step, .. } => {
                let wait = waits.take();
                law(wait.is_some_and(|wait| wait.signals.contains(name)), "only what is waited for is taken");
                law(step.as_str() == next.step, "the step is the one that waited");
                law(received.insert(signal_id.clone()), "no signal is taken twice");
                next.due = *at;
            }
            Event::WaitTimedOut { next: step, .. } => {
                let over = waits.take().and_then(|wait| wait.timeout.as_ref());
                let in_time = over.is_some_and(|timeout| timeout.at <= *at && timeout.then == *step);
                law(in_time, "a wait is over no earlier than it said");
                next = Visit { attempt: 1, delivery: 1, due: *at, step: step.to_string() };
            }
            Event::WorkflowCompleted { .. } | Event::WorkflowFailed { .. } => {
                law(open.is_none(), "an end by itself leaves no claim open");
            }
            Event::WorkflowCancelled { .. } => open = None,
        }
    }
}

fn of_head(head: &Head, log: &[Logged], break_law: &mut impl FnMut(String)) {
    let mut law = |holds: bool, law: &str| {
        if !holds {
            break_law(format!("head: {law}: {head:?}"));
        }
    };
    let status = head.status();
    let placed = head.placed();
    let sources = usize::from(placed.rank.is_some()) + usize::from(placed.due.is_some());
    // A wait without a timeout has its signals alone.
    let expected = match &head.state {
        State::Waiting { wait, .. } => usize::from(wait.timeout.is_some()),
        _ => usize::from(!status.is_terminal()),
    };
    law(sources == expected, "what is live has exactly one wake source, what is over none");
    law(head.claim.is_some() == (status == Status::Running), "a claim is open exactly while a step runs");
    law(Some(head.seq + 1) == u64::try_from(log.len()).ok(), "it stands at the end of its log");
    let Some(last) = log.last() else { return law(false, "it has a log") };
    law(last.event.is_terminal() == status.is_terminal(), "it is over when its log is");
    law(matches!(last.event, Event::StepStarted { .. }) == (status == Status::Running), "it runs when its log says so");
    law(head.updated_at == last.at, "it was changed when its log was");
    if let Some(claim) = &head.claim {
        law(claim.look_at <= claim.lease_until.min(claim.step_deadline), "the sweep comes no later than the lease");
    }
}
