//! Worker: claims steps, runs their handlers, commits what they decide.
//!
//! Work on one workflow is a pipeline over one value: claim, run, judge, commit, and on to the next step with the
//! claim that the commit brought.
//!
//! # Handler errors and commit errors
//! They never mix. Once a handler has answered, only its commit is tried again, with the same token, until the store
//! says what became of it; the handler does not run again for that.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use steadfast_core::claim::{Granted, Held, Request, Steps, Terms};
use steadfast_core::command::{Command, Outcome};
use steadfast_core::commit::{self, Complete, Fail, FailKind};
use steadfast_core::event::{SIGNAL_PREFIX, Writes};
use steadfast_core::heartbeat::{self, Beat};
use steadfast_core::json::Json;
use steadfast_core::limits::cut;
use steadfast_core::text::{FailureCode, SignalName, Step, WorkflowKey};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;

use crate::context::{Ctx, Seen};
use crate::definition::{Decision, Failure};
use crate::engine::Inner;
use crate::error::Error;

/// Steps of one workflow in a row while other ready work waits.
const STREAK_STEPS: u32 = 100;
/// Time on one workflow in a row while other ready work waits.
const STREAK_TIME: Duration = Duration::from_millis(100);
/// Most steps in one claim call.
const CLAIM_MAX: usize = 256;
/// Steps in a claim call of a worker that knows of none.
const CLAIM_FEW: usize = 4;
/// What a worker remembers of a scratchpad from step to step.
const SEEN_BYTES_MAX: usize = 256 << 10;
/// Likewise, in variables.
const SEEN_KEYS_MAX: usize = 256;
/// How long the heartbeat waits for the answers to its beats before it looks for the next ones.
const BEATS_PATIENCE: Duration = Duration::from_millis(500);
/// How long a handler may go on after it has lost its claim, to tidy up, before it is dropped.
const LOST_GRACE: Duration = Duration::from_secs(5);

/// A place in which one workflow runs at a time.
pub(crate) struct Slot {
    running: Mutex<Option<Running>>,
}

