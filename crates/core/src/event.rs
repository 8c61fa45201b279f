//! Event: what a workflow's log holds.
//!
//! The log is append-only. An event is stored as its type, the version of its payload's form, and the payload
//! as JSON text that stays readable with any database shell; user values stand in it byte for byte.
//! A form that changes gets a new version and the old one keeps its reader for ever, because logs outlive code.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json::Json;
use crate::options::Options;
use crate::text::{FailureCode, Key, Name, SignalId, SignalName, Step};

/// The version of the payload forms that this code writes.
pub const VERSION: u32 = 1;

/// One change of the scratchpad: a new value, or `None` to unset the key. `null` is a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The variable.
    pub key: Key,
    /// Its new value.
    pub value: Option<Json>,
}

/// The scratchpad changes of one commit, in the order they were made, each key at most once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writes(Vec<Write>);

impl Writes {
    /// Records a change; a later change of the same key replaces the earlier one.
    pub fn put(&mut self, key: Key, value: Option<Json>) {
        match self.0.iter_mut().find(|write| write.key == key) {
            Some(write) => write.value = value,
            None => self.0.push(Write { key, value }),
        }
    }

    /// What was recorded for `key`: nothing, an unset, or a value.
    pub fn get(&self, key: &str) -> Option<Option<&Json>> {
        self.0.iter().find(|write| write.key.as_str() == key).map(|write| write.value.as_ref())
    }

    /// The changes in order.
    pub fn iter(&self) -> impl Iterator<Item = &Write> {
        self.0.iter()
    }

    /// True when nothing changes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many keys change.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when both change the same keys to the same values, in whatever order. A log keeps what was set apart from
    /// what was unset, so their order among each other is lost there.
    pub fn same_as(&self, other: &Self) -> bool {
        fn sorted(writes: &Writes) -> BTreeMap<&Key, Option<&Json>> {
            writes.iter().map(|write| (&write.key, write.value.as_ref())).collect()
        }
        self.len() == other.len() && sorted(self) == sorted(other)
    }

    /// Bytes of keys and values together.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|write| write.key.as_str().len() + write.value.as_ref().map_or(0, Json::len)).sum()
    }
}

impl FromIterator<(Key, Option<Json>)> for Writes {
    fn from_iter<I: IntoIterator<Item = (Key, Option<Json>)>>(pairs: I) -> Self {
        let mut writes = Self::default();
        for (key, value) in pairs {
            writes.put(key, value);
        }
        writes
    }
}

/// Where a completed step leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// To a step.
    Step {
        /// The step to run.
        step: Step,
        /// Not before this instant (milliseconds since the epoch); at once when absent.
        run_at: Option<i64>,
    },
    /// To a step that a signal brings.
    Wait(Wait),
}

/// What a workflow waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The signals, of which the first to be accepted counts.
    pub signals: Vec<SignalName>,
    /// The step that runs with it.
    pub then: Step,
    /// What ends the wait without one.
    #[serde(flatten)]
    pub timeout: Option<Timeout>,
}

/// How long a wait may take, and what follows then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeout {
    /// Until this instant (milliseconds since the epoch).
    #[serde(rename = "timeout_at")]
    pub at: i64,
    /// The step that runs when no signal came by then.
    #[serde(rename = "on_timeout")]
    pub then: Step,
}

impl Next {
    /// A step to run at once.
    pub fn now(step: Step) -> Self {
        Self::Step { step, run_at: None }
    }
}

/// The variable that holds the last signal of that name which a wait took.
pub fn signal_key(name: &SignalName) -> Key {
    Key::trusted(format!("{SIGNAL_PREFIX}{name}"))
}

/// What the names of variables begin with that hold signals; nobody else sets such a variable.
pub const SIGNAL_PREFIX: &str = "signal:";

/// The variable that says which signal was taken last.
pub fn last_signal_key() -> Key {
    Key::trusted(SIGNAL_PREFIX)
}

/// Which attempt ended the workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The step that failed.
    pub step: Step,
    /// Its attempt.
    pub attempt: u32,
}

