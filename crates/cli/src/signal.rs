//! `steadfast signal` and `steadfast inbox`.

use clap::Args;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::client::{Client, read};
use crate::exit::Exit;
use crate::output::{instant, plain, print, print_json, short, table};
use crate::start::{named, read_json};
use crate::wire::Accepted;

/// Sends a workflow a signal. The same signal with the same id is accepted once, however often it is sent.
#[derive(Debug, Args)]
pub struct Signal {
    /// The workflow's id.
    id: String,
    /// The signal's name: what a wait names.
    name: String,
    /// What it carries: JSON, @FILE, or - for standard input.
    #[arg(long, value_name = "JSON", default_value = "null")]
    payload: String,
    /// The signal's own id; a new one when absent.
    #[arg(long, value_name = "ID")]
    signal_id: Option<String>,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Serialize)]
struct Body<'a> {
    name: &'a str,
    signal_id: &'a str,
    payload: &'a RawValue,
}

impl Signal {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let payload = read_json("--payload", &self.payload)?;
        // An id of our own: when the answer is lost, sending it again is safe.
        let signal_id = self.signal_id.clone().unwrap_or_else(|| uuid::Uuid::now_v7().to_string());
        let payload: &RawValue =
            serde_json::from_str(payload.as_str()).map_err(|error| Exit::other(error.to_string()))?;
        let body = serde_json::to_string(&Body { name: &self.name, signal_id: &signal_id, payload })
            .map_err(|error| Exit::other(error.to_string()))?;
        let path = ["v1", "workflows", &self.id, "signals"];
        let sent = self.client.call_repeatable(Method::POST, &path, &[], Some(body)).await;
        let answer = sent.map_err(|exit| named(exit, &signal_id, "repeat it with --signal-id"))?;
        if self.client.json {
            return print(&answer.text);
        }
        let replay = if answer.read::<Accepted>()?.replay { " (accepted before)" } else { "" };
        print(&format!("{}{replay}", plain(&signal_id)))
    }
}

/// Prints the signals that wait in a workflow's inbox: accepted, and not taken by a wait yet.
#[derive(Debug, Args)]
pub struct Inbox {
    /// The workflow's id.
    id: String,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Deserialize, Serialize)]
struct Pending {
    number: u64,
    name: String,
    signal_id: String,
    payload: Box<RawValue>,
    accepted_at: i64,
}

#[derive(Serialize)]
struct Page {
    signals: Vec<Pending>,
}

impl Inbox {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let path = ["v1", "workflows", &self.id, "signals"];
        let (signals, _) = self.client.pages(&path, "signals", Vec::new(), "after", usize::MAX).await?;
        let signals = signals.iter().map(|text| read(text.get())).collect::<Result<Vec<Pending>, Exit>>()?;
        if self.client.json {
            return print_json(&Page { signals });
        }
        let rows: Vec<Vec<String>> = signals
            .iter()
            .map(|pending| {
                let Pending { number, name, signal_id, payload, accepted_at } = pending;
                let payload = short(payload.get(), 100);
                vec![number.to_string(), instant(*accepted_at), plain(name), plain(signal_id), payload]
            })
            .collect();
        print(&table(&["NUMBER", "ACCEPTED", "NAME", "SIGNAL ID", "PAYLOAD"], &rows))
    }
}
