//! `steadfast why`.

use clap::Args;

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{plain, print};
use crate::show::{signals, time};
use crate::wire::Reason;

/// Says why a workflow does not run now, or who runs it.
#[derive(Debug, Args)]
pub struct Why {
    /// The workflow's id.
    id: String,
    #[command(flatten)]
    pub(crate) client: Client,
}

impl Why {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let answer = self.client.get(&["v1", "workflows", &self.id, "why"], &[]).await?;
        if self.client.json {
            return print(&answer.text);
        }
        print(&said(&plain(&self.id), &answer.read()?))
    }
}

fn said(id: &str, reason: &Reason) -> String {
    let step = format!("step {}", plain(&reason.step));
    let (since, until) = (time(reason.since), time(reason.until));
    match reason.why.as_str() {
        "running" => {
            let worker = plain(&reason.worker);
            format!(
                "{id} runs: {step} at {worker} since {since}; it is taken from there at {until} unless it is heard of"
            )
        }
        "sleeping" => format!("{id} sleeps until {until}, then {step} runs"),
        "waiting" => {
            let timeout = match &reason.on_timeout {
                Some(on_timeout) => format!(", until {until}, then step {} runs", plain(on_timeout)),
                None => String::new(),
            };
            format!("{id} waits for {}, with which {step} runs{timeout}", signals(&reason.signals))
        }
        "backoff" => format!("{id} waits for its next try: attempt {} of {step} at {until}", reason.attempt),
        "ready" => format!("{id} waits for a worker with room: {step} is ready since {since}"),
        "blocked" => format!("{id} waits for code: no worker knows {step}, which is ready since {since}"),
        "ended" => {
            let code = reason.code.as_ref().map_or_else(String::new, |code| format!(" ({})", plain(code)));
            format!("{id} has ended: {}{code}", plain(&reason.status))
        }
        // A newer server may have more reasons.
        other => format!("{id}: {}", plain(other)),
    }
}
