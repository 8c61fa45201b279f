//! Claim: how exactly one worker comes to hold a step.
//!
//! # Identity
//! A claim is named by workflow and seq (of its `step_started`), and fenced by a random token and the store's
//! epoch. An old claim can still be presented by a worker that outlived it; it then loses, and nothing is written.
//!
//! # Order
//! By rank: when a row becomes ready its rank is fixed at that instant minus one second for each step of priority.
//!
//! # Crashes
//! Before the commit nobody holds the step. After it the worker holds it, whether or not it heard so: a call with
//! a request id may be repeated and brings the still open claims of the first one with the same tokens. A claim
//! nobody works on ends with its lease, or at once when the store's next owner sees that its process is gone.
//!
//! # Races
//! Two workers in one batch: the second sees the head running. Two nodes: the row lock and `(workflow, seq)`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::command::Moment;
use crate::event::Event;
use crate::head::{Claim, Token, WorkerRef};
use crate::snapshot::{Snapshot, Stop, Wants};
use crate::state::State;
use crate::text::{Name, Namespace, Step, WorkflowKey};

/// Which steps of a definition a worker knows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Steps {
    /// These, by name.
    Listed(BTreeSet<Step>),
    /// Every step but these, of which it has learned that its handler does not know them.
    AllBut(BTreeSet<Step>),
}

impl Steps {
    /// True when the worker can run `step`.
    pub fn knows(&self, step: &Step) -> bool {
        match self {
            Self::Listed(steps) => steps.contains(step),
            Self::AllBut(unknown) => !unknown.contains(step),
        }
    }
}

/// What a worker can run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Announced {
    /// Whose workflows it works for.
    pub namespace: Namespace,
    /// Steps by definition.
    pub definitions: BTreeMap<Name, Steps>,
}

impl Announced {
    /// True when the worker can run this step of this definition.
    pub fn knows(&self, name: &Name, step: &Step) -> bool {
        self.definitions.get(name).is_some_and(|steps| steps.knows(step))
    }
}

/// The terms on which a worker claims.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Who.
    pub worker: WorkerRef,
    /// What it can run.
    pub announced: Arc<Announced>,
    /// How long a claim lasts without a heartbeat, in milliseconds.
    pub lease_ms: u64,
    /// Random, new for every call; the tokens are derived from it.
    pub seed: [u8; 32],
}

/// The request id of a claim call, unique in its namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(pub Arc<str>);

/// What a claim call with a request id was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Whose.
    pub namespace: Namespace,
    /// The request id.
    pub id: CallId,
    /// When.
    pub at: i64,
    /// The claims: workflow and seq.
    pub granted: Vec<(WorkflowKey, u64)>,
}

/// A request for up to `n` steps.
#[derive(Debug, Clone)]
pub struct Request {
    /// The terms.
    pub terms: Terms,
    /// How many at most.
    pub n: usize,
    /// Makes the call repeatable.
    pub id: Option<CallId>,
}

/// A claim, as the worker that holds it sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// What to present with the commit.
    pub held: Held,
    /// The definition.
    pub name: Name,
    /// The step.
    pub step: Step,
    /// The visit.
    pub visit: u64,
    /// The attempt.
    pub attempt: u32,
    /// The delivery.
    pub delivery: u32,
    /// How long it lasts without a heartbeat, in milliseconds.
    pub lease_ms: u64,
    /// How long this attempt may take, in milliseconds.
    pub step_timeout_ms: u64,
}

/// What names an open claim: presented with every commit, failure and heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The workflow.
    pub key: WorkflowKey,
    /// Seq of its `step_started`.
    pub seq: u64,
    /// The secret.
    pub token: Token,
    /// The store's epoch at the claim.
    pub epoch: u64,
}

impl Request {
    /// Names the rows it needs.
    pub(crate) fn wants(&self, wants: &mut Wants) {
        wants.ready(&self.terms.announced, self.n + 1);
        wants.calls.extend(self.id.clone().map(|id| (self.terms.announced.namespace.clone(), id)));
    }
}

/// What a claim call is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The claims, in claim order.
    pub granted: Vec<Granted>,
    /// One more step was ready than was asked for. False for a repeated call, which looks at nothing new.
    pub more: bool,
}