/// An event of a workflow's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The workflow was admitted. Always the first event, never any other.
    WorkflowCreated {
        /// The definition it runs.
        name: Name,
        /// `input` and further initial variables.
        writes: Writes,
        /// What it runs by.
        options: Options,
    },
    /// A worker holds the step.
    StepStarted {
        /// The step.
        step: Step,
        /// How many steps this workflow has entered, this one included.
        visit: u64,
        /// The try that the retry policy counts.
        attempt: u32,
        /// How often this visit was handed out.
        delivery: u32,
        /// Who holds it: node, boot and worker name.
        worker: String,
        /// The store's epoch at the claim.
        epoch: u64,
        /// Digest of the claim's token; the token itself stands on the head while the claim is open.
        token_digest: TokenDigest,
    },
    /// The step's commit: what it decided. Without `next` the run is complete and `workflow_completed` follows.
    StepCompleted {
        /// The step.
        step: Step,
        /// Its attempt.
        attempt: u32,
        /// Scratchpad changes.
        writes: Writes,
        /// What runs next.
        next: Option<Next>,
    },
    /// An attempt ended without a commit. Nothing it set is kept.
    StepFailed {
        /// The step.
        step: Step,
        /// The visit.
        visit: u64,
        /// The attempt.
        attempt: u32,
        /// The delivery.
        delivery: u32,
        /// `panic`, `step_timeout`, `lease_lost`, `given_back`, or the handler's own code.
        code: FailureCode,
        /// For people; cut at the limit.
        reason: String,
        /// Whether the handler allows another try.
        retryable: bool,
        /// When the next attempt may start; absent when there is none or it may start at once.
        retry_at: Option<i64>,
        /// Whether it counts as an attempt: lost leases and give-backs do not.
        counts: bool,
    },
    /// A wait took a signal.
    SignalReceived {
        /// The signal.
        name: SignalName,
        /// Which of that name.
        signal_id: SignalId,
        /// What it carried.
        payload: Json,
        /// The step that runs with it.
        next: Step,
        /// The visit in which it runs.
        visit: u64,
    },
    /// A wait ended without a signal.
    WaitTimedOut {
        /// What had been waited for.
        signals: Vec<SignalName>,
        /// The step that runs instead.
        next: Step,
    },
    /// The end of a workflow that returned `done`.
    WorkflowCompleted {
        /// What it returned.
        result: Json,
    },
    /// The end of a workflow that cannot go on.
    WorkflowFailed {
        /// The failing step's code, or `attempts_exhausted`'s cause code, `deliveries_exhausted`, ..
        code: FailureCode,
        /// For people.
        reason: String,
        /// The attempt that ended it.
        cause: Option<Cause>,
    },
    /// The end of a workflow that was cancelled from outside.
    WorkflowCancelled {
        /// For people.
        reason: String,
        /// Who asked.
        by: String,
    },
}

/// The first 16 bytes of a claim token's SHA-256, written in hex.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenDigest(pub [u8; 16]);

impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl TokenDigest {
    fn hex<'a>(&self, text: &'a mut [u8; 32]) -> &'a str {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        for (i, byte) in self.0.iter().enumerate() {
            text[2 * i] = HEX[usize::from(byte >> 4)];
            text[2 * i + 1] = HEX[usize::from(byte & 15)];
        }
        std::str::from_utf8(text).expect("hex digits are ASCII")
    }
}

impl Serialize for TokenDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.hex(&mut [0; 32]))
    }
}

impl<'de> Deserialize<'de> for TokenDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut digest = [0u8; 16];
        if text.len() != 32 || !text.is_ascii() {
            return Err(serde::de::Error::custom("a token digest has 32 hex digits"));
        }
        for (i, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(serde::de::Error::custom)?;
        }
        Ok(Self(digest))
    }
}

/// A stored event that no version of this code has written.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The type and version are not known here.
    #[error("decode event: type {kind:?} version {version} is not known to this release")]
    Unknown {
        /// The stored type.
        kind: String,
        /// The stored version.
        version: u32,
    },
    /// The payload does not have the form of its type.
    #[error("decode event {kind}: its payload does not have that form (line {line}, column {column})")]
    Form {
        /// The stored type.
        kind: String,
        /// Where, in the payload.
        line: usize,
        /// Where, in the line.
        column: usize,
    },
}

