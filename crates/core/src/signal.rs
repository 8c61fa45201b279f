//! Signal: a message to one workflow, accepted exactly once and taken by the first wait that names it.
//!
//! # Identity
//! The caller's signal id names it among the signals of its workflow. Its receipt is looked up before the workflow's
//! state: a repeat is a replay also when the workflow has finished meanwhile.
//!
//! # Inbox
//! An accepted signal is a row of its workflow's inbox, numbered in the order of acceptance. Neither log nor head hear of
//! it until a wait takes it: at once when the workflow waits for it, else with the commit of the step that begins such a
//! wait. Of several names that one wait gives, the signal that was accepted first counts.
//!
//! # Races
//! All that puts in or takes holds the workflow's head, so there is one order. A signal that is accepted before
//! `wait_timed_out` commits wins, however late.

use crate::command::Moment;
use crate::event::{Event, Wait};
use crate::fingerprint::{Fingerprint, FingerprintKey};
use crate::json::Json;
use crate::limits::{Invalid, Limits};
use crate::snapshot::{Snapshot, Stop};
use crate::state::{State, Status};
use crate::text::{SignalId, SignalName, WorkflowKey};

/// A checked request to signal a workflow.
#[derive(Debug, Clone)]
pub struct Send {
    /// Whom.
    pub key: WorkflowKey,
    /// What.
    pub name: SignalName,
    /// What to call it.
    pub id: SignalId,
    /// What it carries.
    pub payload: Json,
    /// The digest of what was asked.
    pub fingerprint: Fingerprint,
}

/// The durable proof that a signal was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// The digest of what was asked.
    pub fingerprint: Fingerprint,
    /// When.
    pub accepted_at: i64,
}

/// A signal in an inbox that no wait has taken yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// Its place in the inbox, from 1.
    pub number: u64,
    /// What.
    pub name: SignalName,
    /// What it is called.
    pub id: SignalId,
    /// What it carries.
    pub payload: Json,
    /// When it was accepted.
    pub accepted_at: i64,
}

/// What became of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted now.
    Accepted {
        /// A wait took it at once.
        taken: bool,
    },
    /// The same signal was accepted before; nothing is new.
    Replay {
        /// When it was accepted.
        accepted_at: i64,
    },
    /// The id was used for another signal to this workflow; nothing was written.
    IdentityConflict {
        /// When that one was accepted.
        accepted_at: i64,
    },
    /// The workflow has ended and takes no signals.
    Finished {
        /// How.
        status: Status,
    },
    /// No such workflow.
    Unknown,
}

/// A request to signal a workflow, as it was sent.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Whom.
    pub key: WorkflowKey,
    /// What.
    pub name: SignalName,
    /// What to call it.
    pub id: SignalId,
    /// What it carries.
    pub payload: Json,
}

impl Asked {
    /// Checks the request against the limits and computes its fingerprint.
    ///
    /// # Errors
    /// [`Invalid`] with code `value_too_large`.
    pub fn check(self, secret: &FingerprintKey, limits: &Limits) -> Result<Send, Invalid> {
        let Self { key, name, id, payload } = self;
        if payload.len() > limits.value_bytes_max {
            let remedy = "store the content elsewhere and send a reference";
            return Err(Invalid::over("value_too_large", "payload", payload.len(), limits.value_bytes_max, remedy));
        }
        let fingerprint = Fingerprint::of_signal(secret, &key, &name, &payload);
        Ok(Send { key, name, id, payload, fingerprint })
    }
}

/// Judges a signal.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn decide(snapshot: &mut Snapshot, send: &Send, moment: &Moment) -> Result<Outcome, Stop> {
    if let Some(Receipt { fingerprint, accepted_at }) = snapshot.signal(&send.key, &send.id)? {
        let accepted_at = *accepted_at;
        return Ok(if *fingerprint == send.fingerprint {
            Outcome::Replay { accepted_at }
        } else {
            Outcome::IdentityConflict { accepted_at }
        });
    }
    let Some(head) = snapshot.head(&send.key)? else { return Ok(Outcome::Unknown) };
    let status = head.status();
    if status.is_terminal() {
        return Ok(Outcome::Finished { status });
    }
    let waits = match &head.state {
        // Of the names that it gives, this one.
        State::Waiting { wait, .. } if wait.signals.contains(&send.name) => {
            Some(Wait { signals: vec![send.name.clone()], ..wait.clone() })
        }
        _ => None,
    };
    let accepted_at = moment.now.max(head.updated_at);
    if waits.is_some() {
        // All that is needed, before anything is written.
        snapshot.pending(&send.key, &send.name)?;
    }
    snapshot.accept(send, accepted_at);
    let taken = match &waits {
        Some(wait) => take(snapshot, &send.key, wait, moment)?,
        None => false,
    };
    Ok(Outcome::Accepted { taken })
}

/// Gives a wait that has begun the signal that was accepted first of those it names; false when there is none yet.
///
/// # Panics
/// If the head is not loaded: the caller has looked.
pub(crate) fn take(snapshot: &mut Snapshot, key: &WorkflowKey, wait: &Wait, moment: &Moment) -> Result<bool, Stop> {
    let Some(Pending { name, id, payload, .. }) = first(snapshot, key, wait)? else { return Ok(false) };
    let visit = snapshot.head(key)?.and_then(|head| head.visit()).expect("the caller has looked").visit;
    let event = Event::SignalReceived { name: name.clone(), signal_id: id, payload, next: wait.then.clone(), visit };
    let seq = snapshot.append(key, event, None, moment.now)?;
    snapshot.taken(key, &name, seq);
    Ok(true)
}

/// The pending signal that was accepted first of those that the wait names.
pub(crate) fn first(snapshot: &Snapshot, key: &WorkflowKey, wait: &Wait) -> Result<Option<Pending>, Stop> {
    let mut first: Option<Pending> = None;
    for name in &wait.signals {
        if let Some(pending) = snapshot.pending(key, name)?
            && first.as_ref().is_none_or(|first| pending.number < first.number)
        {
            first = Some(pending.clone());
        }
    }
    Ok(first)
}
