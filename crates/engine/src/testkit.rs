//! Test kit: workflows under a test's control, in memory.
//!
//! Nothing runs by itself: a test says when a step runs, moves the clock (a sleep of thirty days takes microseconds)
//! and lets the process die at the points that matter. The rules, the committer and the handlers are the real ones.
//!
//! ```
//! # use std::time::Duration;
//! use steadfast::testkit::TestKit;
//! use steadfast::{Ctx, Definition, StepResult, done, step};
//!
//! async fn remind(ctx: Ctx) -> StepResult {
//!     match ctx.step() {
//!         "start" => Ok(step("send").after(Duration::from_secs(30 * 86_400))),
//!         "send" => Ok(done("sent")),
//!         _ => Err(ctx.unknown_step()),
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), steadfast::Error> {
//! let mut kit = TestKit::new([Definition::new("remind", remind)])?;
//! let id = kit.start("remind", &()).await?;
//! assert_eq!(kit.step().await?.unwrap().step, "start");
//! assert!(kit.step().await?.is_none(), "it sleeps");
//! kit.advance(Duration::from_secs(30 * 86_400)).await?;
//! assert_eq!(kit.result::<String>(&id).await?, "sent");
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use steadfast_core::claim::{Granted, Request as ClaimRequest};
use steadfast_core::command::{Command, Outcome};
use steadfast_core::commit;
use steadfast_core::control;
use steadfast_core::head::Head;
use steadfast_store::clock::{Clock, ManualClock};
use steadfast_store::faults::{Faulty, Plan};
use steadfast_store::memory::MemoryStore;
use steadfast_store::{Logged, Store, Variable};

use crate::context::Seen;
use crate::definition::Definition;
use crate::engine::{End, Engine, Guard, Inner, Request, Sent, Signal};
use crate::error::Error;
use crate::worker;

/// Where a test lets the process die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// The step is claimed; its handler has not begun.
    BeforeHandler,
    /// The handler has run, outside effects included; nothing is committed.
    BeforeCommit,
    /// The commit is durable; its answer was never heard.
    AfterCommit,
}

/// A step that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Whose.
    pub workflow_id: String,
    /// Which.
    pub step: String,
    /// Which try.
    pub attempt: u32,
    /// What became of its commit.
    pub outcome: commit::Outcome,
}

/// Workflows under a test's control.
#[derive(Debug)]
pub struct TestKit {
    definitions: Vec<Definition>,
    clock: Arc<ManualClock>,
    store: MemoryStore,
    plan: Plan,
    engine: Engine,
}

/// When a kit's clock begins: 2030-01-01T00:00:00Z.
const BEGIN: i64 = 1_893_456_000_000;

impl TestKit {
    /// A kit with these definitions. Must be made within a tokio runtime.
    ///
    /// # Errors
    /// As [`Builder::run`](crate::Builder::run).
    pub fn new(definitions: impl IntoIterator<Item = Definition>) -> Result<Self, Error> {
        let clock = Arc::new(ManualClock::new(BEGIN));
        let store = MemoryStore::new(clock.clone());
        let definitions: Vec<Definition> = definitions.into_iter().collect();
        let (engine, plan) = Self::boot(&store, &definitions)?;
        Ok(Self { definitions, clock, store, plan, engine })
    }

    fn boot(store: &MemoryStore, definitions: &[Definition]) -> Result<(Engine, Plan), Error> {
        let faulty = Faulty::new(store.clone());
        let plan = faulty.plan();
        // No room for the engine itself: a step runs when the test says so, and only then.
        let mut builder = Engine::on(faulty).concurrency(0);
        for definition in definitions {
            builder = builder.define(definition.clone());
        }
        let inner = builder.build(false)?;
        Ok((Engine { guard: Arc::new(Guard { inner }) }, plan))
    }

    fn inner(&self) -> &Arc<Inner> {
        self.engine.inner()
    }

    /// The engine, for everything a kit has no shortcut for. Its loops do not run.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Where to add faults of the store.
    pub fn faults(&self) -> &Plan {
        &self.plan
    }

    /// The store's now, in milliseconds since the epoch.
    pub fn now(&self) -> i64 {
        self.clock.now()
    }

    /// Starts a workflow and answers its id.
    ///
    /// # Errors
    /// As [`Engine::start_request`].
    pub async fn start<T: Serialize + ?Sized>(&self, name: &str, input: &T) -> Result<String, Error> {
        self.start_request(Request::new(name).input(input)).await
    }

    /// Starts a workflow by a request and answers its id.
    ///
    /// # Errors
    /// As [`Engine::start_request`].
    pub async fn start_request(&self, request: Request) -> Result<String, Error> {
        let start = self.inner().check(request)?;
        // As a bulk start: it claims nothing, so that the test's `step` is what runs it.
        Ok(self.inner().admit(start, true).await?.id.to_string())
    }