impl Event {
    /// Every event type, in the order of the specification.
    pub const KINDS: [&'static str; 9] = [
        "workflow_created",
        "step_started",
        "step_completed",
        "step_failed",
        "signal_received",
        "wait_timed_out",
        "workflow_completed",
        "workflow_failed",
        "workflow_cancelled",
    ];

    /// The stable word of this type.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::WorkflowCreated { .. } => "workflow_created",
            Self::StepStarted { .. } => "step_started",
            Self::StepCompleted { .. } => "step_completed",
            Self::StepFailed { .. } => "step_failed",
            Self::SignalReceived { .. } => "signal_received",
            Self::WaitTimedOut { .. } => "wait_timed_out",
            Self::WorkflowCompleted { .. } => "workflow_completed",
            Self::WorkflowFailed { .. } => "workflow_failed",
            Self::WorkflowCancelled { .. } => "workflow_cancelled",
        }
    }

    /// True for the three ends, which nothing follows.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::WorkflowCompleted { .. } | Self::WorkflowFailed { .. } | Self::WorkflowCancelled { .. })
    }

    /// The scratchpad changes this event carries.
    pub fn writes(&self) -> Option<Cow<'_, Writes>> {
        match self {
            Self::WorkflowCreated { writes, .. } | Self::StepCompleted { writes, .. } => Some(Cow::Borrowed(writes)),
            Self::SignalReceived { name, signal_id, payload, visit, .. } => {
                let last = LastSignal { name: name.clone(), signal_id: signal_id.clone(), visit: *visit };
                let last = serde_json::to_string(&last);
                let last = Json::trusted(last.expect("strings serialize"));
                let both = [(signal_key(name), Some(payload.clone())), (last_signal_key(), Some(last))];
                Some(Cow::Owned(both.into_iter().collect()))
            }
            _ => None,
        }
    }

    /// The payload as it is stored.
    ///
    /// The two events that every step writes are put together by hand, which takes a third of the time; a test holds
    /// them against the general way.
    pub fn payload(&self) -> String {
        let mut text = String::with_capacity(192);
        match self {
            Self::StepStarted { step, visit, attempt, delivery, worker, epoch, token_digest } => {
                text.push_str("{\"step\":");
                push_string(&mut text, step.as_str());
                // Writing to a string cannot fail.
                let _ = write!(text, ",\"visit\":{visit},\"attempt\":{attempt},\"delivery\":{delivery},\"worker\":");
                push_string(&mut text, worker);
                let _ = write!(text, ",\"epoch\":{epoch},\"token_digest\":\"");
                text.push_str(token_digest.hex(&mut [0; 32]));
                text.push_str("\"}");
                text
            }
            Self::StepCompleted { step, attempt, writes, next } => {
                text.push_str("{\"step\":");
                push_string(&mut text, step.as_str());
                let _ = write!(text, ",\"attempt\":{attempt}");
                push_writes(&mut text, writes);
                match next {
                    None => {}
                    Some(Next::Step { step, run_at }) => {
                        text.push_str(",\"next\":{\"step\":");
                        push_string(&mut text, step.as_str());
                        if let Some(run_at) = run_at {
                            let _ = write!(text, ",\"run_at\":{run_at}");
                        }
                        text.push('}');
                    }
                    Some(Next::Wait(wait)) => {
                        text.push_str(",\"wait_for\":");
                        text.push_str(&serde_json::to_string(wait).expect("strings and integers serialize"));
                    }
                }
                text.push('}');
                text
            }
            _ => self.general_payload(),
        }
    }

    /// The payload by way of serde.
    fn general_payload(&self) -> String {
        let text = match self {
            Self::WorkflowCreated { name, writes, options } => {
                serde_json::to_string(&CreatedForm { name, writes: Values(writes), unset: unset(writes), options })
            }
            Self::StepStarted { step, visit, attempt, delivery, worker, epoch, token_digest } => {
                serde_json::to_string(&StartedForm {
                    step,
                    visit: *visit,
                    attempt: *attempt,
                    delivery: *delivery,
                    worker,
                    epoch: *epoch,
                    token_digest: *token_digest,
                })
            }
            Self::StepCompleted { step, attempt, writes, next } => serde_json::to_string(&CompletedForm {
                step,
                attempt: *attempt,
                writes: Values(writes),
                unset: unset(writes),
                next: match next {
                    Some(Next::Step { step, run_at }) => Some(NextForm { step: step.clone(), run_at: *run_at }),
                    _ => None,
                },
                wait_for: match next {
                    Some(Next::Wait(wait)) => Some(wait.clone()),
                    _ => None,
                },
            }),
            Self::StepFailed { step, visit, attempt, delivery, code, reason, retryable, retry_at, counts } => {
                serde_json::to_string(&FailedForm {
                    step: step.clone(),
                    visit: *visit,
                    attempt: *attempt,
                    delivery: *delivery,
                    code: code.clone(),
                    reason: reason.clone(),
                    retryable: *retryable,
                    retry_at: *retry_at,
                    counts: *counts,
                })
            }
            Self::SignalReceived { name, signal_id, payload, next, visit } => {
                serde_json::to_string(&ReceivedForm { name, signal_id, payload, next, visit: *visit })
            }
            Self::WaitTimedOut { signals, next } => {
                serde_json::to_string(&TimedOutForm { signals: signals.clone(), next: next.clone() })
            }
            Self::WorkflowCompleted { result } => serde_json::to_string(&EndForm { result }),
            Self::WorkflowFailed { code, reason, cause } => {
                serde_json::to_string(&FailForm { code: code.clone(), reason: reason.clone(), cause: cause.clone() })
            }
            Self::WorkflowCancelled { reason, by } => {
                serde_json::to_string(&CancelForm { reason: reason.clone(), by: by.clone() })
            }
        };
        text.expect("events hold strings, integers and checked JSON, all of which serialize")
    }

    /// Reads a stored event.
    ///
    /// # Errors
    /// [`DecodeError`] for a type or version unknown to this release, or a payload of another form.
    pub fn decode(kind: &str, version: u32, payload: &str) -> Result<Self, DecodeError> {
        let form = |error: serde_json::Error| DecodeError::Form {
            kind: kind.to_owned(),
            line: error.line(),
            column: error.column(),
        };
        if version != VERSION {
            return Err(DecodeError::Unknown { kind: kind.to_owned(), version });
        }
        Ok(match kind {
            "workflow_created" => {
                let read: CreatedRead = serde_json::from_str(payload).map_err(form)?;
                Self::WorkflowCreated { name: read.name, writes: read.writes.with(read.unset), options: read.options }
            }
            "step_started" => {
                let read: StartedRead = serde_json::from_str(payload).map_err(form)?;
                Self::StepStarted {
                    step: read.step,
                    visit: read.visit,
                    attempt: read.attempt,
                    delivery: read.delivery,
                    worker: read.worker,
                    epoch: read.epoch,
                    token_digest: read.token_digest,
                }
            }
            "step_completed" => {
                let read: CompletedRead = serde_json::from_str(payload).map_err(form)?;
                Self::StepCompleted {
                    step: read.step,
                    attempt: read.attempt,
                    writes: read.writes.with(read.unset),
                    next: match (read.next, read.wait_for) {
                        (Some(NextForm { step, run_at }), _) => Some(Next::Step { step, run_at }),
                        (None, wait) => wait.map(Next::Wait),
                    },
                }
            }
            "step_failed" => {
                let read: FailedForm = serde_json::from_str(payload).map_err(form)?;
                Self::StepFailed {
                    step: read.step,
                    visit: read.visit,
                    attempt: read.attempt,
                    delivery: read.delivery,
                    code: read.code,
                    reason: read.reason,
                    retryable: read.retryable,
                    retry_at: read.retry_at,
                    counts: read.counts,
                }
            }
            "signal_received" => {
                let read: ReceivedRead = serde_json::from_str(payload).map_err(form)?;
                Self::SignalReceived {
                    name: read.name,
                    signal_id: read.signal_id,
                    payload: read.payload,
                    next: read.next,
                    visit: read.visit,
                }
            }
            "wait_timed_out" => {
                let read: TimedOutForm = serde_json::from_str(payload).map_err(form)?;
                Self::WaitTimedOut { signals: read.signals, next: read.next }
            }
            "workflow_completed" => {
                let read: EndRead = serde_json::from_str(payload).map_err(form)?;
                Self::WorkflowCompleted { result: read.result }
            }
            "workflow_failed" => {
                let read: FailForm = serde_json::from_str(payload).map_err(form)?;
                Self::WorkflowFailed { code: read.code, reason: read.reason, cause: read.cause }
            }
            "workflow_cancelled" => {
                let read: CancelForm = serde_json::from_str(payload).map_err(form)?;
                Self::WorkflowCancelled { reason: read.reason, by: read.by }
            }
            _ => return Err(DecodeError::Unknown { kind: kind.to_owned(), version }),
        })
    }
}

