//! Head: the current state of one workflow in one row.
//!
//! A head is a cache: it equals the fold of its log at every commit and can be rebuilt from it, all but the open
//! claim's raw token, its lease end and the handler's progress. Commands decide on heads, so that no command ever
//! reads a history.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::event::TokenDigest;
use crate::json::Json;
use crate::options::Options;
use crate::state::{State, Status, Visit};
use crate::text::{Name, WorkflowKey};

/// The random secret of one claim. Who does not hold it cannot commit, fail or extend the step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// The token of the claim that writes `seq` of `key`, from the caller's random `seed`.
    ///
    /// Derived rather than drawn, so that a command decided twice (after a rolled back batch) grants the same token.
    pub fn derive(seed: &[u8; 32], key: &WorkflowKey, seq: u64) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed);
        hash.update(seq.to_be_bytes());
        hash.update(key.namespace.as_str().as_bytes());
        hash.update([0]);
        hash.update(key.id.as_str().as_bytes());
        Self(half(hash))
    }

    /// What the log keeps of it.
    pub fn digest(&self) -> TokenDigest {
        let mut hash = Sha256::new();
        hash.update(self.0);
        TokenDigest(half(hash))
    }
}

fn half(hash: Sha256) -> [u8; 16] {
    let whole = hash.finalize();
    let mut half = [0; 16];
    half.copy_from_slice(&whole[..16]);
    half
}

impl fmt::Debug for Token {
    /// Tokens are secrets: a log line shows that there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Who holds a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerRef {
    /// Node, boot and worker in one printable label, as the log shows it.
    pub label: Arc<str>,
    /// The boot of the process that runs it; a later owner of the store knows by it that the worker is gone.
    pub boot: u64,
    /// True for workers in other processes, which outlive a restart of the store's owner.
    pub remote: bool,
}

/// The exclusive right to run one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The secret.
    pub token: Token,
    /// The store's epoch when it was granted.
    pub epoch: u64,
    /// Who holds it.
    pub worker: WorkerRef,
    /// When it was granted.
    pub started_at: i64,
    /// How long it lasts without a heartbeat, in milliseconds.
    pub lease_ms: u64,
    /// When it is lost unless a heartbeat comes first.
    pub lease_until: i64,
    /// When this attempt times out however alive its worker is.
    pub step_deadline: i64,
    /// When the sweep looks at it: never after the lease or the deadline ends, often before.
    ///
    /// It stays where it is while the same worker goes from step to step, so that a sequential workflow does not
    /// move an index entry with every commit; the sweep then finds the lease alive and moves it on, once a lease.
    pub look_at: i64,
    /// What the handler last reported.
    pub progress: Option<Json>,
}

impl Claim {
    /// The earlier of lease end and step deadline.
    pub fn ends_at(&self) -> i64 {
        self.lease_until.min(self.step_deadline)
    }
}

/// Which of the two clocks a timed row waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wake {
    /// A claim that may have been lost. It comes first, so that open claims can be paged through alone.
    Lease,
    /// A sleep, backoff or wait that ends.
    Timer,
}

/// Where a head stands in the two scheduling indexes. At most one of `due` and `rank` is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Entry of the `timed` index.
    pub due: Option<(Wake, i64)>,
    /// Entry of the `ready` index.
    pub rank: Option<i64>,
}

/// The current state of one workflow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Its namespace and id.
    pub key: WorkflowKey,
    /// The definition it runs.
    pub name: Name,
    /// What it runs by.
    pub options: Arc<Options>,
    /// Seq of the last event.
    pub seq: u64,
    /// Where it stands.
    pub state: State,
    /// The open claim; there exactly when the state is `Running`.
    pub claim: Option<Claim>,
    /// When it was admitted.
    pub created_at: i64,
    /// When the last event was written.
    pub updated_at: i64,
}

impl Head {
    /// The status word.
    ///
    /// # Panics
    /// If the head stands between two events of one commit, which no saved head does.
    pub fn status(&self) -> Status {
        self.state.status().expect("a head is looked at only between commits")
    }

    /// The visit in progress, for live workflows.
    pub fn visit(&self) -> Option<&Visit> {
        self.state.visit()
    }

    /// Where it stands in the scheduling indexes.
    pub fn placed(&self) -> Placed {
        match &self.state {
            State::Ready { since, .. } => Placed { due: None, rank: Some(rank(*since, self.options.priority)) },
            State::Sleeping { until, .. } | State::Backoff { until, .. } => {
                Placed { due: Some((Wake::Timer, *until)), rank: None }
            }
            State::Running { .. } => {
                Placed { due: self.claim.as_ref().map(|claim| (Wake::Lease, claim.look_at)), rank: None }
            }
            State::Waiting { wait, .. } => {
                Placed { due: wait.timeout.as_ref().map(|timeout| (Wake::Timer, timeout.at)), rank: None }
            }
            _ => Placed { due: None, rank: None },
        }
    }
}

/// The place in the claim order, lower first: one second earlier for each step of priority.
///
/// Fixed when a row becomes ready, so a waiting row is overtaken only by rows that become ready within
/// 200 seconds after it: that is the ageing, and the bound of any wait.
pub fn rank(since: i64, priority: i32) -> i64 {
    since.saturating_sub(i64::from(priority) * 1_000)
}