/// What runs in a slot, for the heartbeat.
struct Running {
    held: Held,
    ctx: Ctx,
    lost: watch::Sender<bool>,
    lease: Duration,
    /// When the last beat was sent that arrived.
    beaten: Instant,
    /// A beat is on its way.
    beating: bool,
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self { running: Mutex::new(None) }
    }

    /// The beat that is to be sent now, if one is.
    fn next_beat(&self) -> Option<Beat> {
        let mut running = self.running();
        let running = running.as_mut().filter(|running| !running.beating)?;
        let progress = running.ctx.inner.progress.lock().unwrap_or_else(PoisonError::into_inner).take();
        if progress.is_none() && running.beaten.elapsed() < running.lease / 3 {
            return None;
        }
        running.beating = true;
        Some(Beat { held: running.held.clone(), progress })
    }

    /// A beat is over: its step hears when the claim is gone, and what did not arrive is sent again.
    fn beaten(&self, beat: &Beat, sent_at: Instant, sent: &Result<heartbeat::Answer, Error>) {
        let mut running = self.running();
        // It may run something else by now.
        let Some(running) = running.as_mut().filter(|running| running.held == beat.held) else { return };
        running.beating = false;
        match sent {
            Ok(heartbeat::Answer::Held { .. }) => running.beaten = sent_at,
            Ok(heartbeat::Answer::Lost) => {
                // Nobody listens once the handler has ended.
                let _ = running.lost.send(true);
            }
            Err(_) => {
                let mut progress = running.ctx.inner.progress.lock().unwrap_or_else(PoisonError::into_inner);
                // The handler may have said something newer meanwhile.
                *progress = progress.take().or_else(|| beat.progress.clone());
            }
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Claims ready steps as long as there is room for them, and sets them going. Answers whether any are left for which there
/// is none.
///
/// Room that is kept for a claim is taken from the starts that come meanwhile, whose first steps then have to be claimed
/// too. So it asks for as many as are known to be ready, and for few where only a look can tell.
pub(crate) async fn claim(engine: &Arc<Inner>) -> Result<bool, Error> {
    loop {
        let known = engine.take_ready();
        let most = if engine.has_backlog() { CLAIM_MAX } else { known.clamp(CLAIM_FEW, CLAIM_MAX) };
        let mut permits: Vec<OwnedSemaphorePermit> = Vec::new();
        while permits.len() < most
            && let Ok(permit) = engine.slots.clone().try_acquire_owned()
        {
            permits.push(permit);
        }
        if permits.is_empty() {
            engine.look_later(known);
            if engine.slots.available_permits() == 0 {
                return Ok(known > 0 || engine.has_backlog());
            }
            // Room was made before anybody knew that it is waited for.
            continue;
        }
        if engine.is_draining() {
            return Ok(false);
        }
        let asked = permits.len();
        let request = Request { terms: engine.terms(), n: asked, id: None };
        let Outcome::Claim(page) = engine.committer.begin(Command::Claim(request)).await? else {
            return Err(Error::Internal("a claim was answered as something else".to_owned()));
        };
        engine.set_backlog(page.more);
        for (granted, permit) in page.granted.into_iter().zip(permits) {
            spawn(engine, granted, Seen::new(), permit);
        }
        if !page.more {
            return Ok(false);
        }
    }
}

/// Sets a claimed workflow going in a slot.
pub(crate) fn spawn(engine: &Arc<Inner>, granted: Granted, seen: Seen, permit: OwnedSemaphorePermit) {
    let engine = engine.clone();
    let key = granted.held.key.clone();
    let seat = engine.enters(&key, permit);
    tokio::spawn(async move {
        let slot = engine.take_slot();
        run(&engine, granted, seen, &slot).await;
        *slot.running() = None;
        engine.return_slot(slot);
        engine.leaves(&key, &seat);
        engine.room();
    });
}

/// Runs a workflow from step to step while its commits bring the next claim.
async fn run(engine: &Arc<Inner>, first: Granted, mut seen: Seen, slot: &Slot) {
    let mut next = Some(first);
    let started = Instant::now();
    let mut steps = 0;
    while let Some(granted) = next {
        steps += 1;
        // Asked when the step has run: meanwhile the engine may have been told to stop.
        let goes_on = || {
            let held_long = steps >= STREAK_STEPS || started.elapsed() >= STREAK_TIME;
            !(engine.is_draining() || (held_long && engine.has_backlog()))
        };
        (next, seen) = attempt(engine, granted, seen, slot, goes_on).await;
    }
}

/// One attempt of one step: run, judge, commit. Answers the claim of the next step, if the commit brought one.
async fn attempt(
    engine: &Arc<Inner>,
    granted: Granted,
    seen: Seen,
    slot: &Slot,
    goes_on: impl Fn() -> bool,
) -> (Option<Granted>, Seen) {
    let (mut command, mut seen) = decide(engine, &granted, seen, Some(slot)).await;
    let mut writes = Writes::default();
    if let Command::Complete(complete) = &mut command
        && goes_on()
    {
        complete.claim_next = Some(engine.terms());
        writes = complete.writes.clone();
    }
    let is_given_back = matches!(&command, Command::Fail(fail) if fail.kind == FailKind::GivenBack);
    let outcome = commit_until_known(engine, command, &granted).await;
    if is_given_back && matches!(outcome, Some(commit::Outcome::Committed(_) | commit::Outcome::AlreadyCommitted(_))) {
        engine.gave_back();
    }
    let next = match outcome {
        Some(commit::Outcome::Committed(after) | commit::Outcome::AlreadyCommitted(after)) => after.next,
        Some(commit::Outcome::Lost) => {
            metrics::counter!("steadfast_late_results_total").increment(1);
            tracing::debug!(workflow = %granted.held.key, step = %granted.step, "late result discarded");
            None
        }
        None => None,
    };
    if next.is_some() {
        for write in writes.iter() {
            seen.insert(write.key.clone(), write.value.clone());
        }
        // The commit may have taken a signal.
        seen.retain(|key, _| !key.as_str().starts_with(SIGNAL_PREFIX));
        let bytes: usize = seen.values().flatten().map(Json::len).sum();
        if bytes > SEEN_BYTES_MAX || seen.len() > SEEN_KEYS_MAX {
            seen.clear();
        }
    }
    (next, seen)
}

/// Runs the handler and judges how it ended: the command that records it, not sent yet.
pub(crate) async fn decide(engine: &Arc<Inner>, granted: &Granted, seen: Seen, slot: Option<&Slot>) -> (Command, Seen) {
    let (lost, heard) = watch::channel(false);
    let reading = (engine.reader.clone(), engine.looks.clone());
    let ctx = Ctx::new(granted.clone(), reading, engine.limits.clone(), seen, heard);
    // Kept until the handler has ended: a sender that is gone would read as a lost claim.
    let mut kept = Some(lost);
    if let Some(slot) = slot
        && let Some(lost) = kept.take()
    {
        *slot.running() = Some(Running {
            held: granted.held.clone(),
            ctx: ctx.clone(),
            lost,
            lease: Duration::from_millis(granted.lease_ms),
            beaten: Instant::now(),
            beating: false,
        });
    }
    let ended = handle(engine, granted, ctx.clone()).await;
    drop(kept);
    let (writes, seen) = ctx.take();
    (judge(engine, granted, writes, ended), seen)
}

/// How a handler ended.
enum Ended {
    Answered(crate::definition::StepResult),
    Panicked(String),
    TimedOut,
    /// The engine shuts down and its grace is over.
    GivenBack,
    /// The claim is gone and the handler did not end by itself.
    Lost,
}

/// Runs the handler, within the step's time and the engine's life.
async fn handle(engine: &Arc<Inner>, granted: &Granted, ctx: Ctx) -> Ended {
    let Some(known) = engine.definitions.get(&granted.name) else {
        return Ended::Answered(Err(ctx.unknown_step()));
    };
    let handler = known.handler.clone();
    let for_lost = ctx.clone();
    // Calling the handler may panic as well as polling it.
    let running = AssertUnwindSafe(async move { handler(ctx).await }).catch_unwind();
    let lost = async {
        for_lost.cancelled().await;
        tokio::time::sleep(LOST_GRACE).await;
    };
    tokio::select! {
        biased;
        ended = running => match ended {
            Ok(result) => Ended::Answered(result),
            Err(panic) => Ended::Panicked(panic_text(&*panic)),
        },
        () = engine.grace_over() => Ended::GivenBack,
        () = tokio::time::sleep(Duration::from_millis(granted.step_timeout_ms)) => Ended::TimedOut,
        () = lost => Ended::Lost,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the handler panicked".to_owned())
}

/// Turns a handler's end into the command that records it.
fn judge(engine: &Arc<Inner>, granted: &Granted, writes: Writes, ended: Ended) -> Command {
    let failed = |code: &str, reason: String, kind: FailKind| {
        let retry = engine.definitions.get(&granted.name).and_then(|known| known.step_retry.get(granted.step.as_str()));
        let fail = Fail {
            held: granted.held.clone(),
            kind,
            code: FailureCode::trusted(code),
            reason: cut(&reason, engine.limits.reason_bytes_max).to_owned(),
            retry: retry.cloned(),
            jitter: engine.random_u32(),
            deliveries_max: engine.limits.deliveries_max,
        };
        Command::Fail(Box::new(fail))
    };
    let failure = |failure: Failure| {
        if failure.unknown_step {
            engine.learn_unknown_step(&granted.name, &granted.step);
            return failed("unknown_step", failure.reason, FailKind::GivenBack);
        }
        let retry_after_ms = failure.retry_after.map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
        let kind = FailKind::Error { retryable: failure.retryable, retry_after_ms };
        let code = failure.checked_code(&engine.limits);
        failed(code.as_str(), failure.reason, kind)
    };
    let retryable = FailKind::Error { retryable: true, retry_after_ms: None };
    let continuation = match ended {
        Ended::Panicked(text) => return failed("panic", text, retryable),
        Ended::TimedOut => {
            let reason = format!("attempt took longer than {} ms", granted.step_timeout_ms);
            return failed("step_timeout", reason, retryable);
        }
        Ended::GivenBack => {
            return failed("given_back", "the engine shut down".to_owned(), FailKind::GivenBack);
        }
        // The fence will say so; the command only makes the answer known.
        Ended::Lost => return failed("lost", "the claim was lost".to_owned(), FailKind::GivenBack),
        Ended::Answered(Err(error)) => return failure(error),
        Ended::Answered(Ok(continuation)) => match continuation.0 {
            Decision::Fail(error) | Decision::Done(Err(error)) => return failure(error),
            Decision::Done(Ok(result)) => commit::Continuation::Done(result),
            Decision::Step { step, when } => commit::Continuation::Step { step: Step::trusted(step), when },
            Decision::Wait { signals, then, timeout } => commit::Continuation::Wait {
                signals: signals.into_iter().map(SignalName::trusted).collect(),
                then: Step::trusted(then),
                timeout: timeout.map(|(when, step)| (when, Step::trusted(step))),
            },
        },
    };
    if let Err(invalid) = commit::check(&writes, &continuation, engine.clock.now(), &engine.limits) {
        return failure(Failure::of_invalid(&invalid));
    }
    Command::Complete(Box::new(Complete { held: granted.held.clone(), writes, continuation, claim_next: None }))
}

/// Sends a commit until its outcome is known. `None` only when the engine is closed.
pub(crate) async fn commit_until_known(
    engine: &Arc<Inner>,
    command: Command,
    granted: &Granted,
) -> Option<commit::Outcome> {
    let mut pause = Duration::from_millis(5);
    loop {
        match engine.committer.finish(command.clone()).await {
            Ok(Outcome::Commit(outcome)) => return Some(outcome),
            Ok(_) | Err(Error::Closed) => return None,
            Err(error) => {
                if let Some(left_out) = engine.commits_again() {
                    let (workflow, step) = (&granted.held.key, &granted.step);
                    tracing::warn!(%workflow, %step, %error, left_out, "a commit is tried again");
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
}

/// Keeps the claims of all slots alive that need it, and tells those that are lost.
///
/// Each beat is a command of its own, and nobody waits long for its answer: one whose row somebody holds keeps the others
/// neither from this beat nor from the next.
pub(crate) async fn heartbeat(engine: &Arc<Inner>) -> Result<(), Error> {
    let mut beats = JoinSet::new();
    for slot in engine.all_slots() {
        let Some(beat) = slot.next_beat() else { continue };
        let engine = engine.clone();
        beats.spawn(async move {
            let sent_at = Instant::now();
            let sent = send_beat(&engine, beat.clone()).await;
            slot.beaten(&beat, sent_at, &sent);
            sent.map(drop)
        });
    }
    let answered = async {
        while let Some(sent) = beats.join_next().await {
            sent.map_err(|error| Error::Internal(format!("a heartbeat ended early: {error}")))??;
        }
        Ok(())
    };
    let answered = tokio::time::timeout(BEATS_PATIENCE, answered).await.unwrap_or(Ok(()));
    // Those under way go on.
    beats.detach_all();
    answered
}

async fn send_beat(engine: &Arc<Inner>, beat: Beat) -> Result<heartbeat::Answer, Error> {
    let command = Command::Heartbeat(heartbeat::Request { beats: vec![beat] });
    match engine.committer.finish(command).await? {
        Outcome::Heartbeat(answers) if answers.len() == 1 => Ok(answers[0]),
        _ => Err(Error::Internal("a heartbeat was answered as something else".to_owned())),
    }
}

/// Tells the step of a workflow that runs here, if one does, that its claim is gone.
pub(crate) fn lose(engine: &Arc<Inner>, key: &WorkflowKey) {
    for slot in engine.all_slots() {
        if let Some(running) = slot.running().as_ref()
            && running.held.key == *key
        {
            let _ = running.lost.send(true);
        }
    }
}

/// What this worker knows of a definition, after it has learned that one more step is unknown to its code.
pub(crate) fn without_step(steps: &Steps, step: &Step) -> Steps {
    match steps {
        Steps::Listed(listed) => Steps::Listed(listed.iter().filter(|known| *known != step).cloned().collect()),
        Steps::AllBut(unknown) => Steps::AllBut(unknown.iter().chain([step]).cloned().collect::<BTreeSet<Step>>()),
    }
}

/// The terms of this engine's claims.
pub(crate) fn terms(engine: &Inner) -> Terms {
    Terms {
        worker: engine.worker.clone(),
        announced: engine.announced(),
        lease_ms: engine.lease_ms,
        seed: engine.random_seed(),
    }
}
