//! Definition: the code of a workflow, registered under a name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use steadfast_core::claim::Steps;
use steadfast_core::commit::When;
use steadfast_core::json::Json;
use steadfast_core::limits::{Invalid, Limits};
use steadfast_core::options::{Options, StartOptions};
use steadfast_core::retry::RetryPolicy;
use steadfast_core::text::{FailureCode, Name, Step};

use crate::context::Ctx;

/// What a step returns: what to do next, or why the attempt failed.
pub type StepResult = Result<Continuation, Failure>;

/// What to do next.
#[derive(Debug, Clone)]
pub struct Continuation(pub(crate) Decision);

#[derive(Debug, Clone)]
pub(crate) enum Decision {
    Step { step: String, when: When },
    Wait { signals: Vec<String>, then: String, timeout: Option<(When, String)> },
    Done(Result<Json, Failure>),
    Fail(Failure),
}

/// Runs the step `name` next.
pub fn step(name: impl Into<String>) -> Continuation {
    Continuation(Decision::Step { step: name.into(), when: When::Now })
}

/// Waits durably for a signal of this name, also one that came before: say with `then` which step runs with it.
pub fn wait_for(signal: impl Into<String>) -> Waiting {
    wait_for_any([signal])
}

/// Waits durably for the first signal of any of these names: say with `then` which step runs with it.
pub fn wait_for_any<S: Into<String>>(signals: impl IntoIterator<Item = S>) -> Waiting {
    Waiting { signals: signals.into_iter().map(Into::into).collect() }
}

/// A wait that lacks its step.
#[derive(Debug, Clone)]
#[must_use = "a wait is none until `then` says which step runs with the signal"]
pub struct Waiting {
    signals: Vec<String>,
}

impl Waiting {
    /// The step that runs with the signal, which it reads with [`Ctx::signal`].
    pub fn then(self, step: impl Into<String>) -> Continuation {
        Continuation(Decision::Wait { signals: self.signals, then: step.into(), timeout: None })
    }
}

/// Completes the workflow with `result`.
pub fn done<T: Serialize>(result: T) -> Continuation {
    Continuation(Decision::Done(Json::from_serialize(&result).map_err(|error| Failure::of_json("result", &error))))
}

/// Fails the workflow for good: no retry, and nothing this step set is kept.
pub fn fail(code: impl Into<String>, reason: impl Into<String>) -> Continuation {
    Continuation(Decision::Fail(Failure::terminal(code, reason)))
}

impl Continuation {
    /// Sleeps durably until `at` (milliseconds since the epoch, by the store's clock), then runs the step.
    ///
    /// On `done` and `fail` it has no meaning and fails the attempt for good.
    #[must_use]
    pub fn at(self, at: i64) -> Self {
        self.when(When::At(at))
    }

