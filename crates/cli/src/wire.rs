//! Wire: what a server answers, as far as people are shown it.
//!
//! What users stored (inputs, variables, results, progress) stays the text it was: a number may be larger or more exact
//! than any type here.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

/// A value that a user stored.
pub type Stored = Option<Box<RawValue>>;

/// The text of a stored value.
pub fn text(stored: &Stored) -> &str {
    stored.as_ref().map_or("null", |value| value.get())
}

/// The answer to a start.
#[derive(Debug, Deserialize)]
pub struct Accepted {
    pub replay: bool,
    pub warning: Option<String>,
}

/// Where a workflow stands.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Workflow {
    pub id: String,
    pub name: String,
    pub status: String,
    pub step: Option<String>,
    pub attempt: Option<u32>,
    pub seq: u64,
    pub due: Option<i64>,
    pub waits_for: Vec<String>,
    pub created_at: Option<i64>,
    pub updated_at: Option<i64>,
    pub blocked: Option<String>,
    pub claim: Option<Claim>,
    pub result: Stored,
    pub error: Option<Failure>,
}

/// Why it does not run, or who runs it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Reason {
    pub why: String,
    pub step: String,
    pub signals: Vec<String>,
    pub on_timeout: Option<String>,
    pub attempt: u32,
    pub worker: String,
    pub since: Option<i64>,
    pub until: Option<i64>,
    pub status: String,
    pub code: Option<String>,
}

/// Who runs its step.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Claim {
    pub worker: String,
    pub started_at: Option<i64>,
    pub progress: Stored,
}

/// Why it has no result.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Failure {
    pub code: String,
    pub reason: String,
}

/// How it ended, or that it has not.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Standing {
    pub status: String,
    pub result: Stored,
    pub error: Option<Failure>,
}

/// What a cancel did.
#[derive(Debug, Deserialize)]
pub struct Cancelled {
    pub outcome: String,
    #[serde(default)]
    pub status: String,
}

/// An event with its payload as it is stored.
#[derive(Debug, Deserialize)]
pub struct Event {
    pub seq: u64,
    pub at: i64,
    pub r#type: String,
    pub payload: Box<RawValue>,
}

/// What payloads hold, all kinds of them together.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Payload {
    pub step: String,
    pub attempt: u32,
    pub delivery: u32,
    pub counts: bool,
    pub code: String,
    pub reason: String,
    pub writes: BTreeMap<String, Stored>,
    /// An object after a commit, a step's name after a wait.
    pub next: Stored,
    pub wait_for: Option<Wait>,
    pub name: String,
    pub signal_id: String,
    pub payload: Stored,
}

/// What a commit waits for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Wait {
    pub signals: Vec<String>,
    pub then: String,
    pub timeout_at: Option<i64>,
}

/// The step that a commit leads to.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Next {
    pub step: String,
    pub run_at: Option<i64>,
}