/// Hands out up to `n` ready steps in claim order.
///
/// # Errors
/// [`Stop`], see [`crate::command::decide`].
pub fn decide(snapshot: &mut Snapshot, request: &Request, moment: &Moment) -> Result<Page, Stop> {
    let namespace = &request.terms.announced.namespace;
    if let Some(id) = &request.id
        && let Some(call) = snapshot.call(namespace, id)?
    {
        let granted = again(snapshot, &call.granted.clone(), moment)?;
        return Ok(Page { granted, more: false });
    }
    let mut chosen = snapshot.ready(&request.terms.announced, request.n + 1)?;
    let more = chosen.len() > request.n;
    chosen.truncate(request.n);
    let mut granted = Vec::with_capacity(chosen.len());
    for key in &chosen {
        granted.push(grant(snapshot, key, &request.terms, moment)?);
    }
    if let Some(id) = &request.id
        && !granted.is_empty()
    {
        let claims = granted.iter().map(|granted| (granted.held.key.clone(), granted.held.seq)).collect();
        let namespace = namespace.clone();
        snapshot.remember_call(Call { namespace, id: id.clone(), at: moment.now, granted: claims });
    }
    Ok(Page { granted, more })
}

/// The claims of an earlier call that are still open, with their first tokens.
fn again(snapshot: &Snapshot, claims: &[(WorkflowKey, u64)], moment: &Moment) -> Result<Vec<Granted>, Stop> {
    let mut granted = Vec::new();
    let mut wants = Wants::default();
    for (key, seq) in claims {
        match snapshot.head(key) {
            Ok(Some(head)) if head.seq == *seq => {
                // A claim of an earlier epoch is void, though nobody has given it back yet.
                granted.extend(granted_of(head).filter(|granted| granted.held.epoch == moment.epoch));
            }
            Ok(_) => {}
            Err(_) => {
                wants.heads.insert(key.clone());
            }
        }
    }
    if wants.is_empty() { Ok(granted) } else { Err(Stop::Missing(Box::new(wants))) }
}

/// Claims the step of a ready head.
///
/// # Panics
/// If the head is not loaded and ready: the caller has looked.
pub(crate) fn grant(
    snapshot: &mut Snapshot,
    key: &WorkflowKey,
    terms: &Terms,
    moment: &Moment,
) -> Result<Granted, Stop> {
    let head = snapshot.head(key)?.expect("the caller has looked");
    let visit = head.visit().expect("a ready head has a visit").clone();
    let token = Token::derive(&terms.seed, key, head.seq + 1);
    // Another node may have ended its sleep by a clock that is ahead of ours, or while this command waited: a step still
    // never starts before its time.
    let ready_since = if let State::Ready { since, .. } = head.state { since } else { head.updated_at };
    let at = moment.now.max(head.updated_at).max(ready_since);
    let lease_until = at.saturating_add_unsigned(terms.lease_ms);
    let step_deadline = at.saturating_add_unsigned(head.options.step_timeout_ms);
    let claim = Claim {
        token,
        epoch: moment.epoch,
        worker: terms.worker.clone(),
        started_at: at,
        lease_ms: terms.lease_ms,
        lease_until,
        step_deadline,
        look_at: lease_until.min(step_deadline),
        progress: None,
    };
    let event = Event::StepStarted {
        step: visit.step,
        visit: visit.visit,
        attempt: visit.attempt,
        delivery: visit.delivery,
        worker: terms.worker.label.to_string(),
        epoch: moment.epoch,
        token_digest: token.digest(),
    };
    snapshot.append(key, event, Some(claim), at)?;
    let head = snapshot.head(key)?.expect("it was there a line ago");
    Ok(granted_of(head).expect("it was claimed a line ago"))
}

/// The open claim of a running head as its worker sees it.
pub(crate) fn granted_of(head: &crate::head::Head) -> Option<Granted> {
    let (State::Running { visit, .. }, Some(claim)) = (&head.state, &head.claim) else { return None };
    Some(Granted {
        held: Held { key: head.key.clone(), seq: head.seq, token: claim.token, epoch: claim.epoch },
        name: head.name.clone(),
        step: visit.step.clone(),
        visit: visit.visit,
        attempt: visit.attempt,
        delivery: visit.delivery,
        lease_ms: claim.lease_ms,
        step_timeout_ms: head.options.step_timeout_ms,
    })
}
