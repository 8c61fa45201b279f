//! `steadfast show`.

use clap::Args;

use crate::client::{Client, read};
use crate::exit::Exit;
use crate::output::{instant, plain, print, short, span};
use crate::wire::{Event, Next, Payload, Workflow, text};

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
        let workflow: Workflow = answer.read()?;
        let mut shown = heading(&workflow);
        if self.last > 0 {
            let from = workflow.seq.saturating_sub(self.last as u64 - 1);
            let path = ["v1", "workflows", &self.id, "events"];
            let query = vec![("from", from.to_string())];
            let (events, _) = self.client.pages(&path, "events", query, "from", self.last).await?;
            if from > 0 {
                shown += &format!("  … {from} events before\n");
            }
            for event in tree(events.iter().map(|event| read(event.get()))) {
                shown += &event?;
            }
        }
        print(&shown)
    }
}

fn heading(workflow: &Workflow) -> String {
    let mut shown = format!("{}  {}  {}\n", plain(&workflow.id), plain(&workflow.name), plain(&workflow.status));
    if let Some(ms) = workflow.created_at {
        shown += &format!("  created {}\n", instant(ms));
    }
    let step = workflow.step.as_deref().map_or_else(String::new, |step| format!("step {}", plain(step)));
    shown += &match (workflow.status.as_str(), &workflow.claim) {
        ("sleeping", _) => format!("  sleeps until {}, then {step}\n", time(workflow.due)),
        ("waiting", _) => {
            let until = workflow.due.map_or_else(String::new, |due| format!(" until {}", instant(due)));
            format!("  waits for {}{until}, then {step}\n", signals(&workflow.waits_for))
        }
        ("backoff", _) => format!(
            "  {step} is tried again (attempt {}) at {}\n",
            workflow.attempt.unwrap_or_default(),
            time(workflow.due)
        ),
        ("running", Some(claim)) => {
            let progress = match &claim.progress {
                Some(progress) => format!("  progress {}\n", short(progress.get(), 100)),
                None => String::new(),
            };
            format!("  {step} runs at {} since {}\n{progress}", plain(&claim.worker), time(claim.started_at))
        }
        ("ready", _) if workflow.blocked.is_some() => format!("  blocked: no worker knows {step}\n"),
        ("ready", _) => format!("  {step} waits for a worker\n"),
        ("completed", _) => format!("  result {}\n", short(text(&workflow.result), 160)),
        _ => match &workflow.error {
            Some(error) => format!("  {}{}\n", plain(&error.code), because(&error.reason, 160)),
            None => String::new(),
        },
    };
    shown
}

fn because(reason: &str, width: usize) -> String {
    if reason.is_empty() { String::new() } else { format!(": {}", short(reason, width)) }
}

/// Names of signals, any of which will do.
pub fn signals(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
    format!("signal {}", names.join(" or "))
}

pub fn time(ms: Option<i64>) -> String {
    ms.map_or_else(|| "?".to_owned(), instant)
}

/// A line for each attempt, under the step it belongs to.
fn tree(events: impl Iterator<Item = Result<Event, Exit>>) -> impl Iterator<Item = Result<String, Exit>> {
    let mut started = None;
    events.map(move |event| {
        let Event { seq, at, r#type, payload } = event?;
        let payload: Payload = read(payload.get())?;
        let took = started.map_or_else(String::new, |from| format!(" after {}", span(at - from)));
        Ok(match r#type.as_str() {
            "workflow_created" => {
                let input = payload.writes.get("input").map_or("null", text);
                format!("{seq:>6}  input {}\n", short(input, 100))
            }
            "step_started" => {
                started = Some(at);
                if payload.delivery == 1 { format!("{seq:>6}  step {}\n", plain(&payload.step)) } else { String::new() }
            }
            "step_completed" => {
                let set: Vec<String> = payload.writes.keys().map(|key| plain(key)).collect();
                let set = if set.is_empty() { String::new() } else { format!(", set {}", short(&set.join(" "), 60)) };
                let next = match (&payload.next, payload.wait_for) {
                    (Some(next), _) => {
                        let Next { step, run_at } = read(next.get())?;
                        let at = run_at.map_or_else(String::new, |at| format!(" at {}", instant(at)));
                        format!(" → step {}{at}", plain(&step))
                    }
                    (None, Some(wait)) => {
                        let until = wait.timeout_at.map_or_else(String::new, |at| format!(" until {}", instant(at)));
                        format!(" → waits for {}{until}, then step {}", signals(&wait.signals), plain(&wait.then))
                    }
                    (None, None) => String::new(),
                };
                format!("{seq:>6}    attempt {} committed{took}{set}{next}\n", payload.attempt)
            }
            "step_failed" => {
                let kind = if payload.counts { "failed" } else { "ended" };
                let why = because(&payload.reason, 100);
                format!("{seq:>6}    attempt {} {kind}{took}: {}{why}\n", payload.attempt, plain(&payload.code))
            }
            "signal_received" => {
                let (name, id) = (plain(&payload.name), plain(&payload.signal_id));
                format!("{seq:>6}  signal {name} ({id}): {}\n", short(text(&payload.payload), 100))
            }
            "wait_timed_out" => format!("{seq:>6}  no signal came in time\n"),
            other => format!("{seq:>6}  {}\n", plain(other)),
        })
    })
}
