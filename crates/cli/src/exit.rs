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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// What only the command says: the code, how it ends, and what that means.
    const WORDS: &[(&str, &str, &str)] = &[
        ("unreachable", "7", "The server cannot be reached"),
        ("unknown_answer", "1, 5, 6, 8", "The server's answer has no code; the exit code is that of its status"),
        ("invalid_url", "6", "What `--server` names is no URL with a host"),
        ("unreadable_input", "6", "The file or the standard input of `--input` cannot be read"),
        ("unsupported", "6", "This verb does not do that for such a store"),
        ("cannot_listen", "1, 6", "The address cannot be listened on; 6 when it is not a loopback one"),
        ("faults_found", "3", "`verify` or `copy` found what contradicts the logs"),
        ("target_not_empty", "6", "The target of `copy` has workflows; give a schema that is new or empty"),
        ("target_in_use", "6", "Nodes have the target of `copy` open; stop them first"),
        ("copy_differs", "1", "Not every row has arrived in the copy, and nothing was kept"),
        ("failed", "1", "Something else; the message says what"),
    ];
    const HEADING: &str = "\n## On the command line alone\n";

    fn path() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/errors.md")
    }

    /// `docs/guide/errors.md` ends with this table; with `UPDATE_DOCS=1` the test writes it.
    #[test]
    fn the_guide_has_every_code_of_the_command() {
        let mut text = format!(
            "{HEADING}\nEach with its [exit code](cli.md#exit-codes).\n\n\
             | code | exit code | meaning |\n|---|---:|---|\n"
        );
        for (code, exit, meaning) in WORDS {
            text += &format!("| `{code}` | {exit} | {meaning} |\n");
        }
        let page = fs::read_to_string(path()).unwrap();
        let (server, own) = page.split_at(page.find("\n## ").unwrap_or(page.len()));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            return fs::write(path(), format!("{server}{text}")).unwrap();
        }
        assert_eq!(own, text, "run this test with UPDATE_DOCS=1");
    }

    /// The sources themselves are asked which codes there are.
    #[test]
    fn every_code_that_the_command_names_is_in_the_guide() {
        let page = fs::read_to_string(path()).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let copy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../store/src/postgres/copy.rs");
        let verbs =
            [sources.clone(), sources.join("demo")].into_iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let files = verbs.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).chain([copy]);
        let mut found = 0;
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let marks =
                if file.ends_with("postgres/copy.rs") { ["} => ", "(_) => "] } else { ["Exit::new(", "refused("] };
            for before in marks {
                for (at, _) in text.match_indices(before) {
                    // The first text within the call.
                    let call: String = text[at..].chars().take(120).collect();
                    let code = call.split('"').nth(1).unwrap_or_default();
                    let is_code = !code.is_empty() && code.chars().all(|c| c.is_ascii_lowercase() || c == '_');
                    if is_code && code != "broken_pipe" {
                        assert!(page.contains(&format!("\n| `{code}` |")), "{code} of {} has no row", file.display());
                        found += 1;
                    }
                }
            }
        }
        assert!(found > 12, "{found}");
    }
}