/// Appends `text` as a JSON string. Names are printable, so most need no escape.
fn push_string(out: &mut String, text: &str) {
    if text.bytes().all(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        out.push('"');
        out.push_str(text);
        out.push('"');
    } else {
        out.push_str(&serde_json::to_string(text).expect("a string serializes"));
    }
}

/// Appends `,"writes":{..}` and `,"unset":[..]`, each only when there is something in it.
fn push_writes(out: &mut String, writes: &Writes) {
    let mut lead = ",\"writes\":{";
    for write in writes.iter() {
        if let Some(value) = &write.value {
            out.push_str(lead);
            push_string(out, write.key.as_str());
            out.push(':');
            out.push_str(value.as_str());
            lead = ",";
        }
    }
    if lead == "," {
        out.push('}');
    }
    let mut lead = ",\"unset\":[";
    for write in writes.iter().filter(|write| write.value.is_none()) {
        out.push_str(lead);
        push_string(out, write.key.as_str());
        lead = ",";
    }
    if lead == "," {
        out.push(']');
    }
}

/// The set values of a [`Writes`] as a JSON object.
struct Values<'a>(&'a Writes);

impl Values<'_> {
    fn is_empty(&self) -> bool {
        self.0.iter().all(|write| write.value.is_none())
    }
}

