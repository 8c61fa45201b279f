//! Stored: a head as the columns of a row, and back. A combination that means nothing is corruption.
//!
//! Every database keeps a head in the same columns; only how a column is read and bound is its own.

use std::sync::{Arc, OnceLock};

use steadfast_core::event::Event;
use steadfast_core::head::{Claim, Head, Placed, Token, Wake, WorkerRef};
use steadfast_core::json::Json;
use steadfast_core::options::Options;
use steadfast_core::state::{State, Status, Visit};
use steadfast_core::text::{FailureCode, Name, Step, WorkflowKey};

use crate::contract::StoreError;

/// The columns of a head, but for the numbers that name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stored<'a> {
    pub id: &'a str,
    pub name: &'a str,
    /// Nothing for the defaults.
    pub options: Option<std::borrow::Cow<'a, str>>,
    pub priority: i64,
    pub created_at: i64,
    pub updated_at: i64,
    pub seq: i64,
    pub status: &'a str,
    pub code: Option<&'a str>,
    pub step: Option<&'a str>,
    pub visit: Option<i64>,
    pub attempt: Option<i64>,
    pub delivery: Option<i64>,
    pub rank: Option<i64>,
    pub wake: Option<i64>,
    pub due: Option<i64>,
    pub token: Option<&'a [u8]>,
    pub epoch: Option<i64>,
    pub worker: Option<&'a str>,
    pub boot: Option<i64>,
    pub remote: Option<bool>,
    pub started_at: Option<i64>,
    pub lease_ms: Option<i64>,
    pub lease_until: Option<i64>,
    pub step_deadline: Option<i64>,
    pub progress: Option<&'a str>,
    pub wait: Option<std::borrow::Cow<'a, str>>,
}

/// How the two clocks are numbered.
pub(crate) fn wake_number(wake: Wake) -> i64 {
    match wake {
        Wake::Lease => 0,
        Wake::Timer => 1,
    }
}

/// A counter as a column holds it.
pub(crate) fn signed(n: u64) -> i64 {
    i64::try_from(n).expect("counters stay far below 2^63")
}

/// The options as they are stored: nothing for the defaults.
pub(crate) fn stored_options(options: &Options) -> Option<String> {
    (*options != Options::default()).then(|| serde_json::to_string(options).expect("options hold integers and strings"))
}

impl<'a> Stored<'a> {
    /// The columns of a head. The options are left out: they never change, and only a new head needs them.
    pub(crate) fn of(head: &'a Head) -> Self {
        let visit = head.visit();
        let claim = head.claim.as_ref();
        let placed = head.placed();
        Self {
            id: head.key.id.as_str(),
            name: head.name.as_str(),
            options: None,
            priority: i64::from(head.options.priority),
            created_at: head.created_at,
            updated_at: head.updated_at,
            seq: signed(head.seq),
            status: head.status().label(),
            code: match &head.state {
                State::Failed { code } => Some(code.as_str()),
                _ => None,
            },
            step: visit.map(|visit| visit.step.as_str()),
            visit: visit.map(|visit| signed(visit.visit)),
            attempt: visit.map(|visit| i64::from(visit.attempt)),
            delivery: visit.map(|visit| i64::from(visit.delivery)),
            rank: placed.rank,
            wake: placed.due.map(|(wake, _)| wake_number(wake)),
            due: placed.due.map(|(_, due)| due),
            token: claim.map(|claim| &claim.token.0[..]),
            epoch: claim.map(|claim| signed(claim.epoch)),
            worker: claim.map(|claim| &*claim.worker.label),
            boot: claim.map(|claim| signed(claim.worker.boot)),
            remote: claim.map(|claim| claim.worker.remote),
            started_at: claim.map(|claim| claim.started_at),
            lease_ms: claim.map(|claim| signed(claim.lease_ms)),
            lease_until: claim.map(|claim| claim.lease_until),
            step_deadline: claim.map(|claim| claim.step_deadline),
            progress: claim.and_then(|claim| claim.progress.as_ref()).map(Json::as_str),
            wait: match &head.state {
                State::Waiting { wait, .. } => {
                    Some(serde_json::to_string(wait).expect("strings and integers serialize").into())
                }
                _ => None,
            },
        }
    }

    /// The head that these columns mean.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] when they mean none.
    pub(crate) fn head(&self, key: &WorkflowKey) -> Result<Head, StoreError> {
        self.read(key).map_err(|problem| StoreError::Corrupt { what: "head", key: key.to_string(), problem })
    }