    async fn claim(&self) -> Result<Option<Granted>, Error> {
        let request = ClaimRequest { terms: self.inner().terms(), n: 1, id: None };
        match self.inner().committer.begin(Command::Claim(request)).await? {
            Outcome::Claim(mut page) => Ok(page.granted.pop()),
            _ => Err(Error::Internal("a claim was answered as something else".to_owned())),
        }
    }

    /// Runs the next ready step, if there is one, and commits it.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub async fn step(&mut self) -> Result<Option<Ran>, Error> {
        let Some(granted) = self.claim().await? else { return Ok(None) };
        let (command, _) = worker::decide(self.inner(), &granted, Seen::new(), None).await;
        let outcome = worker::commit_until_known(self.inner(), command, &granted).await.ok_or(Error::Closed)?;
        Ok(Some(Ran {
            workflow_id: granted.held.key.id.to_string(),
            step: granted.step.to_string(),
            attempt: granted.attempt,
            outcome,
        }))
    }

    /// Runs the next ready step and lets the process die at `point`; a new process then owns the store.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub async fn crash(&mut self, point: CrashPoint) -> Result<(), Error> {
        if let Some(granted) = self.claim().await?
            && point != CrashPoint::BeforeHandler
        {
            let (command, _) = worker::decide(self.inner(), &granted, Seen::new(), None).await;
            if point == CrashPoint::AfterCommit {
                self.inner().committer.finish(command).await?;
            }
        }
        self.restart(false).await
    }

    /// Lets a new process own the store; `restored` as if from a backup, which voids every claim.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub async fn restart(&mut self, restored: bool) -> Result<(), Error> {
        self.engine.clone().shutdown(Duration::ZERO).await;
        self.store = self.store.reopened(restored);
        let (engine, plan) = Self::boot(&self.store, &self.definitions)?;
        (self.engine, self.plan) = (engine, plan);
        self.inner().give_back().await?;
        Ok(())
    }

    /// Moves the clock and lets the sweep find what is due by then.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub async fn advance(&mut self, duration: Duration) -> Result<(), Error> {
        self.clock.advance(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX));
        self.inner().sweep().await?;
        Ok(())
    }

    /// Runs steps, and skips whatever time lies between them, until the workflow has ended.
    ///
    /// # Errors
    /// [`Error::Internal`] when nothing is left that could end it; [`Error`] when the store fails.
    pub async fn end(&mut self, id: &str) -> Result<End, Error> {
        loop {
            if let Some(end) = self.engine.end(id).await? {
                return Ok(end);
            }
            if self.step().await?.is_some() {
                continue;
            }
            let Some(due) = self.store.reader().next_due()? else {
                return Err(Error::Internal(format!("workflow {id} waits for nothing that could end it")));
            };
            let now = self.clock.now();
            self.advance(Duration::from_millis(due.saturating_sub(now).max(0).unsigned_abs())).await?;
        }
    }

    /// Runs the workflow to its end and answers its result.
    ///
    /// # Errors
    /// As [`Handle::result`](crate::Handle::result) and [`TestKit::end`].
    pub async fn result<T: DeserializeOwned>(&mut self, id: &str) -> Result<T, Error> {
        self.end(id).await?;
        self.engine.handle(id).result().await
    }

    /// The workflow's current state.
    ///
    /// # Errors
    /// [`Error::UnknownWorkflow`].
    pub async fn head(&self, id: &str) -> Result<Head, Error> {
        self.engine.head(id).await
    }

    /// Sends the workflow a signal.
    ///
    /// # Errors
    /// As [`Engine::signal`].
    pub async fn signal(&self, id: &str, signal: Signal) -> Result<Sent, Error> {
        self.engine.signal(id, signal).await
    }

    /// Cancels the workflow.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub async fn cancel(&self, id: &str) -> Result<control::Outcome, Error> {
        self.engine.cancel(id, "test", "test").await
    }

    /// The workflow's events.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub fn events(&self, id: &str) -> Result<Vec<Logged>, Error> {
        Ok(self.store.reader().events(&self.engine.handle(id).key, 0, usize::MAX)?)
    }

    /// The types of the workflow's events, in order, in one line.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub fn timeline(&self, id: &str) -> Result<String, Error> {
        Ok(self.events(id)?.iter().map(|logged| logged.event.kind()).collect::<Vec<_>>().join(" "))
    }

    /// The workflow's variables.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub fn variables(&self, id: &str) -> Result<Vec<Variable>, Error> {
        Ok(self.store.reader().variables(&self.engine.handle(id).key, None, usize::MAX)?)
    }

    /// Panics unless every head and scratchpad equals its log.
    ///
    /// # Errors
    /// [`Error`] when the store fails.
    pub fn verify(&self) -> Result<(), Error> {
        let verified = self.store.reader().verify(&mut |_| {})?;
        assert!(verified.faults.is_empty(), "the store is not what its logs say: {:?}", verified.faults);
        Ok(())
    }
}