    /// Sleeps durably for `duration` from the commit on, then runs the step.
    ///
    /// On `done` and `fail` it has no meaning and fails the attempt for good.
    #[must_use]
    pub fn after(self, duration: std::time::Duration) -> Self {
        self.when(When::After(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    fn when(self, when: When) -> Self {
        Self(match self.0 {
            Decision::Step { step, .. } => Decision::Step { step, when },
            Decision::Wait { .. } => invalid("a wait has no time of its own: give it one with timeout(..)"),
            Decision::Done(_) | Decision::Fail(_) => {
                invalid("an end cannot wait: return step(..).after(..) and end there")
            }
        })
    }

    /// Runs `step` instead when no signal has come `duration` after the commit.
    ///
    /// On anything but a wait it has no meaning and fails the attempt for good.
    #[must_use]
    pub fn timeout(self, duration: std::time::Duration, step: impl Into<String>) -> Self {
        self.unless(When::After(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)), step.into())
    }

    /// Runs `step` instead when no signal has come by `at` (milliseconds since the epoch, by the store's clock).
    ///
    /// On anything but a wait it has no meaning and fails the attempt for good.
    #[must_use]
    pub fn timeout_at(self, at: i64, step: impl Into<String>) -> Self {
        self.unless(When::At(at), step.into())
    }

    fn unless(self, when: When, step: String) -> Self {
        Self(match self.0 {
            Decision::Wait { signals, then, .. } => Decision::Wait { signals, then, timeout: Some((when, step)) },
            _ => invalid("only a wait can time out: return wait_for(..).then(..).timeout(..)"),
        })
    }
}

fn invalid(problem: &str) -> Decision {
    Decision::Fail(Failure::terminal("invalid_continuation", problem))
}

/// Why an attempt failed.
///
/// Every error converts into a retryable failure with code `error`, so `?` works in a handler.
#[derive(Debug, Clone)]
pub struct Failure {
    pub(crate) code: String,
    pub(crate) reason: String,
    pub(crate) retryable: bool,
    pub(crate) retry_after: Option<std::time::Duration>,
    /// The handler does not know the step: the attempt does not count and this worker takes no more of them.
    pub(crate) unknown_step: bool,
}

impl Failure {
    /// A failure that the retry policy may try again.
    pub fn retryable(code: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { code: code.into(), reason: reason.into(), retryable: true, retry_after: None, unknown_step: false }
    }

    /// A failure that no retry can mend: the workflow fails.
    pub fn terminal(code: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { retryable: false, ..Self::retryable(code, reason) }
    }

    /// Waits this long before the next attempt, whatever the policy says.
    #[must_use]
    pub fn retry_after(mut self, delay: std::time::Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// The failure's code.
    pub fn code(&self) -> &str {
        &self.code
    }

    /// The failure's reason.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    pub(crate) fn of_json(what: &str, error: &steadfast_core::json::JsonError) -> Self {
        Self::terminal(error.code(), format!("{what}: {error}"))
    }

    pub(crate) fn of_invalid(invalid: &Invalid) -> Self {
        Self::terminal(invalid.code, invalid.to_string())
    }

    /// The code as the log takes it; a code that is no printable word becomes `error`.
    pub(crate) fn checked_code(&self, limits: &Limits) -> FailureCode {
        FailureCode::parse_as("code", &self.code, limits).unwrap_or_else(|_| FailureCode::trusted("error"))
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            reason = format!("{reason}: {cause}");
            source = cause.source();
        }
        Self::retryable("error", reason)
    }
}

pub(crate) type BoxFuture = Pin<Box<dyn Future<Output = StepResult> + Send>>;
pub(crate) type Handler = Arc<dyn Fn(Ctx) -> BoxFuture + Send + Sync>;

/// A handler under a name, with what its workflows run by unless a start says otherwise.
#[derive(Clone)]
pub struct Definition {
    pub(crate) name: String,
    pub(crate) handler: Handler,
    pub(crate) steps: Option<Vec<String>>,
    pub(crate) options: StartOptions,
    pub(crate) step_retry: BTreeMap<String, RetryPolicy>,
}

impl fmt::Debug for Definition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Definition").field("name", &self.name).field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl Definition {
    /// A definition that takes every step its handler does not answer with [`Ctx::unknown_step`].
    pub fn new<F, Fut>(name: impl Into<String>, handler: F) -> Self
    where
        F: Fn(Ctx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = StepResult> + Send + 'static,
    {
        Self {
            name: name.into(),
            handler: Arc::new(move |ctx| Box::pin(handler(ctx))),
            steps: None,
            options: StartOptions::default(),
            step_retry: BTreeMap::new(),
        }
    }

    /// The name it is registered under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Announces exactly these steps: workflows that stand on another one wait, shown as blocked, for a worker that
    /// knows it.
    #[must_use]
    pub fn steps<S: Into<String>>(mut self, steps: impl IntoIterator<Item = S>) -> Self {
        self.steps = Some(steps.into_iter().map(Into::into).collect());
        self
    }

    /// The retry policy of its steps.
    #[must_use]
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.options.retry = Some(policy);
        self
    }

    /// The retry policy of one step.
    #[must_use]
    pub fn retry_step(mut self, step: impl Into<String>, policy: RetryPolicy) -> Self {
        self.step_retry.insert(step.into(), policy);
        self
    }

    /// How long one attempt may take.
    #[must_use]
    pub fn step_timeout(mut self, timeout: std::time::Duration) -> Self {
        self.options.step_timeout_ms = Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// The priority of its workflows, -100 to 100, higher first.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.options.priority = Some(priority);
        self
    }

    pub(crate) fn check(self, limits: &Limits) -> Result<(Name, Known), Invalid> {
        let name = Name::parse_as("definition name", &self.name, limits)?;
        self.options.check(limits)?;
        self.step_retry.values().try_for_each(RetryPolicy::check)?;
        let steps = match self.steps {
            None => Steps::AllBut(BTreeSet::new()),
            Some(steps) => {
                Steps::Listed(steps.iter().map(|step| Step::parse_as("steps", step, limits)).collect::<Result<_, _>>()?)
            }
        };
        let options = self.options.resolve(&Options::default());
        Ok((name, Known { handler: self.handler, steps, options, step_retry: self.step_retry }))
    }
}

/// A registered definition.
pub(crate) struct Known {
    pub(crate) handler: Handler,
    pub(crate) steps: Steps,
    pub(crate) options: Options,
    pub(crate) step_retry: BTreeMap<String, RetryPolicy>,
}