impl Serialize for Values<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for write in self.0.iter() {
            if let Some(value) = &write.value {
                map.serialize_entry(&write.key, value)?;
            }
        }
        map.end()
    }
}

fn unset(writes: &Writes) -> Vec<&Key> {
    writes.iter().filter(|write| write.value.is_none()).map(|write| &write.key).collect()
}

/// The read side of [`Values`]: a JSON object whose members stay in order and whose values stay text.
#[derive(Default)]
struct ValuesRead(Vec<(Key, Json)>);

impl ValuesRead {
    fn with(self, unset: Vec<Key>) -> Writes {
        let set = self.0.into_iter().map(|(key, value)| (key, Some(value)));
        set.chain(unset.into_iter().map(|key| (key, None))).collect()
    }
}

impl<'de> Deserialize<'de> for ValuesRead {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = ValuesRead;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of variables")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(key) = map.next_key::<Key>()? {
                    let value: Box<serde_json::value::RawValue> = map.next_value()?;
                    members.push((key, Json::trusted(String::from(Box::<str>::from(value)))));
                }
                Ok(ValuesRead(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

#[derive(Serialize)]
struct CreatedForm<'a> {
    name: &'a Name,
    writes: Values<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unset: Vec<&'a Key>,
    options: &'a Options,
}

#[derive(Deserialize)]
struct CreatedRead {
    name: Name,
    writes: ValuesRead,
    #[serde(default)]
    unset: Vec<Key>,
    options: Options,
}

#[derive(Serialize)]
struct StartedForm<'a> {
    step: &'a Step,
    visit: u64,
    attempt: u32,
    delivery: u32,
    worker: &'a str,
    epoch: u64,
    token_digest: TokenDigest,
}

