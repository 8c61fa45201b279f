//! `steadfast show`.

use clap::Args;
use serde_json::Value;

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{cell, instant, plain, print, short, span};

/// Shows where a workflow stands and how it came there.
#[derive(Debug, Args)]
pub struct Show {
    /// The workflow's id.
    id: String,
    /// How many of its last events to show.
    #[arg(long, default_value_t = 200)]
    last: usize,
    #[command(flatten)]
    pub(crate) client: Client,
}

impl Show {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let answer = self.client.get(&["v1", "workflows", &self.id], &[]).await?;
        if self.client.json {
            return print(&answer.text);
        }
        let workflow = answer.value()?;
        let seq = workflow["seq"].as_u64().unwrap_or(0);
        let from = seq.saturating_sub(self.last as u64 - u64::from(self.last > 0));
        let path = ["v1", "workflows", &self.id, "events"];
        let (events, _) =
            self.client.pages(&path, "events", vec![("from", from.to_string())], "from", self.last).await?;
        let events: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event.get()).ok()).collect();
        let mut text = heading(&workflow);
        if from > 0 {
            text += &format!("  … {from} events before\n");
        }
        text += &tree(&events);
        print(&text)
    }
}

fn heading(workflow: &Value) -> String {
    let mut text = format!("{}  {}  {}\n", cell(&workflow["id"]), cell(&workflow["name"]), cell(&workflow["status"]));
    if let Some(ms) = workflow["created_at"].as_i64() {
        text += &format!("  created {}\n", instant(ms));
    }
    match workflow["status"].as_str().unwrap_or_default() {
        "sleeping" => text += &format!("  sleeps until {}, then {}\n", time(&workflow["due"]), cell(&workflow["step"])),
        "backoff" => {
            text += &format!(
                "  {} is tried again (attempt {}) at {}\n",
                cell(&workflow["step"]),
                cell(&workflow["attempt"]),
                time(&workflow["due"])
            );
        }
        "running" => {
            let claim = &workflow["claim"];
            text += &format!(
                "  {} runs at {} since {}\n",
                cell(&workflow["step"]),
                cell(&claim["worker"]),
                time(&claim["started_at"])
            );
            if !claim["progress"].is_null() {
                text += &format!("  progress {}\n", short(&claim["progress"].to_string(), 100));
            }
        }
        "ready" if workflow["blocked"].is_string() => {
            text += &format!("  blocked: no worker knows step {}\n", cell(&workflow["step"]));
        }
        "ready" => text += &format!("  {} waits for a worker\n", cell(&workflow["step"])),
        "completed" => text += &format!("  result {}\n", short(&workflow["result"].to_string(), 160)),
        _ => {
            let error = &workflow["error"];
            text +=
                &format!("  {}: {}\n", cell(&error["code"]), short(error["reason"].as_str().unwrap_or_default(), 160));
        }
    }
    text
}

fn time(value: &Value) -> String {
    value.as_i64().map_or_else(|| "?".to_owned(), instant)
}

/// A line for each attempt, under the step it belongs to.
fn tree(events: &[Value]) -> String {
    let mut text = String::new();
    let mut started = None;
    for event in events {
        let payload = &event["payload"];
        let at = event["at"].as_i64().unwrap_or(0);
        let took =
            |started: Option<i64>| started.map_or_else(String::new, |from| format!(" after {}", span(at - from)));
        match event["type"].as_str().unwrap_or_default() {
            "workflow_created" => {
                let input = payload["writes"]["input"].to_string();
                text += &format!("{:>6}  input {}\n", event["seq"], short(&input, 100));
            }
            "step_started" => {
                if payload["delivery"] == 1 {
                    text += &format!("{:>6}  {}\n", event["seq"], cell(&payload["step"]));
                }
                started = Some(at);
            }
            "step_completed" => {
                let set: Vec<String> =
                    payload["writes"].as_object().into_iter().flatten().map(|(key, _)| plain(key)).collect();
                let set = if set.is_empty() { String::new() } else { format!(", set {}", short(&set.join(" "), 60)) };
                let next = &payload["next"];
                let next = match (next["step"].as_str(), next["run_at"].as_i64()) {
                    (Some(step), Some(at)) => format!(" → {} at {}", plain(step), instant(at)),
                    (Some(step), None) => format!(" → {}", plain(step)),
                    _ => String::new(),
                };
                let attempt = &payload["attempt"];
                text += &format!("{:>6}    attempt {attempt} committed{}{set}{next}\n", event["seq"], took(started));
            }
            "step_failed" => {
                let kind = if payload["counts"] == true { "failed" } else { "ended" };
                text += &format!(
                    "{:>6}    attempt {} {kind}{}: {} {}\n",
                    event["seq"],
                    payload["attempt"],
                    took(started),
                    cell(&payload["code"]),
                    short(payload["reason"].as_str().unwrap_or_default(), 100)
                );
            }
            other => text += &format!("{:>6}  {}\n", event["seq"], other),
        }
    }
    text
}
