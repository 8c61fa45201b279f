//! Context: what a handler sees of its workflow.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use steadfast_core::claim::Granted;
use steadfast_core::event::{LastSignal, Writes, last_signal_key, signal_key};
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::text::{Key, SignalName};
use steadfast_store::Reader;
use tokio::sync::{Semaphore, watch};

use crate::definition::Failure;
use crate::engine::look_beside;
use crate::error::Error;

/// Between two looks at a store that is away.
const OUTAGE_PAUSE: Duration = Duration::from_millis(100);

/// Values this worker has read or written while it holds the workflow: nobody else can change them meanwhile.
pub(crate) type Seen = BTreeMap<Key, Option<Json>>;

/// One attempt of one step, as its handler sees it. Cheap to clone.
#[derive(Clone)]
pub struct Ctx {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) granted: Granted,
    reader: Arc<dyn Reader>,
    looks: Arc<Semaphore>,
    limits: Arc<Limits>,
    writes: Mutex<Writes>,
    seen: Mutex<Seen>,
    pub(crate) progress: Mutex<Option<Json>>,
    lost: watch::Receiver<bool>,
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx")
            .field("workflow_id", &self.inner.granted.held.key.id)
            .field("step", &self.inner.granted.step)
            .field("attempt", &self.inner.granted.attempt)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A handler that panics while it holds one of these ends its attempt; what it left is then dropped.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Ctx {
    pub(crate) fn new(
        granted: Granted,
        (reader, looks): (Arc<dyn Reader>, Arc<Semaphore>),
        limits: Arc<Limits>,
        seen: Seen,
        lost: watch::Receiver<bool>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                granted,
                reader,
                looks,
                limits,
                writes: Mutex::default(),
                seen: Mutex::new(seen),
                progress: Mutex::default(),
                lost,
            }),
        }
    }

    /// The workflow's id.
    pub fn workflow_id(&self) -> &str {
        self.inner.granted.held.key.id.as_str()
    }

    /// The name of its definition.
    pub fn name(&self) -> &str {
        self.inner.granted.name.as_str()
    }

    /// The step to run.
    pub fn step(&self) -> &str {
        self.inner.granted.step.as_str()
    }

    /// Which try of this step it is; 1 is the first.
    pub fn attempt(&self) -> u32 {
        self.inner.granted.attempt
    }

    /// How often this entry into the step was handed out, lost leases and give-backs included; 1 is the first.
    pub fn delivery(&self) -> u32 {
        self.inner.granted.delivery
    }

    /// The same for every attempt of this entry into the step, and for no other: an idempotency key for calls to
    /// the outside.
    pub fn effect_token(&self) -> String {
        let Granted { held, visit, .. } = &self.inner.granted;
        let mut hash = Sha256::new();
        hash.update(b"steadfast effect\0");
        hash.update(held.key.namespace.as_str().as_bytes());
        hash.update([0]);
        hash.update(held.key.id.as_str().as_bytes());
        hash.update([0]);
        hash.update(visit.to_be_bytes());
        hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The workflow's input.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be read or does not have this form; the latter is terminal.
    pub async fn input<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let json = self.json("input").await?.unwrap_or_else(Json::null);
        typed("input", &json)
    }

    /// A variable of the scratchpad: what this attempt has set, else what is committed. `None` when there is none.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be read or does not have this form; the latter is terminal.
    pub async fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Failure> {
        match self.json(key).await? {
            Some(json) => typed(key, &json).map(Some),
            None => Ok(None),
        }
    }

    /// A variable as JSON text, byte for byte as it was set.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be read.
    pub async fn json(&self, key: &str) -> Result<Option<Json>, Failure> {
        if let Some(written) = lock(&self.inner.writes).get(key) {
            return Ok(written.cloned());
        }
        if let Some(seen) = lock(&self.inner.seen).get(key) {
            return Ok(seen.clone());
        }
        let name = Key::parse_as("key", key, &self.inner.limits).map_err(|invalid| Failure::of_invalid(&invalid))?;
        let (workflow, wanted) = (self.inner.granted.held.key.clone(), name.clone());
        let found = loop {
            let (workflow, wanted) = (workflow.clone(), wanted.clone());
            let look = move |reader: &dyn Reader| reader.variable(&workflow, &wanted);
            match look_beside(&self.inner.looks, &self.inner.reader, look).await {
                Ok(found) => break found,
                // The store is away, which is no fault of this attempt: it waits, as its commit would. The time of the
                // step bounds that, and the loss of the claim.
                Err(error) if error.is_outage() => tokio::time::sleep(OUTAGE_PAUSE).await,
                Err(error) => return Err(Failure::retryable(error.code(), error.to_string())),
            }
        };
        // Written after our claim: the claim is gone, and what is there now is not ours to see.
        if found.as_ref().is_some_and(|variable| variable.seq > self.inner.granted.held.seq) {
            return Err(Failure::retryable("lost", "this attempt has lost its claim"));
        }
        let value = found.map(|variable| variable.value);
        lock(&self.inner.seen).insert(name, value.clone());
        Ok(value)
    }

    /// The signal that this step was waited for with; `None` in a step that did not wait, or whose wait timed out.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be read.
    pub async fn signal(&self) -> Result<Option<Signalled>, Failure> {
        let Some(last) = self.json(last_signal_key().as_str()).await? else { return Ok(None) };
        let last: LastSignal = typed("the last signal", &last)?;
        if last.visit != self.inner.granted.visit {
            return Ok(None);
        }
        let payload = self.json(signal_key(&last.name).as_str()).await?.unwrap_or_else(Json::null);
        Ok(Some(Signalled { name: last.name.to_string(), id: last.signal_id.to_string(), payload }))
    }

    /// Sets a variable. It is saved when the step commits, and vanishes when the attempt fails.
    ///
    /// # Errors
    /// [`Failure`], terminal, when the key or value is over a limit or cannot be JSON.
    pub fn set<T: Serialize + ?Sized>(&self, key: &str, value: &T) -> Result<(), Failure> {
        let json = Json::from_serialize(value).map_err(|error| Failure::of_json(key, &error))?;
        self.set_json(key, json)
    }

    /// Sets a variable to a JSON text that was checked.
    ///
    /// # Errors
    /// [`Failure`], terminal, when the key or value is over a limit.
    pub fn set_json(&self, key: &str, value: Json) -> Result<(), Failure> {
        self.put(key, Some(value))
    }

    /// Removes a variable when the step commits.
    ///
    /// # Errors
    /// [`Failure`], terminal, when the key is not one.
    pub fn unset(&self, key: &str) -> Result<(), Failure> {
        self.put(key, None)
    }

    fn put(&self, key: &str, value: Option<Json>) -> Result<(), Failure> {
        let key = Key::parse_as("key", key, &self.inner.limits).map_err(|invalid| Failure::of_invalid(&invalid))?;
        lock(&self.inner.writes).put(key, value);
        Ok(())
    }

    /// Reports how far the step is, for people who watch. The lease is renewed by itself.
    ///
    /// # Errors
    /// [`Failure`], terminal, when the progress cannot be JSON or is over its limit.
    pub fn heartbeat<T: Serialize + ?Sized>(&self, progress: &T) -> Result<(), Failure> {
        let json = Json::from_serialize(progress).map_err(|error| Failure::of_json("progress", &error))?;
        let limit = self.inner.limits.progress_bytes_max;
        if json.len() > limit {
            return Err(Failure::terminal(
                "value_too_large",
                format!("progress is {} where at most {limit} is allowed; keep it short", json.len()),
            ));
        }
        *lock(&self.inner.progress) = Some(json);
        Ok(())
    }

    /// True once this attempt has lost its claim: it was cancelled, timed out or handed to somebody else. What it
    /// does from then on cannot be committed.
    pub fn is_cancelled(&self) -> bool {
        *self.inner.lost.borrow()
    }

    /// Returns when this attempt has lost its claim.
    pub async fn cancelled(&self) {
        let mut lost = self.inner.lost.clone();
        if lost.wait_for(|lost| *lost).await.is_err() {
            // The attempt has ended: nobody will ever say that it is lost.
            std::future::pending::<()>().await;
        }
    }

    /// The answer to a step that this code does not know: the attempt does not count, and the workflow waits for a
    /// worker that knows it.
    pub fn unknown_step(&self) -> Failure {
        Failure {
            unknown_step: true,
            ..Failure::retryable(
                "unknown_step",
                format!("definition {} does not know step {}", self.name(), self.step()),
            )
        }
    }

    /// What this attempt has set so far, and what it has seen.
    pub(crate) fn take(&self) -> (Writes, Seen) {
        (std::mem::take(&mut *lock(&self.inner.writes)), std::mem::take(&mut *lock(&self.inner.seen)))
    }
}

/// A signal as the step sees it that was waited for with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signalled {
    /// Its name.
    pub name: String,
    /// What its sender called it.
    pub id: String,
    /// What it carries, as it was sent.
    pub payload: Json,
}

impl Signalled {
    /// What it carries.
    ///
    /// # Errors
    /// [`Failure`], terminal, when it does not have this form.
    pub fn payload<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        typed(&signal_key(&SignalName::trusted(self.name.as_str())).to_string(), &self.payload)
    }
}

fn typed<T: DeserializeOwned>(what: &str, json: &Json) -> Result<T, Failure> {
    json.to().map_err(|error| {
        // The text of a serde error may quote the value; the position does not.
        let problem = format!("line {} column {}", error.line(), error.column());
        let error = Error::Value { what: what.to_owned(), problem };
        Failure::terminal(error.code(), error.to_string())
    })
}