#[derive(Deserialize)]
struct StartedRead {
    step: Step,
    visit: u64,
    attempt: u32,
    delivery: u32,
    worker: String,
    epoch: u64,
    token_digest: TokenDigest,
}

#[derive(Serialize)]
struct CompletedForm<'a> {
    step: &'a Step,
    attempt: u32,
    #[serde(skip_serializing_if = "Values::is_empty")]
    writes: Values<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unset: Vec<&'a Key>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<NextForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wait_for: Option<Wait>,
}

#[derive(Serialize, Deserialize)]
struct NextForm {
    step: Step,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    run_at: Option<i64>,
}

#[derive(Deserialize)]
struct CompletedRead {
    step: Step,
    attempt: u32,
    #[serde(default)]
    writes: ValuesRead,
    #[serde(default)]
    unset: Vec<Key>,
    #[serde(default)]
    next: Option<NextForm>,
    #[serde(default)]
    wait_for: Option<Wait>,
}

#[derive(Serialize, Deserialize)]
struct FailedForm {
    step: Step,
    visit: u64,
    attempt: u32,
    delivery: u32,
    code: FailureCode,
    reason: String,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    retry_at: Option<i64>,
    counts: bool,
}

#[derive(Serialize)]
struct ReceivedForm<'a> {
    name: &'a SignalName,
    signal_id: &'a SignalId,
    payload: &'a Json,
    next: &'a Step,
    visit: u64,
}

#[derive(Deserialize)]
struct ReceivedRead {
    name: SignalName,
    signal_id: SignalId,
    payload: Json,
    next: Step,
    visit: u64,
}

#[derive(Serialize, Deserialize)]
struct TimedOutForm {
    signals: Vec<SignalName>,
    next: Step,
}

/// Which signal a wait took last, as the scratchpad holds it under [`last_signal_key`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSignal {
    /// Its name.
    pub name: SignalName,
    /// Which of that name.
    pub signal_id: SignalId,
    /// The visit that it was taken for.
    pub visit: u64,
}

#[derive(Serialize)]
struct EndForm<'a> {
    result: &'a Json,
}

#[derive(Deserialize)]
struct EndRead {
    result: Json,
}

#[derive(Serialize, Deserialize)]
struct FailForm {
    code: FailureCode,
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    cause: Option<Cause>,
}

#[derive(Serialize, Deserialize)]
struct CancelForm {
    reason: String,
    by: String,
}

#[cfg(test)]
pub(crate) mod samples {
    //! One event of each type and of each outcome that the rules tell apart.

    use super::*;

