//! Command: the one road of every change.
//!
//! `wants` names the rows a command needs, `decide` judges it. `now` is fixed for each attempt to commit a batch, before
//! anything of it is decided; only what certainly left no trace is attempted again.

use crate::snapshot::{Snapshot, Stop, Wants};
use crate::{admission, claim, commit, control, heartbeat, signal, sweep};

/// What a decision may know of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The store's clock, in milliseconds since the epoch.
    pub now: i64,
    /// The store's life between restores and failovers; claims of another epoch are void.
    pub epoch: u64,
}

/// One change asked of the system.
#[derive(Debug, Clone)]
pub enum Command {
    /// Admit a workflow.
    Start(Box<admission::Start>),
    /// Hand out ready steps.
    Claim(claim::Request),
    /// Commit what a step decided.
    Complete(Box<commit::Complete>),
    /// End an attempt without a commit.
    Fail(Box<commit::Fail>),
    /// Keep claims alive.
    Heartbeat(heartbeat::Request),
    /// End a workflow from outside.
    Cancel(control::Cancel),
    /// Send a workflow a message.
    Signal(Box<signal::Send>),
    /// Repair what is overdue.
    Sweep(sweep::Sweep),
    /// Give back the claims of workers that are known to be gone.
    GiveBack(sweep::GiveBack),
}

/// What became of a command. All are expected answers; faults of the store are not among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Of [`Command::Start`].
    Start(admission::Outcome),
    /// Of [`Command::Claim`].
    Claim(claim::Page),
    /// Of [`Command::Complete`] and [`Command::Fail`].
    Commit(commit::Outcome),
    /// Of [`Command::Heartbeat`], one answer for each beat, in order.
    Heartbeat(Vec<heartbeat::Answer>),
    /// Of [`Command::Cancel`].
    Cancel(control::Outcome),
    /// Of [`Command::Signal`].
    Signal(signal::Outcome),
    /// Of [`Command::Sweep`] and [`Command::GiveBack`].
    Sweep(sweep::Report),
}

/// Which of the committer's two lanes a command takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// What frees work: completions, failures, heartbeats, sweeps. New work can never fill this lane.
    Finish,
    /// What brings or asks for work: starts, claims, cancels, signals.
    Begin,
}

impl Command {
    /// The lane it takes.
    pub fn lane(&self) -> Lane {
        match self {
            Self::Complete(_) | Self::Fail(_) | Self::Heartbeat(_) | Self::Sweep(_) | Self::GiveBack(_) => Lane::Finish,
            Self::Start(_) | Self::Claim(_) | Self::Cancel(_) | Self::Signal(_) => Lane::Begin,
        }
    }

    /// About how many bytes it will write, for bounding a batch.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Start(start) => start.input.len() + start.writes.bytes() + 512,
            Self::Complete(complete) => complete.bytes() + 512,
            Self::Signal(send) => send.payload.len() * 2 + 512,
            Self::Claim(request) => request.n * 256,
            Self::Sweep(sweep) => sweep.limit * 256,
            Self::GiveBack(give_back) => give_back.limit * 256,
            Self::Fail(_) | Self::Heartbeat(_) | Self::Cancel(_) => 512,
        }
    }

    /// Names the rows that the common case needs.
    pub fn wants(&self, moment: &Moment, wants: &mut Wants) {
        match self {
            Self::Start(start) => {
                wants.admissions.insert(start.key.clone());
            }
            Self::Claim(request) => request.wants(wants),
            Self::Complete(complete) => {
                wants.heads.insert(complete.held.key.clone());
                if let commit::Continuation::Wait { signals, .. } = &complete.continuation {
                    let key = &complete.held.key;
                    wants.pending.extend(signals.iter().map(|name| ((key.clone(), name.clone()), 0)));
                }
            }
            Self::Fail(fail) => {
                wants.heads.insert(fail.held.key.clone());
            }
            Self::Heartbeat(request) => wants.heads.extend(request.beats.iter().map(|beat| beat.held.key.clone())),
            Self::Cancel(cancel) => {
                wants.heads.insert(cancel.key.clone());
            }
            Self::Signal(send) => {
                wants.heads.insert(send.key.clone());
                wants.signals.insert((send.key.clone(), send.id.clone()));
                // All that a wait of this name could take is there when it is accepted: nothing, or it would not wait.
                wants.pending.insert((send.key.clone(), send.name.clone()), 0);
            }
            Self::Sweep(sweep) => {
                // Of two sweeps in a batch the larger page serves both.
                let (now, limit) = wants.due.unwrap_or((moment.now, sweep.limit));
                wants.due = Some((now.max(moment.now), limit.max(sweep.limit)));
            }
            Self::GiveBack(give_back) => wants.open = Some((give_back.after.clone(), give_back.limit)),
        }
    }
}

/// Judges one command on the snapshot and records what it changes there.
///
/// # Errors
/// [`Stop::Missing`] names rows to load before it is decided again; [`Stop::Illegal`] is a fault of ours.
pub fn decide(snapshot: &mut Snapshot, command: &Command, moment: &Moment) -> Result<Outcome, Stop> {
    match command {
        Command::Start(start) => admission::decide(snapshot, start, moment).map(Outcome::Start),
        Command::Claim(request) => claim::decide(snapshot, request, moment).map(Outcome::Claim),
        Command::Complete(complete) => commit::complete(snapshot, complete, moment).map(Outcome::Commit),
        Command::Fail(fail) => commit::fail(snapshot, fail, moment).map(Outcome::Commit),
        Command::Heartbeat(request) => heartbeat::decide(snapshot, request, moment).map(Outcome::Heartbeat),
        Command::Cancel(cancel) => control::cancel(snapshot, cancel, moment).map(Outcome::Cancel),
        Command::Signal(send) => signal::decide(snapshot, send, moment).map(Outcome::Signal),
        Command::Sweep(sweep) => sweep::decide(snapshot, sweep, moment).map(Outcome::Sweep),
        Command::GiveBack(give_back) => sweep::give_back(snapshot, give_back, moment).map(Outcome::Sweep),
    }
}
