//! `steadfast start`.

use std::io::Read;

use clap::Args;
use reqwest::{Method, StatusCode};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use steadfast::Json;

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{plain, print, print_json};
use crate::wire::{Accepted, Failure, Standing, Stored, text};

/// Starts a workflow. The same id with the same content is accepted once, however often it is sent.
#[derive(Debug, Args)]
pub struct Start {
    /// The definition's name.
    name: String,
    /// The input: JSON, @FILE, or - for standard input.
    #[arg(long, value_name = "JSON", default_value = "null")]
    input: String,
    /// The workflow's id; a new one when absent.
    #[arg(long)]
    id: Option<String>,
    /// -100 to 100, higher first.
    #[arg(long, allow_negative_numbers = true)]
    priority: Option<i32>,
    /// A label that is shown with the workflow; may be given several times.
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Wait until the workflow has ended and print its result.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Serialize)]
struct Body<'a> {
    name: &'a str,
    id: &'a str,
    input: &'a RawValue,
    #[serde(skip_serializing_if = "Value::is_null")]
    options: Value,
}

impl Start {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let input = read_json("--input", &self.input)?;
        // An id of our own: when the answer is lost, sending it again is safe.
        let id = self.id.clone().unwrap_or_else(|| uuid::Uuid::now_v7().to_string());
        let mut options = serde_json::Map::new();
        if let Some(priority) = self.priority {
            options.insert("priority".to_owned(), json!(priority));
        }
        if !self.tags.is_empty() {
            options.insert("tags".to_owned(), json!(self.tags));
        }
        let raw: &RawValue = serde_json::from_str(input.as_str()).map_err(|error| Exit::other(error.to_string()))?;
        let options = if options.is_empty() { Value::Null } else { Value::Object(options) };
        let body = serde_json::to_string(&Body { name: &self.name, id: &id, input: raw, options })
            .map_err(|error| Exit::other(error.to_string()))?;
        let answer = self
            .client
            .call_repeatable(Method::POST, &["v1", "workflows"], &[], Some(body))
            .await
            .map_err(|exit| named(exit, &id, "repeat it with --id"))?;
        let accepted: Accepted = answer.read()?;
        if accepted.warning.as_deref() == Some("no_worker") {
            eprintln!("steadfast: no worker knows {}; the workflow waits for one", plain(&self.name));
        }
        if !self.wait {
            if self.client.json {
                return print(&answer.text);
            }
            let replay = if accepted.replay { " (started before)" } else { "" };
            return print(&format!("{}{replay}", plain(&id)));
        }
        self.wait_for(&id).await.map_err(|exit| named(exit, &id, "it was started; wait for it with --id"))
    }

    async fn wait_for(&self, id: &str) -> Result<(), Exit> {
        loop {
            let path = ["v1", "workflows", id, "result"];
            let query = [("wait_ms", "30000".to_owned())];
            let answer = self.client.call_repeatable(Method::GET, &path, &query, None).await?;
            if answer.status == StatusCode::ACCEPTED {
                continue;
            }
            let Standing { status, result, error } = answer.read()?;
            if self.client.json {
                let error = error.as_ref().map(|error| json!({ "code": error.code, "reason": error.reason }));
                print_json(&Ended { id, status: &status, result: &result, error })?;
            } else if status == "completed" {
                print(&plain(text(&result)))?;
            }
            if status == "completed" {
                return Ok(());
            }
            let Failure { code, reason } = error.unwrap_or_default();
            let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
            return Err(Exit::new(4, &code, format!("workflow {id} {status}{because}")));
        }
    }
}

/// Reads a JSON value from the command line, from @FILE, or from standard input.
pub(crate) fn read_json(flag: &str, given: &str) -> Result<Json, Exit> {
    let text = if given == "-" {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .map_err(|error| Exit::refused("unreadable_input", format!("read standard input: {error}")))?;
        text
    } else if let Some(path) = given.strip_prefix('@') {
        std::fs::read_to_string(path).map_err(|error| {
            Exit::refused("unreadable_input", format!("read {path}: {error}; give @ and the path of a file"))
        })?
    } else {
        given.to_owned()
    };
    Json::parse(&text).map_err(|error| {
        Exit::refused(error.code(), format!("{flag}: {error}; in a shell, quote it: {flag} '{{\"steps\": 3}}'"))
    })
}

/// What `--wait --json` prints.
#[derive(Serialize)]
struct Ended<'a> {
    id: &'a str,
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: &'a Stored,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
}

/// An end that leaves the outcome open names the id that tells it.
pub(crate) fn named(mut exit: Exit, id: &str, how: &str) -> Exit {
    if exit.code == 7 || exit.code == 8 {
        exit.message = format!("{}; {how} {id}", exit.message);
        if let Some(Value::Object(problem)) = &mut exit.problem {
            problem.entry("id").or_insert_with(|| json!(id));
        } else {
            exit.problem = Some(json!({ "code": exit.word, "detail": exit.message, "id": id }));
        }
    }
    exit
}