    pub(crate) fn all() -> Vec<(&'static str, Event)> {
        let step = Step::start();
        let failed = |retryable, retry_at, counts| Event::StepFailed {
            step: Step::start(),
            visit: 1,
            attempt: 1,
            delivery: 1,
            code: FailureCode::trusted("boom"),
            reason: "it broke".into(),
            retryable,
            retry_at,
            counts,
        };
        let completed = |next| Event::StepCompleted {
            step: Step::start(),
            attempt: 1,
            writes: [
                (Key::trusted("user"), Some(Json::trusted(r#"{"n":9007199254740993}"#))),
                (Key::trusted("old"), None),
            ]
            .into_iter()
            .collect(),
            next,
        };
        let next = |run_at| Some(Next::Step { step: Step::trusted("charge"), run_at });
        let signals = || vec![SignalName::trusted("paid"), SignalName::trusted("void")];
        let wait = |timeout| Some(Next::Wait(Wait { signals: signals(), then: Step::trusted("charge"), timeout }));
        vec![
            (
                "created",
                Event::WorkflowCreated {
                    name: Name::trusted("onboard"),
                    writes: [(Key::trusted("input"), Some(Json::trusted("1.10")))].into_iter().collect(),
                    options: Options::default(),
                },
            ),
            (
                "started",
                Event::StepStarted {
                    step,
                    visit: 1,
                    attempt: 1,
                    delivery: 1,
                    worker: "n1.b1".into(),
                    epoch: 1,
                    token_digest: TokenDigest([0xab; 16]),
                },
            ),
            ("completed_next", completed(next(None))),
            ("completed_sleep", completed(next(Some(5_000)))),
            ("completed_wait", completed(wait(Some(Timeout { at: 7_000, then: Step::trusted("remind") })))),
            ("completed_wait_long", completed(wait(None))),
            ("completed_end", completed(None)),
            ("failed_retry", failed(true, Some(6_000), true)),
            ("failed_given_back", failed(true, None, false)),
            ("failed_final", failed(false, None, true)),
            (
                "signal_received",
                Event::SignalReceived {
                    name: SignalName::trusted("paid"),
                    signal_id: SignalId::trusted("s-1"),
                    payload: Json::trusted("{\"cents\":1.0}"),
                    next: Step::trusted("charge"),
                    visit: 2,
                },
            ),
            ("wait_timed_out", Event::WaitTimedOut { signals: signals(), next: Step::trusted("remind") }),
            ("wf_completed", Event::WorkflowCompleted { result: Json::trusted("[1.0]") }),
            (
                "wf_failed",
                Event::WorkflowFailed {
                    code: FailureCode::trusted("boom"),
                    reason: "it broke".into(),
                    cause: Some(Cause { step: Step::start(), attempt: 1 }),
                },
            ),
            ("wf_cancelled", Event::WorkflowCancelled { reason: "no longer needed".into(), by: "ops".into() }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        for (label, event) in samples::all() {
            let payload = event.payload();
            let read = Event::decode(event.kind(), VERSION, &payload).unwrap();
            assert_eq!(read, event, "{label}: {payload}");
            assert_eq!(read.payload(), payload, "{label}");
        }
    }

    #[test]
    fn the_fast_way_writes_what_the_general_way_writes() {
        let key = |text: &str| Key::trusted(text);
        let value = |text: &str| Some(Json::trusted(text));
        let mut events: Vec<Event> = samples::all().into_iter().map(|(_, event)| event).collect();
        for writes in [
            vec![],
            vec![(key("a"), None)],
            vec![(key("a\"b\\c"), value("1.0")), (key("é"), value("null"))],
            vec![(key("x"), None), (key("y"), value("\"\\u0000\"")), (key("z"), None)],
        ] {
            let step = Step::trusted("quo\"te");
            let next = Some(Next::Step { step: Step::trusted("back\\slash"), run_at: Some(-1) });
            events.push(Event::StepCompleted { step, attempt: u32::MAX, writes: writes.into_iter().collect(), next });
        }
        for event in events {
            assert_eq!(event.payload(), event.general_payload());
        }
    }

    #[test]
    fn payloads_have_the_documented_form() {
        let text: Vec<String> = samples::all()
            .iter()
            .map(|(label, event)| format!("{label}: {} {}", event.kind(), event.payload()))
            .collect();
        insta::assert_snapshot!(text.join("\n"));
    }

    #[test]
    fn unknown_events_are_named_not_guessed() {
        let error = Event::decode("step_started", 2, "{}").unwrap_err();
        assert!(matches!(error, DecodeError::Unknown { version: 2, .. }), "{error}");
        let error = Event::decode("step_paused", 1, "{}").unwrap_err();
        assert!(matches!(error, DecodeError::Unknown { .. }), "{error}");
        let error = Event::decode("step_started", 1, r#"{"step":"secret"}"#).unwrap_err();
        assert!(matches!(error, DecodeError::Form { .. }));
        assert!(!error.to_string().contains("secret"), "an error text holds no payload: {error}");
    }

    #[test]
    fn a_later_write_of_a_key_replaces_the_earlier_one() {
        let mut writes = Writes::default();
        writes.put(Key::trusted("a"), Some(Json::trusted("1")));
        writes.put(Key::trusted("b"), Some(Json::trusted("2")));
        writes.put(Key::trusted("a"), None);
        assert_eq!(writes.len(), 2);
        assert_eq!(writes.get("a"), Some(None));
        assert_eq!(writes.get("b"), Some(Some(&Json::trusted("2"))));
        assert_eq!(writes.get("toString"), None);
    }
}