    fn read(&self, key: &WorkflowKey) -> Result<Head, String> {
        let options = self.options()?;
        let priority = options.priority;
        let status = Status::from_label(self.status).ok_or("its status is not known to this release")?;
        let mut claim = None;
        let state = match status {
            Status::Completed => State::Completed,
            Status::Cancelled => State::Cancelled,
            Status::Failed => State::Failed { code: FailureCode::trusted(there(self.code, "code")?) },
            live => {
                let visit = Visit {
                    step: Step::trusted(there(self.step, "step")?),
                    visit: count(self.visit, "visit")?,
                    attempt: count(self.attempt, "attempt")?,
                    delivery: count(self.delivery, "delivery")?,
                };
                match live {
                    Status::Ready => {
                        let rank = there(self.rank, "rank")?;
                        State::Ready { visit, since: rank.saturating_add(i64::from(priority) * 1_000) }
                    }
                    Status::Sleeping => State::Sleeping { visit, until: self.due(Wake::Timer)? },
                    Status::Backoff => State::Backoff { visit, until: self.due(Wake::Timer)? },
                    Status::Waiting => {
                        let wait = there(self.wait.as_deref(), "wait")?;
                        let wait = serde_json::from_str(wait)
                            .map_err(|error| format!("its wait cannot be read (column {})", error.column()))?;
                        State::Waiting { visit, wait }
                    }
                    _ => {
                        let open = self.claim()?;
                        let token_digest = open.token.digest();
                        claim = Some(open);
                        State::Running { visit, token_digest }
                    }
                }
            }
        };
        let head = Head {
            key: key.clone(),
            name: Name::trusted(self.name),
            options,
            seq: count(Some(self.seq), "seq")?,
            state,
            claim,
            created_at: self.created_at,
            updated_at: self.updated_at,
        };
        let placed = Placed {
            rank: self.rank,
            due: match (self.wake, self.due) {
                (None, None) => None,
                (Some(0), Some(due)) => Some((Wake::Lease, due)),
                (Some(1), Some(due)) => Some((Wake::Timer, due)),
                _ => return Err("its wake and due do not belong together".to_owned()),
            },
        };
        if placed != head.placed() {
            return Err("its place in a scheduling index is not that of its status".to_owned());
        }
        Ok(head)
    }

    fn claim(&self) -> Result<Claim, String> {
        let token = there(self.token, "token")?.try_into().map_err(|_| "its token is not 16 bytes long")?;
        Ok(Claim {
            token: Token(token),
            epoch: count(self.epoch, "epoch")?,
            worker: WorkerRef {
                label: there(self.worker, "worker")?.into(),
                boot: count(self.boot, "boot")?,
                remote: there(self.remote, "remote")?,
            },
            started_at: there(self.started_at, "started_at")?,
            lease_ms: count(self.lease_ms, "lease_ms")?,
            lease_until: there(self.lease_until, "lease_until")?,
            step_deadline: there(self.step_deadline, "step_deadline")?,
            look_at: self.due(Wake::Lease)?,
            progress: self.progress.map(Json::trusted),
        })
    }

    fn options(&self) -> Result<Arc<Options>, String> {
        static STANDARD: OnceLock<Arc<Options>> = OnceLock::new();
        match &self.options {
            None => Ok(STANDARD.get_or_init(|| Arc::new(Options::default())).clone()),
            Some(text) => serde_json::from_str(text)
                .map(Arc::new)
                .map_err(|error| format!("its options cannot be read (column {})", error.column())),
        }
    }

    fn due(&self, wake: Wake) -> Result<i64, String> {
        if self.wake != Some(wake_number(wake)) {
            return Err("it waits for another clock than its status says".to_owned());
        }
        there(self.due, "due")
    }
}

fn there<T>(value: Option<T>, column: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("its {column} is empty"))
}

fn count<T: TryFrom<i64>>(value: Option<i64>, column: &str) -> Result<T, String> {
    T::try_from(there(value, column)?).map_err(|_| format!("its {column} is out of range"))
}

/// The event that type, version and payload mean.
///
/// # Errors
/// [`StoreError::Event`] when they mean none.
pub(crate) fn event(kind: &str, version: i64, payload: &str, key: &WorkflowKey, seq: u64) -> Result<Event, StoreError> {
    let version = u32::try_from(version).map_err(|_| StoreError::Corrupt {
        what: "event",
        key: key.to_string(),
        problem: "its version is out of range".to_owned(),
    })?;
    Event::decode(kind, version, payload).map_err(|source| StoreError::Event { key: key.clone(), seq, source })
}
