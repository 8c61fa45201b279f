//! Verify: does a head equal its log?
//!
//! The log is read once, event by event, so that a log of ten million events needs no memory. What the log cannot
//! tell (lease end, raw token, progress) is not compared; the token is, by its digest.

use std::collections::{BTreeMap, BTreeSet};

use crate::event::Event;
use crate::head::Head;
use crate::json::Json;
use crate::options::Options;
use crate::state::State;
use crate::text::{Key, Name, SignalId, SignalName, WorkflowKey};

/// Re-derives one workflow from its log.
#[derive(Debug)]
pub struct Rebuilt {
    key: WorkflowKey,
    next_seq: u64,
    state: Option<State>,
    name: Option<Name>,
    options: Option<Options>,
    created_at: i64,
    updated_at: i64,
    variables: BTreeMap<Key, (Json, u64)>,
    /// Signals that waits took, by the event that says so.
    received: BTreeMap<u64, (SignalName, SignalId)>,
    /// Names of signals that lie in the inbox.
    pending: BTreeSet<SignalName>,
    faults: Vec<Fault>,
}

/// One thing that is not as the log says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which workflow.
    pub key: WorkflowKey,
    /// A stable word: `gap`, `illegal_event`, `unfinished_commit`, `head_differs`, `variable_differs`, ..
    pub code: &'static str,
    /// What, naming positions and keys but no contents.
    pub detail: String,
}

impl Rebuilt {
    /// Before the first event.
    pub fn new(key: WorkflowKey) -> Self {
        Self {
            key,
            next_seq: 0,
            state: None,
            name: None,
            options: None,
            created_at: 0,
            updated_at: i64::MIN,
            variables: BTreeMap::new(),
            received: BTreeMap::new(),
            pending: BTreeSet::new(),
            faults: Vec::new(),
        }
    }

    fn fault(&mut self, code: &'static str, detail: String) {
        self.faults.push(Fault { key: self.key.clone(), code, detail });
    }

    /// Takes the next event of the log, in order of seq.
    pub fn event(&mut self, seq: u64, at: i64, event: &Event) {
        if seq != self.next_seq {
            self.fault("gap", format!("seq {seq} where {} was expected", self.next_seq));
        }
        self.next_seq = seq + 1;
        if at < self.updated_at {
            self.fault("time_runs_back", format!("seq {seq} is earlier than the event before it"));
        }
        self.updated_at = at;
        let next = match &self.state {
            None => State::first(event, at),
            Some(state) => state.after(event, at),
        };
        match next {
            Ok(state) => self.state = Some(state),
            Err(illegal) => self.fault("illegal_event", format!("seq {seq}: {illegal}")),
        }
        if let Event::WorkflowCreated { name, options, .. } = event {
            self.name = Some(name.clone());
            self.options = Some(options.clone());
            self.created_at = at;
        }
        if let Event::SignalReceived { name, signal_id, .. } = event {
            self.received.insert(seq, (name.clone(), signal_id.clone()));
        }
        for write in event.writes().iter().flat_map(|writes| writes.iter()) {
            match &write.value {
                Some(value) => self.variables.insert(write.key.clone(), (value.clone(), seq)),
                None => self.variables.remove(&write.key),
            };
        }
    }

    /// Takes one signal of the stored inbox: `taken` is the event that took it.
    pub fn signal(&mut self, name: &SignalName, id: &SignalId, taken: Option<u64>) {
        match taken {
            None => drop(self.pending.insert(name.clone())),
            Some(seq) if self.received.remove(&seq).as_ref() == Some(&(name.clone(), id.clone())) => {}
            Some(seq) => {
                self.fault("signal_not_received", format!("signal {name:?}, which seq {seq} shall have taken"));
            }
        }
    }

    /// Takes one stored variable.
    pub fn variable(&mut self, key: &Key, value: &Json, seq: u64) {
        match self.variables.remove(key) {
            Some((logged, logged_seq)) if logged == *value && logged_seq == seq => {}
            Some(_) => self.fault("variable_differs", format!("scratchpad key {key:?}")),
            None => self.fault("variable_unknown_to_log", format!("scratchpad key {key:?}")),
        }
    }

    /// Compares the stored head; `None` when there is none. Ends the check of this workflow.
    pub fn finish(mut self, head: Option<&Head>) -> Vec<Fault> {
        let missing: Vec<Key> = self.variables.keys().cloned().collect();
        for key in missing {
            self.fault("variable_missing", format!("scratchpad key {key:?}"));
        }
        for (seq, (name, _)) in std::mem::take(&mut self.received) {
            self.fault("signal_missing", format!("signal {name:?} of seq {seq}"));
        }
        if let Some(State::Waiting { wait, .. }) = &self.state
            && let Some(name) = wait.signals.iter().find(|name| self.pending.contains(*name))
        {
            self.fault("signal_not_taken", format!("it waits for {name:?}, which lies in its inbox"));
        }
        let Some(state) = self.state.clone() else {
            self.fault("no_log", "there is a head without a log".to_owned());
            return self.faults;
        };
        if state.status().is_none() {
            self.fault("unfinished_commit", format!("the log ends in {}", state.label()));
        }
        let Some(head) = head else {
            self.fault("no_head", "there is a log without a head".to_owned());
            return self.faults;
        };
        let mut differ = |what: &str, same: bool| {
            if !same {
                self.faults.push(Fault {
                    key: self.key.clone(),
                    code: "head_differs",
                    detail: format!("{what} is not what the log says"),
                });
            }
        };
        differ("seq", head.seq + 1 == self.next_seq);
        // A sleep that is over may have been seen by the sweep or not yet.
        let woken = matches!((&state, &head.state),
            (State::Sleeping { visit, until } | State::Backoff { visit, until }, State::Ready { visit: ready, since })
                if visit == ready && until == since);
        differ("state", head.state == state || woken);
        differ("name", self.name.as_ref() == Some(&head.name));
        differ("options", self.options.as_ref() == Some(&*head.options));
        differ("created_at", head.created_at == self.created_at);
        differ("updated_at", head.updated_at == self.updated_at);
        match (&head.state, &head.claim) {
            (State::Running { token_digest, .. }, Some(claim)) => {
                differ("claim token", claim.token.digest() == *token_digest);
                differ("sweep time", claim.look_at <= claim.ends_at());
            }
            (State::Running { .. }, None) => differ("claim", false),
            (_, Some(_)) => differ("claim", false),
            (_, None) => {}
        }
        self.faults
    }
}
