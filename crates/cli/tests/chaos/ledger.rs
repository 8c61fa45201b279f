//! Ledger: what the callers asked for and what they were answered, to be held against the store.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use serde_json::{Value, json};

/// The content of a start.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub name: &'static str,
    pub input: Value,
    /// A further variable that it begins with.
    pub mark: Option<u64>,
}

impl Asked {
    pub fn new(name: &'static str, input: Value) -> Self {
        Self { name, input, mark: None }
    }

    pub fn marked(self, mark: u64) -> Self {
        Self { mark: Some(mark), ..self }
    }

    /// As it is sent.
    pub fn body(&self, id: &str) -> Value {
        let mut body = json!({"name": self.name, "id": id, "input": self.input});
        if let Some(mark) = self.mark {
            body["writes"] = json!({"mark": mark});
        }
        body
    }

    /// How it ends when nobody cancels it.
    pub fn expected(&self) -> Expected {
        let n = |field: &str| self.input[field].as_u64().unwrap_or_default();
        let completes = |commits, failures| Expected { commits, failures, status: "completed", code: None };
        match self.name {
            "hello" if n("steps") == 0 => {
                Expected { commits: 0, failures: 1, status: "failed", code: Some("invalid_input") }
            }
            "hello" => completes(n("steps"), 0),
            "flaky" => completes(1, n("failures")),
            "sleeper" => completes(n("times") + 1, 0),
            "flight" => completes(3, 0),
            "tally" => completes(n("signals") + 1, 0),
            other => panic!("nobody has said how {other} ends"),
        }
    }
}

/// What the log of a workflow must come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Steps that committed.
    pub commits: u64,
    /// Attempts that failed and counted.
    pub failures: u64,
    pub status: &'static str,
    pub code: Option<&'static str>,
}

/// Where a start stands for its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Sent, and there has been no definite answer.
    Open,
    Accepted,
    /// Certainly refused, with this code.
    Refused(String),
}

/// What a caller knows of a cancel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cancel {
    /// Sent, and there has been no definite answer.
    Open,
    Cancelled,
    /// It had ended before, in this status.
    AlreadyFinished(String),
}

#[derive(Debug, Clone)]
pub struct Start {
    pub asked: Asked,
    pub standing: Standing,
    pub cancel: Option<Cancel>,
    /// The signals that were accepted for it, in their order.
    pub signals: Vec<String>,
}

#[derive(Debug, Default)]
pub struct Ledger {
    starts: Mutex<BTreeMap<String, Start>>,
    /// Answers that contradict earlier ones.
    contradictions: Mutex<Vec<String>>,
    pub tally: Tally,
}

/// How often what was heard.
#[derive(Debug, Default)]
pub struct Tally {
    /// Definite answers.
    pub answers: AtomicUsize,
    /// Starts answered as accepted before.
    pub replays: AtomicUsize,
    pub conflicts: AtomicUsize,
    pub cancels: AtomicUsize,
    /// Signals that were accepted.
    pub signals: AtomicUsize,
    /// Attempts whose outcome the caller could not know.
    pub unknown: AtomicUsize,
    /// Attempts that were refused for the time being.
    pub not_now: AtomicUsize,
    /// How often the request that was sent most often was sent before its definite answer.
    pub sent_most: AtomicUsize,
}

pub fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Ledger {
    pub fn starts(&self) -> MutexGuard<'_, BTreeMap<String, Start>> {
        self.starts.lock().expect("nobody panics while he writes into the ledger")
    }

    /// Before it is sent for the first time.
    pub fn sent(&self, id: &str, asked: &Asked) {
        let start = Start { asked: asked.clone(), standing: Standing::Open, cancel: None, signals: Vec::new() };
        self.starts().entry(id.to_owned()).or_insert(start);
    }

    pub fn stands(&self, id: &str, standing: Standing) {
        self.starts().get_mut(id).expect("it was sent").standing = standing;
    }

    pub fn cancel(&self, id: &str, cancel: Cancel) {
        self.starts().get_mut(id).expect("it was sent").cancel = Some(cancel);
    }

    pub fn signalled(&self, id: &str, signal: String) {
        self.starts().get_mut(id).expect("it was sent").signals.push(signal);
        count(&self.tally.signals);
    }

    pub fn contradiction(&self, what: String) {
        self.contradictions.lock().expect("held for one push").push(what);
    }

    pub fn contradictions(&self) -> Vec<String> {
        self.contradictions.lock().expect("held for one look").clone()
    }
}
