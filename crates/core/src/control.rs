//! Control: what is asked of a workflow from outside its code.
//!
//! # Races
//! Cancel against commit is settled by commit order. Whoever comes second finds the claim gone or the workflow
//! finished, and is told so.

use crate::command::Moment;
use crate::event::Event;
use crate::limits::{Limits, cut};
use crate::snapshot::{Snapshot, Stop};
use crate::state::Status;
use crate::text::WorkflowKey;

/// Ends a workflow now, fencing a running attempt.
#[derive(Debug, Clone)]
pub struct Cancel {
    /// Which.
    pub key: WorkflowKey,
    /// For people.
    pub reason: String,
    /// Who asks.
    pub by: String,
}

/// What a cancel really did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was live and is cancelled now.
    Cancelled,
    /// It had ended before; nothing was written.
    AlreadyFinished {
        /// How.
        status: Status,
    },
    /// No such workflow.
    Unknown,
}

/// Judges a cancel.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn cancel(snapshot: &mut Snapshot, cancel: &Cancel, moment: &Moment) -> Result<Outcome, Stop> {
    let Some(head) = snapshot.head(&cancel.key)? else { return Ok(Outcome::Unknown) };
    let status = head.status();
    if status.is_terminal() {
        return Ok(Outcome::AlreadyFinished { status });
    }
    let limit = Limits::default().reason_bytes_max;
    let event = Event::WorkflowCancelled {
        reason: cut(&cancel.reason, limit).to_owned(),
        by: cut(&cancel.by, limit).to_owned(),
    };
    snapshot.append(&cancel.key, event, None, moment.now)?;
    Ok(Outcome::Cancelled)
}
