//! Exit: how the command ends when it does not succeed: a code for scripts, a sentence for people.

use std::fmt;
use std::process::ExitCode;

use serde_json::{Value, json};
use steadfast::store::StoreError;

/// The codes, as `--help` shows them.
pub const HELP: &str = "\
Exit codes:
  0  done
  1  something else failed
  2  the command line was not understood
  3  verify or copy found faults
  4  the awaited workflow failed or was cancelled
  5  there is no such workflow or variable
  6  refused: invalid input, an id that was used for another request, or a store that is in use or not empty
  7  the server cannot be reached
  8  try again: overloaded, the store is away or busy, or the outcome is unknown

Environment:
  STEADFAST_URL    the server to talk to (default http://127.0.0.1:7420)
  STEADFAST_STORE  the store, as --store takes it
  STEADFAST_LOG    what to log, as in `info` or `steadfast=debug`";

/// Why the command ends, and with which code.
#[derive(Debug)]
pub struct Exit {
    /// The process's exit code.
    pub code: u8,
    /// The stable word.
    pub word: String,
    /// What happened and what to do.
    pub message: String,
    /// The problem document, when a server sent one.
    pub problem: Option<Value>,
}

impl Exit {
    /// An end with a code of its own.
    pub fn new(code: u8, word: &str, message: impl Into<String>) -> Self {
        Self { code, word: word.to_owned(), message: message.into(), problem: None }
    }

    /// Something else failed.
    pub fn other(message: impl Into<String>) -> Self {
        Self::new(1, "failed", message)
    }

    /// Input was refused here, before anything was sent.
    pub fn refused(word: &str, message: impl Into<String>) -> Self {
        Self::new(6, word, message)
    }

    /// What a store said, which was used without a server.
    pub fn from_store(error: &StoreError) -> Self {
        let code = match error {
            _ if error.code().starts_with("invalid") => 6,
            StoreError::InUse { .. } => 6,
            _ if error.may_pass() => 8,
            _ => 1,
        };
        Self::new(code, error.code(), chain(error))
    }

    /// What a server's problem document means.
    pub fn of_problem(status: u16, problem: Value) -> Self {
        let word = problem["code"].as_str().unwrap_or("unknown_answer").to_owned();
        let detail = problem["detail"].as_str().or(problem["title"].as_str()).unwrap_or("the server gave no reason");
        let code = match (status, word.as_str()) {
            (404, _) => 5,
            (429 | 503 | 504, _) | (_, "outcome_unknown" | "overloaded") => 8,
            (400..500, _) => 6,
            _ => 1,
        };
        Self { code, message: detail.to_owned(), problem: Some(problem), word }
    }

    /// Says it on standard error: a sentence, or one JSON object.
    pub fn report(&self, json: bool) -> ExitCode {
        if self.word != "broken_pipe" {
            let message = crate::output::without_passwords(&self.message);
            if json {
                let error = self.problem.clone().unwrap_or_else(|| json!({"code": self.word, "detail": message}));
                eprintln!("{}", json!({ "error": error }));
            } else {
                eprintln!("steadfast: {} [{}]", crate::output::plain(&message), self.word);
            }
        }
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Exit {}

impl From<Box<dyn std::error::Error>> for Exit {
    fn from(error: Box<dyn std::error::Error>) -> Self {
        // Those that have a code keep it.
        if let Some(error) = error.downcast_ref::<StoreError>() {
            return Self::from_store(error);
        }
        match error.downcast::<steadfast::Error>() {
            Ok(error) => (*error).into(),
            Err(error) => Self::other(chain(&*error)),
        }
    }
}

impl From<Box<dyn std::error::Error + Send + Sync>> for Exit {
    fn from(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        match error.downcast::<Self>().map(|exit| *exit) {
            Ok(exit) => exit,
            Err(error) => Self::from(error as Box<dyn std::error::Error>),
        }
    }
}

impl From<steadfast::Error> for Exit {
    fn from(error: steadfast::Error) -> Self {
        let code = match &error {
            steadfast::Error::Store(error) => Self::from_store(error).code,
            steadfast::Error::Overloaded { .. } | steadfast::Error::OutcomeUnknown { .. } => 8,
            _ if error.code().starts_with("invalid") => 6,
            _ => 1,
        };
        Self::new(code, error.code(), chain(&error))
    }
}

impl From<StoreError> for Exit {
    fn from(error: StoreError) -> Self {
        Self::from_store(&error)
    }
}

/// An error with its causes, in one line, each said once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
