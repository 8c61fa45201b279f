//! Heartbeat: how a worker says that it is still at it.
//!
//! A beat moves the lease end forward, never back, and only for the open claim of this token. A worker whose claim
//! is gone learns it from the answer and stops.

use crate::claim::Held;
use crate::command::Moment;
use crate::commit::is_open;
use crate::json::Json;
use crate::snapshot::{Snapshot, Stop, Wants};

/// One claim to keep alive.
#[derive(Debug, Clone)]
pub struct Beat {
    /// The claim.
    pub held: Held,
    /// What the handler has to report, if anything.
    pub progress: Option<Json>,
}

/// Claims to keep alive, of one worker.
#[derive(Debug, Clone)]
pub struct Request {
    /// The claims.
    pub beats: Vec<Beat>,
}

/// The answer to one beat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Still held, until then.
    Held {
        /// When the lease ends now.
        lease_until: i64,
    },
    /// The claim is gone: stop.
    Lost,
}

/// Extends leases.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn decide(snapshot: &mut Snapshot, request: &Request, moment: &Moment) -> Result<Vec<Answer>, Stop> {
    let mut wants = Wants::default();
    for beat in &request.beats {
        if snapshot.head(&beat.held.key).is_err() {
            wants.heads.insert(beat.held.key.clone());
        }
    }
    if !wants.is_empty() {
        return Err(Stop::Missing(Box::new(wants)));
    }
    let mut answers = Vec::with_capacity(request.beats.len());
    for beat in &request.beats {
        let open = snapshot.head(&beat.held.key)?.is_some_and(|head| is_open(head, &beat.held, moment));
        if !open {
            answers.push(Answer::Lost);
            continue;
        }
        let mut lease_until = 0;
        snapshot.touch(&beat.held.key, |head| {
            let claim = head.claim.as_mut().expect("an open claim was just seen");
            claim.lease_until = claim.lease_until.max(moment.now.saturating_add_unsigned(claim.lease_ms));
            if beat.progress.is_some() {
                claim.progress = beat.progress.clone();
            }
            lease_until = claim.lease_until;
        });
        answers.push(Answer::Held { lease_until });
    }
    Ok(answers)
}
