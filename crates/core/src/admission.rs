//! Admission: the moment a start is accepted, and its proof.
//!
//! # Identity
//! The caller's id names the workflow. Its receipt (key, fingerprint, time) is written in the same commit as the
//! first event and outlives the workflow, so a retry after any delay gets the first answer.
//!
//! # Verdicts
//! No receipt: start. Receipt with the same fingerprint: replay, nothing new. Receipt with another: conflict.
//!
//! # Races
//! Two starts of one id in a batch: the second sees the first in the snapshot and is a replay. Between two nodes
//! the receipt's primary key settles it, and the loser is decided again.

use crate::claim::{self, Granted, Terms};
use crate::command::Moment;
use crate::event::{Event, SIGNAL_PREFIX, Writes};
use crate::fingerprint::{Fingerprint, FingerprintKey};
use crate::json::Json;
use crate::limits::{Invalid, Limits};
use crate::options::{Options, StartOptions};
use crate::snapshot::{Admission, Snapshot, Stop};
use crate::text::{Key, Name, Step, WorkflowKey};

/// A checked request to start a workflow.
#[derive(Debug, Clone)]
pub struct Start {
    /// What to call it.
    pub key: WorkflowKey,
    /// The definition to run.
    pub name: Name,
    /// Its input.
    pub input: Json,
    /// Further initial variables; never `input`.
    pub writes: Writes,
    /// What it runs by, defaults filled in.
    pub options: Options,
    /// The digest of what was asked.
    pub fingerprint: Fingerprint,
    /// Claims the first step in the same commit, when a worker with room stands by.
    pub claim: Option<Terms>,
}

/// What became of a start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted now.
    Started {
        /// The claim of the first step, when one was asked for.
        claimed: Option<Granted>,
    },
    /// The same request was accepted before; nothing is new.
    Replay {
        /// When it was accepted.
        admitted_at: i64,
    },
    /// The id was used for another request; nothing was written.
    IdentityConflict {
        /// When that one was accepted.
        admitted_at: i64,
    },
}

/// A request to start a workflow, as it was sent.
#[derive(Debug, Clone)]
pub struct Asked {
    /// What to call it.
    pub key: WorkflowKey,
    /// The definition to run.
    pub name: Name,
    /// Its input.
    pub input: Json,
    /// Further initial variables.
    pub writes: Writes,
    /// What was asked of how it runs.
    pub options: StartOptions,
}

impl Asked {
    /// Checks the request against the limits, computes its fingerprint and fills in the definition's options.
    ///
    /// # Errors
    /// [`Invalid`] with code `invalid_key`, `value_too_large`, `writes_too_large` or `invalid_options`, naming the
    /// field.
    pub fn check(self, definition: &Options, secret: &FingerprintKey, limits: &Limits) -> Result<Start, Invalid> {
        let Self { key, name, input, writes, options } = self;
        if input.len() > limits.value_bytes_max {
            let remedy = "store the content elsewhere and pass a reference";
            return Err(Invalid::over("value_too_large", "input", input.len(), limits.value_bytes_max, remedy));
        }
        if writes.get("input").is_some() {
            return Err(Invalid::new("invalid_key", "writes.input", "is taken by the input; choose another key"));
        }
        check_writes(&writes, limits)?;
        options.check(limits)?;
        let fingerprint = Fingerprint::of_start(secret, &key.namespace, &name, &input, &writes, &options);
        let options = options.resolve(definition);
        Ok(Start { key, name, input, writes, options, fingerprint, claim: None })
    }
}

/// Checks scratchpad changes, of a start or of a step's commit.
///
/// # Errors
/// [`Invalid`] with code `invalid_key`, `value_too_large` or `writes_too_large`, naming the key.
pub fn check_writes(writes: &Writes, limits: &Limits) -> Result<(), Invalid> {
    for write in writes.iter() {
        let key = write.key.as_str();
        Key::parse_as("writes", key, limits)?;
        // Kept free for the payloads of signals, which only the engine saves.
        if key.starts_with(SIGNAL_PREFIX) {
            let problem = "begins with the reserved prefix signal:; choose another key";
            return Err(Invalid::new("invalid_key", format!("writes.{key}"), problem));
        }
        if let Some(value) = &write.value
            && value.len() > limits.value_bytes_max
        {
            let remedy = "store the content elsewhere and keep a reference";
            let field = format!("writes.{key}");
            return Err(Invalid::over("value_too_large", field, value.len(), limits.value_bytes_max, remedy));
        }
    }
    if writes.bytes() > limits.writes_bytes_max {
        let remedy = "spread the values over several steps";
        return Err(Invalid::over("writes_too_large", "writes", writes.bytes(), limits.writes_bytes_max, remedy));
    }
    Ok(())
}

/// Judges a start.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn decide(snapshot: &mut Snapshot, start: &Start, moment: &Moment) -> Result<Outcome, Stop> {
    if let Some(admission) = snapshot.admission(&start.key)? {
        let admitted_at = admission.admitted_at;
        return Ok(if admission.fingerprint == start.fingerprint {
            Outcome::Replay { admitted_at }
        } else {
            Outcome::IdentityConflict { admitted_at }
        });
    }
    let mut writes = Writes::default();
    writes.put(Key::trusted("input"), Some(start.input.clone()));
    for write in start.writes.iter() {
        writes.put(write.key.clone(), write.value.clone());
    }
    let event = Event::WorkflowCreated { name: start.name.clone(), writes, options: start.options.clone() };
    let admission = Admission { key: start.key.clone(), fingerprint: start.fingerprint, admitted_at: moment.now };
    snapshot.create(admission, &start.name, start.options.clone(), event, moment.now)?;
    let claimed = match &start.claim {
        Some(terms) if terms.announced.knows(&start.name, &Step::start()) => {
            Some(claim::grant(snapshot, &start.key, terms, moment)?)
        }
        _ => None,
    };
    Ok(Outcome::Started { claimed })
}
